"""A gateway's side and a node's side that find each other again after every fault, as membership and daemon do."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from manager.action import Action, Lease, Outcome
from manager.config import NodeSpec
from manager.errors import CodedError
from manager.executor import Call, CallHooks
from manager.function import FunctionSpec
from runtimes.node import protocol as wire
from runtimes.node.daemon import NodeDaemon
from runtimes.node.protocol import Inventory, Message
from runtimes.node.remote import RemoteNode
from runtimes.sandbox.command import claims_of
from tests.runtimes.node.machine import Machine, MachineRuntimes, Words, daemon_settings
from tests.runtimes.node.memory_stream import pair

#: Seconds after which a test is taken for stuck.
STUCK_S = 60.0
FUNCTION = FunctionSpec(name="shell", runtime="exec")


class KeptLog:
    """A log that a gateway keeps on disk: the next one passes over what it has already (`InvocationLog.restore`)."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        self.omitted_bytes = 0
        self._known: dict[str, int] = {}

    def restore(self) -> None:
        """A new gateway takes it up."""
        self._known = {stream: len(text) for stream, text in self.said.items()}

    def write(self, stream: str, data: str) -> None:
        known = min(len(data), self._known.get(stream, 0))
        self._known[stream] = self._known.get(stream, 0) - known
        self.said[stream] = self.said.get(stream, "") + data[known:]

    def omit(self, size_bytes: int) -> None:
        self.omitted_bytes = size_bytes


@dataclass(slots=True, eq=False)
class SessionAction:
    """One action as its gateways have it on record."""

    action: Action
    function: FunctionSpec
    log: KeptLog = field(default_factory=KeptLog)
    #: Whether the record says that it may have begun; how often it was asked, and told of its beginning.
    begun: bool = False
    asked: int = 0
    ends: list[Outcome] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    #: What its caller gave.
    given: Mapping[str, object] = field(default_factory=dict)

    @property
    def claim(self) -> str:
        return claims_of(self.action.id, self.action.attempt)


@dataclass(slots=True, eq=False)
class SessionHooks(CallHooks):
    """Puts on record that an action begins, and lets it."""

    kept: SessionAction

    async def commit_begin(self) -> bool:
        self.kept.begun, self.kept.asked = True, self.kept.asked + 1
        return True


def hello(protocol: int = wire.PROTOCOL) -> wire.NodeHello:
    """Return what a node says first."""
    return wire.NodeHello(
        protocol=protocol,
        version="1",
        name="n1",
        epoch="e",
        instance="i",
        ticket="t",
        key="",
        spec=NodeSpec(name="n1", numa=((0,),), memory_bytes=1),
        labels={},
        isolation="",
    )


