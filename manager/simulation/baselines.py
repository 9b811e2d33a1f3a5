"""What is compared with: how the same workload fares without action-level scheduling (paper, section 6.1).

- k8s: a pod for each trajectory, requested at its start; half a core is guaranteed to it, four at most are used,
  and what is busy on a node shares the node. Pods are created one after the other by a control plane.
- static-gpu: every service owns a fixed, equal part of the devices and serves one request after the other there.
- serverless-llm: services are loaded on demand into chunks of one size, least recently used ones go; no elasticity.
- uncontrolled: API calls are sent at once; what is above the provider's limit fails and is tried again.

Of an action's time, waiting for a pod's creation, for an instance or for the next try counts as queue, the start of a
pod and the loading of a service as overhead, and all else (a slow-down by neighbours too) as execution.

They are models, not measurements: the paper's largest ratios depend on how badly a baseline collapses.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from manager.config import ManagerSpec
from manager.errors import InvalidInput
from manager.simulation.lease_audit import LeaseAudit
from manager.simulation.simulator import SimulatedAction, SimulationRun
from manager.simulation.trace import TracedTrajectory, TraceStep
from manager.simulation.workloads import Workload

#: Pods that a control plane creates in a second, and the seconds that one takes.
PODS_PER_S = 20.0
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
        self._next_pod_s = 0.0
        self._homes: dict[str, SharedNode] = {}

    def serve(self, trajectory: TracedTrajectory, step: TraceStep, done: Callback) -> None:
        if trajectory.id not in self._homes:
            self._homes[trajectory.id] = self._nodes[len(self._homes) % len(self._nodes)]
            self._next_pod_s = max(self._next_pod_s, self._timeline.now_s) + 1.0 / PODS_PER_S
            self._ready_s[trajectory.id] = self._next_pod_s + POD_START_S
        units = step.cost["cpu"]
        cores = min(POD_CORES_MAX, units.maximum)
        work_s = step.t_ori_s
        if step.elasticity is not None:
            work_s /= step.elasticity.efficiency(cores) * cores
        waited_s = max(0.0, self._ready_s[trajectory.id] - self._timeline.now_s)
        start_s = min(waited_s, POD_START_S)
        served = Served(queue_s=waited_s - start_s, overhead_s=start_s, units=cores)
        home = self._homes[trajectory.id]
        self._timeline.at(self._timeline.now_s + waited_s, lambda: home.start(work_s, cores, lambda: done(served)))


class Queues:
    """Requests for a service wait for an instance that has it; both GPU baselines are made of these."""

    def __init__(
        self, timeline: Timeline, ledger: LeaseAudit, workload: Workload, devices: int, *, on_demand: bool
    ) -> None:
        self._timeline = timeline
        self._ledger = ledger
        self.loads = 0
        self._workload = workload
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
        self._waiting: deque[tuple[float, TraceStep, Callback]] = deque()

    def serve(self, trajectory: TracedTrajectory, step: TraceStep, done: Callback) -> None:
        self._waiting.append((self._timeline.now_s, step, done))
        self._dispatch()

    def _dispatch(self) -> None:
        """First come first served, each by a free instance that has its service or may load it."""
        later: deque[tuple[float, TraceStep, Callback]] = deque()
        while self._waiting and self._free:
            since_s, step, done = self._waiting.popleft()
            instance = self._instance(step.service or "")
            if instance is None:
                later.append((since_s, step, done))
            else:
                self._run(instance, since_s, step, done)
        later.extend(self._waiting)
        self._waiting = later

    def _instance(self, service: str) -> int | None:
        warm = next((index for index in self._free if self._loaded[index] == service), None)
        if warm is not None or not self._on_demand:
            return warm
        return self._free[0]

    def _run(self, instance: int, since_s: float, step: TraceStep, done: Callback) -> None:
        self._free.remove(instance)
        service = step.service or ""
        load_s = 0.0
        if self._loaded[instance] != service:
            self._loaded[instance] = service
            load_s = LOAD_FACTOR * self._workload.services[service].restore_s_by_dop[self._dop]
            self.loads += 1
        assert step.elasticity is not None
        duration_s = step.t_ori_s / (step.elasticity.efficiency(self._dop) * self._dop)
        now_s = self._timeline.now_s
        served = Served(queue_s=now_s - since_s, overhead_s=load_s, units=self._dop)
        self._ledger.occupy("gpu", self._dop, now_s)
        self._timeline.at(now_s + load_s + duration_s, lambda: self._end(instance, served, done))

    def _end(self, instance: int, served: Served, done: Callback) -> None:
        self._ledger.occupy("gpu", -self._dop, self._timeline.now_s)
        self._free.append(instance)
        done(served)
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


#: Baselines by name, and the resources that each manages in its own way; others are given without waiting.
BASELINES: Mapping[str, str] = {"k8s": "cpu", "static-gpu": "gpu", "serverless-llm": "gpu", "uncontrolled": "quota"}


def run_baseline(name: str, workload: Workload, spec: ManagerSpec) -> SimulationRun:
    """Play the workload without action-level scheduling; raises InvalidInput for an unknown name."""
    if name not in BASELINES:
        raise InvalidInput(f"no baseline is named {name!r}: known are {', '.join(BASELINES)}", component="simulate")
    timeline, ledger = Timeline(), LeaseAudit()
    devices = sum(node.devices for node in spec.nodes)
    pods = Pods(timeline, ledger, spec) if any(node.cores for node in spec.nodes) else None
    queues = Queues(timeline, ledger, workload, devices, on_demand=name == "serverless-llm")
    calls = UncontrolledCalls(timeline, workload)
    records: list[SimulatedAction] = []

    def serve(trajectory: TracedTrajectory, step: TraceStep, done: Callback) -> None:
        if "gpu" in step.cost and step.service is not None:
            queues.serve(trajectory, step, done)
        elif any(kind in workload.quotas for kind in step.cost):
            calls.serve(trajectory, step, done)
        elif pods is not None and "cpu" in step.cost:
            pods.serve(trajectory, step, done)
        else:
            timeline.at(timeline.now_s + step.t_ori_s, lambda: done(Served()))

    def begin(trajectory: TracedTrajectory, number: int) -> None:
        submitted_s, step = timeline.now_s, trajectory.steps[number]
        serve(trajectory, step, lambda served: end(trajectory, number, submitted_s, served))

    def end(trajectory: TracedTrajectory, number: int, submitted_s: float, served: Served) -> None:
        step, ended_s = trajectory.steps[number], timeline.now_s
        records.append(
            SimulatedAction(
                trajectory=trajectory.id,
                function=step.function,
                submitted_s=submitted_s,
                queue_s=served.queue_s,
                overhead_s=served.overhead_s,
                execution_s=ended_s - submitted_s - served.queue_s - served.overhead_s,
                units=served.units,
            )
        )
        if number + 1 < len(trajectory.steps):
            timeline.at(ended_s + trajectory.steps[number + 1].think_s, lambda: begin(trajectory, number + 1))

    for trajectory in workload.trajectories:
        if trajectory.steps:
            start_s = trajectory.arrival_s + trajectory.steps[0].think_s
            timeline.at(start_s, lambda trajectory=trajectory: begin(trajectory, 0))  # type: ignore[misc]
    timeline.run()
    assert len(records) == workload.actions, f"{len(records)} of {workload.actions} actions ended"
    return SimulationRun(
        records=records,
        trajectories=len(workload.trajectories),
        makespan_s=max((record.ended_s for record in records), default=0.0),
        ledger=ledger,
        restores=queues.loads,
        failures=calls.failures,
    )
