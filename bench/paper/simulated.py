"""What the figures are made of: one simulation as a row of its mean, its tail and its length; medians over seeds.

Simulations are played side by side, a process for each core of this machine.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from bench.report import Figure, median, percentile
from manager.simulation.bounds import lower_bound
from manager.simulation.simulate import Size, simulate
from manager.simulation.simulator import DurationModel, Learning, Physics, SimulationRun
from manager.simulation.workloads import Workload

#: Not the seeds that constants were chosen on, 1 to 3.
SEEDS = (11, 12, 13)

Row = dict[str, float]
Make = Callable[[int], Workload]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A policy or baseline as it is played."""

    policy: str
    strict: bool = False
    #: Whether it learns all durations while it plays.
    learned: bool = False
    #: Whether it knows the sizes of calls then.
    sized: bool = False
    physics: Physics | None = None

    def play(self, workload: Workload, size: Size) -> SimulationRun:
        knowledge = Learning(sized=self.sized) if self.learned else None
        return simulate(workload, self.policy, size, physics=self.physics, knowledge=knowledge, strict=self.strict)


def shown(rows: Mapping[str, Row]) -> dict[str, Figure]:
    """Rows as a report takes them."""
    return {name: dict(row) for name, row in rows.items()}


def named(*policies: str) -> dict[str, Contender]:
    """Contenders under the names of their policies."""
    return {policy: Contender(policy=policy) for policy in policies}


#: Algorithm 1 in its two readings (docs/SCHEDULING.md R3): the stronger of the two is what ours are checked against.
PAPERS: Mapping[str, Contender] = {
    "paper": Contender(policy="paper"),
    "paper, greedy": Contender(policy="paper,greedy=1"),
}


def mean_act_s(run: SimulationRun) -> float:
    """Mean over trajectories of the sum of their actions' ACTs."""
    return sum(record.act_s for record in run.records) / max(1, run.trajectories)


def act_s(
    workload: Workload, policy: str, size: Size, *, strict: bool = False, knowledge: DurationModel | None = None
) -> float:
    return mean_act_s(simulate(workload, policy, size, strict=strict, knowledge=knowledge))


def row_of(run: SimulationRun) -> Row:
    """Return in seconds: the mean ACT of a trajectory, the tail of single actions' ACTs, the longest wait, the end."""
    acts_s = [record.act_s for record in run.records]
    return {
        "mean": mean_act_s(run),
        "p99": percentile(acts_s, 0.99),
        "p99.9": percentile(acts_s, 0.999),
        "max_wait": max((record.queue_s for record in run.records), default=0.0),
        "makespan": run.makespan_s,
    }


def trajectory_tail_of(run: SimulationRun) -> Row:
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


def table(
    seeds: Sequence[int],
    make: Make,
    size: Size,
    contenders: Mapping[str, Contender],
    dops: Sequence[int],
    more: Callable[[SimulationRun], Row] = lambda run: {},
) -> dict[str, Row]:
    """A row for each contender: `row_of` and ``more``, over the bound, and beside it the best constant DoP of ``dops``.

    Medians over seeds; the mean is over its own seed's bound.
    """
    plays: list[Callable[[], Row]] = []
    for seed in seeds:
        plays += [lambda seed=seed: {"bound": bound_s(make(seed), size)}]  # type: ignore[misc]
        plays += [lambda seed=seed: {"best_fixed": best_fixed_s(make(seed), size, dops)}]  # type: ignore[misc]
        for one in contenders.values():
            plays += [lambda seed=seed, one=one: _played(one.play(make(seed), size), more)]  # type: ignore[misc]
    played, each = side_by_side(plays), 2 + len(contenders)
    by_seed = [played[index * each : (index + 1) * each] for index in range(len(seeds))]
    rows: dict[str, Row] = {}
    for number, name in enumerate(contenders, start=2):
        rows[name] = medians([of[number] for of in by_seed])
        rows[name]["over_bound"] = median([of[number]["mean"] / of[0]["bound"] for of in by_seed])
        rows[name]["best_fixed"] = median([of[1]["best_fixed"] for of in by_seed])
    return rows


def _played(run: SimulationRun, more: Callable[[SimulationRun], Row]) -> Row:
    return {**row_of(run), **more(run)}


def best_fixed_s(workload: Workload, size: Size, dops: Sequence[int]) -> float:
    """The ACT of the best constant DoP, known only afterwards: at most that wide, or waiting for all of it.

    Of ascending ``dops``, from the middle one on in the direction in which the ACT falls.
    """
    return min(_descent(dops, lambda dop, wait_s=wait_s: _fixed_s(workload, size, dop, wait_s)) for wait_s in (0, 1e9))  # type: ignore[misc]


def _fixed_s(workload: Workload, size: Size, dop: int, wait_s: float) -> float:
    return act_s(workload, f"fixed:{dop},wait_s={wait_s}", size)


def _descent(dops: Sequence[int], act: Callable[[int], float]) -> float:
    """The least value of a function with one valley."""
    middle = len(dops) // 2
    best = act(dops[middle])
    for side in (dops[middle + 1 :], dops[:middle][::-1]):
        before = best
        for dop in side:
            value = act(dop)
            if value >= best:
                break
            best = value
        if best < before:
            break
    return best


def bound_s(workload: Workload, size: Size) -> float:
    bound = lower_bound(workload.trajectories, size.capacity, workload.quotas, worker_cost_s=Physics().worker_cost_s)
    return bound.best_s / max(1, len(workload.trajectories))


def medians(rows: Sequence[Row]) -> Row:
    """Each column's median."""
    return {name: median([row[name] for row in rows]) for name in rows[0]}


#: What the forked processes play, by number: a closure cannot be sent to a process, only inherited.
_PLAYS: list[Callable[[], Row]] = []


def side_by_side(plays: Sequence[Callable[[], Row]]) -> list[Row]:
    """What each returns, in order; each in a forked process, as many at once as this machine has cores."""
    workers = min(len(plays), len(os.sched_getaffinity(0)))
    if workers < 2 or multiprocessing.current_process().daemon or multiprocessing.parent_process() is not None:
        return [play() for play in plays]
    _PLAYS[:] = plays
    try:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
            return list(pool.map(_play, range(len(plays))))
    finally:
        _PLAYS.clear()


def _play(number: int) -> Row:
    return _PLAYS[number]()
