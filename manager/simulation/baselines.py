"""What is compared with: how the same workload fares without action-level scheduling (paper, section 6.1).

- k8s: a pod for each trajectory, requested when the trajectory begins; four cores at most are used by it, and what is
  busy on a node shares the node. A node creates its pods one after the other. How many fit on a node is not bounded.
- static-gpu: every service owns a fixed, equal part of the devices and serves one batch after the other there.
- serverless-llm: services are loaded on demand into chunks of one size, least recently used ones go; no elasticity.
- uncontrolled: API calls are sent at once; what is above the provider's limit fails and is tried again.

Each of them manages one kind and is shown by the actions of that kind alone. What a trajectory does besides takes as
long as it can take at the least and is no part of the baseline's figures. Several are played together under their names
joined by a slash: ``k8s/static-gpu``.

Of an action's time, waiting for a pod's creation, for an instance or for the next try counts as queue, the start of a
pod and the loading of a service as overhead, and all else (a slow-down by neighbours too) as execution.

They are models, not measurements: the paper's largest ratios depend on how badly a baseline collapses.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from manager.action import Work
from manager.config import ManagerSpec
from manager.errors import InvalidInput
from manager.simulation.bounds import fastest_s
from manager.simulation.simulator import LeaseAudit, SimulatedAction, SimulationRun
from manager.simulation.workloads import TracedTrajectory, TraceStep, Workload

#: Pods that one node creates in a second: at that rate Kubernetes' own one-node test asks for them, images pulled
#: (kubernetes/perf-tests, clusterloader2/testing/node-throughput: ``POD_THROUGHPUT``).
PODS_PER_NODE_S = 5.0
#: Seconds that one takes, images pulled. The same test, and the project's objective, allow 5 at the 99th percentile.
POD_START_S = 3.0
POD_CORES_MAX = 4
#: Devices of a static service's instance and of a serverless one, as deployed in the paper.
SERVICE_DOP = 4
#: Loading on demand is this much slower than a restore from a pinned host image.
LOAD_FACTOR = 4.0
#: Tries of an uncontrolled call, and the seconds after which the provider's refusal comes and the next try goes.
CALL_TRIES = 4
CALL_BACKOFF_S = (1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What an action spent before its work began; the rest of its time is execution."""

    queue_s: float = 0.0
    overhead_s: float = 0.0
    units: int = 0


Callback = Callable[[Served], None]


