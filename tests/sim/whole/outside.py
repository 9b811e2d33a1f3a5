"""The world outside: disks, sandboxes with their runners, an upstream, and networks, which outlive every process.

Only these are faked. Each has its own time and its own faults; what a killed process asked of it goes on as it would.
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from manager.clock import Clock
from manager.errors import CapacityExceeded
from manager.function import SandboxSpec
from runtimes.node.protocol import LinkSettings, NodeLink
from runtimes.runtime import Execution, Result, Runtime
from runtimes.sandbox.command import Command, CommandResult, OnOutput, ResumableCommand
from runtimes.sandbox.environments import TRAJECTORY
from runtimes.sandbox.linux import CpuWeight
from runtimes.sandbox.runner.client import lost
from runtimes.sandbox.sandbox import CreationGate, Sandbox
from runtimes.sandbox.spec import ProviderInfo, SandboxRecord
from tests.sim.whole.loop import PROCESS, Killed, SimLoop, SimProcess, write

#: First words of statements that change something.
WRITES = ("BEGIN", "COMMIT", "INSERT", "UPDATE", "DELETE", "REPLACE")
#: Seconds that a message takes at most, but for those that are late.
WAY_S = 0.003
#: Seconds for which two commands may share a core, while one of them is moved.
SHARED_S = 1.0
WARM_IMAGES: dict[str, bytes] = {}


# --- disks


class SimDisk:
    """SQLite files that outlive processes: of a killed one all is kept that was committed, and nothing else."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._files: dict[str, sqlite3.Connection] = {}
        #: Files of which there was no image.
        self._fresh: set[str] = set()
        #: Files that refuse every write now, and those that refuse the next one.
        self.full: set[str] = set()
        self.failing: set[str] = set()
        #: Files of which some row is never written: the next log record, and then that one.
        self.unwritable: dict[str, tuple[object, ...] | None] = {}

    def connect(self, path: object, **options: object) -> SimConnection:
        name = str(path)
        if name not in self._files or not Path(name).exists():
            Path(name).touch()  # it is there in name only: whoever removes it begins anew
            database = self._files[name] = _connect(":memory:", isolation_level=None, check_same_thread=False)
            image = WARM_IMAGES.get(Path(name).name)
            if image is not None:
                database.deserialize(image)
            else:
                self._fresh.add(name)
        return SimConnection(self, name, self._files[name])

    def is_fresh(self, name: str) -> bool:
        return name in self._fresh

    def made(self, name: str) -> None:
        """Let later histories begin with such a file."""
        self._fresh.discard(name)
        WARM_IMAGES.setdefault(Path(name).name, self._files[name].serialize())

    def check(self, name: str, statement: str, rows: Iterable[Sequence[object]] = ()) -> None:
        """Raise what the disk, or a shortage of memory, has against a write."""
        if name in self.full:
            raise sqlite3.OperationalError("database or disk is full")
        if name in self.failing:
            self.failing.discard(name)
            raise sqlite3.OperationalError("disk I/O error")
        if name in self.unwritable and "log_records" in statement:
            for row in rows:
                place = self.unwritable[name] = self.unwritable[name] or tuple(row[:2])
                if place == tuple(row[:2]):
                    raise MemoryError("as the seed has it")

    def close(self) -> None:
        for name, database in self._files.items():
            database.close()
            Path(name).unlink(missing_ok=True)


_connect = sqlite3.connect


