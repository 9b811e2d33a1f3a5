"""The simulator: the real core on a virtual clock."""

from __future__ import annotations

import heapq
import random
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, get_args

from manager.action import (
    PRIOR_BATCH_MARGINAL,
    Action,
    Amdahl,
    Chunk,
    Elasticity,
    Grant,
    Lease,
    Outcome,
    Settlement,
    SizeLine,
    State,
    Work,
    capped,
)
from manager.assembly import build_core
from manager.config import ManagerSpec, NodeSpec, SchedulerSpec, ServiceSpec, TaskSpec
from manager.core.views import replicas_view
from manager.errors import CANCEL_ASKED, FILES_LOST, InvalidInput, Reason, Unsatisfiable
from manager.events import (
    Abort,
    Command,
    EndTrajectory,
    Event,
    Execute,
    Finished,
    NodeClosed,
    NodeJoined,
    NodeLost,
    NodeOpened,
    Refuse,
    ReplicaEnded,
    Replicate,
    Resize,
    Settle,
    Submitted,
    Tick,
    TrajectoryEnded,
    WakeAt,
)
from manager.learning import History
from manager.resources.pools import ResourceSpec
from manager.scheduler.policy import PolicySpec
from manager.simulation.workloads import TracedTrajectory, TraceStep

#: Bytes of a node and of a device where nothing else is said (the paper's nodes, rounded).
NODE_BYTES = 2400 * 10**9
DEVICE_BYTES = 80 * 10**9
CORES_PER_NUMA = 128


def cluster(
    *,
    cores: int = 1280,
    nodes: int = 5,
    devices: int = 0,
    device_nodes: int = 0,
    services: Mapping[str, ServiceSpec] | None = None,
    resources: Mapping[str, ResourceSpec] | None = None,
    policy: str = "adaptive",
    strict: bool = False,
    replicate: bool = True,
) -> ManagerSpec:
    """CPU nodes with ``cores`` in all and device nodes with ``devices`` in all, as even as possible.

    Where ``device_nodes`` does not say how many, a device node has eight and the last one what is left.

    Raises InvalidInput where there are fewer units than nodes or the policy's name cannot be read.
    """
    if cores and cores < nodes:
        raise InvalidInput(f"{nodes} nodes cannot share {cores} cores", component="simulate")
    shares = _even(devices, device_nodes) if device_nodes else _full(devices)
    specs = [_cpu_node(index, count) for index, count in enumerate(_even(cores, nodes if cores else 0))]
    specs += [_device_node(index, count) for index, count in enumerate(shares)]
    return ManagerSpec(
        nodes=tuple(specs),
        resources=dict(resources or {}),
        tasks={"default": TaskSpec(max_queued=10**9)},
        services=dict(services or {}),
        scheduler=SchedulerSpec(policies=policies(policy), strict=strict, max_queued=10**9, replicate=replicate),
    )


def policies(text: str) -> dict[str, PolicySpec]:
    """Policies by resource kind from ``NAME``, ``fixed:8``, or ``adaptive,resize_interval_s=0.5``.

    ``adaptive`` means adaptive on cores and price on everything else.
    """
    name, *settings = text.split(",")
    name, _, dop = name.partition(":")
    options = dict(_setting(setting) for setting in settings)
    if dop:
        options["dop"] = _number(dop, text)
    spec = PolicySpec(name=name, options=options)
    return {"cpu": spec, "default": PolicySpec(name="price")} if name == "adaptive" else {"default": spec}