class Session:
    """The two sides, the streams between them, and the faults."""

    def __init__(self, directory: Path, machine: Machine) -> None:
        self.directory, self.machine = directory, machine
        directory.mkdir(exist_ok=True)
        self.daemon: NodeDaemon | None = None
        self.runtimes: MachineRuntimes | None = None
        self.node = RemoteNode("n1")
        self.actions: dict[str, SessionAction] = {}
        self.frames = 0
        #: How many of each kind of message have travelled, and what happens in place of the next of a kind.
        self.kinds: Counter[type[Message]] = Counter()
        self.faults_of: dict[type[Message], str] = {}
        #: How many there were of each message.
        self.heard: Counter[type[Message]] = Counter()
        #: What happens instead of the arrival of a frame, by its number.
        self.faults: dict[int, str] = {}
        self._due: list[str] = []
        self._recovering = False
        #: What the gateway of now runs on since one before, and what that had not begun.
        self._resumed: list[SessionAction] = []
        self._waiting: list[SessionAction] = []
        #: The node's life that the gateways have on record.
        self._epoch = ""
        self.joined = asyncio.Event()
        self.links = 0

    # --- the actions

    def start(
        self, name: str, function: FunctionSpec = FUNCTION, given: Mapping[str, object] | None = None, **more: object
    ) -> SessionAction:
        """Give the node an action."""
        action = Action(id=name, function=function.name, **more)  # type: ignore[arg-type]
        kept = self.actions[name] = SessionAction(action, function, given=given or {"of": name})
        self._execute(kept)
        return kept

    def _execute(self, kept: SessionAction, *, resumed: bool = False) -> None:
        kept.task = asyncio.create_task(self._end(kept, self.node, resumed=resumed))

    async def _end(self, kept: SessionAction, node: RemoteNode, *, resumed: bool) -> None:
        call = Call(function=kept.function, input=kept.given, log=kept.log, hooks=SessionHooks(kept), resumed=resumed)
        outcome = await node.execute(kept.action, Lease(action_id=kept.action.id, node="n1"), call)
        kept.ends.append(outcome)
        node.acknowledge(kept.claim)

    # --- the link

    async def play(self, until: Callable[[], bool]) -> None:
        """Keep both sides joined, through every fault, until something holds."""
        async with asyncio.timeout(STUCK_S):
            while not until():
                await self._join(until)

    async def _join(self, until: Callable[[], bool]) -> None:
        for fault in self._due:
            await {"cut": self._nothing, "daemon": self._kill_daemon, "gateway": self._kill_gateway}[fault]()
        self._due.clear()
        if self.daemon is None:
            await self.begin_daemon()
        assert self.daemon is not None
        self.links += 1
        near, far = pair(self._arrives)
        serving = asyncio.create_task(self.daemon.serve(far))
        with suppress(CodedError):
            inventory = await near.receive(Inventory, STUCK_S, frame_max_bytes=2**20)
            self.node.connect(near, inventory, recovering=self._recovering)
            if self._recovering:
                await self._recover()
            self._epoch = inventory.epoch  # as `gateway.cluster.store.NodeRecords.compared`
            self.joined.set()
            listening = asyncio.create_task(self.node.serve(near))
            watching = asyncio.create_task(_until(until))
            await asyncio.wait([listening, serving, watching], return_when=asyncio.FIRST_COMPLETED)
            watching.cancel()
            near.close("the end of this link")
            await listening
        far.close("the end of this link")
        await serving
        self.joined.clear()

    def _arrives(self, kind: int) -> bool:
        self.frames += 1
        self.heard[wire.KINDS[kind]] += 1
        message = wire.KINDS[kind]
        self.kinds[message] += 1
        fault = self.faults.get(self.frames) or self.faults_of.pop(message, None)
        if fault is not None:
            self._due.append(fault)
        return fault is None

    # --- the faults

    async def _nothing(self) -> None: ...

    async def begin_daemon(self) -> None:
        """Begin a daemon in the state directory."""
        self.runtimes = MachineRuntimes.on(self.machine)
        self.daemon = NodeDaemon(daemon_settings(self.directory), self.runtimes)
        await self.daemon.start()

    async def _kill_daemon(self) -> None:
        """Nothing of it is written at its end, as nothing is by one that is killed; its commands run on."""
        assert self.daemon is not None
        await self.daemon.close()
        self.daemon = None

    async def _kill_gateway(self) -> None:
        for kept in self.actions.values():
            if kept.task is not None:
                kept.task.cancel()
        await self.node.close()
        await asyncio.gather(*(kept.task for kept in self.actions.values() if kept.task), return_exceptions=True)
        self.node, self._recovering = RemoteNode("n1", epoch=self._epoch), True
        self._waiting = [kept for kept in self.actions.values() if not kept.ends and not kept.begun]
        self._resumed = [kept for kept in self.actions.values() if not kept.ends and kept.begun]
        for kept in self._resumed:
            kept.log.restore()
            self._execute(kept, resumed=True)
        await asyncio.sleep(0)

    async def _recover(self) -> None:
        """Begin what had not begun when the gateway before was killed, as `gateway.invocations.restart` does."""
        self._recovering = False
        await self.node.end_unclaimed({kept.claim for kept in self._resumed})
        for kept in self._waiting:
            self._execute(kept)

    async def close(self) -> None:
        """End both sides."""
        await self.node.close()
        for kept in self.actions.values():
            if kept.task is not None and not kept.task.done():
                kept.task.cancel()
        if self.daemon is not None:
            await self.daemon.close()


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  # what is waited for has no event, and every turn may bring it
        await asyncio.sleep(0)


def settled(session: Session) -> bool:
    """Return whether every action has ended and the node has forgotten it."""
    return (
        all(kept.ends for kept in session.actions.values()) and session.daemon is not None and not session.daemon.busy
    )


#: What the actions of a session say; more than one piece, in both streams, not only ASCII.
WORDS: Mapping[str, Words] = {
    "a.1/": tuple(("stdout" if each % 3 else "stderr", f"line {each} läuft ✓\n" * 3) for each in range(8)),
    "b.1/": (("stdout", "short"),),
}


def said(words: Words) -> dict[str, str]:
    """Return what a log holds that heard all of it, by stream."""
    streams: dict[str, str] = {}
    for stream, text in words:
        streams[stream] = streams.get(stream, "") + text
    return streams


def kept_in(directory: Path, *tables: str) -> list[str]:
    """Return the claims that tables of a journal hold: of a copy, as its daemon may have it."""
    with TemporaryDirectory() as copy:
        for file in directory.glob("journal*"):
            shutil.copy(file, copy)
        with closing(sqlite3.connect(Path(copy, "journal"))) as journal:
            return [row[0] for table in tables for row in journal.execute(f"SELECT claim FROM {table}")]
