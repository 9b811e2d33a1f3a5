"""The machines that work for a gateway: this one alone, or, as `gateway.cluster.cluster` has it, others that join."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import structlog

from gateway.cluster.snapshots import NodeSnapshots
from gateway.invocations.reattach import AttemptHolder, Reattachment
from gateway.invocations.record import Record
from gateway.invocations.trajectories import TrajectoryRecovery
from gateway.preparation import Prepare
from manager.action import Chunk, State
from manager.config import NodeSpec, ServiceSpec
from manager.engine import Engine
from manager.errors import NotFound, Unsupported
from manager.events import NodeClosed, NodeOpened
from manager.executor import Executor
from manager.function import FunctionSpec
from runtimes.node.daemon import Trouble
from runtimes.node.remote import RemoteNode
from runtimes.sandbox.files import SandboxFiles
from tangram.types import LivingSandbox, NodeStatus, NodeStatusList, NodeTicket

#: Seconds between two looks at this machine's sandboxes.
LOOK_S = 1.0
NO_CLUSTER = "this gateway has no section cluster, so no other machine can join it (docs/CLUSTER.md)"


class NodeRecovery(Protocol):
    """What decides on what ran on a node under the gateway before: `gateway.invocations.restart.Restart`."""

    async def recover_on(self, node: str, found: Reattachment | None) -> None: ...


class NodeServices(Protocol):
    """What keeps the costs of model services by node: `gateway.runtime_factory.ModelServices`."""

    def learn(self, node: str, services: Sequence[ServiceSpec]) -> None:
        """Take up what services cost on a node."""
        ...

    def forget(self, node: str) -> None:
        """A node is gone."""
        ...

    def resident(self) -> Mapping[str, tuple[Chunk, ...]]:
        """Return what is resident on the devices of this machine: chunks by service."""
        ...


class OneMachine:
    """This machine alone: what is asked of the machines is answered for it."""

    def __init__(self, here: NodeSpec) -> None:
        self.here = here
        #: Whether idle trajectories are left for the next gateway, once this one ends.
        self.keep = False
        #: The snapshots of other machines; None if none can join.
        self.snapshots: NodeSnapshots | None = None
        self._engine: Engine | None = None
        self._services: NodeServices | None = None
        #: Why no sandbox can be made on this machine now, and since when, on the loop's clock; empty if one can.
        self._trouble = ""
        self._trouble_since_s = 0.0

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "begin first"
        return self._engine

    @property
    def specs(self) -> tuple[NodeSpec, ...]:
        """The machines that the scheduler begins with."""
        return (self.here,)

    @property
    def awaited(self) -> frozenset[str]:
        """Names of machines of the gateway before that are not back yet."""
        return frozenset()

    def awaits(self, record: Record) -> bool:
        """Whether a record's action may still run on one of those."""
        return record.state is State.RUNNING and record.node in self.awaited

    def preparing(self, here: Prepare) -> Prepare:
        """Return what makes a function ready wherever it may run, given what does so here."""
        return here

    def executor(self, here: Executor, trajectories: TrajectoryRecovery) -> Executor:
        """Return what executes wherever a lease says, given what executes here and where trajectories are on record."""
        return here

    def reattachment(self, environments: AttemptHolder) -> Reattachment:
        """Return what knows which commands of the gateway before are whose."""
        return Reattachment(environments)

    def begin(
        self,
        engine: Engine,
        recovery: NodeRecovery,
        functions: Callable[[], Sequence[FunctionSpec]],
        services: NodeServices,
    ) -> None:
        """The scheduler runs: say which machines it has to wait for."""
        self._engine, self._services = engine, services

    def open(self, again: Callable[[Prepare], None]) -> None:
        """Let machines join from now on; ``again`` has what could not be made ready tried again as it is given."""

    async def watch_for_ever(self, trouble: Trouble) -> None:
        """Ask again and again whether sandboxes can be made on this machine."""
        while True:
            told = await trouble()
            if told != self._trouble:
                self._turned(told)
            await asyncio.sleep(LOOK_S)

    def _turned(self, trouble: str) -> None:
        """No sandbox can be made here, or (empty) one can again: till then this machine is closed to what is new.

        What has not begun waits within its ``queue_timeout`` instead of failing, or goes to another machine: without
        sandboxes this one looks the emptiest of all.
        """
        log = structlog.get_logger("gateway.machine")
        if trouble:
            log.error("nothing new can begin on this machine", why=trouble)
        else:
            log.info("this machine is fit again")
        self._trouble, self._trouble_since_s = trouble, asyncio.get_running_loop().time()
        name = self.here.name
        self.engine.tell(
            NodeClosed(node=name, why=f"unfit: {trouble}", finishing=True) if trouble else NodeOpened(node=name)
        )

    async def let_go(self) -> None:
        """Take nothing from other machines any more: what runs there is the next gateway's."""

    async def close(self) -> None:
        """Let go of everything."""

    # -- for people

    def info(self) -> NodeStatusList:
        """Return every machine, and how it is."""
        return NodeStatusList(nodes=(self._local_status({}, ()),))

    def drain(self, name: str, why: str) -> NodeStatus:
        """Have a machine take no new work, and leave when it is empty; raises NotFound or Unsupported."""
        raise self._no_such(name)

    def ticket(self, name: str) -> NodeTicket:
        """Return what admits a machine once; raises Unsupported or InvalidInput."""
        raise Unsupported(NO_CLUSTER, component="cluster")

    def living(self, trajectory: str) -> LivingSandbox | None:
        """Return the sandbox of a trajectory that lives on another machine."""
        return None

    def elsewhere(self, trajectory: str) -> str:
        """Return the node on which a trajectory lives; empty if that is this machine, or none."""
        return ""

    def remote_of(self, trajectory: str) -> RemoteNode | None:
        """Return the other machine that a trajectory lives on; None if it lives here, or nowhere."""
        return None

    def leaving(self, node: str) -> str:
        """Return why another machine takes no new work and will leave; empty if it does not."""
        return ""

    def files(self, trajectory: str) -> SandboxFiles | None:
        """Return the files of a trajectory that lives on another machine; raises CapacityExceeded if that is silent."""
        return None

    def warnings(self) -> list[str]:
        """Return what should be looked at."""
        return [f"nothing new can begin on this machine: {self._trouble}"] if self._trouble else []

    def lost(self, within_s: float) -> list[str]:
        """Return the machines that were lost so short a while ago."""
        return []

    def counts(self) -> Iterator[tuple[str, str, float]]:
        """Yield (node, what, number) for the metrics."""
        for status in self.info().nodes:
            if status.state == "drained":
                continue  # it has left, empty, and nobody waits for it
            yield status.node, "up", float(status.state in ("ready", "unfit", "draining"))
            yield status.node, "running", float(status.running)
            yield status.node, "trajectories", float(status.trajectories)
            yield status.node, "losses", float(status.losses)
            yield status.node, "devices", float(status.devices)
            yield status.node, "resident_models", float(sum(map(len, status.resident.values())))

    def _local_status(self, unable: Mapping[str, str], able: Sequence[str]) -> NodeStatus:
        here = self.here
        running, holders = self.engine.held_on(here.name)
        return NodeStatus(
            node=here.name,
            state="unfit" if self._trouble else "ready",
            why=self._trouble,
            since_s=asyncio.get_running_loop().time() - self._trouble_since_s if self._trouble else 0.0,
            local=True,
            cores=here.cores,
            devices=here.devices,
            device_kind=here.device_kind,
            memory_bytes=here.memory_bytes,
            labels=here.labels,
            running=running,
            trajectories=holders,
            able=tuple(able),
            unable=unable,
            resident={} if self._services is None else self._services.resident(),
        )

    def _no_such(self, name: str) -> NotFound | Unsupported:
        if name == self.here.name:
            told = f"{name} is the gateway's own machine: it drains with the gateway, at SIGTERM"
            return Unsupported(told, component="cluster")
        return NotFound(f"no node {name!r}", component="cluster")