def _setting(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    if not equals:
        hint = "an option is NAME=NUMBER; several policies are joined by +, or --policy is given again"
        raise InvalidInput(f"policy option {text!r}: {hint}", component="simulate")
    return name, _number(value, text)


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InvalidInput(f"policy {whole!r}: {text!r} is no number", component="simulate") from error


def _even(units: int, parts: int) -> list[int]:
    """Units dealt to parts, the first ones one more where it does not divide."""
    return [units // parts + (index < units % parts) for index in range(parts)] if parts else []


def _full(devices: int) -> list[int]:
    """Devices in nodes of eight, the last one with the rest."""
    return [min(8, devices - start) for start in range(0, devices, 8)]


def _cpu_node(index: int, cores: int) -> NodeSpec:
    numa = tuple(tuple(range(start, min(cores, start + CORES_PER_NUMA))) for start in range(0, cores, CORES_PER_NUMA))
    return NodeSpec(name=f"node{index}", numa=numa, memory_bytes=NODE_BYTES)


def _device_node(index: int, devices: int) -> NodeSpec:
    return NodeSpec(name=f"gpu{index}", numa=(), memory_bytes=NODE_BYTES, devices=devices, device_bytes=DEVICE_BYTES)


class KnownDuration(NamedTuple):
    """What an action shall state of its duration."""

    t_ori_s: float | None
    elasticity: Elasticity | None
    batch_marginal: float
    #: The most units of its key that it may have: None for all of its unit set.
    units_max: int | None = None
    line: SizeLine | None = None
    #: The size of the call, where its function declares one.
    size: float | None = None
    #: Whether the line is the function's, while the key has none of its own.
    borrows: bool = False


class DurationModel(Protocol):
    """Gives estimates for actions and takes in how they ended."""

    def of(self, step: TraceStep) -> KnownDuration:
        """What is known of a step before it runs."""
        ...

    def observe(self, settlement: Settlement) -> None:
        """Learn from an action that ended."""
        ...


class Oracle:
    """Profiles that are exact."""

    def __init__(self, batch_marginal: float = PRIOR_BATCH_MARGINAL) -> None:
        self._batch_marginal = batch_marginal

    def of(self, step: TraceStep) -> KnownDuration:
        return KnownDuration(step.t_ori_s, step.elasticity, self._batch_marginal, size=step.size)

    def observe(self, settlement: Settlement) -> None:
        pass


class Learning:
    """No profile at all but what the gateway's own history learns, here and in earlier runs that share it.

    ``sized``: whether it knows the sizes of calls, as where their functions declare one.
    """

    def __init__(self, history: History | None = None, *, sized: bool = True) -> None:
        self.history = history or History()
        self._sized = sized

    def of(self, step: TraceStep) -> KnownDuration:
        size = step.size if self._sized else None
        learned = self.history.learned(step.function, step.profile_key, size)
        elasticity = Amdahl(learned.serial_fraction) if step.key is not None else None
        return KnownDuration(
            learned.t_ori_s,
            elasticity,
            learned.batch_marginal,
            learned.units_max,
            learned.line,
            size,
            learned.borrowed,
        )

    def observe(self, settlement: Settlement) -> None:
        self.history.observe(settlement)


# Faults of a simulated cluster: nodes that are lost, go in a wave, are upgraded in turn, or fall silent for a while.
#
# A fault is written ``KIND:NODES@START`` or ``KIND:NODES@START+FOR``, times in seconds:
#
# - ``lose:3@600``: three nodes are lost at 600 s and do not come back; ``lose:3@600+300``: they join again 300 s later;
# - ``wave:50@600+120``: fifty nodes are lost within 120 s, as spot machines are;
# - ``upgrade:10@600+60``: all nodes in turn, ten at a time, are drained for 60 s, then lost, and join again at once;
# - ``cut:40@600+30``: forty nodes are silent for 30 s: nothing is placed there, what runs there goes on and is told of
#   when they are back. Silent for longer than a gateway waits, they are lost, and join again.

FaultKind = Literal["lose", "wave", "upgrade", "cut"]
NodeEvent = NodeLost | NodeJoined | NodeClosed | NodeOpened
#: Seconds of silence until a gateway places nothing on a node, and until it takes it for lost (membership's defaults).
SUSPECT_S = 3.0
LOST_S = 60.0
#: Most events that the faults of one simulation may make.
EVENTS_MAX = 100_000
_FAULT = re.compile(r"(?P<kind>[a-z]+):(?P<nodes>\d{1,6})@(?P<start>\d+(?:\.\d+)?)(?:\+(?P<span>\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFault:
    """One fault. ``for_s`` is None where it was not said."""

    kind: FaultKind
    nodes: int
    start_s: float
    for_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultEvent:
    """Something that happens to a node; in silence its ends are told at ``silent_until_s``."""

    instant_s: float
    event: NodeEvent | None
    node: str
    silent_until_s: float | None = None


@dataclass(slots=True, kw_only=True)
class FaultTally:
    """What faults have cost."""

    nodes_lost: int = 0
    #: Trajectories that lost their sandbox and began again.
    trajectories: int = 0
    #: Actions that were ended by the loss of their node or their trajectory's, and how many were asked for again.
    actions: int = 0
    again: int = 0
    #: Unit-seconds by kind of what was lost while it ran.
    wasted: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return {
            "nodes_lost": self.nodes_lost,
            "trajectories_begun_again": self.trajectories,
            "actions_lost": self.actions,
            "actions_run_again": self.again,
            "wasted_unit_s": {kind: round(spent, 6) for kind, spent in sorted(self.wasted.items())},
        }

    def line(self) -> str:
        """Return it for people."""
        wasted = ", ".join(f"{spent:.0f} s of {kind}" for kind, spent in sorted(self.wasted.items())) or "nothing"
        return (
            f"{self.nodes_lost} nodes lost: {self.trajectories} trajectories began again, {self.actions} actions lost "
            f"({self.again} asked for again), wasted {wasted}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What befalls a cluster."""

    faults: tuple[NodeFault, ...] = ()
    #: Draws the nodes that faults meet.
    seed: int = 0


def read_fault(text: str) -> NodeFault:
    """Return the fault that a text describes; raises InvalidInput."""
    match = _FAULT.fullmatch(text)
    kinds = get_args(FaultKind)
    if match is None or match["kind"] not in kinds:
        hint = f"KIND:NODES@START or KIND:NODES@START+FOR, in seconds; kinds are {', '.join(kinds)}"
        raise InvalidInput(f"fault {text!r}: written {hint}", component="simulate")
    for_s = None if match["span"] is None else float(match["span"])
    fault = NodeFault(kind=match["kind"], nodes=int(match["nodes"]), start_s=float(match["start"]), for_s=for_s)  # type: ignore[arg-type]
    if fault.nodes == 0:
        raise InvalidInput(f"fault {text!r}: names no node", component="simulate")
    if not fault.for_s and fault.kind != "lose":
        raise InvalidInput(f"fault {text!r}: how long? {fault.kind}:NODES@START+SECONDS", component="simulate")
    return fault


def fault_events(faults: Sequence[NodeFault], nodes: Sequence[NodeSpec], seed: int) -> list[FaultEvent]:
    """Return what happens, in order of time; which nodes it meets is drawn by ``seed``, each fault anew.

    Raises InvalidInput where a fault names more nodes than there are.
    """
    chance = random.Random(seed)
    events: list[FaultEvent] = []
    for fault in faults:
        if fault.nodes > len(nodes):
            problem = f"{fault.kind} of {fault.nodes} nodes: the cluster has {len(nodes)}"
            raise InvalidInput(problem, component="simulate")
        drawn = chance.sample(list(nodes), len(nodes) if fault.kind == "upgrade" else fault.nodes)
        events += _events(fault, drawn, chance)
        if len(events) > EVENTS_MAX:
            raise InvalidInput(f"the faults make more than {EVENTS_MAX} events", component="simulate")
    return sorted(events, key=lambda each: each.instant_s)


def _events(fault: NodeFault, drawn: Sequence[NodeSpec], chance: random.Random) -> list[FaultEvent]:
    start_s, for_s = fault.start_s, fault.for_s or 0.0
    match fault.kind:
        case "lose":
            back_s = None if fault.for_s is None else start_s + for_s
            return [each for node in drawn for each in _loss(node, start_s, back_s)]
        case "wave":
            return [each for node in drawn for each in _loss(node, start_s + chance.uniform(0.0, for_s), None)]
        case "upgrade":
            turns = [drawn[first : first + fault.nodes] for first in range(0, len(drawn), fault.nodes)]
            return [
                each
                for turn, batch in enumerate(turns)
                for node in batch
                for each in _upgrade(node, start_s + turn * for_s, for_s)
            ]
        case "cut":
            return [each for node in drawn for each in _silence(node, start_s, start_s + for_s)]


def _loss(node: NodeSpec, lost_s: float, back_s: float | None) -> list[FaultEvent]:
    lost = FaultEvent(instant_s=lost_s, event=NodeLost(node=node.name), node=node.name)
    if back_s is None:
        return [lost]
    return [lost, FaultEvent(instant_s=back_s, event=NodeJoined(node=node), node=node.name)]


def _upgrade(node: NodeSpec, start_s: float, drain_s: float) -> list[FaultEvent]:
    closed = FaultEvent(
        instant_s=start_s, event=NodeClosed(node=node.name, why="upgrade", finishing=True), node=node.name
    )
    return [closed, *_loss(node, start_s + drain_s, start_s + drain_s)]


def _silence(node: NodeSpec, start_s: float, until_s: float) -> list[FaultEvent]:
    begins = FaultEvent(instant_s=start_s, event=None, node=node.name, silent_until_s=until_s)
    if until_s - start_s <= SUSPECT_S:
        return [begins]
    closed = NodeClosed(node=node.name, why="silent")
    suspected = FaultEvent(instant_s=start_s + SUSPECT_S, event=closed, node=node.name)
    if until_s - start_s > LOST_S:
        return [begins, suspected, *_loss(node, start_s + LOST_S, until_s)]
    return [begins, suspected, FaultEvent(instant_s=until_s, event=NodeOpened(node=node.name), node=node.name)]


class LeaseAudit:
    """Leases by action. Cores and devices are told apart one by one; other units are summed."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._owner: dict[tuple[str, int], str] = {}
        self._units: defaultdict[str, int] = defaultdict(int)
        self._since_s = 0.0
        #: Unit-seconds by kind.
        self.used: defaultdict[str, float] = defaultdict(float)
        self.granted = 0

    def grant(self, lease: Lease, now_s: float) -> None:
        """Enter a new lease; a unit that somebody holds is an error of the core."""
        assert lease.action_id not in self._leases, f"{lease.action_id} is leased twice"
        self._flow(now_s)
        self._leases[lease.action_id] = lease
        self.granted += 1
        for kind, grant in lease.grants.items():
            if self._shares(lease):
                continue
            self._units[kind] += grant.units
            for place in _places(kind, lease.node, grant):
                holder = self._owner.setdefault(place, lease.action_id)
                assert holder == lease.action_id, f"{place} is leased to {holder} and to {lease.action_id}"

    def settle(self, action_id: str, now_s: float) -> None:
        """Take a lease back; nothing for an action that never started."""
        lease = self._leases.pop(action_id, None)
        if lease is None:
            return
        self._flow(now_s)
        if self._shares(lease):
            return
        for kind, grant in lease.grants.items():
            self._units[kind] -= grant.units
            for place in _places(kind, lease.node, grant):
                assert self._owner.pop(place) == action_id

    def change(self, lease: Lease, now_s: float) -> None:
        """Replace a lease by its resized one."""
        self.settle(lease.action_id, now_s)
        self.grant(lease, now_s)
        self.granted -= 1

    def occupy(self, kind: str, units: int, now_s: float) -> None:
        """Count ``units`` more (or, negative, fewer) as in use: for baselines, which lease nothing."""
        self._flow(now_s)
        self._units[kind] += units
        assert self._units[kind] >= 0, f"more of {kind} was given back than was taken"

    @property
    def empty(self) -> bool:
        return not self._leases and not self._owner

    def _shares(self, lease: Lease) -> bool:
        """Whether it runs on the units of its batch's leader."""
        return bool(lease.batch) and lease.batch[0] != lease.action_id

    def _flow(self, now_s: float) -> None:
        """Account what was in use since the last change."""
        start_s, self._since_s = self._since_s, now_s
        if now_s <= start_s:
            return
        for kind, units in self._units.items():
            if units:
                self.used[kind] += units * (now_s - start_s)


def _places(kind: str, node: str, grant: Grant) -> Iterator[tuple[str, int]]:
    where = f"{kind}:{node}"
    if grant.chunk is not None:
        where = grant.pool
        for device in grant.chunk.devices:
            yield where, device
    for core in grant.cores:
        yield where, core


@dataclass(frozen=True, slots=True)
class PendingRestore:
    """A service on its way."""

    node: str
    service: str
    chunk: Chunk
    arrives_s: float


class PendingRestores:
    """What is under way. The link of a device carries one service at a time, in the order that they were asked for."""

    def __init__(self) -> None:
        self._under_way: list[PendingRestore] = []
        self.count = 0

    def add(self, node: str, service: str, chunk: Chunk, from_s: float, restore_s: float) -> float:
        """Send a service on its way once the link is free, from ``from_s`` on; the instant of its arrival."""
        arrives_s = max(from_s, self.busy_until_s(node, chunk, from_s)) + restore_s
        self._under_way.append(PendingRestore(node, service, chunk, arrives_s))
        self.count += 1
        return arrives_s

    def busy_until_s(self, node: str, chunk: Chunk, now_s: float) -> float:
        """When the links of these devices are free; ``now_s`` where they are."""
        self._under_way = [one for one in self._under_way if one.arrives_s > now_s]
        reaching = [one.arrives_s for one in self._under_way if one.node == node and one.chunk.meets(chunk)]
        return max(reaching, default=now_s)

    def of(self, service: str | None, lease: Lease, now_s: float) -> float:
        """When a leased action's own service arrives, where it is on its way to that very place; else ``now_s``."""
        where = (lease.node, service, lease.chunk)
        mine = (one.arrives_s for one in self._under_way if (one.node, one.service, one.chunk) == where)
        return max(now_s, max(mine, default=now_s))


@dataclass(slots=True, eq=False)
class PlayedAction:
    """A leased action as it really goes."""

    action: Action
    step: TraceStep
    lease: Lease
    #: Worker processes that were started.
    workers: int
    #: Seconds of restore and of resizes so far: overhead.
    lost_s: float
    #: Instant from which the work goes on at the present units, and the fraction done before.
    since_s: float
    started_s: float
    #: When its service was in place.
    ready_s: float
    done: float = 0.0
    #: Unit-seconds held until the last resize.
    area: float = 0.0
    resized_s: float = 0.0
    version: int = 0

    @property
    def units(self) -> int:
        """Units of the key resource, or of the first of a rigid action."""
        kind = self.step.key or next(iter(self.step.cost), "")
        return self.lease.units(kind)


def work_s(step: TraceStep, lease: Lease) -> float:
    """Seconds of a step alone on the units of a lease."""
    if step.key is None or step.elasticity is None:
        return step.t_ori_s
    units = lease.units(step.key)
    return step.t_ori_s / (step.elasticity.efficiency(units) * units)


class SandboxStarts:
    """Sandboxes by trajectory; each takes ``start_s`` once its node gets to it, ``per_node_s`` of them a second."""

    def __init__(self, start_s: float, per_node_s: float) -> None:
        self._start_s = start_s
        self._per_node_s = per_node_s
        self._made: set[str] = set()
        #: When a node can make the next one.
        self._next_s: dict[str, float] = {}

    def ready_s(self, trajectory: str, node: str, now_s: float) -> float:
        """The instant from which an action of a trajectory can work; its first one asks for the sandbox."""
        if trajectory in self._made:
            return now_s
        self._made.add(trajectory)
        made_s = max(now_s, self._next_s.get(node, 0.0)) + 1.0 / self._per_node_s
        self._next_s[node] = made_s
        return made_s + self._start_s

    def lost(self, trajectory: str) -> None:
        """Its sandbox went with its node: the trajectory will ask for another one."""
        self._made.discard(trajectory)


# The simulator: the same core, policies and managers as the engine's, under a virtual clock.
#
# A workload is played in a closed loop: a trajectory thinks, submits its next action, and goes on when that has
# settled. Every run asserts that each action completed, that no unit was leased twice, and the core's own invariants.
# The same workload and cluster give the same run, byte for byte.

#: Steps between two checks of all the core's invariants.
CHECK_EVERY = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """What elasticity costs on real machines; each says where it is measured."""

    #: Core-seconds that each further worker process of a test run adds: 0.2 to 1.4 on real suites.
    worker_cost_s: float = 0.3
    #: Seconds that a resized action stands still (more than a cgroup write takes in ``bench.sandbox``).
    resize_cost_s: float = 0.02
    #: How many times as long work takes while a service is restored beside it (the limit of ``bench.model``).
    replica_slowdown: float = 1.05
    #: What a further member adds to a batch, as a fraction of what it takes alone: 1 where one sequence keeps a device
    #: busy, as the log-probabilities of a whole rollout do; near 0 where launching is all that a short one costs. The
    #: runtime computes a batch in forward passes of ``batch_tokens`` each and answers all members at its end.
    batch_marginal: float = 1.0
    #: Seconds that a trajectory's sandbox takes to be there, from its first action on cores on, and how many of them a
    #: node makes in a second. 0: no time, as from a warm pool; what is compared with pods is charged as they are.
    sandbox_start_s: float = 0.0
    sandboxes_per_node_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedAction:
    """One settled action."""

    trajectory: str
    #: Its place among the steps of its trajectory.
    number: int
    function: str
    submitted_s: float
    queue_s: float
    overhead_s: float
    execution_s: float
    units: int

    @property
    def ended_s(self) -> float:
        return self.submitted_s + self.act_s

    @property
    def act_s(self) -> float:
        return self.queue_s + self.overhead_s + self.execution_s


@dataclass(slots=True, kw_only=True)
class SimulationRun:
    """What one simulation of one policy gave."""

    records: list[SimulatedAction]
    trajectories: int
    makespan_s: float
    ledger: LeaseAudit
    resizes: int = 0
    restores: int = 0
    #: Copies of services made in free memory, and how many of them were used.
    replicas: int = 0
    replica_hits: int = 0
    #: Actions that gave up: in baselines only.
    failures: int = 0
    #: What faults of the cluster have cost.
    faults: FaultTally = field(default_factory=FaultTally)


class Simulation:
    """Plays one workload on one core."""

    def __init__(
        self,
        spec: ManagerSpec,
        trajectories: Sequence[TracedTrajectory],
        *,
        physics: Physics | None = None,
        knowledge: DurationModel | None = None,
        faults: Sequence[FaultEvent] = (),
    ) -> None:
        """``faults``: what happens to nodes, in order of time (`manager.simulation.simulator`)."""
        self._spec = spec
        self._core = build_core(spec)
        self._trajectories = trajectories
        self._physics = physics or Physics()
        self._knowledge = knowledge or Oracle(self._physics.batch_marginal)
        self._ledger = LeaseAudit()
        self._events: list[tuple[float, int, Event | tuple[int, int]]] = []
        self._seq = 0
        self._now_s = 0.0
        self._wake_s: float | None = None
        self._running: dict[str, PlayedAction] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._records: list[SimulatedAction] = []
        self._resizes = 0
        self._restores = 0
        self._arrivals = PendingRestores()
        self._faults = deque(faults)
        self._tally = FaultTally()
        self._gone: set[str] = set()
        #: Until when a node's ends are not heard.
        self._silent: dict[str, float] = {}
        #: Trajectories that have work left, how often each began again, and those whose sandbox was lost.
        self._left = sum(1 for trajectory in trajectories if trajectory.steps)
        self._lives = [0] * len(trajectories)
        self._lost: set[str] = set()
        self._tries: dict[str, int] = {}
        self._sandboxes = SandboxStarts(self._physics.sandbox_start_s, self._physics.sandboxes_per_node_s)
        self.steps = 0

    def run(self) -> SimulationRun:
        """Play to the end; raises Unsatisfiable where an action could never start.

        A trajectory whose sandbox is lost with its node begins again, as a trainer would have it; an action that lost
        its node alone is asked for again.
        """
        for index, trajectory in enumerate(self._trajectories):
            if trajectory.steps:
                self._push(trajectory.arrival_s + trajectory.steps[0].think_s, (index, 0))
        while self._events or self._wake_s is not None or (self._faults and self._left):
            events = self._next_events()
            if not events:
                continue  # an end that a resize has moved
            for command in self._core.step(events, self._now_s):
                self._obey(command)
            self.steps += 1
            if self.steps % CHECK_EVERY == 0:
                self._core.check()
        self._finish()
        return SimulationRun(
            records=self._records,
            trajectories=len(self._trajectories),
            makespan_s=max((record.ended_s for record in self._records), default=0.0),
            ledger=self._ledger,
            resizes=self._resizes,
            restores=self._restores,
            replicas=self._arrivals.count,
            replica_hits=replicas_view(self._core).get("hits", 0),
            faults=self._tally,
        )

    def _finish(self) -> None:
        self._core.check()
        expected = sum(len(trajectory.steps) for trajectory in self._trajectories)
        assert self._left == 0, f"{self._left} of {len(self._trajectories)} trajectories have not ended"
        assert len(self._records) >= expected, f"{len(self._records)} of {expected} actions completed"
        assert self._tally.trajectories or len(self._records) == expected, "an action was completed twice"
        assert self._ledger.empty and not self._running, "something is leased after the end"

    # -- time

    def _push(self, instant_s: float, event: Event | tuple[int, int]) -> None:
        self._seq += 1
        heapq.heappush(self._events, (instant_s, self._seq, event))

    def _next_events(self) -> list[Event]:
        """Go to the next instant at which something happens, and take all of it."""
        next_s = self._events[0][0] if self._events else float("inf")
        if self._faults and self._left:
            next_s = min(next_s, self._faults[0].instant_s)
        if self._wake_s is not None and self._wake_s < next_s:
            assert self._events or self._wake_s > self._now_s, "the core asks for an instant that has passed"
            self._now_s, self._wake_s = max(self._now_s, self._wake_s), None
            return [Tick()]
        self._now_s = next_s
        events: list[Event] = []
        while self._faults and self._left and self._faults[0].instant_s <= next_s:
            events += self._befall(self._faults.popleft())
        while self._events and self._events[0][0] <= next_s:
            event = heapq.heappop(self._events)[2]
            if isinstance(event, tuple):
                events.append(self._submission(*event))
            elif not isinstance(event, Finished) or self._is_current(event):
                events.append(event)
        return events

    def _is_current(self, event: Finished) -> bool:
        """Whether the end was not moved by a resize since, nor the action killed; that it was killed is told once."""
        if event.outcome.state is State.CANCELLED:
            return True
        running = self._running.get(event.action_id)
        if running is None or event.outcome.usage.get("version") != running.version:
            return False
        heard_s = self._silent.get(running.lease.node, 0.0)
        if heard_s > self._now_s:
            self._push(heard_s, event)
            return False
        return True

    def _befall(self, fault: FaultEvent) -> list[Event]:
        """Return what the core is told of a fault."""
        if fault.silent_until_s is not None:
            self._silent[fault.node] = fault.silent_until_s
        if isinstance(fault.event, NodeJoined):
            self._gone.discard(fault.node)
        elif isinstance(fault.event, NodeLost) and fault.node not in self._gone:
            self._gone.add(fault.node)
            self._tally.nodes_lost += 1
            self._silent.pop(fault.node, None)
        return [] if fault.event is None else [fault.event]

    # -- the workload

    def _submission(self, index: int, number: int) -> Submitted:
        trajectory = self._trajectories[index]
        if self._name(index) in self._lost:  # while it thought
            self._begin_again(index)
            number = 0
        step = trajectory.steps[number]
        name = self._name(index)
        action_id = f"{name}/{number}"
        if action_id in self._tries:
            action_id = f"{action_id}~{self._tries[action_id]}"
        self._places[action_id] = (index, number)
        known = self._knowledge.of(step)
        return Submitted(
            action=Action(
                id=action_id,
                function=step.function,
                task=trajectory.task,
                trajectory=name,
                cost=capped(step.cost, step.key, known.units_max),
                memory_bytes=trajectory.memory_bytes,
                trajectory_ttl_s=1e9,
                key=step.key,
                elasticity=known.elasticity,
                t_ori_s=known.t_ori_s,
                line=known.line,
                borrows=known.borrows,
                malleable=step.malleable,
                service=step.service,
                profile_key=step.profile_key,
                size=known.size,
                batch_tokens=step.batch_tokens,
                batch_marginal=known.batch_marginal,
                submitted_s=self._now_s,
                timeout_s=1e9,
                queue_timeout_s=1e9,
            ),
        )

    def _name(self, index: int) -> str:
        """Return a trajectory's id; each new life has another."""
        name, lives = self._trajectories[index].id, self._lives[index]
        return f"{name}#{lives}" if lives else name

    def _begin_again(self, index: int) -> None:
        self._lost.discard(self._name(index))
        self._lives[index] += 1
        self._tally.trajectories += 1

    # -- the core's commands

    def _obey(self, command: Command) -> None:
        match command:
            case Execute():
                self._execute(command.action, command.lease)
            case Resize():
                self._resize(command.action, command.lease)
            case Replicate():
                self._replicate(command)
            case Settle():
                self._settle(command.settlement)
            case Abort():
                self._abort(command.action_id)
            case EndTrajectory():
                self._lost.add(command.trajectory)
                self._sandboxes.lost(command.trajectory)
            case WakeAt():
                self._wake_s = command.instant_s
            case Refuse():
                raise Unsatisfiable(f"the core refused {command.action_id}: {command.error}", component="simulate")
            case _:
                pass  # placing trajectories needs nothing here

    def _execute(self, action: Action, lease: Lease) -> None:
        self._ledger.grant(lease, self._now_s)
        index, number = self._places[action.id]
        step = self._trajectories[index].steps[number]
        grant = lease.grants.get(step.key or "")
        workers = 0 if grant is None else grant.most
        leads = not lease.batch or lease.batch[0] == action.id
        ready_s = self._ready_s(action, lease) if leads else self._running[lease.batch[0]].ready_s
        if self._physics.sandbox_start_s and "cpu" in lease.grants:
            ready_s = max(ready_s, self._sandboxes.ready_s(action.trajectory or action.id, lease.node, self._now_s))
        ready_s += step.overhead_s
        running = PlayedAction(action, step, lease, workers, ready_s - self._now_s, ready_s, self._now_s, ready_s)
        running.resized_s = self._now_s
        self._running[action.id] = running
        self._slow(running)

    def _ready_s(self, action: Action, lease: Lease) -> float:
        """When the action's service is in place: what travels to its devices already goes first."""
        chunk = lease.chunk
        if action.service is None or chunk is None:
            return self._now_s
        if not any(grant.restore for grant in lease.grants.values()):
            return self._arrivals.of(action.service, lease, self._now_s)
        self._restores += 1
        return self._arrivals.busy_until_s(lease.node, chunk, self._now_s) + self._restore_s(action.service, chunk.size)

    def _restore_s(self, service: str, units: int) -> float:
        return self._spec.services[service].restore_s_by_dop[units]

    def _replicate(self, command: Replicate) -> None:
        """Send a copy to devices on which nothing computes yet; what starts there meanwhile is slowed."""
        restore_s = self._restore_s(command.service, command.chunk.size)
        arrives_s = self._arrivals.add(command.node, command.service, command.chunk, self._now_s, restore_s)
        self._push(arrives_s, ReplicaEnded(number=command.number, done=True))

    def _slow(self, running: PlayedAction) -> None:
        """Plan the end of an action that works more slowly while anything travels to its devices."""
        chunk, slowdown = running.lease.chunk, self._physics.replica_slowdown
        if chunk is not None:
            from_s = max(self._now_s, running.since_s)
            beside_s = max(0.0, self._arrivals.busy_until_s(running.lease.node, chunk, self._now_s) - from_s)
            left_s = (1.0 - running.done) * self._duration_s(running)
            running.since_s = from_s + min(beside_s * (1 - 1 / slowdown), left_s * (slowdown - 1))
        running.version += 1
        self._schedule_end(running)

    def _resize(self, action: Action, lease: Lease) -> None:
        """Account the work done with the old units; the action stands still for a moment and goes on."""
        running = self._running[action.id]
        self._ledger.change(lease, self._now_s)
        self._resizes += 1
        self._account(running)
        running.area += running.units * (self._now_s - running.resized_s)
        running.resized_s = self._now_s
        running.lease = lease
        running.since_s += self._physics.resize_cost_s
        running.lost_s += self._physics.resize_cost_s
        running.version += 1
        self._schedule_end(running)

    def _account(self, running: PlayedAction) -> None:
        """Note the work that was done with the present units."""
        if self._now_s > running.since_s:
            running.done += (self._now_s - running.since_s) / self._duration_s(running)
            running.since_s = self._now_s

    def _duration_s(self, running: PlayedAction) -> float:
        """Seconds of the whole work with the present units: of its batch, where it is part of one."""
        if running.lease.batch:
            return self._batch_s(running.lease)
        step = running.step
        alone_s = work_s(step, running.lease)
        if step.key is None or not step.malleable:
            return alone_s
        units = running.lease.units(step.key)
        assert 0 < units <= running.workers, f"{running.action.id}: {units} units for {running.workers} workers"
        return alone_s + self._physics.worker_cost_s * running.workers / units

    def _batch_s(self, lease: Lease) -> float:
        """All members end together, when the last forward pass has."""
        places = (self._places[member] for member in lease.batch)
        works_s = [work_s(self._trajectories[index].steps[number], lease) for index, number in places]
        return Work.of(works_s).seconds(self._physics.batch_marginal)

    def _schedule_end(self, running: PlayedAction) -> None:
        left_s = max(0.0, 1.0 - running.done) * self._duration_s(running)
        end_s = max(running.since_s, self._now_s) + left_s
        ran_s = end_s - running.started_s
        area = running.area + running.units * (end_s - running.resized_s)
        outcome = Outcome(
            state=State.SUCCEEDED,
            execution_s=max(0.0, ran_s - running.lost_s),
            usage={"version": float(running.version), "mean_units": area / ran_s if ran_s > 0 else running.units},
        )
        self._push(end_s, Finished(action_id=running.action.id, outcome=outcome))

    def _settle(self, settlement: Settlement) -> None:
        """Record it, and let its trajectory think on."""
        action = settlement.action
        if settlement.outcome.state in (State.LOST, State.CANCELLED) and self._tally.nodes_lost:
            self._settle_lost(settlement)
            return
        if settlement.outcome.reason is Reason.QUEUE_TIMEOUT and self._tally.nodes_lost:
            problem = f"{action.id} waits for ever, with {len(self._gone)} nodes lost: {settlement.outcome.message}"
            raise Unsatisfiable(problem, component="simulate")
        assert settlement.outcome.state is State.SUCCEEDED, f"{action.id}: {settlement.outcome}"
        self._ledger.settle(action.id, self._now_s)
        running = self._running.pop(action.id)
        index, number = self._places.pop(action.id)
        self._knowledge.observe(settlement)
        self._records.append(
            SimulatedAction(
                trajectory=action.trajectory or "",
                number=number,
                function=action.function,
                submitted_s=action.submitted_s,
                queue_s=settlement.queue_s,
                overhead_s=settlement.overhead_s,
                execution_s=settlement.execution_s,
                units=running.units,
            )
        )
        steps = self._trajectories[index].steps
        if number + 1 < len(steps):
            self._push(self._now_s + steps[number + 1].think_s, (index, number + 1))
        else:
            self._left -= 1
            self._push(self._now_s, TrajectoryEnded(trajectory=self._name(index)))

    def _abort(self, action_id: str) -> None:
        """Its node is lost, or its trajectory's: what it did is wasted.

        Where its own node lives it holds its units until it is known to be dead, as a runtime would say.
        """
        running = self._running.pop(action_id)
        self._ledger.settle(action_id, self._now_s)
        killed = Finished(action_id=action_id, outcome=Outcome(state=State.CANCELLED, reason=Reason.CANCELLED))
        self._push(max(self._now_s, self._silent.get(running.lease.node, 0.0)), killed)
        self._tally.actions += 1
        if running.lease.batch and running.lease.batch[0] != action_id:
            return  # its batch's units are its leader's
        for kind, grant in running.lease.grants.items():
            spent = grant.units * (self._now_s - running.started_s + running.lost_s)
            self._tally.wasted[kind] = self._tally.wasted.get(kind, 0.0) + spent

    def _settle_lost(self, settlement: Settlement) -> None:
        """Ask for an action again, or begin its trajectory again where that was lost with it."""
        action = settlement.action
        index, number = self._places.pop(action.id)
        trajectory = self._trajectories[index]
        bereft = (
            not {CANCEL_ASKED, FILES_LOST}.isdisjoint(settlement.outcome.detail)
            or settlement.outcome.state is State.CANCELLED
        )
        if bereft or settlement.outcome.reason is Reason.ENVIRONMENT_LOST:
            self._begin_again(index)
            self._push(self._now_s + trajectory.steps[0].think_s, (index, 0))
        else:
            first = f"{self._name(index)}/{number}"
            self._tries[first] = self._tries.get(first, 0) + 1
            self._tally.again += 1
            self._push(self._now_s, (index, number))
