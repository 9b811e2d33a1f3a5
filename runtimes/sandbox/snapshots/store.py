"""The snapshots of a provider: taken, held while a sandbox is made from one, and kept within their bounds."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import structlog

from manager.errors import CapacityExceeded, CodedError, Conflict, NotFound, TooLarge, Unsupported, exhaustion
from manager.function import SandboxSpec
from runtimes.sandbox.snapshots.record import SnapshotRecord, SnapshotSettings, read_snapshots

logger = structlog.get_logger("sandbox.snapshots")

COMPONENT = "sandbox.snapshots"
RETRY_S = 10.0

#: Writes a snapshot's files: (id, its directory, most bytes) -> bytes on the disk; raises CodedError or OSError.
Write = Callable[[str, Path, int], Awaitable[int]]


class SnapshotStore:
    """Snapshots and their records, a directory for each below ``root``, used from one event loop."""

    def __init__(
        self,
        root: Path,
        settings: SnapshotSettings,
        *,
        provider: Callable[[], str],
        remove: Callable[[SnapshotRecord], Awaitable[None]] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``provider`` is the kind of sandboxes; ``remove`` removes what one has beside its directory. Blocks."""
        self.settings = settings
        self._root = root
        self._provider = provider
        self._remove = remove
        self._wall = wall
        self._records = {record.id: record for record in read_snapshots(root)}
        self._gate = asyncio.Semaphore(settings.at_once)
        #: Being taken, and being removed.
        self._taking: set[str] = set()
        self._leaving: set[str] = set()
        #: Being taken, and nobody wants them any more.
        self._unwanted: set[str] = set()
        #: How many sandboxes are being made from each.
        self._held: Counter[str] = Counter()
        #: Tells which snapshots living trajectories began with, and one trajectory of each.
        self.users: Callable[[], Mapping[str, str]] = dict[str, str]
        #: Called when one that could be used has come, was used or has gone.
        self.on_change: Callable[[], None] = lambda: None

    @property
    def ids(self) -> set[str]:
        """Every snapshot that is known, also one that is being taken or removed."""
        return {*self._records, *self._leaving}

    def all(self) -> list[SnapshotRecord]:
        """Return every snapshot that can be used, the oldest first."""
        return sorted((each for each in self._records.values() if each.ready), key=lambda each: each.made_s)

    def user(self, id: str) -> str:
        """Return a trajectory that needs a snapshot, or what else does; empty if nothing does."""
        if self._held[id]:
            return "a sandbox that is being made"
        trajectory = self.users().get(id)
        return "" if trajectory is None else f"trajectory {trajectory!r}"

    def get(self, id: str) -> SnapshotRecord:
        """Return a snapshot; raises NotFound, or Unsupported for one of another kind of sandbox."""
        record = self._records.get(id)
        if record is None or not record.ready:
            raise NotFound(f"no snapshot {id!r}", component=COMPONENT)
        if record.provider != self._provider():
            told = f"snapshot {id!r} is of sandboxes of kind {record.provider}, and these are {self._provider()}"
            raise Unsupported(told, component=COMPONENT)
        return record

    async def take(
        self, trajectory: str, task: str, spec: SandboxSpec, write: Write, *, id: str = "", spared: Collection[str] = ()
    ) -> SnapshotRecord:
        """Take a snapshot with what ``write`` writes, and make room for it.

        ``id`` is its own if somebody else names it: then it is taken once, however often that is asked. Those in
        ``spared`` are not removed to make room. Raises CapacityExceeded if those in use leave no room, TooLarge if it
        alone is larger than all may be, Conflict if it was given up meanwhile, and what ``write`` raises.
        """
        id = id or secrets.token_hex(6)
        if (known := self._records.get(id)) is not None and known.ready:
            return known
        if known is not None and id not in self._taking:
            await self._forget(id)  # half taken when an earlier life of this machine ended
        self._taking.add(id)
        try:
            async with self._gate:
                record = await self._take(id, trajectory, task, spec, write, spared)
            if id in self._unwanted:
                await self._forget(id)
                raise Conflict(f"snapshot {id!r} was given up while it was taken", component=COMPONENT)
            return record
        finally:
            self._taking.discard(id)
            self._unwanted.discard(id)

    async def _take(
        self, id: str, trajectory: str, task: str, spec: SandboxSpec, write: Write, spared: Collection[str]
    ) -> SnapshotRecord:
        now_s = self._wall()
        record = SnapshotRecord(
            id=id,
            trajectory=trajectory,
            task=task,
            provider=self._provider(),
            spec=spec,
            made_s=now_s,
            used_s=now_s,
        )
        self._records[id] = record
        try:
            await self._make_room(spared)
            await asyncio.to_thread(record.write, self._root)
            size_bytes = await write(id, self._root / id, self.settings.total_max_bytes)
            if size_bytes > self.settings.total_max_bytes:
                raise self.too_large(size_bytes)
            self._records[id] = replace(record, size_bytes=size_bytes)
            await self._make_room(spared)
            record = replace(record, size_bytes=size_bytes, ready=True)
            await asyncio.to_thread(record.write, self._root)
            self._records[id] = record
        except BaseException as error:
            await asyncio.shield(self._forget(id))
            if short := exhaustion(error, COMPONENT):
                raise short from None
            raise
        logger.info("snapshot taken", snapshot=id, trajectory=trajectory, size_bytes=record.size_bytes)
        self.on_change()
        return record

    def too_large(self, size_bytes: int) -> TooLarge:
        """Return what is told of a snapshot that is larger than all together may be."""
        bound = self.settings.total_max_bytes
        told = f"the snapshot takes {size_bytes} bytes or more, and all may take {bound} (sandbox.snapshots.total_max)"
        return TooLarge(told, component=COMPONENT)

    @asynccontextmanager
    async def held(self, id: str) -> AsyncIterator[SnapshotRecord]:
        """Yield a snapshot, which is not removed meanwhile; raises as `get`."""
        record = self.get(id)
        self._held[id] += 1
        try:
            yield record
            if id in self._records:  # else somebody else has removed it meanwhile (`lose`)
                record = self._records[id] = replace(self._records[id], used_s=self._wall())
                with suppress(OSError):
                    await asyncio.to_thread(record.write, self._root)
                self.on_change()
        finally:
            self._held[id] -= 1

    async def remove(self, id: str) -> None:
        """Remove a snapshot; raises NotFound, or Conflict for one that a living trajectory needs."""
        record = self._records.get(id)
        if record is None or not record.ready:
            raise NotFound(f"no snapshot {id!r}", component=COMPONENT)
        if user := self.user(id):
            raise Conflict(f"snapshot {id!r} is in use by {user}: end that first", component=COMPONENT)
        await self._forget(id)

    async def give_up(self, id: str) -> None:
        """Let nothing begin with a snapshot any more, and remove it once nothing needs it; idempotent.

        One that is being taken is removed as soon as it is taken.
        """
        record = self._records.get(id)
        if id in self._taking:
            self._unwanted.add(id)
        elif record is not None and self.user(id):
            self._records[id] = replace(record, ready=False)  # `prune` removes it, or that of the next life does
            with suppress(OSError):
                await asyncio.to_thread(self._records[id].write, self._root)
            self.on_change()
        elif record is not None:
            await self._forget(id)

    async def prune(self) -> int:
        """Remove what was not used for too long, and what an earlier gateway left half taken; return how many."""
        oldest_s = self._wall() - self.settings.age_s
        old = [
            each.id
            for each in self._records.values()
            if each.id not in self._taking and (not each.ready or each.used_s < oldest_s) and not self.user(each.id)
        ]
        for id in old:
            await self._forget(id)
        return len(old)

    async def lose(self, present: set[str], ready: set[str]) -> None:
        """Forget those that were ``ready`` and are not ``present``: somebody else has removed what they hold."""
        for id in [id for id in ready - present if id in self._records]:
            logger.warning("a snapshot was removed by somebody else", snapshot=id)
            await self._forget(id)

    async def _make_room(self, spared: Collection[str]) -> None:
        """Remove what was used least recently until the others and the one that is being taken are within the bounds.

        Raises CapacityExceeded if what is in use leaves no room.
        """
        for id in [each.id for each in sorted(self._records.values(), key=lambda each: each.used_s)]:
            if self._fits():
                return
            if id in self._records and id not in self._taking and id not in spared and not self.user(id):
                logger.info("snapshot removed, as it was used least recently", snapshot=id)
                await self._forget(id)
        if not self._fits():
            told = (
                f"{len(self._records) - 1} snapshots are in use and leave no room for another: delete some, end "
                "trajectories that began with them, or raise sandbox.snapshots.count_max and total_max"
            )
            raise CapacityExceeded(told, component=COMPONENT, retry_after_s=RETRY_S)

    def _fits(self) -> bool:
        used_bytes = sum(each.size_bytes for each in self._records.values())
        return len(self._records) <= self.settings.count_max and used_bytes <= self.settings.total_max_bytes

    async def _forget(self, id: str) -> None:
        """Remove a snapshot with all that it has; its record last, as long as it is there somebody knows of it."""
        record = self._records.pop(id)
        self._leaving.add(id)
        try:
            if self._remove is not None:
                await self._remove(record)
            await asyncio.to_thread(shutil.rmtree, self._root / id, ignore_errors=True)
        except CodedError as error:
            logger.warning("a snapshot was not removed; it will be tried again", snapshot=id, why=error.message)
            self._records[id] = replace(record, ready=False)
        finally:
            self._leaving.discard(id)
            if record.ready:
                self.on_change()
