"""Sandboxes of the E2B API, a trajectory each: their records, their ends, and the commands that run in them."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import structlog
from msgspec import Struct

from gateway.api import Api
from gateway.facades.commands import PIDS_FROM, CommandSpec, KeptCommand
from gateway.facades.facade import ForeignCalls
from manager.errors import CapacityExceeded, CodedError, Conflict, NotFound
from runtimes.chores import Chores, end_chores
from tangram.types import SandboxChoice, TrajectoryOpening

COMPONENT = "e2b"
#: Begins the names of the documents that hold sandboxes; the id of each follows.
DOCUMENT = "e2b_sandbox:"
#: Most sandboxes, paused ones too: each is a document of the store.
SANDBOXES_MAX = 4096
#: Seconds that a command may wait in line for a place in the queue: as long as the SDK waits for any answer.
PATIENCE_S = 60.0

#: Seconds between two tries of a snapshot while files are on their way.
AGAIN_S = 0.05

logger = structlog.get_logger("gateway.facades")


class E2bRecord(Struct, kw_only=True):
    """What is kept of a sandbox."""

    id: str
    function: str
    task: str
    #: As it was asked for.
    template: str
    metadata: dict[str, str]
    envs: dict[str, str]
    started_s: float
    #: When it ends, and whether it is paused then instead.
    end_s: float
    auto_pause: bool = False
    paused: bool = False
    #: The snapshot that its present life began with, or its next will, and that goes after that life; empty for none.
    snapshot: str = ""

    @property
    def trajectory(self) -> str:
        """The trajectory that it is."""
        return self.id


class SandboxCommand(KeptCommand):
    """A command, as the E2B API knows it."""

    def __init__(self, api: Api, calls: ForeignCalls, record: E2bRecord, spec: CommandSpec, tag: str | None) -> None:
        super().__init__(api, calls, record, spec, api.sessions.settings.output_bytes)
        self.pid, self.tag = 0, tag
        #: Seconds after which it was ended, if it was for that.
        self.expired_s: float | None = None
        self._typing = asyncio.Lock()

    async def type(self, data: bytes) -> None:
        """Pass on input, behind what was typed before; return when the command was sent all, or takes no more."""
        await self.opened.wait()
        async with self._typing:
            place = 0
            while self.session is not None and self.session.reads and place < len(data):
                before = self.session.input_offset
                place += await self.session.write(data[place:]) - before


class E2bSandbox:
    """A sandbox with what lives of it in this gateway."""

    def __init__(self, record: E2bRecord) -> None:
        self.record = record
        #: Commands that have not ended, by process id, the oldest first.
        self.commands: dict[int, SandboxCommand] = {}
        #: Held while it is paused, resumed or ended.
        self.lock = asyncio.Lock()
        self.timer: asyncio.TimerHandle | None = None

    async def neighbour(self) -> str | None:
        """Return the invocation of the command that was started last and runs: what comes runs beside it.

        What waits for its turn is waited for, so that nothing stands behind a command that does not end.
        """
        while (last := next(reversed(self.commands.values()), None)) is not None:
            if last.opened.is_set() and not last.ended.is_set():
                return last.invocation_id
            if last.ended.is_set():
                self.commands.pop(last.pid, None)
            await last.opened.wait()
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSource:
    """What a sandbox begins with: a function, and what is chosen of it or a snapshot."""

    function: str
    choice: SandboxChoice | None = None
    snapshot: str | None = None


class SandboxManager:
    """All sandboxes of the facade."""

    def __init__(self, api: Api, calls: ForeignCalls) -> None:
        self._api = api
        self._calls = calls
        self._by_id: dict[str, E2bSandbox] = {}
        self._pids = itertools.count(PIDS_FROM)
        self._slots = asyncio.Semaphore(api.sessions.settings.living_max)
        self._chores = Chores(
            lambda error: logger.warning("a sandbox's chore failed", facade=COMPONENT, error=str(error))
        )
        self._loading = asyncio.get_running_loop().create_task(self._load())

    async def close(self) -> None:
        """Stop what it does by itself; sandboxes stay."""
        for sandbox in self._by_id.values():
            self._arm(sandbox, None)
        await end_chores(self._loading, *self._chores.tasks)

    # --- which there are

    async def find(self, id: str) -> E2bSandbox:
        """Return one that lives or is paused; raises NotFound."""
        await asyncio.shield(self._loading)
        sandbox = self._by_id.get(id)
        if sandbox is not None and not sandbox.record.paused and self._api.engine.trajectory(id) is None:
            if not sandbox.lock.locked():
                self._forget(sandbox)
            sandbox = None
        if sandbox is None:
            raise NotFound(f"sandbox {id[:64]!r} was not found", component=COMPONENT)
        return sandbox

    async def all(self) -> list[E2bSandbox]:
        """Return all that live or are paused, by their beginning."""
        await asyncio.shield(self._loading)
        found = []
        for id in list(self._by_id):
            with suppress(NotFound):
                found.append(await self.find(id))
        return sorted(found, key=lambda each: (each.record.started_s, each.record.id))

    # --- their lives

    async def create(self, record: E2bRecord, source: SandboxSource, within_s: float) -> E2bSandbox:
        """Make one, on disk before it is told of. Raises as `Api.open_trajectory`, CapacityExceeded after its time."""
        await asyncio.shield(self._loading)
        known = self._by_id.get(record.id)
        if known is not None:  # the same request again
            async with known.lock:
                return await self.find(record.id)
        if len(self._by_id) >= SANDBOXES_MAX and len(await self.all()) >= SANDBOXES_MAX:
            message = f"there are {SANDBOXES_MAX} sandboxes, as many as may be: kill some"
            raise CapacityExceeded(message, component=COMPONENT, retry_after_s=1.0)
        sandbox = self._by_id[record.id] = E2bSandbox(record)
        try:
            async with sandbox.lock:
                await self._open(record, source, within_s)
                await self._keep(sandbox)
                return sandbox
        except BaseException:  # its client knows of none
            self._forget(sandbox)
            self._chores.begin(self._end(record.id))
            raise

    async def kill(self, sandbox: E2bSandbox) -> None:
        """End it with all that is in it."""
        async with sandbox.lock:
            await self._end(sandbox.record.id)
            self._forget(sandbox)

    async def pause(self, sandbox: E2bSandbox) -> None:
        """Keep its files and let go of the rest; raises Conflict for one that is paused."""
        async with sandbox.lock:
            record = sandbox.record
            if record.paused:
                raise Conflict(f"sandbox {record.id} is paused already", component=COMPONENT)
            ends = (each.cancel("the sandbox is paused") for each in list(sandbox.commands.values()))
            await asyncio.gather(*ends)
            earlier, taken = record.snapshot, await self._take(record.id)
            record.paused, record.snapshot = True, taken
            await self._keep(sandbox)
            await self._end(record.id)
            await self._drop(earlier)

    async def resume(self, sandbox: E2bSandbox, timeout_s: float, within_s: float) -> None:
        """Let it live for so long from now on, again if it was paused."""
        async with sandbox.lock:
            record = sandbox.record
            if record.paused:
                source = SandboxSource(function=record.function, snapshot=record.snapshot)
                try:
                    await self._open(record, source, within_s)
                except BaseException:
                    self._chores.begin(self._end(record.id))
                    raise
                record.paused = False
            await self.set_timeout(sandbox, max(timeout_s, record.end_s - self._api.wall()))

    async def set_timeout(self, sandbox: E2bSandbox, timeout_s: float) -> None:
        """Let it live for so long from now on."""
        sandbox.record.end_s = self._api.wall() + timeout_s
        await self._keep(sandbox)

    async def snapshot(self, sandbox: E2bSandbox) -> str:
        """Keep its files as they are; return the template that begins with them."""
        async with sandbox.lock:
            taken = await self._take(sandbox.record.id)
        return f"{sandbox.record.function}:{taken}"

    # --- commands

    async def begin(
        self, sandbox: E2bSandbox, spec: CommandSpec, tag: str | None, timeout_s: float | None
    ) -> SandboxCommand:
        """Start a command, which is ended after ``timeout_s`` whoever listens; raises CapacityExceeded."""
        bound = self._api.sessions.settings.living_max
        if sum(len(each.commands) for each in self._by_id.values()) >= bound:
            message = f"{bound} commands run or wait, as many as may (server.sessions.living_max)"
            raise CapacityExceeded(message, component=COMPONENT, retry_after_s=1.0)
        command = SandboxCommand(self._api, self._calls, sandbox.record, spec, tag)
        command.parent, command.pid = await sandbox.neighbour(), next(self._pids)
        sandbox.commands[command.pid] = command
        command.start(self._slots, asyncio.get_running_loop().time() + PATIENCE_S)
        self._chores.begin(self._attend(sandbox, command, timeout_s))
        return command

    async def _attend(self, sandbox: E2bSandbox, command: SandboxCommand, timeout_s: float | None) -> None:
        """Keep what it says until it ends, which it does in its time."""
        if not command.spec.stdin:
            self._chores.begin(command.end_input())
        try:
            async with asyncio.timeout(timeout_s):
                await command.keep_output()
                await command.ended.wait()
        except TimeoutError:
            command.expired_s = timeout_s
            await command.cancel(f"it ran longer than its client allows, {timeout_s:g} s")
        finally:
            sandbox.commands.pop(command.pid, None)

    # --- inside

    async def _load(self) -> None:
        """Take up what an earlier gateway kept."""
        for name in [str(row["name"]) for row in await self._api.store.read("document_names", (DOCUMENT,))]:
            try:
                kept = await self._api.store.document(name) or ""
                sandbox = E2bSandbox(msgspec.json.decode(kept, type=E2bRecord))
            except msgspec.MsgspecError as error:  # it stays as it is, and the others are served
                logger.warning("a sandbox's record cannot be read", facade=COMPONENT, record=name, why=str(error))
                continue
            self._by_id[sandbox.record.id] = sandbox
            self._arm(sandbox, sandbox.record.end_s)
            if sandbox.record.paused:  # which its trajectory may not have been told
                self._chores.begin(self._end(sandbox.record.id))

    async def _open(self, record: E2bRecord, source: SandboxSource, within_s: float) -> None:
        opening = TrajectoryOpening(
            function=source.function, task=record.task, sandbox=source.choice, snapshot=source.snapshot, new=True
        )
        try:
            async with asyncio.timeout(within_s):
                await self._api.open_trajectory(record.id, opening)
        except TimeoutError:
            message = "the sandbox was not made in the time that its client waits; ask again"
            raise CapacityExceeded(message, component=COMPONENT, retry_after_s=1.0) from None

    async def _keep(self, sandbox: E2bSandbox) -> None:
        """Have it on disk, before its client is told."""
        record = sandbox.record
        self._api.store.save_document(DOCUMENT + record.id, msgspec.json.encode(record).decode())
        self._arm(sandbox, record.end_s)
        await self._api.store.commit()

    def _forget(self, sandbox: E2bSandbox) -> None:
        self._arm(sandbox, None)
        if self._by_id.get(sandbox.record.id) is sandbox:
            del self._by_id[sandbox.record.id]
            self._api.store.save_document(DOCUMENT + sandbox.record.id, None)
            self._chores.begin(self._drop(sandbox.record.snapshot))

    def _arm(self, sandbox: E2bSandbox, end_s: float | None) -> None:
        """Let it end at an instant of the day, None for none."""
        if sandbox.timer is not None:
            sandbox.timer.cancel()
            sandbox.timer = None
        if end_s is not None and not sandbox.record.paused:
            loop = asyncio.get_running_loop()
            left_s = max(0.0, end_s - self._api.wall())
            sandbox.timer = loop.call_later(left_s, lambda: self._chores.begin(self._expire(sandbox)))

    async def _expire(self, sandbox: E2bSandbox) -> None:
        if sandbox.record.end_s > self._api.wall():  # a loop's timer may be a little early, and the end was moved on
            self._arm(sandbox, sandbox.record.end_s)
            return
        if sandbox.record.auto_pause:
            await self.pause(sandbox)
        else:
            await self.kill(sandbox)

    async def _take(self, id: str) -> str:
        """Return a snapshot of its files, once none is on its way; raises CapacityExceeded if some are for too long."""
        now = asyncio.get_running_loop().time
        until_s = now() + PATIENCE_S / 2
        while True:
            try:
                return (await self._api.take_snapshot(id)).snapshot
            except Conflict as error:  # its client has read a file a moment ago, and knows of no transfer
                if now() >= until_s:
                    raise CapacityExceeded(error.message, component=COMPONENT, retry_after_s=1.0) from None
            await asyncio.sleep(AGAIN_S)

    async def _drop(self, snapshot: str) -> None:
        if snapshot:
            with suppress(CodedError):  # it is gone already, or another began with it and needs it yet
                await self._api.remove_snapshot(snapshot)

    async def _end(self, trajectory: str) -> None:
        await self._api.engine.end_trajectory(trajectory)


def new_id(key: str | None) -> str:
    """Return the id of a new sandbox; the same for the same request, if it has a key."""
    return "e2b" + (secrets.token_hex(10) if key is None else hashlib.sha256(key.encode()).hexdigest()[:20])