class Timeline:
    """A virtual clock with callbacks."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, instant_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (instant_s, next(self._order), act))

    def run(self) -> None:
        while self._heap:
            self.now_s, _, act = heapq.heappop(self._heap)
            act()


@dataclass(slots=True)
class SharedNode:
    """Cores shared by what is busy: each action gets its demand, or all the same fraction of it."""

    timeline: Timeline
    ledger: LeaseAudit
    cores: int
    #: Action -> (seconds left at full demand, cores it can use, call when done), by number.
    busy: dict[int, tuple[float, int, Callable[[], None]]] = field(default_factory=dict)
    since_s: float = 0.0
    version: int = 0
    used: int = 0
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def start(self, work_s: float, demand: int, done: Callable[[], None]) -> None:
        """Run ``work_s`` seconds at full demand."""
        self._advance()
        self.busy[next(self.numbers)] = (work_s, demand, done)
        self._plan()

    def _demand(self) -> int:
        return sum(units for _, units, _ in self.busy.values())

    def _speed(self) -> float:
        return min(1.0, self.cores / self._demand()) if self.busy else 1.0

    def _advance(self) -> None:
        passed_s = (self.timeline.now_s - self.since_s) * self._speed()
        self.since_s = self.timeline.now_s
        for number, (left_s, units, done) in self.busy.items():
            self.busy[number] = (left_s - passed_s, units, done)

    def _plan(self) -> None:
        self.version += 1
        used = min(self.cores, self._demand())
        self.ledger.occupy("cpu", used - self.used, self.timeline.now_s)
        self.used = used
        if self.busy:
            version = self.version
            soonest_s = max(0.0, min(left_s for left_s, _, _ in self.busy.values()))
            self.timeline.at(self.timeline.now_s + soonest_s / self._speed(), lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self.version:
            return
        self._advance()
        ended = [number for number, (left_s, _, _) in self.busy.items() if left_s <= 1e-9]
        done = [self.busy.pop(number)[2] for number in ended]
        self._plan()
        for call in done:
            call()


class Pods:
    """The k8s baseline: trajectories own a share of a node."""

    def __init__(self, timeline: Timeline, ledger: LeaseAudit, spec: ManagerSpec) -> None:
        self._timeline = timeline
        self._nodes = [SharedNode(timeline, ledger, node.cores) for node in spec.nodes if node.cores]
        self._ready_s: dict[str, float] = {}
        self._next_pod_s = [0.0] * len(self._nodes)
        self._homes: dict[str, SharedNode] = {}

    def request(self, trajectory: str) -> None:
        """Ask for a pod, on the nodes in turn."""
        number = len(self._homes) % len(self._nodes)
        self._homes[trajectory] = self._nodes[number]
        self._next_pod_s[number] = max(self._next_pod_s[number], self._timeline.now_s) + 1.0 / PODS_PER_NODE_S
        self._ready_s[trajectory] = self._next_pod_s[number] + POD_START_S

    def serve(self, trajectory: TracedTrajectory, step: TraceStep, done: Callback) -> None:
        units = step.cost["cpu"]
        cores = max(units.minimum, min(POD_CORES_MAX, units.maximum))
        work_s = step.t_ori_s
        if step.elasticity is not None and step.key == "cpu":
            work_s /= step.elasticity.efficiency(cores) * cores
        waited_s = max(0.0, self._ready_s[trajectory.id] - self._timeline.now_s)
        start_s = min(waited_s, POD_START_S)
        served = Served(queue_s=waited_s - start_s, overhead_s=start_s, units=cores)
        home = self._homes[trajectory.id]
        self._timeline.at(self._timeline.now_s + waited_s, lambda: home.start(work_s, cores, lambda: done(served)))


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """One request that waits for an instance."""

    since_s: float
    step: TraceStep
    done: Callback


class Queues:
    """Requests for a service wait for an instance that has it; both GPU baselines are made of these.

    They batch as ours do: what waits for the same service joins whoever starts, up to the service's tokens.
    """

    def __init__(
        self,
        timeline: Timeline,
        ledger: LeaseAudit,
        workload: Workload,
        devices: int,
        batch_marginal: float,
        *,
        on_demand: bool,
    ) -> None:
        self._timeline = timeline
        self._ledger = ledger
        self.loads = 0
        self._workload = workload
        self._batch_marginal = batch_marginal
        names = sorted(workload.services)
        self._on_demand = on_demand
        if on_demand:
            self._loaded: list[str] = [""] * max(1, devices // SERVICE_DOP)
            self._dop = SERVICE_DOP
        else:
            share = max(1, devices // max(1, len(names)))
            self._dop = min(8, 1 << (share.bit_length() - 1))
            self._loaded = [name for name in names for _ in range(max(1, share // self._dop))]
        self._free = deque(range(len(self._loaded)))
        self._waiting: list[_Request] = []

    def serve(self, trajectory: TracedTrajectory, step: TraceStep, done: Callback) -> None:
        self._waiting.append(_Request(self._timeline.now_s, step, done))
        self._dispatch()

    def _dispatch(self) -> None:
        """First come first served, each by a free instance that has its service or may load it."""
        index = 0
        while index < len(self._waiting) and self._free:
            instance = self._instance(self._waiting[index].step.service or "")
            if instance is None:
                index += 1
            else:
                batch = self._batch(index)
                self._waiting = [one for one in self._waiting if one not in batch]
                self._run(instance, batch)

    def _batch(self, index: int) -> list[_Request]:
        """The request at ``index`` and those behind it that join its batch."""
        first = self._waiting[index].step
        batch, budget = [self._waiting[index]], self._workload.services[first.service or ""].batch_tokens
        budget -= first.batch_tokens
        for one in self._waiting[index + 1 :] if first.batch_tokens else ():
            if one.step.service != first.service or not one.step.batch_tokens:
                continue
            if one.step.batch_tokens > budget:
                break
            budget -= one.step.batch_tokens
            batch.append(one)
        return batch

    def _instance(self, service: str) -> int | None:
        warm = next((index for index in self._free if self._loaded[index] == service), None)
        if warm is not None or not self._on_demand:
            return warm
        return self._free[0]

    def _run(self, instance: int, batch: Sequence[_Request]) -> None:
        self._free.remove(instance)
        service = batch[0].step.service or ""
        load_s = 0.0
        if self._loaded[instance] != service:
            self._loaded[instance] = service
            load_s = LOAD_FACTOR * self._workload.services[service].restore_s_by_dop[self._dop]
            self.loads += 1
        duration_s = Work.of([self._alone_s(one.step) for one in batch]).seconds(self._batch_marginal)
        now_s = self._timeline.now_s
        self._ledger.occupy("gpu", self._dop, now_s)
        self._timeline.at(now_s + load_s + duration_s, lambda: self._end(instance, batch, now_s, load_s))

    def _alone_s(self, step: TraceStep) -> float:
        return step.t_ori_s / (1.0 if step.elasticity is None else step.elasticity.efficiency(self._dop) * self._dop)

    def _end(self, instance: int, batch: Sequence[_Request], began_s: float, load_s: float) -> None:
        self._ledger.occupy("gpu", -self._dop, self._timeline.now_s)
        self._free.append(instance)
        for one in batch:
            one.done(Served(queue_s=began_s - one.since_s, overhead_s=load_s, units=self._dop))
        self._dispatch()


class UncontrolledCalls:
    """The uncontrolled baseline: the provider counts, and refuses what is above its limit."""

    def __init__(self, timeline: Timeline, workload: Workload) -> None:
        self._timeline = timeline
        self._quotas = workload.quotas
        self._accepted: dict[str, deque[float]] = {name: deque() for name in workload.quotas}
        self.failures = 0

    def serve(self, trajectory: TracedTrajectory, step: TraceStep, done: Callback) -> None:
        self._try(step, done, self._timeline.now_s, 0)

    def _try(self, step: TraceStep, done: Callback, since_s: float, tries: int) -> None:
        now_s = self._timeline.now_s
        served = Served(queue_s=now_s - since_s)
        if all(self._accepts(name, now_s) for name in step.cost if name in self._quotas):
            for name in step.cost:
                if name in self._quotas:
                    self._accepted[name].append(now_s)
            self._timeline.at(now_s + step.t_ori_s, lambda: done(served))
        elif tries + 1 < CALL_TRIES:
            self._timeline.at(now_s + CALL_BACKOFF_S[tries], lambda: self._try(step, done, since_s, tries + 1))
        else:
            self.failures += 1
            done(served)

    def _accepts(self, name: str, now_s: float) -> bool:
        quota, recent = self._quotas[name], self._accepted[name]
        while recent and recent[0] <= now_s - quota.period_s:
            recent.popleft()
        return len(recent) < quota.limit


#: Baselines by name, and the kind that each manages: devices, cores, or what a provider limits.
BASELINES: Mapping[str, str] = {"k8s": "cpu", "static-gpu": "gpu", "serverless-llm": "gpu", "uncontrolled": "quota"}


def is_baseline(name: str) -> bool:
    """Whether a name is a baseline's, or those of several joined by a slash."""
    return all(part in BASELINES for part in name.split("/"))


