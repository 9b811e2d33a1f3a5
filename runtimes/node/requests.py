"""What a gateway asks of a node beside executing actions: trajectories, and whether functions can run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from manager.errors import CodedError, InvalidConfig, Unsupported
from manager.executor import Executor
from manager.function import FunctionSpec, SandboxSpec
from runtimes.kinds import KINDS
from runtimes.node import wire
from runtimes.node.errors import facts_of
from runtimes.node.fitness.served import Trouble
from runtimes.node.handlers.store import HandlerStore
from runtimes.node.message import Message
from runtimes.node.models.served import NodeModels
from runtimes.node.sandboxes import NodeSandboxes
from runtimes.node.snapshots.served import ServedSnapshots
from runtimes.node.wire import COMPONENT

logger = structlog.get_logger("node.requests")

#: The kinds whose functions a node executes for a gateway. The others need what only the gateway has: its own address
#: towards the world.
SERVED: tuple[str, ...] = ("exec", "pytest", "handler", "model")


class NodeWork(Protocol):
    """What an agent works with: `gateway.runtime_factory.Runtimes`, or a test's."""

    @property
    def executor(self) -> Executor: ...

    @property
    def sandboxes(self) -> NodeSandboxes: ...

    @property
    def models(self) -> NodeModels | None:
        """The model services of this machine; None if it serves none."""
        ...

    @property
    def snapshots(self) -> ServedSnapshots | None:
        """The snapshots of this machine's trajectories; None if it keeps none."""
        ...

    @property
    def trouble(self) -> Trouble | None:
        """What says why no sandbox can be made; None where nothing could tell."""
        ...

    async def prepare(self, function: FunctionSpec) -> None:
        """Check that the function can run here; raises CodedError."""
        ...

    def handlers_in_use(self) -> Collection[Path]:
        """Return the directories that instances of handlers have mounted, or may."""
        ...


class DefinedFunctions:
    """What gateways have defined, by digest; what a link has defined lately is never dropped."""

    def __init__(self, most: int, handlers: HandlerStore) -> None:
        self._most = most
        self._handlers = handlers
        self._known: dict[str, tuple[bytes, FunctionSpec | CodedError]] = {}

    def define(self, digest: str, data: bytes) -> None:
        """Keep a function as it travelled, as the youngest; one of another version too, which `get` refuses."""
        self._known.pop(digest, None)
        while len(self._known) >= self._most:
            del self._known[next(iter(self._known))]
        kind = KINDS.get(msgspec.json.decode(data, type=_Kind).runtime)
        try:
            function = wire.read_function(data, FunctionSpec if kind is None else kind.function)
            self._known[digest] = (data, self._handlers.placed(function))
        except wire.ChannelError as error:  # the others run here all the same
            self._known[digest] = (data, InvalidConfig(f"{error.message}; upgrade the node", component=COMPONENT))

    def get(self, digest: str) -> tuple[bytes, FunctionSpec]:
        """Return a function, as it travelled too; raises ChannelError if it was never defined, or InvalidConfig."""
        known = self._known.get(digest)
        if known is None:
            raise wire.ChannelError(f"function {digest} was never defined")
        data, function = known
        if isinstance(function, CodedError):
            raise function
        return data, function


class _Kind(msgspec.Struct):
    runtime: str


class NodeRequests:
    """The requests of one agent, each answered once on the link that is there at its end."""

    def __init__(
        self,
        work: NodeWork,
        functions: DefinedFunctions,
        say: Callable[[Message], None],
        handlers: HandlerStore,
    ) -> None:
        self._work = work
        self._functions = functions
        self._say = say
        self._handlers = handlers
        self._under_way: dict[int, asyncio.Task[None]] = {}
        if work.snapshots is not None:
            work.snapshots.on_change = say

    def detach(self) -> None:
        """There is no link."""
        if self._work.snapshots is not None:
            self._work.snapshots.detach()

    @property
    def tasks(self) -> Collection[asyncio.Task[None]]:
        """Return what is under way."""
        return list(self._under_way.values())

    def begin(self, asked: wire.NodeRequest) -> None:
        """Do what is asked, once: while it is under way it may be asked again after a cut."""
        if asked.number not in self._under_way:
            task = asyncio.create_task(self._answer(asked), name=f"request {asked.verb} {asked.name}")
            self._under_way[asked.number] = task
            task.add_done_callback(lambda _: self._under_way.pop(asked.number, None))

    async def _answer(self, asked: wire.NodeRequest) -> None:
        done, failure = True, None
        try:
            done = await self._do(asked)
        except CodedError as error:
            failure = facts_of(error)
        except Exception as error:  # told to the gateway: a bug here ends no daemon
            logger.exception("a request failed", verb=asked.verb, name=asked.name)
            failure = facts_of(CodedError(f"the node failed: {error!r}", component=COMPONENT))
        self._say(wire.NodeAnswer(asked.number, failure, done))

    async def _do(self, asked: wire.NodeRequest) -> bool:
        verbs: Mapping[str, Callable[[wire.NodeRequest], Awaitable[bool]]] = {
            "open": self._open,
            "end": self._end,
            "prepare": self._prepare,
            "replicate": self._replicate,
            "mark_lost": self._mark_lost,
            "choose": self._choose,
            "has_handler": self._has_handler,
        }
        if self._work.snapshots is not None:
            of_snapshots = {"snapshot": self._snapshot, "snapshots": self._snapshots, "drop_snapshot": self._drop}
            verbs = {**verbs, **of_snapshots}
        if asked.verb not in verbs:
            raise Unsupported(f"this node knows no request {asked.verb!r}", component=COMPONENT)
        return await verbs[asked.verb](asked)

    async def _open(self, asked: wire.NodeRequest) -> bool:
        await self._work.executor.open_trajectory(asked.name, asked.task, self._function(asked))
        self._work.sandboxes.look(asked.name)
        return True

    async def _end(self, asked: wire.NodeRequest) -> bool:
        await self._work.executor.end_trajectory(asked.name)
        self._work.sandboxes.look(asked.name)
        return True

    async def _prepare(self, asked: wire.NodeRequest) -> bool:
        function = self._function(asked)
        if self._work.models is not None:
            self._work.models.check(function)
        async with self._handlers.held(function):
            await self._work.prepare(function)
        if self._work.models is not None:
            await self._work.models.prepared(function)
        return True

    async def _has_handler(self, asked: wire.NodeRequest) -> bool:
        return await self._handlers.has(asked.name)

    async def _snapshot(self, asked: wire.NodeRequest) -> bool:
        assert self._work.snapshots is not None
        await self._work.snapshots.take(asked.name, asked.body)
        return True

    async def _snapshots(self, asked: wire.NodeRequest) -> bool:
        assert self._work.snapshots is not None
        self._work.snapshots.tell()
        return True

    async def _drop(self, asked: wire.NodeRequest) -> bool:
        assert self._work.snapshots is not None
        await self._work.snapshots.drop(asked.name)
        return True

    async def _replicate(self, asked: wire.NodeRequest) -> bool:
        if asked.chunk is None:
            return False
        return await self._work.executor.replicate(self._function(asked), asked.name, "", asked.chunk)

    def _function(self, asked: wire.NodeRequest) -> FunctionSpec:
        return self._functions.get(asked.function)[1]

    async def _mark_lost(self, asked: wire.NodeRequest) -> bool:
        self._work.sandboxes.mark_lost([asked.name])
        return True

    async def _choose(self, asked: wire.NodeRequest) -> bool:
        self._work.sandboxes.choose(asked.name, msgspec.json.decode(asked.body, type=SandboxSpec))
        return True
