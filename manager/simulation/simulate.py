"""Runs of the simulator and their results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from manager.config import ManagerSpec
from manager.errors import InvalidInput
from manager.resources.pools import QuotaSpec
from manager.simulation.baselines import is_baseline, run_baseline
from manager.simulation.bounds import LowerBound, lower_bound
from manager.simulation.simulator import (
    DurationModel,
    Learning,
    Physics,
    Scenario,
    Simulation,
    SimulationRun,
    cluster,
    fault_events,
    policies,
)
from manager.simulation.workloads import PRESETS, Workload, service


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one policy or baseline did. ACTs are sums over a trajectory's actions, averaged over trajectories."""

    policy: str
    act_s: float
    queue_s: float
    overhead_s: float
    execution_s: float
    #: How many it had to serve: a baseline is shown by those of its own kind.
    actions: int
    #: Single actions: median and upper percentiles of their ACT, and the longest that one was queued.
    action_p50_s: float
    action_p99_s: float
    action_p999_s: float
    max_wait_s: float
    makespan_s: float
    utilisation: dict[str, float] = field(default_factory=dict)
    resizes: int = 0
    restores: int = 0
    #: Copies of services made in free memory, and how many of them were used.
    prefetches: int = 0
    prefetch_hits: int = 0
    #: Actions that never ended well (uncontrolled baselines only: our own policies assert that all do).
    failures: int = 0

    @classmethod
    def of(cls, policy: str, run: SimulationRun, capacity: dict[str, int]) -> Row:
        """The row of a run; ``capacity`` is what utilisation is measured against."""
        count = max(1, run.trajectories)
        acts = sorted(record.act_s for record in run.records)
        span_s = max(1e-9, run.makespan_s)
        return cls(
            policy=policy,
            act_s=sum(acts) / count,
            queue_s=sum(record.queue_s for record in run.records) / count,
            overhead_s=sum(record.overhead_s for record in run.records) / count,
            execution_s=sum(record.execution_s for record in run.records) / count,
            actions=len(acts),
            action_p50_s=_rank(acts, 0.5),
            action_p99_s=_rank(acts, 0.99),
            action_p999_s=_rank(acts, 0.999),
            max_wait_s=max((record.queue_s for record in run.records), default=0.0),
            makespan_s=run.makespan_s,
            utilisation={
                kind: run.ledger.used[kind] / (units * span_s) for kind, units in sorted(capacity.items()) if units
            },
            resizes=run.resizes,
            restores=run.restores,
            prefetches=run.replicas,
            prefetch_hits=run.replica_hits,
            failures=run.failures,
        )

    def as_json(self, bound_s: float | None) -> dict[str, object]:
        line: dict[str, object] = {
            name: _rounded(getattr(self, name))
            for name in (
                "policy",
                "act_s",
                "queue_s",
                "overhead_s",
                "execution_s",
                "actions",
                "action_p50_s",
                "action_p99_s",
                "action_p999_s",
                "max_wait_s",
                "makespan_s",
                "resizes",
                "restores",
                "prefetches",
                "prefetch_hits",
                "failures",
            )
        }
        line["utilisation"] = {kind: _rounded(value) for kind, value in self.utilisation.items()}
        if bound_s:
            line["over_bound"] = _rounded(self.act_s / bound_s)
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Several policies on one workload and cluster."""

    workload: str
    trajectories: int
    actions: int
    rows: tuple[Row, ...]
    #: Lower bound on the sum of ACTs, where it was asked for.
    bound: LowerBound | None = None
    #: The fewest units that reach a target, where that was asked for: (kind, units, ACT there).
    found: tuple[str, int, float] | None = None
    #: The row of the best constant DoP, known only afterwards; None where it was not asked for.
    best_fixed: Row | None = None
    runs: dict[str, SimulationRun] = field(default_factory=dict)

    @property
    def bound_s(self) -> float | None:
        """The best bound on the mean ACT of a trajectory."""
        return None if self.bound is None else self.bound.best_s / max(1, self.trajectories)

    def to_json(self) -> str:
        """One object; nothing in it depends on the machine or on the time of day."""
        value: dict[str, object] = {
            "workload": self.workload,
            "trajectories": self.trajectories,
            "actions": self.actions,
            "policies": [row.as_json(self._bound_of(row)) for row in self.rows],
        }
        if self.best_fixed is not None:
            value["best_fixed"] = self.best_fixed.as_json(self.bound_s)
        compared = self.on_the_same()
        if compared:
            value["same_actions"] = [
                {
                    "policy": name,
                    "than": ours,
                    "actions": actions,
                    "act_s": _rounded(mine_s),
                    "than_act_s": _rounded(ours_s),
                }
                for name, ours, actions, mine_s, ours_s in compared
            ]
        if self.bound is not None:
            count = max(1, self.trajectories)
            value["bound"] = {
                "act_s": _rounded(self.bound.best_s / count),
                "infinite_s": _rounded(self.bound.infinite_s / count),
                "area_s": _rounded(self.bound.area_s / count),
                "price_s": _rounded(self.bound.price_s / count),
            }
        faults = {name: run.faults.as_json() for name, run in self.runs.items() if run.faults.nodes_lost}
        if faults:
            value["faults"] = faults
        if self.found is not None:
            value["found"] = {"kind": self.found[0], "units": self.found[1], "act_s": _rounded(self.found[2])}
        return json.dumps(value, sort_keys=True)

    def table(self) -> str:
        """Columns for people, one line a policy."""
        head = ["policy", "ACT s", "queue", "overhead", "execution", "p99 action", "p99.9", "max wait", "makespan"]
        head += ["use", "resizes", "restores", *(["over bound"] if self.bound is not None else [])]
        lines = [self._line(row, row.policy) for row in self.rows]
        if self.best_fixed is not None:
            lines.append(self._line(self.best_fixed, f"best fixed ({self.best_fixed.policy})"))
        widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
        text = [
            "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(pairs))
            for pairs in (list(zip(line, widths, strict=True)) for line in [head, *lines])
        ]
        title = f"{self.workload}: {self.trajectories} trajectories, {self.actions} actions"
        if self.bound_s is not None:
            title += f"; no schedule has a mean ACT below {self.bound_s:.2f} s"
        for name, ours, actions, mine_s, ours_s in self.on_the_same():
            if not actions:
                text.append(f"{name} has nothing to do here: no action needs what it manages")
                continue
            text.append(
                f"{name} is shown by its own {actions} of {self.actions} actions: {mine_s:.2f} s; "
                f"{ours} takes {ours_s:.2f} s on the same"
            )
        if self.found is not None:
            text.append(f"{self.found[1]} units of {self.found[0]} are enough: mean ACT {self.found[2]:.2f} s")
        text += [f"{name}: {run.faults.line()}" for name, run in self.runs.items() if run.faults.nodes_lost]
        return "\n".join([title, *text])

    def _line(self, row: Row, name: str) -> list[str]:
        use = " ".join(f"{kind} {share:.0%}" for kind, share in row.utilisation.items())
        seconds = (row.act_s, row.queue_s, row.overhead_s, row.execution_s)
        tail = (row.action_p99_s, row.action_p999_s, row.max_wait_s)
        line = [name, *(f"{value:.2f}" for value in (*seconds, *tail)), f"{row.makespan_s:.0f}", use]
        line += [str(row.resizes), str(row.restores)]
        if self.bound_s is not None:
            bound_s = self._bound_of(row)
            line.append("-" if bound_s is None else f"{row.act_s / bound_s:.2f}x")
        return line

    def _bound_of(self, row: Row) -> float | None:
        """The bound that a row may be held against: it is on all actions, so none for one that is shown by some."""
        return self.bound_s if row.actions >= self.actions else None

    def on_the_same(self) -> list[tuple[str, str, int, float, float]]:
        """For rows of some actions only: (policy, ours, actions, its mean, that of ours on the same actions).

        Ours is the first row of all actions.
        """
        whole = next((row.policy for row in self.rows if row.actions >= self.actions), None)
        rows: list[tuple[str, str, int, float, float]] = []
        for row in self.rows:
            if whole is None or row.actions >= self.actions:
                continue
            part = self.runs[row.policy]
            same = {(record.trajectory, record.number) for record in part.records}
            ours_s = sum(one.act_s for one in self.runs[whole].records if (one.trajectory, one.number) in same)
            rows.append((row.policy, whole, row.actions, row.act_s, ours_s / max(1, part.trajectories)))
        return rows


def _rank(ordered: Sequence[float], share: float) -> float:
    """Nearest rank; 0 where there is nothing."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def _rounded(value: object) -> object:
    return round(value, 6) if isinstance(value, float) else value


