"""Shares of tasks: what a task gets while it and another wait, against what their weights give it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bench.figures.simulated import Row, mean_act_s, over_seeds, row_of, shown
from bench.report import BenchReport
from manager.action import Amdahl, UnitSet
from manager.config import TaskSpec
from manager.simulation.simulate import Size
from manager.simulation.simulator import SimulatedAction, Simulation, SimulationRun
from manager.simulation.workloads import (
    DEVICE_UNITS,
    TENSOR_PARALLEL,
    TracedTrajectory,
    TraceStep,
    Workload,
    coding,
    service,
)

HEAVY, LIGHT = "heavy", "light"
CORES, DEVICES = Size(nodes=1, cores=32), Size(nodes=1, cores=0, gpus=16)
#: Trajectories of the issue's case, and the weight of those that are few.
FEW, MANY, WEIGHT = 20, 300, 10.0
#: Actions of each task that are there from the start in a queue that is watched.
QUEUED = 400

MakeStep = Callable[[random.Random], TraceStep]


def _narrow(chance: random.Random) -> TraceStep:
    return TraceStep(
        think_s=0.0, function="one", cost={"cpu": UnitSet.fixed(1)}, t_ori_s=chance.lognormvariate(1.0, 0.8)
    )


def _widths(chance: random.Random) -> TraceStep:
    return replace(_narrow(chance), cost={"cpu": UnitSet.fixed(chance.choice((1, 2, 4, 8)))})


def _suite(chance: random.Random) -> TraceStep:
    """A test suite, or in one case of four a short command."""
    if chance.random() < 0.25:
        return _narrow(chance)
    return TraceStep(
        think_s=0.0,
        function="suite",
        cost={"cpu": UnitSet.span(1, 16)},
        key="cpu",
        t_ori_s=chance.lognormvariate(3.0, 0.5),
        elasticity=Amdahl(chance.uniform(0.02, 0.1)),
        malleable=True,
    )


def _model(chance: random.Random) -> TraceStep:
    return TraceStep(
        think_s=0.0,
        function="model",
        cost={"gpu": DEVICE_UNITS},
        key="gpu",
        t_ori_s=chance.lognormvariate(0.0, 0.5),
        elasticity=TENSOR_PARALLEL,
        service="model",
    )


#: Queues of two tasks by name: the weight of the first beside 1, what both send, and where it runs.
QUEUES: Mapping[str, tuple[float, MakeStep, Size]] = {
    "one core each, 10 to 1": (10.0, _narrow, CORES),
    "one to eight cores, 3 to 1": (3.0, _widths, CORES),
    "suites and commands, 3 to 1": (3.0, _suite, CORES),
    "suites and commands, 1 to 1": (1.0, _suite, CORES),
    "devices, 3 to 1": (3.0, _model, DEVICES),
}


def weight_figures(report: BenchReport, seeds: Sequence[int]) -> None:
    """What share of a resource each task gets while both wait, and what it is worth to be few of a high weight."""
    rows = {name: over_seeds(seeds, lambda seed, name=name: queue_row(name, seed)) for name in QUEUES}  # type: ignore[misc]
    report.figure("weights_share", shown(rows))
    report.check("weights_share_error", max(row["error"] for row in rows.values()), 0.1, "lower")
    report.figure("weights_few_beside_many_s", shown({"adaptive": over_seeds(seeds, _few_beside_many)}))


def play_weighted(work: Workload, size: Size, weights: Mapping[str, float]) -> SimulationRun:
    """Our default policies, with tasks of these weights."""
    spec = size.spec(work, "adaptive")
    tasks = {name: TaskSpec(weight=weight, max_queued=10**9) for name, weight in weights.items()}
    return Simulation(replace(spec, tasks={**spec.tasks, **tasks}), work.trajectories).run()


def queue_row(name: str, seed: int) -> Row:
    """Two tasks with `QUEUED` actions each, all there from the start: what each gets while both wait."""
    weight, make, size = QUEUES[name]
    chance = random.Random(seed)
    trajectories = [
        TracedTrajectory(id=f"{task}-{index}", task=task, steps=(make(chance),))
        for index in range(QUEUED)
        for task in (HEAVY, LIGHT)
    ]
    work = Workload(name="queue", trajectories=tuple(trajectories), services={"model": service("model", 64 * 10**9)})
    run = play_weighted(work, size, {HEAVY: weight, LIGHT: 1.0})
    return {**share_of(run, weight / (weight + 1.0), size.cores + size.gpus), **row_of(run)}


def share_of(run: SimulationRun, due: float, units: int) -> Row:
    """Return the heavy task's part of the unit-seconds while both tasks wait, and how far the worse served is off.

    ``due``: the part that its weight gives it. The error is what a task lacks of its part, relative to that part. Both
    are watched until one has fewer actions left to start than there are ``units``: from then on it cannot use its
    part. The units of an action count evenly from its start to its end.
    """
    starts: dict[str, list[float]] = {HEAVY: [], LIGHT: []}
    for one in run.records:
        starts[_task(one)].append(one.submitted_s + one.queue_s)
    until_s = min(sorted(each)[-units] for each in starts.values())
    held = dict.fromkeys(starts, 0.0)
    for one in run.records:
        held[_task(one)] += one.unit_s * _part(one, until_s)
    part = held[HEAVY] / sum(held.values())
    return {
        "due": due,
        "share": part,
        "error": max((due - part) / due, (part - due) / (1.0 - due)),
        "watched_s": until_s,
    }


def _task(record: SimulatedAction) -> str:
    return record.trajectory.partition("-")[0]


def _part(record: SimulatedAction, until_s: float) -> float:
    """Return the part of an action's time with its units that lies before ``until_s``."""
    began_s = record.submitted_s + record.queue_s
    return min(1.0, max(0.0, until_s - began_s) / max(1e-9, record.ended_s - began_s))


def _few_beside_many(seed: int) -> Row:
    """Mean ACT of a few trajectories of a high weight beside many, of the many, and of the few if they are alone."""
    few, many = _of_task(HEAVY, coding(FEW, seed)), _of_task(LIGHT, coding(MANY, seed + 1000))
    weights = {HEAVY: WEIGHT, LIGHT: 1.0}
    together = play_weighted(Workload(name="both", trajectories=(*few, *many)), CORES, weights)
    alone = play_weighted(Workload(name="few", trajectories=few), CORES, weights)
    acts_s = {task: sum(one.act_s for one in together.records if _task(one) == task) for task in (HEAVY, LIGHT)}
    return {
        f"{FEW} of weight {WEIGHT:g}": acts_s[HEAVY] / FEW,
        f"{MANY} of weight 1": acts_s[LIGHT] / MANY,
        f"the {FEW} alone": mean_act_s(alone),
        **row_of(together),
    }


def _of_task(task: str, work: Workload) -> tuple[TracedTrajectory, ...]:
    return tuple(replace(each, id=f"{task}-{each.id}", task=task) for each in work.trajectories)
