"""The machines of the cluster: which joined, what each can do, and what runs where."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Concatenate, ParamSpec

import structlog
from msgspec import convert

from gateway.cluster.listener import NodeListener, bind
from gateway.cluster.ray import RayNodes
from gateway.cluster.store import (
    JoinTickets,
    NodeRecords,
    NodeSnapshots,
    check_name,
    digest_of,
    new_node_key,
    signing_key,
)
from gateway.config.load import GatewayConfig
from gateway.config.schema import ClusterConfig
from gateway.invocations.record import Record
from gateway.invocations.restart import Reattachment, TrajectoryRecovery
from gateway.registry import Prepare
from gateway.runtime_factory import ModelServices
from gateway.store.store import Store
from manager.action import Action, Chunk, Lease, Outcome, State
from manager.clock import Clock
from manager.config import NodeSpec, ServiceSpec
from manager.engine import Engine
from manager.errors import (
    CapacityExceeded,
    CodedError,
    Conflict,
    InvalidConfig,
    NotFound,
    Reason,
    Unauthorized,
    Unsupported,
)
from manager.events import NodeClosed, NodeJoined, NodeLost, NodeOpened
from manager.executor import Call, Executor
from manager.function import FunctionSpec
from runtimes.chores import Chores, end_chores
from runtimes.kinds import kind_of
from runtimes.node.certificate import NodeCertificate, ensure_certificate, server_side
from runtimes.node.daemon import Trouble
from runtimes.node.membership import (
    CONNECTED,
    CountedOut,
    JoinRefused,
    Member,
    NodeMembership,
    NodeState,
    Serves,
    Shut,
    Verdict,
)
from runtimes.node.protocol import (
    FitnessChanged,
    HandlerArchives,
    Inventory,
    NodeDraining,
    NodeGoodbye,
    NodeHello,
    NodeLink,
    NodeRefused,
    NodeWelcome,
)
from runtimes.node.ray.process import RayDriverProcess
from runtimes.node.remote import RemoteNode
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.files import SandboxFiles
from runtimes.sandbox.handler.sources import HandlerCopies
from tangram.types import LivingSandbox, NodeCondition, NodeStatus, NodeStatusList, NodeTicket

#: Seconds between two looks at this machine's sandboxes.
LOOK_S = 1.0
NO_CLUSTER = "this gateway has no section cluster, so no other machine can join it (docs/CLUSTER.md)"


#: Returns what the claims begin with of that which runs on a node since a gateway before, and which is wanted.
AwaitedOn = Callable[[str], Collection[str]]
#: Checks that a function can run on a machine, and warms it up; raises CodedError.
PrepareThere = Callable[[FunctionSpec], Awaitable[None]]
logger = structlog.get_logger("gateway.cluster")
P = ParamSpec("P")
#: Functions that are prepared on one machine at once.
CONCURRENCY = 8


class Abilities:
    """What each machine is able to run. Use from one event loop."""

    def __init__(self, changed: Callable[[str], None]) -> None:
        """``changed`` is called with the name of a machine that is able to run another set of functions than before."""
        self._changed = changed
        self._machines: dict[str, PrepareThere] = {}
        self._able: dict[str, set[str]] = {}
        #: By machine and function, why not.
        self._unable: dict[str, dict[str, CodedError]] = {}

    def able(self, machine: str) -> frozenset[str]:
        return frozenset(self._able.get(machine, ()))

    def unable(self, machine: str) -> Mapping[str, str]:
        """Return the functions that a machine cannot run, and why."""
        return {function: problem.message for function, problem in self._unable.get(machine, {}).items()}

    def join(self, machine: str, prepare: PrepareThere) -> None:
        """Ask this machine too from now on."""
        self._machines[machine] = prepare
        self._able.setdefault(machine, set())

    def leave(self, machine: str) -> None:
        """Ask it no more; what it was able to run stands until it is asked again."""
        self._machines.pop(machine, None)

    def forget(self, machine: str) -> None:
        """It is gone for good."""
        self.leave(machine)
        self._able.pop(machine, None)
        self._unable.pop(machine, None)

    async def prepare(self, function: FunctionSpec) -> None:
        """Have every machine prepare a function; it holds when one can. Raises what the first one says that cannot."""
        machines = dict(self._machines)
        if not machines:
            raise CapacityExceeded("no node has joined yet that could run it (docs/CLUSTER.md)", component="cluster")
        problems = await asyncio.gather(*[self.prepare_on(machine, function) for machine in machines])
        errors = [problem for problem in problems if problem is not None]
        if len(errors) == len(machines):
            raise errors[0]

    def require_on(self, machine: str, function: FunctionSpec) -> None:
        """Raise what the machine said when it was asked last, unless it is able to run the function."""
        if function.name not in self._able.get(machine, ()):
            problem = self._unable.get(machine, {}).get(function.name)
            raise problem or CapacityExceeded(f"node {machine} has not said yet that it can", component="cluster")

    async def prepare_all(self, machine: str, functions: tuple[FunctionSpec, ...]) -> None:
        """Have one machine prepare these, a few at once; what it cannot run is noted."""
        gate = asyncio.Semaphore(CONCURRENCY)

        async def one(function: FunctionSpec) -> None:
            async with gate:
                await self.prepare_on(machine, function)

        async with asyncio.TaskGroup() as group:
            for function in functions:
                group.create_task(one(function))

    async def prepare_on(self, machine: str, function: FunctionSpec) -> CodedError | None:
        """Have one machine prepare a function; return why it cannot run it."""
        prepare = self._machines.get(machine)
        if prepare is None:
            return CapacityExceeded(f"node {machine} is not there", component="cluster")
        problem: CodedError | None = None
        try:
            await prepare(function)
        except CodedError as error:
            problem = error
        except Exception as error:  # the others must not lose their machine for it
            logger.exception("a function could not be prepared", node=machine, function=function.name)
            problem = CodedError(f"a fault of the gateway: {error!r}", component="cluster")
        if self._machines.get(machine) is not prepare:
            return problem  # it has gone meanwhile, and was asked again since
        able, unable = self._able.setdefault(machine, set()), self._unable.setdefault(machine, {})
        before = function.name in able
        if problem is None:
            able.add(function.name)
            unable.pop(function.name, None)
        else:
            able.discard(function.name)
            unable[function.name] = problem.with_traceback(None)
        if before != (problem is None):
            self._changed(machine)
        return problem


#: Of why a node is not fit, as much is shown to people.
WHY_MAX = 1000
#: Seconds for which a node that was lost is among what should be looked at, unless it joins again.
LOST_TOLD_S = 86400.0


@dataclass(slots=True, eq=False)
class ClusterNode:
    """One node that has joined, or is awaited."""

    spec: NodeSpec
    remote: RemoteNode
    link: NodeLink | None = None
    hello: NodeHello | None = None


#: More than any machine has: a larger number is a mistake, and every device and core takes memory here.
DEVICES_MAX = 4096
CORES_MAX = 8192


def described(hello: NodeHello) -> NodeSpec:
    """Return the node that greets, able to run nothing yet; raises InvalidConfig for one that cannot be."""
    spec = replace(hello.spec, name=hello.name, labels={**hello.spec.labels, **hello.labels}, able=frozenset())
    cores = [core for ids in spec.numa for core in ids]
    if not all(spec.numa) or len(set(cores)) != len(cores) or not all(0 <= core < CORES_MAX for core in cores):
        raise _refused(spec, f"no core comes twice, its ids are 0 to {CORES_MAX - 1}, and every NUMA node has some")
    if not 0 <= spec.devices <= DEVICES_MAX:
        raise _refused(spec, f"it has 0 to {DEVICES_MAX} devices, not {spec.devices}")
    if min(spec.memory_bytes, spec.device_bytes) < 0:
        raise _refused(spec, "its memory, and that of its devices, is not negative")
    return spec


def is_changed(spec: NodeSpec, before: NodeSpec, *, awaited: bool) -> bool:
    """Return whether a node has other units than the scheduler leases, which it may not while it is there.

    Nothing is on the devices of one that is ``awaited``, nor on any where there were none: those may be others.
    """
    if (spec.numa, spec.memory_bytes) != (before.numa, before.memory_bytes):
        return True
    devices_stay = bool(before.devices) and not awaited
    return devices_stay and (spec.devices, spec.device_bytes) != (before.devices, before.device_bytes)


def _refused(spec: NodeSpec, rule: str) -> InvalidConfig:
    message = f"{spec.name} describes a machine that cannot be: {rule} (the section node of its configuration)"
    return InvalidConfig(message, component="cluster")


#: Copies on one device, and on all of a node: what more it tells of is taken for not resident, which costs a restore.
DEVICE_COPIES_MAX = 32
NODE_COPIES_MAX = 512
#: No restore takes longer (years), and no device has more bytes: means and sums of these stay finite.
_RESTORE_MAX_S = 1e9
_BYTES_MAX = 2**50


class DeclaredServices:
    """The services of functions that were declared here: a node tells of no others."""

    def __init__(self) -> None:
        self._functions: dict[str, FunctionSpec] = {}

    def declare(self, *functions: FunctionSpec) -> None:
        """Take up functions, each in place of the one of its name."""
        self._functions.update({each.name: each for each in functions if each.model is not None})

    def services(self, told: Sequence[ServiceSpec]) -> list[ServiceSpec]:
        """Return those of declared functions whose costs can be, batched and copied as declared."""
        names = self._names()
        found = {service.name: service for service in told if service.name in names and _can_be(service)}
        return [self._as_declared(service) for service in found.values()]

    def resident(self, told: Mapping[str, Iterable[Chunk]], devices: int) -> dict[str, tuple[Chunk, ...]]:
        """Return the chunks of declared services on the node's devices, no more than a node may have."""
        found: dict[str, tuple[Chunk, ...]] = {}
        on_device: Counter[int] = Counter()
        left, names = NODE_COPIES_MAX, self._names()
        for name in (name for name in told if name in names):
            kept = []
            for chunk in dict.fromkeys(told[name]):
                if not _lies_on(chunk, devices) or not left:
                    continue
                if max(on_device[device] for device in chunk.devices) < DEVICE_COPIES_MAX:
                    on_device.update(chunk.devices)
                    kept.append(chunk)
                    left -= 1
            found[name] = tuple(kept)
        return found

    def _names(self) -> set[str]:
        return {each.model.service for each in self._functions.values() if each.model is not None}

    def _as_declared(self, service: ServiceSpec) -> ServiceSpec:
        declared = [each.model for each in self._functions.values() if each.model is not None]
        models = [model for model in declared if model.service == service.name]
        is_ours = not any(model.engine for model in models)
        batch_tokens = min(model.batch_tokens for model in models) if is_ours else 0
        return replace(service, batch_tokens=batch_tokens, restore_s_by_node={}, replicable=is_ours)