# What if: a workload on a cluster under policies and baselines, against a bound, and how little is enough.
#
# `run` is the whole of ``tangram simulate`` but its command line.

#: Kinds that ``find`` can look for.
FINDABLE = ("cores", "gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A cluster by its numbers."""

    nodes: int = 5
    cores: int = 1280
    gpus: int = 0
    #: Whether services in use are copied into free memory of idle devices.
    replicate: bool = True

    def spec(self, workload: Workload, policy: str, *, strict: bool = False) -> ManagerSpec:
        return cluster(
            nodes=min(self.nodes, max(1, self.cores)),
            cores=self.cores,
            devices=self.gpus,
            services=workload.services,
            resources=workload.quotas,
            policy=policy,
            strict=strict,
            replicate=self.replicate,
        )

    @property
    def capacity(self) -> dict[str, int]:
        return {kind: units for kind, units in (("cpu", self.cores), ("gpu", self.gpus)) if units}


def preset(name: str, batch: int, seed: int) -> Workload:
    """A preset workload; raises InvalidInput for an unknown name or an empty batch."""
    if name not in PRESETS:
        raise InvalidInput(f"no preset is named {name!r}: known are {', '.join(PRESETS)}", component="simulate")
    if batch < 1:
        raise InvalidInput(f"a batch of {batch} trajectories is empty", component="simulate")
    return PRESETS[name](batch, seed)


def with_services(workload: Workload, bytes_per_service: int = 64 * 10**9) -> Workload:
    """Give services that a trace names but does not describe a size."""
    named = {step.service for trajectory in workload.trajectories for step in trajectory.steps if step.service}
    missing = sorted(named - set(workload.services))
    if not missing:
        return workload
    return replace(
        workload, services={**workload.services, **{name: service(name, bytes_per_service) for name in missing}}
    )


def simulate(
    workload: Workload,
    policy: str,
    size: Size,
    *,
    base: ManagerSpec | None = None,
    physics: Physics | None = None,
    knowledge: DurationModel | None = None,
    strict: bool = False,
    scenario: Scenario | None = None,
) -> SimulationRun:
    """One policy or baseline; ``base`` (a gateway's own configuration) replaces the cluster that ``size`` describes.

    In a ``scenario`` nodes fail: for policies, not for baselines.
    """
    spec = size.spec(workload, "fixed" if is_baseline(policy) else policy, strict=strict)
    if base is not None:
        spec = adopted(base, spec)
    _check_kinds(workload, spec)
    _check_sizes(workload, spec)
    if is_baseline(policy):
        return run_baseline(policy, workload, spec, (physics or Physics()).batch_marginal)
    chosen = scenario or Scenario()
    events = fault_events(chosen.faults, spec.nodes, chosen.seed)
    return Simulation(spec, workload.trajectories, physics=physics, knowledge=knowledge, faults=events).run()


def adopted(base: ManagerSpec, spec: ManagerSpec) -> ManagerSpec:
    """A gateway's nodes, quotas, weights, caps and objective, with the workload's services and the policy under test.

    It replicates if both do. Queues are as long as the workload needs: a simulated trajectory does not try again.
    """
    return replace(
        base,
        resources={**spec.resources, **base.resources},
        services={**spec.services, **base.services},
        tasks={**spec.tasks, **{name: replace(task, max_queued=10**9) for name, task in base.tasks.items()}},
        scheduler=replace(
            spec.scheduler,
            objective=base.scheduler.objective,
            replicate=spec.scheduler.replicate and base.scheduler.replicate,
        ),
    )


def run(
    workload: Workload,
    names: Sequence[str],
    size: Size,
    *,
    base: ManagerSpec | None = None,
    physics: Physics | None = None,
    learned: bool = False,
    with_bound: bool = False,
    with_best_fixed: bool = False,
    find: str | None = None,
    target_act_s: float | None = None,
    scenario: Scenario | None = None,
    begun: Callable[[str], None] = lambda name: None,
) -> SimulationResult:
    """Every named policy and baseline on the same workload; ``begun`` is told each before it is played.

    ``learned`` hides all profiles from the policies. ``with_best_fixed`` adds the best constant DoP. ``find`` is
    ``cores`` or ``gpus``: the fewest of them with which the first policy's mean ACT is at most ``target_act_s``.
    Under a ``scenario`` each policy is played a second time.
    Raises InvalidInput or Unsatisfiable.
    """
    if find is not None and (target_act_s is None or base is not None):
        raise InvalidInput("--find needs --target-act and a cluster given by its size", component="simulate")
    workload = with_services(workload)
    capacity = size.capacity if base is None else capacity_of(base)
    runs: dict[str, SimulationRun] = {}
    for name in names:
        if not is_baseline(name):
            policies(name)
        knowledge = Learning() if learned else None
        begun(name)
        runs[name] = simulate(workload, name, size, base=base, physics=physics, knowledge=knowledge)
        if scenario is not None and scenario.faults and not is_baseline(name):
            knowledge = Learning() if learned else None
            runs[f"{name}, faults"] = simulate(
                workload, name, size, base=base, physics=physics, knowledge=knowledge, scenario=scenario
            )
    best_fixed: Row | None = None
    if with_best_fixed:
        begun("best fixed")
        best_fixed = _best_fixed(workload, size, base, physics, capacity)
    bound = _bound(workload, capacity, base, physics or Physics()) if with_bound else None
    found = None
    if find is not None and target_act_s is not None:
        found = fewest(workload, names[0], size, find, target_act_s, physics)
    return SimulationResult(
        workload=workload.name,
        trajectories=len(workload.trajectories),
        actions=workload.actions,
        rows=tuple(Row.of(name, done, capacity) for name, done in runs.items()),
        bound=bound,
        found=found,
        best_fixed=best_fixed,
        runs=runs,
    )


def _bound(workload: Workload, capacity: dict[str, int], base: ManagerSpec | None, costs: Physics) -> LowerBound:
    quotas = workload.quotas if base is None else {**workload.quotas, **_quotas(base)}
    return lower_bound(
        workload.trajectories,
        capacity,
        quotas,
        worker_cost_s=costs.worker_cost_s,
        batch_marginal=costs.batch_marginal,
    )


def _best_fixed(
    workload: Workload, size: Size, base: ManagerSpec | None, physics: Physics | None, capacity: dict[str, int]
) -> Row:
    """The row of the best constant DoP, found by trying all."""
    runs = ((name, simulate(workload, name, size, base=base, physics=physics)) for name in fixed_policies(workload))
    return min((Row.of(name, done, capacity) for name, done in runs), key=lambda row: row.act_s)


def fixed_policies(workload: Workload) -> list[str]:
    """Every constant DoP that makes a difference, by powers of two: taken as far as it is free, or waited for."""
    widest = max(
        (step.cost[step.key].maximum for each in workload.trajectories for step in each.steps if step.key), default=1
    )
    dops = [1 << power for power in range(widest.bit_length())]
    return [f"fixed:{dop}" for dop in dops] + [f"fixed:{dop},wait_s=1000000000" for dop in dops[1:]]


def fewest(
    workload: Workload, policy: str, size: Size, kind: str, target_act_s: float, physics: Physics | None = None
) -> tuple[str, int, float]:
    """(kind, units, mean ACT) with the fewest units that reach the target, to one unit a node; InvalidInput if none."""
    if kind not in FINDABLE:
        raise InvalidInput(f"--find takes {' or '.join(FINDABLE)}, not {kind!r}", component="simulate")
    step = size.nodes if kind == "cores" else 1

    def act_s(count: int) -> float:
        sized = replace(size, cores=count * step) if kind == "cores" else replace(size, gpus=count)
        run_ = simulate(workload, policy, sized, physics=physics)
        return sum(record.act_s for record in run_.records) / max(1, run_.trajectories)

    largest = max(1, -(-(size.cores if kind == "cores" else size.gpus) // step))
    count, value_s = _least(act_s, largest, target_act_s)
    return kind, count * step, value_s


def _least(act_s: Callable[[int], float], start: int, target_s: float) -> tuple[int, float]:
    """The least count whose ACT reaches the target, by doubling and halving (ACT falls with the count)."""
    high, value_s = start, act_s(start)
    while value_s > target_s:
        if high >= 64 * start:
            raise InvalidInput(
                f"no size reaches a mean ACT of {target_s:g} s: with {high} it is {value_s:.3g} s", component="simulate"
            )
        high *= 2
        value_s = act_s(high)
    low = 0
    while high - low > max(1, high // 64):
        middle = (low + high) // 2
        middle_s = act_s(middle)
        if middle_s <= target_s:
            high, value_s = middle, middle_s
        else:
            low = middle
    return high, value_s


def capacity_of(spec: ManagerSpec) -> dict[str, int]:
    """Units by kind of a configuration."""
    totals = {"cpu": sum(node.cores for node in spec.nodes), "gpu": sum(node.devices for node in spec.nodes)}
    return {kind: units for kind, units in totals.items() if units}


def _quotas(spec: ManagerSpec) -> dict[str, QuotaSpec]:
    return {name: one for name, one in spec.resources.items() if isinstance(one, QuotaSpec)}


def _check_kinds(workload: Workload, spec: ManagerSpec) -> None:
    """A kind that nothing provides would never start: say so before anything runs."""
    known = {*capacity_of(spec), *spec.resources}
    for trajectory in workload.trajectories:
        for step in trajectory.steps:
            missing = sorted(set(step.cost) - known)
            if missing:
                have = ", ".join(sorted(known))
                raise InvalidInput(
                    f"trajectory {trajectory.id}: nothing provides {missing[0]}; the cluster has {have}",
                    component="simulate",
                )


def _check_sizes(workload: Workload, spec: ManagerSpec) -> None:
    """A service that is larger than a device at some DoP could not be restored there."""
    room = min((node.device_bytes for node in spec.nodes if node.devices), default=0)
    steps = (step for trajectory in workload.trajectories for step in trajectory.steps)
    wanted = {step.service: step.cost["gpu"] for step in steps if step.service is not None and "gpu" in step.cost}
    for name, units in wanted.items():
        sizes = spec.services[name].bytes_by_dop if name in spec.services else {}
        large = [dop for dop in units if sizes.get(dop, 0) > room]
        if large:
            raise InvalidInput(
                f"service {name} on {large[0]} devices takes {sizes[large[0]]} bytes of each, which has {room}",
                component="simulate",
            )