class SimConnection:
    """A connection of one process. Whatever it began and did not commit ends with that."""

    def __init__(self, disk: SimDisk, name: str, database: sqlite3.Connection) -> None:
        self._disk, self._name, self._database = disk, name, database
        self._process = PROCESS.get()
        self._process.held[self] = self._let_go
        self._owns = False
        self.row_factory: Any = None

    @property
    def in_transaction(self) -> bool:
        return self._process.alive and self._database.in_transaction

    def execute(self, sql: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        if sql.startswith(("PRAGMA query_only", "PRAGMA wal_checkpoint")):
            sql = "SELECT 0, 0, 0"
        cursor = self._database.cursor()
        cursor.row_factory = self.row_factory
        if sql.startswith(WRITES):
            self._about_to_write(sql, [values])
            cursor.execute(sql, values)
            self._owns = self._database.in_transaction
            write(self._process)  # it is done, and nobody may learn of it
        else:
            self._require_alive()
            cursor.execute(sql, values)
        return cursor

    def executemany(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        rows = list(rows)
        self._about_to_write(sql, rows)
        self._database.executemany(sql, rows)

    def executescript(self, sql: str) -> None:
        """Make the tables: once for all histories."""
        write(self._process)
        if self._disk.is_fresh(self._name):
            self._database.executescript(sql)
            self._disk.made(self._name)

    def close(self) -> None:
        self._let_go()

    def __enter__(self) -> SimConnection:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if self.in_transaction:
            self.execute("ROLLBACK" if kind else "COMMIT")

    def _about_to_write(self, sql: str, rows: Iterable[Sequence[object]] = ()) -> None:
        write(self._process)
        self._disk.check(self._name, sql, rows)

    def _require_alive(self) -> None:
        if not self._process.alive:
            raise Killed

    def _let_go(self) -> None:
        if self._owns and self._database.in_transaction:
            self._database.execute("ROLLBACK")
        self._owns = False
        self._process.held.pop(self, None)


# --- what is done


@dataclass(slots=True)
class Run:
    """One run of a command in a sandbox, as the machine saw it."""

    invocation: str
    attempt: int
    trajectory: str | None
    machine: str
    begun_s: float
    ended_s: float | None = None
    #: ``done``, ``timed_out``, ``killed`` or ``died`` (with its sandbox).
    how: str = ""
    cores: tuple[int, ...] = ()


@dataclass(slots=True)
class Ledger:
    """What the outside saw; nobody inside writes here."""

    runs: list[Run] = field(default_factory=list)
    #: Instants at which the upstream was called.
    calls: list[float] = field(default_factory=list)
    #: What was wrong at once.
    wrong: list[str] = field(default_factory=list)


# --- sandboxes


class BoxCommand:
    """One command and its processes."""

    def __init__(self, box: SimBox, number: int, command: Command) -> None:
        self.box, self.number, self.command = box, number, command
        self.claim, self.detached = command.claim, command.detached
        self.said: list[tuple[str, bytes]] = []
        self.end: CommandResult | None = None
        self.timers: list[asyncio.TimerHandle] = []
        action, _, _ = command.claim.rpartition("/")
        action, _, attempt = action.rpartition(".")
        invocation = action.partition(".")[0]
        labels, loop = box.labels, box.loop
        self.run = Run(invocation, int(attempt), labels.get(TRAJECTORY), box.machine.name, loop.now_s)
        self.run.cores = box.cores
        box.machine.ledger.runs.append(self.run)
        script = json.loads(command.shell)
        seconds = script["s"] if self.run.attempt not in script.get("hangs", ()) else 1e6
        for line in range(script.get("say", 0)):
            at_s = min(seconds, 100.0) * (line + 1) / (script["say"] + 1)
            text = f"{invocation} {self.run.attempt} {line}\n".encode()
            self.timers.append(loop.call_later(at_s, self.say, text))
        self.timers.append(loop.call_later(seconds, self.finish, "done"))
        self.timers.append(loop.call_later(command.timeout_s, self.finish, "timed_out"))

    def say(self, text: bytes) -> None:
        self.said.append(("stdout", text))
        if self.box.client is not None:
            self.box.client.answer(self.number, "said", ("stdout", text))

    def finish(self, how: str) -> None:
        """Its processes are gone."""
        if self.end is not None:
            return
        for timer in self.timers:
            timer.cancel()
        self.run.ended_s, self.run.how = self.box.loop.now_s, how
        stdout = b"".join(text for _, text in self.said)
        ran_s = self.run.ended_s - self.run.begun_s
        self.end = CommandResult(
            exit_code=0 if how == "done" else None,
            signal=None if how == "done" else 9,
            stdout=stdout,
            timed_out=how == "timed_out",
            killed=how == "killed",
            duration_s=ran_s,
        )
        self.box.ended(self)


class SimBox:
    """A sandbox with its runner, which keeps detached commands for the next gateway."""

    def __init__(self, machine: SimMachine, name: str, spec: SandboxSpec, labels: Mapping[str, str]) -> None:
        self.machine, self.name, self.spec, self.labels = machine, name, spec, dict(labels)
        self.loop = machine.loop
        self.alive, self.ready = True, False
        self.cores: tuple[int, ...] = ()
        self.client: BoxClient | None = None
        self.running: dict[int, BoxCommand] = {}
        self.kept: dict[str, BoxCommand] = {}
        self.started: dict[str, None] = {}

    @property
    def held(self) -> dict[str, ResumableCommand]:
        commands = [*self.running.values(), *self.kept.values()]
        return {
            each.claim: ResumableCommand(self._ran_s(each), each.end is None, self.loop.now_s)
            for each in commands
            if each.detached and each.claim
        }

    def _ran_s(self, command: BoxCommand) -> float:
        return (command.run.ended_s or self.loop.now_s) - command.run.begun_s

    def attach(self, client: BoxClient) -> None:
        """A gateway greets; it takes the place of the one before."""
        self.gateway_lost()
        self.client = client

    def gateway_lost(self, client: BoxClient | None = None) -> None:
        """The connection is gone: what is not detached ends."""
        if client is not None and client is not self.client:
            return
        self.client = None
        for command in list(self.running.values()):
            del self.running[command.number]
            self.running[-id(command)] = command
            command.number = -id(command)
            if not command.detached:
                command.finish("killed")

    # --- requests

    def run(self, client: BoxClient, number: int, command: Command) -> None:
        if not self._serves(client):
            return
        if command.detached:
            self.started[command.claim] = None
        self.running[number] = BoxCommand(self, number, command)
        self.machine.check_cores(self)

    def claim(self, client: BoxClient, number: int, claim: str) -> None:
        if not self._serves(client):
            return
        for command in [*self.running.values(), *self.kept.values()]:
            if command.claim == claim and command.detached:
                if self.running.pop(command.number, None) is not None:
                    self.running[number] = command
                command.number = number
                for said in command.said:
                    client.answer(number, "said", said)
                if command.end is not None:
                    client.answer(number, "end", command.end)
                return
        client.answer(number, "end", lost(f"there is no {claim!r} to be claimed"))

    def kill(self, client: BoxClient, number: int) -> None:
        if self._serves(client) and (command := self.running.get(number)) is not None:
            self.loop.call_later(self.machine.way_s(), command.finish, "killed")

    def keep(self, client: BoxClient, claims: str, detached: bool) -> None:
        if not self._serves(client):
            return
        for command in [*self.running.values(), *self.kept.values()]:
            if command.claim.startswith(claims):
                command.detached = detached
                if detached:
                    self.started[command.claim] = None
                elif self.kept.pop(command.claim, None) is None and command.number < 0:
                    command.claim = ""
                    command.finish("killed")
        if not detached:
            for claim in [each for each in self.started if each.startswith(claims)]:
                del self.started[claim]

    def ended(self, command: BoxCommand) -> None:
        if self.running.pop(command.number, None) is None:
            return
        if command.detached and command.claim:
            self.kept[command.claim] = command
        if self.client is not None and command.number >= 0:
            self.client.answer(command.number, "end", command.end)

    def die(self) -> None:
        """Everything in it ends, the runner too; idempotent."""
        if not self.alive:
            return
        self.alive = False
        client, self.client = self.client, None
        for command in list(self.running.values()):
            command.finish("died")
        self.running.clear()
        self.machine.boxes.pop(self.name, None)
        if client is not None:
            client.hang_up()

    def _serves(self, client: BoxClient) -> bool:
        return self.alive and self.client is client


class BoxClient:
    """A `runtimes.sandbox.sandbox.RunnerClient` of one process: requests and answers arrive in order, some late."""

    hides = True

    def __init__(self, box: SimBox) -> None:
        self._box, self._loop, self._process = box, box.loop, PROCESS.get()
        self.lost = asyncio.Event()
        box.attach(self)
        self.resumable: dict[str, ResumableCommand] = dict(box.held)
        self.started: frozenset[str] | None = frozenset(box.started)
        self._calls: dict[int, tuple[asyncio.Future[CommandResult], list[tuple[str, bytes]], OnOutput | None]] = {}
        self._number = 0
        self._there_s = self._here_s = 0.0
        self._process.held[self] = self._drop

    # --- the way

    def _ask(self, request: Callable[..., None], *args: object) -> None:
        write(self._process)
        if self.lost.is_set():
            raise lost("the sandbox's runner is gone")
        self._there_s = max(self._there_s + 1e-7, self._loop.now_s + self._box.machine.way_s())
        context = self._loop.outside.context.copy()
        self._loop.call_at(self._there_s, request, self, *args, context=context)

    def answer(self, number: int, kind: str, value: object) -> None:
        """Send what the runner says."""
        self._here_s = max(self._here_s + 1e-7, self._loop.now_s + self._box.machine.way_s())
        self._loop.call_at(self._here_s, self._take, number, kind, value, context=self._process.context.copy())

    def reset(self) -> None:
        """Let the connection break, though both its ends live."""
        self._box.gateway_lost(self)
        self.hang_up()

    def hang_up(self) -> None:
        self._here_s = max(self._here_s + 1e-7, self._loop.now_s + self._box.machine.way_s())
        self._loop.call_at(self._here_s, self._fail, context=self._process.context.copy())

    def _take(self, number: int, kind: str, value: Any) -> None:
        if number not in self._calls:
            return
        done, said, on_output = self._calls[number]
        if kind == "said":
            said.append(value)
            if on_output is not None:
                on_output(*value)
        elif not done.done():
            if isinstance(value, Exception):
                done.set_exception(value)
                done.exception()
            else:
                done.set_result(replace(value, stdout=b"".join(text for _, text in said)))

    def _fail(self) -> None:
        self.lost.set()
        self._process.held.pop(self, None)
        for done, _, _ in self._calls.values():
            if not done.done():
                done.set_exception(lost("the sandbox's runner is gone"))
                done.exception()

    def _drop(self) -> None:
        """The process is gone, or lets go: the runner learns of it."""
        self._process.held.pop(self, None)
        context = self._loop.outside.context.copy()
        self._loop.call_later(self._box.machine.way_s(), self._box.gateway_lost, self, context=context)

    # --- RunnerClient

    async def run(self, command: Command, on_output: OnOutput | None = None) -> CommandResult:
        self._number = number = self._number + 1
        done: asyncio.Future[CommandResult] = self._loop.create_future()
        self._calls[number] = done, [], on_output
        try:
            if self.resumable.pop(command.claim, None) is not None:
                self._ask(lambda client, *args: self._box.claim(client, *args), number, command.claim)
            else:
                self._ask(lambda client, *args: self._box.run(client, *args), number, command)
            async with asyncio.timeout(command.timeout_s + 10.0):
                return await asyncio.shield(done)
        except TimeoutError:
            self.close()
            raise lost("the runner has fallen silent") from None
        except asyncio.CancelledError:
            if not done.done() and not self.lost.is_set():
                self._ask(lambda client, *args: self._box.kill(client, *args), number)
                await asyncio.wait([done], timeout=10.0)
            raise
        finally:
            self._calls.pop(number, None)

    def keep(self, claims: str, *, detached: bool) -> None:
        if not detached:
            self.resumable = {claim: one for claim, one in self.resumable.items() if not claim.startswith(claims)}
        self._ask(lambda client, *args: self._box.keep(client, *args), claims, detached)

    async def rest(self, *, resting: bool, still: bool = False) -> None: ...

    def lend(self, fd: int) -> bool:
        return False

    async def sweep(self, clear_bytes: int | None = None) -> int:
        return 0

    def close(self) -> None:
        if not self.lost.is_set():
            self._fail()
            self._drop()


class BoxControl:
    """A `runtimes.sandbox.sandbox.SandboxControl`."""

    def __init__(self, box: SimBox) -> None:
        self._box, self._process = box, PROCESS.get()

    async def set_cores(self, cores: Sequence[int], weight: CpuWeight = CpuWeight.ACTION) -> None:
        write(self._process)
        self._box.cores = tuple(cores) if weight is CpuWeight.ACTION else ()
        for command in self._box.running.values():
            command.run.cores = self._box.cores
        self._box.machine.check_cores(self._box)

    async def freeze(self, lend: Callable[[int], bool]) -> bool:
        return True

    async def thaw(self) -> None: ...

    async def gather(self) -> None: ...

    def oom_kills(self) -> int:
        return 0

    def peak_memory_bytes(self) -> int:
        return 0

    def forks_refused(self) -> int:
        return 0

    async def cause_of_death(self) -> str:
        return ""

    async def remove(self) -> None:
        await asyncio.sleep(self._box.machine.way_s())
        write(self._process)
        self._box.die()


class BoxSandbox(Sandbox):
    """The product's sandbox, whose record is kept by the world."""

    box: SimBox

    def _note(self, record: SandboxRecord) -> None:
        write(PROCESS.get())
        self._record = record
        self.box.labels = dict(record.labels)


class SimMachine:
    """One machine: its sandboxes live on when its processes are killed."""

    def __init__(self, name: str, loop: SimLoop, chance: random.Random, ledger: Ledger) -> None:
        self.name, self.loop, self.chance, self.ledger = name, loop, chance, ledger
        self.boxes: dict[str, SimBox] = {}
        #: Whether it is short of what a sandbox takes.
        self.short = False

    def check(self) -> None:
        """Raise CapacityExceeded while it is short."""
        if self.short:
            raise CapacityExceeded("no descriptors are left", component="sandbox", retry_after_s=1.0)

    def way_s(self) -> float:
        drawn = self.chance.random()
        return WAY_S * drawn if drawn < 0.97 else 0.2 * self.chance.random()

    def check_cores(self, box: SimBox) -> None:
        """Note two commands that share a core for longer than it takes to move one."""
        if box.running and box.cores:
            self.loop.call_later(SHARED_S, self._check_cores, box, context=self.loop.outside.context.copy())

    def _check_cores(self, box: SimBox) -> None:
        if not box.running or not box.cores:
            return
        for other in self.boxes.values():
            if other is not box and other.running and set(other.cores) & set(box.cores):
                text = f"{self.loop.now_s:.3f}: {box.name} and {other.name} on {self.name} share {box.cores}"
                self.ledger.wrong.append(f"cores are not exclusive: {text}")


class BoxProvider:
    """A `runtimes.sandbox.sandbox.Provider` of a machine, for one process."""

    info = ProviderInfo(kind="process", engine="the world's", isolation="none: nothing is run")
    images = None

    def __init__(self, machine: SimMachine, clock: Clock) -> None:
        self._machine = machine
        self._process = PROCESS.get()
        self._gate = CreationGate(4, clock=clock)
        self.snapshots: Any = SimpleNamespace(users=dict)

    async def check(self, spec: SandboxSpec) -> None: ...

    async def trouble(self) -> str:
        return ""

    async def create(
        self, spec: SandboxSpec, *, name: str, labels: Mapping[str, str], mounts: Mapping[str, str]
    ) -> Sandbox:
        machine = self._machine
        box = None
        try:
            async with self._gate.slot(name):
                await asyncio.sleep(machine.chance.choice((0.01, 0.05, 0.5)))
                machine.check()
                write(self._process)
                box = machine.boxes[name] = SimBox(machine, name, spec, labels)
                await asyncio.sleep(machine.way_s())
                machine.check()
                if not box.alive:
                    raise lost("it was removed while it was made")
                box.ready = True
                sandbox = self._connect(box)
            # What it was made from is noted as used, by a thread.
            await asyncio.sleep(machine.chance.choice((0.001, 0.02, 0.2)))
            machine.check()
        except BaseException:
            if box is not None and self._process.alive:
                box.die()
            raise
        return sandbox

    def _connect(self, box: SimBox) -> BoxSandbox:
        record = SandboxRecord(name=box.name, token="token", spec=box.spec, labels=box.labels, provider="process")
        sandbox = BoxSandbox(
            record=record,
            directory=Path("/nowhere"),
            client=BoxClient(box),  # type: ignore[arg-type]  # it passes no files
            control=BoxControl(box),  # type: ignore[arg-type]  # nor takes snapshots
            shared_cores=(),
        )
        sandbox.box = box
        return sandbox

    async def adopt(self) -> list[tuple[Sandbox, Mapping[str, str]]]:
        await asyncio.sleep(self._machine.way_s())
        for box in [each for each in self._machine.boxes.values() if not each.ready]:
            box.die()
        return [(self._connect(box), box.labels) for box in self._machine.boxes.values()]

    async def reap(self, living: Collection[str]) -> int:
        with self._gate.watching() as young:
            await asyncio.sleep(self._machine.way_s())
            gone = [box for name, box in self._machine.boxes.items() if name not in living and name not in young]
            write(self._process)
            for box in gone:
                box.die()
        return len(gone)

    async def close(self) -> None: ...


class SimUpstream(Runtime):
    """A runtime whose calls the world outside counts."""

    def __init__(self, machine: SimMachine) -> None:
        self._machine = machine

    async def execute(self, execution: Execution) -> Result:
        execution.begin()
        write(PROCESS.get())
        self._machine.ledger.calls.append(self._machine.loop.now_s)
        await asyncio.sleep(float(str(execution.call.input.get("s", 0.1))))
        execution.end()
        return Result(value={"done": True})


# --- networks


class SimTransport(asyncio.Transport):
    """One end of a connection: bytes arrive in order and in pieces, some late, and none once it is cut."""

    def __init__(self, protocol: NodeLink, machine: SimMachine) -> None:
        super().__init__({"peername": "world"})
        self.protocol, self._machine, self._loop = protocol, machine, machine.loop
        self.process: SimProcess = PROCESS.get()
        self.peer: SimTransport
        self._closing = False
        #: Whether nothing passes any more, and nobody is told.
        self.silent = False
        self._there_s = 0.0
        self.process.held[self] = self._hang_up

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing:
            return
        write(self.process)
        data, chance = bytes(data), self._machine.chance
        while data:
            size = chance.randint(1, len(data)) if chance.random() < 0.1 else len(data)
            piece, data = data[:size], data[size:]
            self._tell(self.peer._arrive, piece)

    def _tell(self, what: Callable[..., None], *args: object) -> None:
        self._there_s = max(self._there_s + 1e-7, self._loop.now_s + self._machine.way_s())
        self._loop.call_at(self._there_s, what, *args, context=self.peer.process.context.copy())

    def _arrive(self, data: bytes) -> None:
        if not self._closing and not self.silent:
            self.protocol.data_received(data)

    def _hang_up(self) -> None:
        self._tell(self.peer._hung_up)

    def _hung_up(self) -> None:
        if not self.silent:
            self.close()

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        if not self._closing:
            self._hang_up()
            self._end(None)

    def reset(self) -> None:
        """Let the connection break: both ends learn of it."""
        for end in (self, self.peer):
            end._end(ConnectionResetError("reset by peer"))

    def _end(self, error: Exception | None) -> None:
        if not self._closing:
            self._closing = True
            self.process.held.pop(self, None)
            self._loop.call_soon(self.protocol.connection_lost, error, context=self.process.context.copy())

    def cut(self) -> None:
        """Let nothing pass any more, without a word."""
        self.silent = self.peer.silent = True


def end_of(machine: SimMachine, settings: LinkSettings, clock: Clock) -> tuple[NodeLink, SimTransport]:
    """Return one end of a connection that is yet to be joined to another, in the present process."""
    link = NodeLink(settings, clock=clock)
    transport = SimTransport(link, machine)
    link.connection_made(transport)
    return link, transport