def _can_be(service: ServiceSpec) -> bool:
    return (
        all(1 <= dop <= DEVICES_MAX for dop in (*service.bytes_by_dop, *service.restore_s_by_dop))
        and all(0 <= size <= _BYTES_MAX for size in service.bytes_by_dop.values())
        and all(0.0 <= restore_s <= _RESTORE_MAX_S for restore_s in service.restore_s_by_dop.values())  # nan is not
    )


def _lies_on(chunk: Chunk, devices: int) -> bool:
    start, size = chunk
    return size > 0 and not size & (size - 1) and start >= 0 and start % size == 0 and chunk.end <= devices


#: Seconds between two looks whether a draining node is empty.
_LOOK_S = 0.5
#: Seconds after which a node that was refused for good may ask again.
_REFUSED_S = 60.0


@dataclass(frozen=True, slots=True)
class NodeAdmission:
    """What lets machines join."""

    tickets: JoinTickets
    certificate: NodeCertificate
    #: The files of handlers, for the nodes that execute them.
    archives: HandlerArchives


class Cluster:
    """The machines of a gateway: its own, and those that join it if its configuration lets them. Use from one loop."""

    def __init__(
        self,
        config: ClusterConfig,
        here: NodeSpec,
        *,
        records: NodeRecords,
        snapshots: NodeSnapshots,
        admission: NodeAdmission | None,
        clock: Clock,
    ) -> None:
        """Without an ``admission`` no other machine ever joins."""
        self._config = config
        self._admission = admission
        self._inline = admission is None or config.local == "inline"
        self.here = here if admission is None or not self._inline else replace(here, able=frozenset())
        self._records = records
        #: The snapshots of other machines.
        self.snapshots = snapshots
        snapshots.member = self._member
        self._clock = clock
        self.abilities = Abilities(self._able_changed)
        self._declared = DeclaredServices()
        self._membership = NodeMembership(config.times)
        self._machines: dict[str, ClusterNode] = {}
        self._awaited = {name for name, known in records.all.items() if known.state != "lost"}
        #: What starts the daemons of a Ray cluster's machines, if there is one.
        self.ray: RayNodes | None = None
        if config.ray is not None:
            self.ray = RayNodes(
                config.ray,
                ticket=self.ticket,
                is_connected=self.joined,
                drain=self.drain_for_ray,
                report=self.note_ray,
                ticket_ttl_s=config.ticket_ttl_s,
                clock=clock,
            )
        #: Where nodes join, as they reach it.
        self.address = ""
        self._listener: NodeListener | None = None
        if admission is not None:
            self._listener = NodeListener(
                bind(config.listen),
                server_side(admission.certificate),
                config.link,
                handshake_s=config.handshake_s,
                handshakes_max=config.handshakes_max,
                greet=self._handshake,
            )
            host, _, _ = config.listen.rpartition(":")
            self.address = config.advertise or f"{host}:{self._listener.port}"
        self._engine: Engine | None = None
        self._services: ModelServices | None = None
        self._executor_here: Executor
        self._trajectories: TrajectoryRecovery
        #: The nodes of trajectories that do not live here.
        self._homes: dict[str, str] = {}
        self._awaited_on: AwaitedOn = lambda node: ()
        self._functions: Callable[[], Sequence[FunctionSpec]] = lambda: ()
        self._again: Callable[[Prepare], None] = lambda instead: None
        self._prepare_here: Prepare | None = None
        #: Why no sandbox can be made on this machine now, and since when, on the loop's clock; empty if one can.
        self._trouble = ""
        self._trouble_since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._chores = Chores(lambda error: logger.error("a node's chore failed", error=repr(error)))
        self._closed = False

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "begin first"
        return self._engine

    # -- what the gateway is made of

    @property
    def specs(self) -> tuple[NodeSpec, ...]:
        """The machines that the scheduler begins with."""
        awaited = [known.spec for name, known in self._records.all.items() if name in self._awaited]
        return (*((self.here,) if self._inline else ()), *[replace(spec, able=frozenset()) for spec in awaited])

    @property
    def awaited(self) -> frozenset[str]:
        """Names of machines of the gateway before that are not back yet."""
        return frozenset(self._awaited)

    def awaits(self, record: Record) -> bool:
        """Whether a record's action may still run on one of those."""
        return record.state is State.RUNNING and record.node in self._awaited

    def preparing(self, here: Prepare) -> Prepare:
        """Return what makes a function ready wherever it may run, given what does so here."""
        if self._admission is None:
            return here
        self._prepare_here = here
        if self._inline:
            self.abilities.join(self.here.name, here)

        async def prepare(function: FunctionSpec) -> None:
            self._declared.declare(function)  # before a node tells what it costs there
            await (self.abilities.prepare(function) if _needs_node(function) else here(function))

        return prepare

    def executor(self, here: Executor, trajectories: TrajectoryRecovery) -> Executor:
        """Return what executes wherever a lease says, given what executes here and where trajectories are on record."""
        self._executor_here, self._trajectories = here, trajectories
        if self._admission is not None:
            trajectories.home = self.home
            trajectories.here = self.here.name if self._inline else ""
            trajectories.release_lost()
            self.snapshots.users = trajectories.snapshots_in_use
            for name in self._awaited:
                self._homes |= dict.fromkeys(trajectories.on_node(name), name)
        return here if self._admission is None else self

    def reattachment(self, environments: Environments) -> Reattachment:
        """Return what knows which commands of the gateway before are whose."""
        return Reattachment(environments, self._member, lambda: [machine.remote for machine in self._machines.values()])

    def begin(
        self,
        engine: Engine,
        awaited_on: AwaitedOn,
        functions: Callable[[], Sequence[FunctionSpec]],
        services: ModelServices,
    ) -> None:
        """The scheduler runs: say which machines it has to wait for."""
        self._engine, self._awaited_on, self._functions, self._services = engine, awaited_on, functions, services
        for name, known in self._records.all.items():
            if name in self._awaited:
                self._machines[name] = self._machine(replace(known.spec, able=frozenset()), known.epoch)
                self._step(self._membership.expect, name, draining=known.state == "draining")

    def open(self, again: Callable[[Prepare], None]) -> None:
        """Let machines join from now on; ``again`` has what could not be made ready tried again as it is given."""
        self._again = again
        if self._listener is not None and self._admission is not None:
            self._listener.open()
            fingerprint = self._admission.certificate.fingerprint
            logger.info("nodes may join", listen=self.address, fingerprint=fingerprint)
        if self.ray is not None and self._config.ray is not None:
            self.ray.open(RayDriverProcess(self._config.ray, self.ray.take, clock=self._clock))

    async def watch_for_ever(self, trouble: Trouble) -> None:
        """Ask again and again whether sandboxes can be made on this machine, if it serves here."""
        while self._inline:
            if (why := await trouble()) != self._trouble:
                self._turned(why)
            await asyncio.sleep(LOOK_S)

    def _turned(self, trouble: str) -> None:
        """No sandbox can be made here, or (empty) one can again: till then this machine is closed to what is new.

        What has not begun waits within its ``queue_timeout`` instead of failing, or goes to another machine: without
        sandboxes this one looks the emptiest of all.
        """
        log = structlog.get_logger("gateway.limits")
        name = self.here.name
        self._trouble, self._trouble_since_s = trouble, asyncio.get_running_loop().time()
        if trouble:
            log.error("nothing new can begin on this machine", why=trouble)
            self.engine.tell(NodeClosed(node=name, why=f"unfit: {trouble}", finishing=True, devices=True))
        else:
            log.info("this machine is fit again")
            self.engine.tell(NodeOpened(node=name))

    async def let_go(self) -> None:
        """Take nothing from other machines any more: what runs there is the next gateway's; idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*[machine.remote.close() for machine in self._machines.values()])
        if self._listener is not None:
            await self._listener.close()

    async def close(self) -> None:
        """Let go of everything."""
        if not self._closed:
            await self.let_go()
        if self.ray is not None:
            await self.ray.close()
        await end_chores(*self._chores.tasks)

    # -- for people

    def info(self) -> NodeStatusList:
        """Return every machine, and how it is."""
        names = [*([self.here.name] if self._inline else []), *[member.name for member in self._membership.members()]]
        ray = () if self.ray is None else self.ray.status()
        return NodeStatusList(nodes=tuple(map(self._status, names)), storm_s=self._membership.storm_left_s, ray=ray)

    def drain(self, name: str, why: str) -> NodeStatus:
        """Have a machine take no new work, and leave when it is empty; raises NotFound or Unsupported."""
        member = self._membership.get(name)
        if member is None or member.state is NodeState.LOST:
            if name == self.here.name:
                message = f"{name} is the gateway's own machine: it drains with the gateway, at SIGTERM"
                raise Unsupported(message, component="cluster")
            raise NotFound(f"no node {name!r}", component="cluster")
        self._step(self._membership.drain, name, why)
        if (remote := self._member(name)) is not None:
            remote.drain(why)
        return self._status(name)

    def ticket(self, name: str) -> NodeTicket:
        """Return what admits a machine once; raises Unsupported, Conflict or InvalidInput."""
        if self._admission is None:
            raise Unsupported(NO_CLUSTER, component="cluster")
        check_name(name)
        if name == self.here.name:
            raise Conflict(f"{name} is the name of the gateway's own machine (node.name)", component="cluster")
        return NodeTicket(
            name=name,
            ticket=self._admission.tickets.issue(name),
            expires_in_s=self._config.ticket_ttl_s,
            gateway=self.address,
            fingerprint=self._admission.certificate.fingerprint,
        )

    # -- Executor

    def _is_here(self, node: str) -> bool:
        return node in ("", self.here.name if self._inline else "")

    def home(self, trajectory: str) -> str:
        """Return the name of the other machine that a trajectory lives on; empty if it lives here, or nowhere yet."""
        node = self._homes.get(trajectory) or self._place_of(trajectory)
        return "" if self._is_here(node) else node

    async def execute(self, action: Action, lease: Lease, call: Call) -> Outcome:
        """Run the action where its lease says."""
        if self._is_here(lease.node):
            return await self._executor_here.execute(action, lease, call)
        remote = self._member(lease.node)
        if remote is None:
            message = f"node {lease.node} is not there any more"
            return Outcome(state=State.LOST, reason=Reason.NODE_LOST, message=message, component="cluster")
        if action.trajectory is not None and kind_of(call.function).works_in_sandbox:
            self._homes[action.trajectory] = lease.node
        return await remote.execute(action, lease, call)

    async def resize(self, action: Action, lease: Lease) -> None:
        """Give a running action other cores, where it runs."""
        machine = self._executor_here if self._is_here(lease.node) else self._member(lease.node)
        if machine is not None:
            await machine.resize(action, lease)

    async def replicate(self, function: FunctionSpec, service: str, node: str, chunk: Chunk) -> bool:
        """Copy a service on the node's devices; return False where it cannot be."""
        machine = self._executor_here if self._is_here(node) else self._member(node)
        return machine is not None and await machine.replicate(function, service, node, chunk)

    async def open_trajectory(self, trajectory: str, task: str, function: FunctionSpec) -> None:
        """Make the trajectory's environment where the core has placed it; raises CodedError."""
        node = self.home(trajectory)
        machine = self._member(node) if node else self._executor_here
        if machine is None:
            raise CapacityExceeded(f"node {node} is not there any more", component="cluster", retry_after_s=1.0)
        if node:
            self._homes[trajectory] = node
        await machine.open_trajectory(trajectory, task, function)

    async def end_trajectory(self, trajectory: str) -> None:
        """Remove the trajectory's environment, and what is kept for it here; that of an absent node when it is back."""
        remote = self._member(self._homes.pop(trajectory, ""))
        if remote is not None:
            await remote.end_trajectory(trajectory)
        await self._executor_here.end_trajectory(trajectory)

    # -- trajectories on other machines

    def living(self, trajectory: str) -> LivingSandbox | None:
        """Return the sandbox of a trajectory that lives on another machine."""
        remote = self.remote_of(trajectory)
        facts = None if remote is None else remote.trajectories().get(trajectory)
        return None if facts is None else convert(facts, LivingSandbox, from_attributes=True)

    def elsewhere(self, trajectory: str) -> str:
        """Return the node on which a trajectory lives; empty if that is this machine, or none."""
        remote = self.remote_of(trajectory)
        return "" if remote is None else remote.name

    def files(self, trajectory: str) -> SandboxFiles | None:
        """Return the files of a trajectory that lives on another machine; raises CapacityExceeded if that is silent."""
        remote = self.remote_of(trajectory)
        if remote is None:
            return None
        if not remote.attached:
            message = f"node {remote.name}, on which trajectory {trajectory!r} lives, is not reached now"
            raise CapacityExceeded(message, component="cluster", retry_after_s=self._config.link.silent_s)
        return remote.files(trajectory)

    def remote_of(self, trajectory: str) -> RemoteNode | None:
        """Return the other machine that a trajectory lives on; None if it lives here, or nowhere."""
        return self._member(self.home(trajectory))

    def leaving(self, node: str) -> str:
        """Return why another machine takes no new work and will leave; empty if it does not."""
        member = self._membership.get(node)
        return "it drains" if member is not None and member.draining else ""

    def lost(self, within_s: float) -> list[str]:
        """Return the machines that were lost so short a while ago."""
        since_s = self._clock.now() - within_s
        members = self._membership.members()
        lost = [each for each in members if each.state is NodeState.LOST and not _is_drained(each)]
        return [each.name for each in lost if each.since_s > since_s]

    def warnings(self) -> list[str]:
        """Return what should be looked at."""
        found = [f"nothing new can begin on this machine: {self._trouble}"] if self._trouble else []
        members = self._membership.members()
        if left_s := self._membership.storm_left_s:
            found.append(
                "too many nodes were silent within a short time, so it may be the gateway's own network: "
                f"none is counted lost for {left_s:.0f} s, or until all are heard"
            )
        if suspects := [member.name for member in members if member.state is NodeState.SUSPECT]:
            found.append(f"nodes that are not heard: {', '.join(suspects[:8])} ({len(suspects)})")
        if unfit := [f"{member.name}: {member.why}" for member in members if member.state is NodeState.UNFIT]:
            found.append(f"nodes on which nothing, or nothing new, can begin ({len(unfit)}): {'; '.join(unfit[:8])}")
        if lost := self.lost(LOST_TOLD_S):
            names = f"{', '.join(lost[:8])} ({len(lost)})"
            found.append(
                f"nodes that were lost within a day and have not joined again: {names}: "
                "`tangram node check` says what mends it"
            )
        return [*found, *([] if self.ray is None else self.ray.warnings())]

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

    @property
    def serving(self) -> int:
        """How many nodes serve now, this machine not counted."""
        return sum(member.state is NodeState.READY for member in self._membership.members())

    def _status(self, name: str) -> NodeStatus:
        """Return how a node is, or this machine where that is none."""
        member, machine, known = self._membership.get(name), self._machines.get(name), self._records.get(name)
        hello = None if machine is None else machine.hello
        if member is None:
            spec: NodeSpec | None = self.here
            state: NodeCondition = "unfit" if self._trouble else "ready"
            why = self._trouble
            since_s = asyncio.get_running_loop().time() - self._trouble_since_s if self._trouble else 0.0
            resident = {} if self._services is None else self._services.resident()
            losses, refused_s = 0, 0.0
        else:
            spec = machine.spec if machine is not None else None if known is None else known.spec
            now_s = self._clock.now()
            state = "drained" if _is_drained(member) else member.state.value
            why, since_s = member.why, max(0.0, now_s - member.since_s)
            resident = {} if machine is None else machine.remote.models.resident
            losses, refused_s = len(member.losses), max(0.0, member.refused_until_s - now_s)
        running, holders = self.engine.held_on(name)
        return NodeStatus(
            node=name,
            state=state,
            why=why,
            since_s=since_s,
            local=name == self.here.name,
            cores=0 if spec is None else spec.cores,
            devices=0 if spec is None else spec.devices,
            device_kind="" if spec is None else spec.device_kind,
            memory_bytes=0 if spec is None else spec.memory_bytes,
            labels={} if spec is None else spec.labels,
            running=running,
            trajectories=holders,
            able=tuple(sorted(self.abilities.able(name))),
            unable=self.abilities.unable(name),
            resident=resident,
            peer="" if machine is None or machine.link is None else machine.link.peer,
            version="" if hello is None else hello.version,
            isolation="" if hello is None else hello.isolation,
            losses=losses,
            refused_s=refused_s,
        )

    # -- for what starts daemons through Ray

    def joined(self, name: str) -> bool:
        """Return whether a node is heard now."""
        member = self._membership.get(name)
        return member is not None and member.state in CONNECTED

    def drain_for_ray(self, name: str, why: str) -> None:
        """Ray takes a node's machine away soon."""
        with suppress(NotFound, Unsupported):  # it has not joined yet, or is gone
            self.drain(name, why)

    def note_ray(self, name: str, why: str, final: bool) -> None:
        """Ray says that a node's machine is there, or gone; ``final`` if it was ended on purpose."""
        self._step(self._membership.note_ray, name, why, final)

    # -- joining

    async def _handshake(self, link: NodeLink, authenticated: Callable[[], None]) -> None:
        """Let a daemon in, and take what it says until its link is gone."""
        hello = await link.receive(NodeHello, self._config.handshake_s)
        try:
            key = self._proven_key(hello)
            try:
                spec = self._described(hello)
                fence = self._admitted(hello)
            except CodedError:
                if key != hello.key and self._admission is not None:
                    self._admission.tickets.give_back(hello.ticket)
                raise
        except CodedError as error:
            retry_s = error.retry_after_s or _REFUSED_S
            link.send(NodeRefused(code=error.code, message=error.message, retry_after_s=retry_s))
            logger.warning("a node was refused", node=hello.name[:128], peer=link.peer, why=error.message)
            return
        authenticated()
        machine = self._machines.get(spec.name)
        if machine is None:
            machine = self._machines[spec.name] = self._machine(spec)
        elif machine.link is not None:
            machine.link.close("its daemon joins again")
        machine.spec, machine.link, machine.hello = replace(spec, able=machine.spec.able), link, hello
        try:
            await self._welcome(machine, link, hello, key, fence)
        finally:
            if machine.link is link:
                machine.link = None
                self.abilities.leave(spec.name)
                if not self._closed:
                    self._step(
                        self._membership.lose_link, spec.name, hello.instance, link.why or "its link was dropped"
                    )

    def _proven_key(self, hello: NodeHello) -> str:
        """Return the key that the node has, or gets, after it has shown who it is; raises Unauthorized."""
        name = check_name(hello.name)
        if name == self.here.name:
            raise Conflict(f"{name} is the name of the gateway's own machine (node.name)", component="cluster")
        known = self._records.get(name)
        if hello.key and known is not None and hmac.compare_digest(digest_of(hello.key), known.key_digest):
            return hello.key
        if not hello.ticket:
            message = f"the key of {name} is not known here (any more): give it a ticket (tangram node ticket {name})"
            raise Unauthorized(message, component="cluster")
        assert self._admission is not None
        self._admission.tickets.take(hello.ticket, name)
        return new_node_key()

    def _described(self, hello: NodeHello) -> NodeSpec:
        """Return the node as the scheduler may use it; raises InvalidConfig, or Conflict if it has changed."""
        spec = described(hello)
        machine = self._machines.get(spec.name)
        if machine is not None and is_changed(spec, machine.spec, awaited=spec.name in self._awaited):
            changed = f"{spec.name} has other cores, memory or devices than before"
            message = f"{changed}: drain it first, or give it a new name"
            raise Conflict(message, component="cluster", retry_after_s=self._config.times.lost_after_s)
        return spec

    def _admitted(self, hello: NodeHello) -> bool:
        """Ask the membership; return whether the node must end all that it has first. Raises Conflict for a refusal."""
        unfit, finishing = hello.unfit[:WHY_MAX], hello.finishing
        greet = self._membership.greet
        for verdict in self._step(greet, hello.name, hello.instance, hello.draining, unfit, finishing):
            if isinstance(verdict, JoinRefused):
                raise Conflict(verdict.why, component="cluster", retry_after_s=verdict.retry_after_s)
        member = self._membership.get(hello.name)
        return member is not None and member.fenced

    async def _welcome(self, machine: ClusterNode, link: NodeLink, hello: NodeHello, key: str, fence: bool) -> None:
        name, config = hello.name, self._config
        self._records.joined(machine.spec, digest_of(key))
        await self._records.durable()
        link.send(
            NodeWelcome(
                generation=self._records.generation,
                key=key,
                beat_s=config.link.beat_s,
                silent_s=config.link.silent_s,
                fence=fence,
            )
        )
        within_s, largest_bytes = config.times.lost_after_s, config.link.frame_max_bytes
        inventory = await link.receive(Inventory, within_s, frame_max_bytes=largest_bytes)
        if name in self._awaited:  # before anything is begun there anew
            living = {facts.trajectory for facts in inventory.trajectories if facts.alive}
            self._lose_trajectories(set(self._trajectories.on_node(name)) - living)
        machine.remote.connect(link, inventory, recovering=name in self._awaited)
        serving = asyncio.create_task(machine.remote.serve(link))
        reconciling = asyncio.create_task(self._reconcile(machine, hello, inventory))
        try:
            await asyncio.wait({serving, reconciling}, return_when=asyncio.FIRST_COMPLETED)
            if reconciling.done():
                reconciling.result()  # which raises what it met
            why = await serving
            logger.info("a node is gone", node=name, why=why)
        finally:
            await end_chores(serving, reconciling)

    async def _reconcile(self, machine: ClusterNode, hello: NodeHello, inventory: Inventory) -> None:
        """Bring both sides to agree on what runs and lives there, then let the node serve."""
        name, remote = hello.name, machine.remote
        self.abilities.join(name, remote.prepare)
        machine.spec = replace(machine.spec, able=self.abilities.able(name))
        if name in self._awaited:
            here = set(self._trajectories.on_node(name))
            for facts in inventory.trajectories:
                if facts.trajectory not in here:  # also what is left of a dead sandbox
                    self._chores.begin(remote.end_trajectory(facts.trajectory))
            self.engine.tell(NodeJoined(node=machine.spec))
            self._awaited.discard(name)
            await remote.end_unclaimed(self._awaited_on(name))
        else:
            self.engine.tell(NodeJoined(node=machine.spec))
        self._records.compared(name, inventory.epoch)
        self._trajectories.choose_on(name, remote.choose)
        await self.snapshots.compare(remote)
        self._models_changed(name)
        self._step(self._membership.reconcile, name, hello.instance)
        logger.info("a node serves", node=name, cores=machine.spec.cores, devices=machine.spec.devices)
        # An image may have to be pulled: until then it serves what it is able to run already.
        await self.abilities.prepare_all(name, tuple(filter(_needs_node, self._functions())))
        self._again(partial(self._as_reported, name))

    async def _as_reported(self, name: str, function: FunctionSpec) -> None:
        """Take the word of a node that has joined: the others have said already whether they can run the function."""
        if _needs_node(function):
            self.abilities.require_on(name, function)
        else:
            assert self._prepare_here is not None
            await self._prepare_here(function)

    def _machine(self, spec: NodeSpec, epoch: str = "") -> ClusterNode:
        assert self._admission is not None
        sessions = self._trajectories.environments.sessions
        remote = RemoteNode(spec.name, archives=self._admission.archives, sessions=sessions, epoch=epoch)
        machine = ClusterNode(spec, remote)
        remote.on_message = partial(self._take, machine)
        remote.on_lost = self._lose_trajectories
        remote.models.on_change = partial(self._models_changed, spec.name)
        return machine

    def _take(self, machine: ClusterNode, message: NodeDraining | NodeGoodbye | FitnessChanged) -> None:
        """Tell the membership what a node says of itself."""
        name, instance = machine.spec.name, "" if machine.hello is None else machine.hello.instance
        match message:
            case NodeDraining():
                self._step(self._membership.drain, name, message.why)
            case FitnessChanged():
                self._step(self._membership.judge, name, instance, message.why[:WHY_MAX], message.finishing)
            case NodeGoodbye():
                if self._is_empty(name):
                    self._step(self._membership.empty, name)  # it drains and has seen it first: nothing is lost with it
                self._step(self._membership.goodbye, name, instance, message.why, message.killed)

    def _member(self, name: str) -> RemoteNode | None:
        machine = self._machines.get(name)
        return None if machine is None else machine.remote

    def _models_changed(self, name: str) -> None:
        """Tell the scheduler what a node's model services cost, and on which of its devices they are."""
        machine = self._machines.get(name)
        if machine is not None and machine.spec.devices and self._services is not None:
            models = machine.remote.models
            self._declared.declare(*self._functions())
            self._services.learn(name, self._declared.services(models.services))
            self.engine.report_residency(name, self._declared.resident(models.resident, machine.spec.devices))

    # -- what the membership decides

    def _step(
        self, event: Callable[Concatenate[float, P], list[Verdict]], *args: P.args, **kwargs: P.kwargs
    ) -> list[Verdict]:
        """Tell what happens now to the membership, by one of its methods, and do what that decides."""
        verdicts = event(self._clock.now(), *args, **kwargs)
        for verdict in verdicts:
            match verdict:
                case Shut():
                    self.engine.tell(
                        NodeClosed(
                            node=verdict.node, why=verdict.why, finishing=verdict.finishing, devices=verdict.devices
                        )
                    )
                    logger.warning("a node is closed", node=verdict.node, why=verdict.why)
                    if self.leaving(verdict.node):
                        self._records.moved(verdict.node, "draining")
                case Serves():
                    self.engine.tell(NodeOpened(node=verdict.node))
                    self._records.moved(verdict.node, "ready")
                case CountedOut():
                    self._count_out(verdict)
                case _:
                    pass
        self._arm()
        return verdicts

    def _count_out(self, verdict: CountedOut) -> None:
        """Everything on the node is lost: first the scheduler decides what runs again, then whoever waits is told."""
        name = verdict.node
        machine = self._machines.pop(name, None)
        log = logger.error if verdict.victims else logger.info
        log("a node is counted out", node=name, why=verdict.why, with_what_it_had=verdict.victims)
        known = self._records.get(name)
        if known is not None and known.state == "draining" and self.ray is not None:
            self.ray.left(name)
        self._records.moved(name, "lost")
        self.abilities.forget(name)
        self.snapshots.lose(name, verdict.why)
        if self._services is not None:
            self._services.forget(name)
        self._lose_trajectories(one for one in self._trajectories.on_node(name) if self._is_unaware(one))
        self.engine.tell(NodeLost(node=name))
        self._awaited.discard(name)
        if machine is not None:
            machine.remote.lost(verdict.why)
            if machine.link is not None:
                machine.link.close(verdict.why)

    def _lose_trajectories(self, trajectories: Iterable[str]) -> None:
        for trajectory in list(trajectories):
            self._homes.pop(trajectory, None)
            self._trajectories.lose([trajectory])

    def _is_unaware(self, trajectory: str) -> bool:
        """Whether no action of the trajectory is told of the loss of its sandbox by its own end."""
        found = self.engine.trajectory(trajectory)
        return found is None or found["state"] == "idle"

    def _arm(self) -> None:
        """Come back when time alone decides something, or a draining node may be empty."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closed:
            return
        due_s = self._membership.next_s()
        waits_s = [] if due_s is None else [max(0.0, due_s - self._clock.now())]
        if self._membership.draining:
            waits_s.append(_LOOK_S)
        if waits_s:
            self._timer = asyncio.get_running_loop().call_later(min(waits_s), self._tick)

    def _tick(self) -> None:
        self._timer = None
        for name in self._membership.draining:
            if self._is_empty(name):
                self._step(self._membership.empty, name)
        self._step(self._membership.tick)

    def _able_changed(self, name: str) -> None:
        """Tell the scheduler what a machine that it knows is able to run by now."""
        if self._engine is None:
            return
        if self._inline and name == self.here.name:
            self.here = replace(self.here, able=self.abilities.able(name))
            self.engine.tell(NodeJoined(node=self.here))
            return
        machine, member = self._machines.get(name), self._membership.get(name)
        if machine is not None and member is not None and member.state in CONNECTED - {NodeState.JOINING}:
            machine.spec = replace(machine.spec, able=self.abilities.able(name))
            self.engine.tell(NodeJoined(node=machine.spec))

    def _is_empty(self, name: str) -> bool:
        """Return whether nothing of the scheduler's is on a node."""
        return self.engine.held_on(name) == (0, 0)

    def _place_of(self, trajectory: str) -> str:
        found = None if self._engine is None else self._engine.trajectory(trajectory)
        return "" if found is None else str(found["node"])