def managed_kind(step: TraceStep, quotas: Collection[str]) -> str | None:
    """Which kind of baseline a step is a matter of; None where no baseline looks after what it needs."""
    if "gpu" in step.cost and step.service is not None:
        return "gpu"
    if any(kind in quotas for kind in step.cost):
        return "quota"
    return "cpu" if "cpu" in step.cost else None


def run_baseline(name: str, workload: Workload, spec: ManagerSpec, batch_marginal: float = 1.0) -> SimulationRun:
    """Play the workload without action-level scheduling; raises InvalidInput for an unknown name."""
    if not is_baseline(name):
        raise InvalidInput(f"no baseline is named {name!r}: known are {', '.join(BASELINES)}", component="simulate")
    return _Baseline(name.split("/"), workload, spec, batch_marginal).run()


class _Baseline:
    """One run: trajectories in a closed loop, each step served by the baseline of its kind."""

    def __init__(self, names: Sequence[str], workload: Workload, spec: ManagerSpec, batch_marginal: float) -> None:
        self._workload = workload
        self._managed = {BASELINES[name] for name in names}
        self._timeline, self._ledger = Timeline(), LeaseAudit()
        devices = sum(node.devices for node in spec.nodes)
        self._pods = Pods(self._timeline, self._ledger, spec)
        self._queues = Queues(
            self._timeline, self._ledger, workload, devices, batch_marginal, on_demand="serverless-llm" in names
        )
        self._calls = UncontrolledCalls(self._timeline, workload)
        self._records: list[SimulatedAction] = []

    def run(self) -> SimulationRun:
        for trajectory in self._workload.trajectories:
            if trajectory.steps:
                self._timeline.at(trajectory.arrival_s, lambda trajectory=trajectory: self._arrive(trajectory))  # type: ignore[misc]
        self._timeline.run()
        quotas = self._workload.quotas
        mine = sum(
            managed_kind(step, quotas) in self._managed for each in self._workload.trajectories for step in each.steps
        )
        assert len(self._records) == mine, f"{len(self._records)} of {mine} actions ended"
        return SimulationRun(
            records=self._records,
            trajectories=len({record.trajectory for record in self._records}),
            makespan_s=max((record.ended_s for record in self._records), default=0.0),
            ledger=self._ledger,
            restores=self._queues.loads,
            failures=self._calls.failures,
        )

    def _arrive(self, trajectory: TracedTrajectory) -> None:
        if any(self._kind(step) == "cpu" for step in trajectory.steps):
            self._pods.request(trajectory.id)
        self._think(trajectory, 0)

    def _kind(self, step: TraceStep) -> str | None:
        """The kind under which one of the baselines here serves a step; None where it is given at once."""
        kind = managed_kind(step, self._workload.quotas)
        return kind if kind in self._managed else None

    def _think(self, trajectory: TracedTrajectory, number: int) -> None:
        if number < len(trajectory.steps):
            begin_s = self._timeline.now_s + trajectory.steps[number].think_s
            self._timeline.at(begin_s, lambda: self._begin(trajectory, number))

    def _begin(self, trajectory: TracedTrajectory, number: int) -> None:
        submitted_s, step = self._timeline.now_s, trajectory.steps[number]
        kind = self._kind(step)
        if kind is None:
            self._timeline.at(submitted_s + fastest_s(step), lambda: self._think(trajectory, number + 1))
            return
        servers = {"gpu": self._queues.serve, "quota": self._calls.serve, "cpu": self._pods.serve}
        servers[kind](trajectory, step, lambda served: self._end(trajectory, number, submitted_s, served))

    def _end(self, trajectory: TracedTrajectory, number: int, submitted_s: float, served: Served) -> None:
        self._records.append(
            SimulatedAction(
                trajectory=trajectory.id,
                number=number,
                function=trajectory.steps[number].function,
                submitted_s=submitted_s,
                queue_s=served.queue_s,
                overhead_s=served.overhead_s,
                execution_s=self._timeline.now_s - submitted_s - served.queue_s - served.overhead_s,
                units=served.units,
            )
        )
        self._think(trajectory, number + 1)
