"""What trajectories take at the least: their fastest way alone, and the area bound on all of them together.

Whatever is said here holds for every schedule: the relaxations are told at each function.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manager.action import UnitSet
from manager.resources.quota import QuotaSpec
from manager.scheduler.durations import Shape, shape_of
from manager.simulation.trace import TracedTrajectory, TraceStep


@dataclass(frozen=True, slots=True)
class FastestPath:
    """A trajectory at full speed: when each step could be ready at the earliest."""

    steps: tuple[TraceStep, ...]
    ready_s: tuple[float, ...]
    fastest_s: tuple[float, ...]
    ends_s: float


def fastest_path(trajectory: TracedTrajectory) -> FastestPath:
    now_s = trajectory.arrival_s
    ready, fastest = [], []
    for step in trajectory.steps:
        ready.append(now_s + step.think_s)
        fastest.append(fastest_s(step))
        now_s = ready[-1] + fastest[-1]
    return FastestPath(trajectory.steps, tuple(ready), tuple(fastest), now_s)


def fastest_s(step: TraceStep) -> float:
    """Seconds with the best admissible units."""
    return step.t_ori_s * float(step_shape(step).factors.min())


def least_s(step: TraceStep, kind: str, worker_cost_s: float) -> float:
    """The least unit-seconds of a kind that a step takes in any schedule; what workers cost is work of the key."""
    if kind not in step.cost:
        return 0.0
    if kind != step.key or step.elasticity is None:
        return step.cost[kind].minimum * fastest_s(step)
    workers_s = worker_cost_s * step.cost[kind].minimum if step.malleable else 0.0
    return step.t_ori_s * float(step_shape(step).areas.min()) + workers_s


def area_bound(
    trajectories: Sequence[TracedTrajectory], capacity: Mapping[str, int], worker_cost_s: float = 0.0
) -> float:
    """Last actions by shortest remaining work on one machine a kind; everything before them at its fastest."""
    jobs: dict[str, list[tuple[float, float]]] = {}
    total_s = 0.0
    for trajectory in trajectories:
        if not trajectory.steps:
            continue
        last = trajectory.steps[-1]
        before_s = sum(fastest_s(step) for step in trajectory.steps[:-1])
        total_s += before_s
        kind = last.key if last.key is not None else next(iter(last.cost), "")
        if kind not in capacity:
            total_s += fastest_s(last)
            continue
        ready_s = trajectory.arrival_s + before_s + sum(step.think_s for step in trajectory.steps)
        jobs.setdefault(kind, []).append((ready_s, least_s(last, kind, worker_cost_s) / capacity[kind]))
    return total_s + sum(shortest_remaining(waiting) for waiting in jobs.values())


def total_area_bound(
    trajectories: Sequence[TracedTrajectory],
    capacity: Mapping[str, int],
    quotas: Mapping[str, QuotaSpec],
    worker_cost_s: float = 0.0,
) -> float:
    """All that a trajectory takes of the kind that is scarcest for it, from its first step of that kind on.

    Its ACT is what it takes from the release of that work to the work's end, and its fastest way before and after, less
    the thinking in between. Each trajectory counts with one kind: what it takes of others is left out, so any choice is
    a relaxation.
    """
    jobs: dict[str, list[tuple[float, float]]] = {}
    total_s = 0.0
    for trajectory in trajectories:
        kind, share_s = _scarcest(trajectory, capacity, quotas, worker_cost_s)
        if share_s == 0.0:
            total_s += sum(fastest_s(step) for step in trajectory.steps)
            continue
        path, once = fastest_path(trajectory), kind in quotas
        uses = [index for index, step in enumerate(path.steps) if kind in step.cost]
        first, last = uses[0], uses[-1]
        # A call is counted at its start; work ends with its step.
        tail_s = sum(fastest_s(step) for step in path.steps[last + (not once) :])
        before_s = sum(fastest_s(step) for step in path.steps[:first])
        thought_s = sum(step.think_s for step in path.steps[first + 1 : last + 1])
        early_s = quotas[kind].period_s if once else 0.0
        jobs.setdefault(kind, []).append((path.ready_s[first] - early_s, share_s))
        total_s += before_s + tail_s - thought_s - early_s
    return total_s + sum(shortest_remaining(waiting) for waiting in jobs.values())


def _scarcest(
    trajectory: TracedTrajectory,
    capacity: Mapping[str, int],
    quotas: Mapping[str, QuotaSpec],
    worker_cost_s: float,
) -> tuple[str, float]:
    """The kind of which a trajectory takes the longest if it had all of it alone, and these seconds."""
    found = [
        (sum(least_s(step, kind, worker_cost_s) for step in trajectory.steps) / units, kind)
        for kind, units in capacity.items()
    ]
    found += [
        (
            sum(step.cost[kind].minimum for step in trajectory.steps if kind in step.cost) * each.period_s / each.limit,
            kind,
        )
        for kind, each in quotas.items()
    ]
    share_s, kind = max(found, default=(0.0, ""))
    return kind, share_s


def shortest_remaining(jobs: Sequence[tuple[float, float]]) -> float:
    """Sum of flow times of (release, seconds) on one machine under shortest remaining processing time, the optimum."""
    pending: list[tuple[float, float]] = []
    now_s, total_s = -math.inf, 0.0
    arrivals = sorted(jobs)
    index = 0
    while pending or index < len(arrivals):
        if not pending:
            now_s = max(now_s, arrivals[index][0])
        while index < len(arrivals) and arrivals[index][0] <= now_s:
            heapq.heappush(pending, (arrivals[index][1], arrivals[index][0]))
            index += 1
        left_s, release_s = heapq.heappop(pending)
        until_s = arrivals[index][0] if index < len(arrivals) else math.inf
        if now_s + left_s <= until_s:
            now_s += left_s
            total_s += now_s - release_s
        else:
            heapq.heappush(pending, (left_s - (until_s - now_s), release_s))
            now_s = until_s
    return total_s


def step_shape(step: TraceStep) -> Shape:
    """Units of the key resource that make a difference; a rigid action has one."""
    if step.key is None or step.elasticity is None:
        units = next(iter(step.cost.values()), UnitSet.fixed(1))
        return shape_of(UnitSet.fixed(units.minimum), None)
    return shape_of(step.cost[step.key], step.elasticity)