def _is_drained(member: Member) -> bool:
    """Return whether a node that is counted out has left empty: it has nothing that it must end first."""
    return member.state is NodeState.LOST and not member.fenced


def _needs_node(function: FunctionSpec) -> bool:
    """Whether its actions run on a node, and not in the gateway itself."""
    return function.sandbox is not None or not {"cpu", "gpu"}.isdisjoint(function.cost)


async def open_cluster(
    config: GatewayConfig,
    here: NodeSpec,
    store: Store,
    clock: Clock,
    wall: Callable[[], float],
    copies: HandlerCopies,
) -> Cluster:
    """Return the machines of a gateway that serves its handlers from ``copies``.

    Raises InvalidConfig or StorageUnavailable.
    """
    state_dir, cluster = config.server.state_dir, config.cluster or ClusterConfig()
    records = NodeRecords(store, wall, nodes_max=cluster.times.nodes_max)
    snapshots = NodeSnapshots(store, cluster.snapshots, age_s=config.sandbox.provider.snapshots.age_s, wall=wall)
    admission = None
    if config.cluster is not None:
        await records.open()
        tickets = JoinTickets(signing_key(state_dir), records.generation, cluster.ticket_ttl_s, wall=wall)
        directory = state_dir / "cluster"
        directory.mkdir(mode=0o700, exist_ok=True)
        certificate = await asyncio.to_thread(ensure_certificate, directory)
        await snapshots.open(records.all)
        admission = NodeAdmission(tickets, certificate, HandlerArchives(copies))
    return Cluster(cluster, here, records=records, snapshots=snapshots, admission=admission, clock=clock)
