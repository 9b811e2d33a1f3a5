"""What the figures are made of: one simulation as a row of its mean, its tail and its length; medians over seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from bench.report import median, percentile
from manager.simulation.bound import lower_bound
from manager.simulation.duration_model import DurationModel
from manager.simulation.simulate import Size, simulate
from manager.simulation.simulator import Physics, SimulationRun
from manager.simulation.workloads import Workload

#: Not the seeds that constants were chosen on, 1 to 3.
SEEDS = (11, 12, 13)


def mean_act_s(run: SimulationRun) -> float:
    """Mean over trajectories of the sum of their actions' ACTs."""
    return sum(record.act_s for record in run.records) / max(1, run.trajectories)


def act_s(
    workload: Workload, policy: str, size: Size, *, strict: bool = False, knowledge: DurationModel | None = None
) -> float:
    return mean_act_s(simulate(workload, policy, size, strict=strict, knowledge=knowledge))


def row_of(run: SimulationRun) -> dict[str, float]:
    """Return in seconds: the mean ACT of a trajectory, the tail of single actions' ACTs, the longest wait, the end."""
    acts_s = [record.act_s for record in run.records]
    return {
        "mean": mean_act_s(run),
        "p99": percentile(acts_s, 0.99),
        "p99.9": percentile(acts_s, 0.999),
        "max_wait": max((record.queue_s for record in run.records), default=0.0),
        "makespan": run.makespan_s,
    }


def trajectory_tail_of(run: SimulationRun) -> dict[str, float]:
    """Return in seconds, of whole trajectories: the tail of their ACTs, the longest, and the longest that one waited.

    A step of training waits for trajectories, not for actions, and policies spread a trajectory's waiting over its
    actions differently: first come first served lets each of its commands wait, others its test suite alone.
    """
    acts_s: defaultdict[str, float] = defaultdict(float)
    waits_s: defaultdict[str, float] = defaultdict(float)
    for record in run.records:
        acts_s[record.trajectory] += record.act_s
        waits_s[record.trajectory] += record.queue_s
    return {
        "trajectory_p99": percentile(list(acts_s.values()), 0.99),
        "trajectory_max": max(acts_s.values(), default=0.0),
        "trajectory_wait": max(waits_s.values(), default=0.0),
    }


def best_fixed_s(workload: Workload, size: Size, dops: Sequence[int]) -> float:
    """The ACT of the best constant DoP, known only afterwards: at most that wide, or waiting for all of it."""
    return min(act_s(workload, f"fixed:{dop},wait_s={wait_s}", size) for dop in dops for wait_s in (0, 1e9))


def bound_s(workload: Workload, size: Size) -> float:
    bound = lower_bound(workload.trajectories, size.capacity, workload.quotas, worker_cost_s=Physics().worker_cost_s)
    return bound.best_s / max(1, len(workload.trajectories))


def over_seeds(seeds: Sequence[int], measure: Callable[[int], dict[str, float]]) -> dict[str, float]:
    """Each figure's median over the seeds."""
    rows = [measure(seed) for seed in seeds]
    return {name: median([row[name] for row in rows]) for name in rows[0]}
