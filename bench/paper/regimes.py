"""Outside the regime that the policies were built in: overload, wide actions, weights, quotas, and what is not known.

Constants were chosen on seeds 1 to 3; the figures are medians over other seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bench.paper.simulated import (
    PAPERS,
    SEEDS,
    Contender,
    Row,
    named,
    over_seeds,
    row_of,
    shown,
    table,
    trajectory_tail_of,
)
from bench.report import BenchReport
from manager.action import Amdahl, UnitSet
from manager.assembly import STEP_BIAS
from manager.config import TaskSpec
from manager.simulation.simulate import Size, simulate
from manager.simulation.simulator import Learning, SimulatedAction, Simulation, SimulationRun
from manager.simulation.workloads import (
    CODING_BURST,
    DEVICE_UNITS,
    TENSOR_PARALLEL,
    Coding,
    Search,
    TracedTrajectory,
    TraceStep,
    Workload,
    coding,
    mixed,
    service,
)

ADAPTIVE, PRICE, FCFS = "adaptive", "price", "fixed:1"
ONE_NODE = Size(nodes=1, cores=64)
#: More work than the cores do while it comes in: (seed -> workload, cluster).
OVERLOADS: Mapping[str, tuple[Callable[[int], Workload], Size]] = {
    "coding 256 on 64": (lambda seed: coding(256, seed), ONE_NODE),
    "coding 512 on 64": (lambda seed: coding(512, seed), ONE_NODE),
    "burst 256 on 64": (lambda seed: coding(256, seed, CODING_BURST), ONE_NODE),
    "coding 768 on 2 x 96": (lambda seed: coding(768, seed), Size(nodes=2, cores=192)),
    "heavy tails 256 on 64": (lambda seed: coding(256, seed, Coding(reward_sigma=1.2)), ONE_NODE),
}


#: What is compared with first come first served: the mean, the tail of trajectories, and that of single actions.
OVERLOAD_KEYS = ("mean", "trajectory_p99", "trajectory_max", "trajectory_wait", "p99", "max_wait")
OVERLOAD_DOPS = (1, 2, 4, 8)


#: Batches that are all there at once or come in as rollouts do: (seed -> workload, cluster).
STEPS: Mapping[str, tuple[Callable[[int], Workload], Size]] = {
    "burst 256 on 64": (lambda seed: coding(256, seed, CODING_BURST), ONE_NODE),
    "burst 256 on 256": (lambda seed: coding(256, seed, CODING_BURST), Size(nodes=1, cores=256)),
    "burst 1280 on 5 x 256": (lambda seed: coding(1280, seed, CODING_BURST), Size(nodes=5, cores=1280)),
    "coding 256 on 64": (lambda seed: coding(256, seed), ONE_NODE),
    "coding 256 on 256": (lambda seed: coding(256, seed), Size(nodes=1, cores=256)),
}
#: ``adaptive`` as ``scheduler.objective: step`` has it.
STEP = f"{ADAPTIVE},bias={STEP_BIAS:g}"


def step_figures(report: BenchReport, seeds: Sequence[int] = SEEDS) -> None:
    """The time of a whole batch, and the mean ACT that it costs, under ``objective: step`` over those under ``act``."""
    ratios: dict[str, Row] = {}
    for name, (make, size) in STEPS.items():
        of = table(seeds, make, size, named(ADAPTIVE, STEP), OVERLOAD_DOPS)
        ratios[name] = {f"{key}_over_act": of[STEP][key] / of[ADAPTIVE][key] for key in ("makespan", "mean", "p99")}
    report.figure("step_over_act", shown(ratios))
    bursts = [row["makespan_over_act"] for name, row in ratios.items() if name.startswith("burst")]
    report.check("step_burst_time_over_act", max(bursts), 0.96, "lower")
    report.check("step_time_over_act", max(row["makespan_over_act"] for row in ratios.values()), 1.0, "lower")


def overload_figures(report: BenchReport, seeds: Sequence[int] = SEEDS) -> None:
    """Too few cores: ours against first come first served with one core each, in the mean and in the tail.

    The tail that is checked is that of trajectories: docs/DECISIONS.md says why, and the table shows both.
    """
    rows: dict[str, Row] = {}
    ratios: dict[str, Row] = {}
    contenders = {**named(ADAPTIVE, PRICE, FCFS), **PAPERS}
    for name, (make, size) in OVERLOADS.items():
        of = table(seeds, make, size, contenders, OVERLOAD_DOPS, trajectory_tail_of)
        rows.update({f"{name}, {policy}": row for policy, row in of.items()})
        ratios[name] = {key: of[ADAPTIVE][key] / of[FCFS][key] for key in OVERLOAD_KEYS}
    worst = {key: max(row[key] for row in ratios.values()) for key in OVERLOAD_KEYS}
    report.figure("overload_s", shown(rows))
    report.figure("overload_over_fcfs", shown(ratios))
    report.figure("overload_single_action_p99_over_fcfs", worst["p99"])
    report.figure("overload_single_action_max_wait_over_fcfs", worst["max_wait"])
    report.check("overload_mean_over_fcfs", worst["mean"], 0.8, "lower")
    report.check("overload_p99_over_fcfs", worst["trajectory_p99"], 1.1, "lower")
    report.check("overload_max_over_fcfs", worst["trajectory_max"], 1.1, "lower")
    report.check("overload_max_wait_over_fcfs", worst["trajectory_wait"], 1.1, "lower")


#: A rigid action for a whole node, and when it comes.
WIDE_S, WIDE_AT_S = 10.0, 60.0


def wide_figures(report: BenchReport, seeds: Sequence[int] = SEEDS) -> None:
    """One action for all cores of a node among narrow ones: what it costs the others, and how long it waits."""

    def with_wide(seed: int) -> Workload:
        work = coding(160, seed)
        wide = _once("wide", WIDE_AT_S, {"cpu": UnitSet.fixed(ONE_NODE.cores)}, WIDE_S)
        return replace(work, trajectories=(*work.trajectories, wide))

    def apart(run: SimulationRun) -> Row:
        others = [record.act_s for record in run.records if record.trajectory != "wide"]
        wait_s = next(record.queue_s for record in run.records if record.trajectory == "wide")
        return {"others": sum(others) / (run.trajectories - 1), "wide_wait": wait_s}

    contenders = {**named(ADAPTIVE, PRICE, FCFS), **PAPERS}
    rows = table(seeds, with_wide, ONE_NODE, contenders, OVERLOAD_DOPS, apart)
    alone = table(seeds, lambda seed: coding(160, seed), ONE_NODE, contenders, OVERLOAD_DOPS)
    report.figure("wide_rigid", shown({**rows, **{f"{name}, without it": row for name, row in alone.items()}}))
    paper_s = min(rows[name]["wide_wait"] for name in PAPERS)
    report.check("wide_over_paper", rows[ADAPTIVE]["wide_wait"] / paper_s, 1.2, "lower")
    report.check("midload_over_bound", alone[ADAPTIVE]["over_bound"], 1.3, "lower")
    report.check("wide_rigid_act_ratio", rows[ADAPTIVE]["others"] / alone[ADAPTIVE]["mean"], 1.3, "lower")
    report.check("wide_rigid_wait_over_fcfs", rows[ADAPTIVE]["wide_wait"] / rows[FCFS]["wide_wait"], 1.5, "lower")


#: Devices, and the seconds over which narrow actions come to them.
DEVICES, NARROW_SPAN_S = Size(nodes=1, cores=0, gpus=16), 300.0
#: First come first served on devices.
STRICT = Contender(policy="fixed", strict=True)


def device_figures(report: BenchReport, seeds: Sequence[int] = SEEDS) -> None:
    """Rare actions of eight devices among many of one, on sixteen."""
    rows: dict[str, Row] = {}
    contenders = {**named(PRICE, "fixed"), **PAPERS}
    worst = 0.0
    for load in (0.9, 1.05):
        of = table(seeds, lambda seed: _with_wide(load, seed), DEVICES, {**contenders, "strict": STRICT}, (1,), _waits)  # noqa: B023
        rows.update({f"load {load}, {policy}": row for policy, row in of.items()})
        worst = max(worst, *(of[name]["wide_wait"] / of["strict"]["wide_wait"] for name in contenders))
    report.figure("gpu_wide", shown(rows))
    report.check("gpu_wide_wait_over_fcfs", worst, 5.0, "lower")


def _with_wide(load: float, seed: int) -> Workload:
    chance = random.Random(seed)
    narrow: list[TracedTrajectory] = []
    at_s = 0.0
    while at_s < NARROW_SPAN_S:
        at_s += chance.expovariate(load * DEVICES.gpus)
        narrow.append(_once(f"n{len(narrow)}", at_s, {"gpu": UnitSet.fixed(1)}, chance.gammavariate(4.0, 0.25)))
    wide = [_once(f"wide{index}", 30.0 + 60.0 * index, {"gpu": UnitSet.fixed(8)}, 2.0) for index in range(4)]
    return Workload(name="wide", trajectories=(*narrow, *wide))


def _waits(run: SimulationRun) -> Row:
    """The longest wait of a wide and of a narrow action."""
    waits = [(record.trajectory.startswith("wide"), record.queue_s) for record in run.records]
    return {
        "wide_wait": max(wait_s for wide, wait_s in waits if wide),
        "narrow_wait": max(wait_s for wide, wait_s in waits if not wide),
    }


def _once(name: str, arrival_s: float, cost: Mapping[str, UnitSet], seconds: float) -> TracedTrajectory:
    """A trajectory of one rigid action."""
    step = TraceStep(think_s=0.0, function="once", cost=cost, t_ori_s=seconds)
    return TracedTrajectory(id=name, arrival_s=arrival_s, steps=(step,))


FIVE_NODES, MIXED = Size(nodes=5, cores=1280), Size(nodes=5, cores=640, gpus=16)
#: Searches a second of a third of a mixed batch of 1,200: below and above what they ask for at their peak.
QUOTAS = {"moderate": 55, "tight": 25}


def unprofiled_figures(report: BenchReport, seeds: Sequence[int] = SEEDS, batch: int = 1280) -> None:
    """No profile at all, after one training step of learning, against exact profiles; tasks repeat as in GRPO."""
    parameters = Coding(suites=max(1, batch // 16))

    def learned(seed: int) -> Row:
        learning = Learning()
        simulate(coding(batch, seed, parameters), ADAPTIVE, FIVE_NODES, knowledge=learning)
        return row_of(simulate(coding(batch, seed, parameters), ADAPTIVE, FIVE_NODES, knowledge=learning))

    rows = table(seeds, lambda seed: coding(batch, seed, parameters), FIVE_NODES, named(ADAPTIVE), (2, 4, 8, 16, 32))
    exact, after = rows.pop(ADAPTIVE), over_seeds(seeds, learned)
    after["over_bound"] = after["mean"] * exact["over_bound"] / exact["mean"]
    report.figure("unprofiled_act_s", shown({"oracle": exact, "learned": {**after, "best_fixed": exact["best_fixed"]}}))
    report.check(f"coding_{batch}_unprofiled_over_oracle", after["mean"] / exact["mean"], 1.03, "lower")


def mixed_figures(report: BenchReport, seeds: Sequence[int] = SEEDS, batch: int = 1200) -> None:
    """Coding, distillation and search together: reservation per resource against one strict queue."""
    limits = {"moderate": 1.4, "tight": 2.5}
    contenders = {"reserved": Contender(policy=ADAPTIVE), "strict": Contender(policy=ADAPTIVE, strict=True)}
    rows: dict[str, Row] = {}
    for name, quota in QUOTAS.items():
        search = Search(quota=quota * batch // 1200 or 1)
        of = table(seeds, lambda seed: mixed(batch, seed, search), MIXED, contenders, (1, 2, 4, 8))  # noqa: B023
        rows.update({f"{name}, {how}": row for how, row in of.items()})
        report.check(
            f"mixed_{name}_strict_over_reserved", of["strict"]["mean"] / of["reserved"]["mean"], limits[name], "higher"
        )
    report.figure("mixed_act_s", shown(rows))


# Shares of tasks: what a task gets while it and another wait, against what their weights give it.

HEAVY, LIGHT = "heavy", "light"
CORES = Size(nodes=1, cores=32)
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


def share_figures(report: BenchReport, seeds: Sequence[int] = SEEDS) -> None:
    """What share of a resource each task gets while both wait, against what the weights give it."""
    rows = {name: over_seeds(seeds, lambda seed, name=name: queue_row(name, seed)) for name in QUEUES}  # type: ignore[misc]
    report.figure("weights_share", shown(rows))
    report.check("weights_share_error", max(row["error"] for row in rows.values()), 0.1, "lower")


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
