"""The snapshots that nodes keep: on record here, so that they are known while their node is away, or gone.

The record says what is to be there. A node that joins says what it has: what is on no record it removes (it was deleted
meanwhile, or taken for a gateway that ended before it knew), and what it does not have is lost.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import msgspec
import structlog

from gateway.store.store import Store
from manager.errors import CapacityExceeded, CodedError, Conflict, NotFound, SnapshotLost
from runtimes.node.remote import RemoteNode
from runtimes.sandbox.snapshots import NodeSnapshotSettings, SnapshotRecord

logger = structlog.get_logger("gateway.cluster.snapshots")

COMPONENT = "cluster.snapshots"
#: Followed by a node's name: the snapshots that it keeps.
DOCUMENT = "cluster.snapshots."
#: Seconds after which a snapshot is tried again, where those in use leave no room.
RETRY_S = 10.0
#: Seconds for which a deletion waits at most for its node: what is on no record is removed there at the latest when it
#: joins the next time.
REMOVAL_S = 10.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One snapshot on a node."""

    node: str
    record: SnapshotRecord
    #: Why it cannot be had; empty while it is there, as far as is known.
    lost: str = ""


class NodeSnapshots:
    """The snapshots on nodes. Use from one event loop."""

    def __init__(
        self, store: Store, settings: NodeSnapshotSettings, *, age_s: float, wall: Callable[[], float] = time.time
    ) -> None:
        """``age_s``: a lost one that was not used for so long is forgotten."""
        self.settings = settings
        self._store = store
        self._age_s = age_s
        self._wall = wall
        self._kept: dict[str, NodeSnapshot] = {}
        #: Being taken: on a node already, and on no record yet.
        self._under_way: set[str] = set()
        #: Nodes that have joined, and are about to say what they have.
        self._comparing: set[str] = set()
        #: What is about to begin with one: its id, and what tells that it is lost.
        self._beginning: list[tuple[str, asyncio.Future[None]]] = []
        #: Tells with which snapshots living trajectories began, and one trajectory of each.
        self.users: Callable[[], Mapping[str, str]] = dict[str, str]
        #: Finds a node that has joined.
        self.member: Callable[[str], RemoteNode | None] = lambda name: None

    async def open(self, nodes: Iterable[str]) -> None:
        """Read what is on record of these nodes; raises StorageUnavailable."""
        known = set(nodes)
        for name in [str(row["name"]) for row in await self._store.read("document_names", (DOCUMENT,))]:
            if name.removeprefix(DOCUMENT) not in known:
                self._store.save_document(name, None)  # of a node that may come again by a new ticket only
                continue
            body = await self._store.document(name)
            for each in msgspec.json.decode(body, type=list[NodeSnapshot]) if body else ():
                self._kept[each.record.id] = each

    # --- what there is

    def all(self) -> list[NodeSnapshot]:
        """Return every snapshot, lost ones too."""
        return list(self._kept.values())

    def find(self, id: str) -> NodeSnapshot | None:
        """Return a snapshot; None if no node is known to have it."""
        return self._kept.get(id)

    def get(self, id: str) -> NodeSnapshot:
        """Return a snapshot; raises NotFound, or SnapshotLost if its node is gone."""
        found = self._kept.get(id)
        if found is None:
            raise NotFound(f"no snapshot {id!r}", component=COMPONENT)
        if found.lost:
            raise SnapshotLost(f"snapshot {id!r} is lost: {found.lost}", component=COMPONENT)
        return found

    def used(self) -> Mapping[str, str]:
        """Return what needs a snapshot, by the snapshots that something needs."""
        making = {id: "a sandbox that is being made" for id, _ in self._beginning}
        return {id: f"trajectory {trajectory!r}" for id, trajectory in self.users().items()} | making

    async def begin(self, id: str, work: Callable[[], Awaitable[_T]]) -> _T:
        """Do what begins with a snapshot, which is not removed meanwhile; it is cancelled when the snapshot is lost.

        Raises as `get`, SnapshotLost if it is lost meanwhile, and what the work raises.
        """
        self.get(id)
        lost = asyncio.get_running_loop().create_future()
        held = (id, lost)
        self._beginning.append(held)
        task = asyncio.ensure_future(work())
        try:
            await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                self.get(id)
            return await task
        finally:
            self._beginning.remove(held)
            lost.cancel()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # --- taking and removing

    async def take(self, remote: RemoteNode, trajectory: str) -> SnapshotRecord:
        """Take a snapshot of a trajectory on its node, and put it on record.

        Raises CapacityExceeded while the node is not reached, or if those in use leave no room, StorageUnavailable, and
        as `RemoteSnapshots.order`. One that nobody is told of is removed again.
        """
        if not remote.attached:
            told = f"node {remote.name}, on which trajectory {trajectory!r} lives, is not reached now"
            raise CapacityExceeded(told, component=COMPONENT, retry_after_s=RETRY_S)
        id = secrets.token_hex(6)
        self._under_way.add(id)
        try:
            self._make_room(0)
            used = self.used()
            spared = [each.record.id for each in self._on(remote.name) if each.record.id in used]
            record = await remote.snapshots.order(trajectory, id, spared)
            self._make_room(record.size_bytes)
            self.adopt(remote.name, record)
            await self._store.commit()
        except BaseException:
            if self._kept.pop(id, None) is not None:
                self._save(remote.name)
            self._drop(remote.name, id)
            raise
        finally:
            self._under_way.discard(id)
        logger.info("snapshot taken", snapshot=id, node=remote.name, trajectory=trajectory)
        return record

    def adopt(self, node: str, record: SnapshotRecord) -> None:
        """Note that a node has a snapshot."""
        self._kept[record.id] = NodeSnapshot(node, record)
        self._save(node)

    async def remove(self, id: str) -> None:
        """Remove a snapshot, from an absent node when that is back; raises NotFound, Conflict or StorageUnavailable."""
        found = self._kept.get(id)
        if found is None:
            raise NotFound(f"no snapshot {id!r}", component=COMPONENT)
        if user := self.used().get(id):
            raise Conflict(f"snapshot {id!r} is in use by {user}: end that first", component=COMPONENT)
        removal = self._remove(found)
        await self._store.commit()
        if removal is not None:
            await asyncio.wait([removal], timeout=REMOVAL_S)

    # --- what nodes say

    async def compare(self, remote: RemoteNode) -> None:
        """Have a node that has joined say which it has, and bring both sides to agree."""
        self.watch(remote)
        self._comparing.add(remote.name)
        try:
            await remote.snapshots.compare()
        except CodedError as error:
            logger.warning("a node does not say which snapshots it has", node=remote.name, why=error.message)
        finally:
            self._comparing.discard(remote.name)

    def watch(self, remote: RemoteNode) -> None:
        """Take what a node says of its snapshots."""
        remote.snapshots.on_change = partial(self._said, remote.name)

    def lose(self, node: str, why: str) -> None:
        """A node is gone, and what it had can be had no more until it is back."""
        self._note(node, [replace(each, lost=each.lost or f"node {node}: {why}") for each in self._on(node)])

    def _said(self, node: str, there: Mapping[str, SnapshotRecord]) -> None:
        """A node has said which it keeps: all that are on record, or it has made room, or its disk is another one."""
        kept: list[NodeSnapshot] = []
        for each in self._on(node):
            if (record := there.get(each.record.id)) is not None:
                kept.append(NodeSnapshot(node, record))
            elif node in self._comparing:
                kept.append(replace(each, lost=each.lost or f"node {node} came back without it"))
            elif each.lost or each.record.id in self._under_way:
                kept.append(each)
            else:
                logger.info("a node has removed a snapshot", node=node, snapshot=each.record.id)
        self._note(node, kept)
        for id in there.keys() - self._under_way:
            if (known := self._kept.get(id)) is None or known.node != node:
                logger.info("a snapshot that nobody knows is removed", node=node, snapshot=id)
                self._drop(node, id)

    def _note(self, node: str, kept: Iterable[NodeSnapshot]) -> None:
        """Put on record what a node has, and tell those that wait for what it has no more."""
        before = {each.record.id: each for each in self._on(node)}
        oldest_s = self._wall() - self._age_s
        now = {each.record.id: each for each in kept if not each.lost or each.record.used_s >= oldest_s}
        if now == before:
            return
        for id in before:
            del self._kept[id]
        self._kept |= now
        for id, lost in self._beginning:
            gone = id in before and (id not in now or now[id].lost)
            if gone and not lost.done():
                lost.set_result(None)
        self._save(node)

    # --- inside

    def _on(self, node: str) -> list[NodeSnapshot]:
        return [each for each in self._kept.values() if each.node == node]

    def _make_room(self, size_bytes: int) -> None:
        """Remove what is lost, or was used least recently, until those under way fit; raises CapacityExceeded."""
        used = self.used()
        for each in sorted(self._kept.values(), key=lambda each: (not each.lost, each.record.used_s)):
            if self._fits(size_bytes):
                return
            if each.record.id not in used and each.record.id not in self._under_way:
                logger.info("snapshot removed, as it was used least recently", snapshot=each.record.id, node=each.node)
                self._remove(each)
        if not self._fits(size_bytes):
            told = (
                f"{len(self._kept)} snapshots on nodes are in use and leave no room for another: end trajectories that "
                "began with them, or raise cluster.snapshots.count_max and total_max"
            )
            raise CapacityExceeded(told, component=COMPONENT, retry_after_s=RETRY_S)

    def _fits(self, size_bytes: int) -> bool:
        there = [each.record.size_bytes for each in self._kept.values() if not each.lost]
        count = len(self._kept.keys() | self._under_way)
        return count <= self.settings.count_max and sum(there) + size_bytes <= self.settings.total_max_bytes

    def _remove(self, found: NodeSnapshot) -> asyncio.Future[bool] | None:
        del self._kept[found.record.id]
        self._save(found.node)
        return self._drop(found.node, found.record.id)

    def _drop(self, node: str, id: str) -> asyncio.Future[bool] | None:
        """Have a node remove one; an absent one does when it is back, as it is on no record."""
        remote = self.member(node)
        if remote is None or not remote.attached:
            return None
        return remote.snapshots.drop(id)

    def _save(self, node: str) -> None:
        kept = self._on(node)
        self._store.save_document(DOCUMENT + node, msgspec.json.encode(kept).decode() if kept else None)
