"""Outside the regime that the policies were built in: overload, wide actions, weights, and learning on an idle node."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bench.figures.simulated import PAPERS, Contender, Row, named, shown, table, trajectory_tail_of
from bench.report import BenchReport
from manager.action import Amdahl, UnitSet
from manager.assembly import STEP_BIAS
from manager.simulation.simulate import Size
from manager.simulation.simulator import SimulationRun
from manager.simulation.workloads import CODING_BURST, Coding, TracedTrajectory, TraceStep, Workload, coding, mopd

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


def step_figures(report: BenchReport, seeds: Sequence[int]) -> None:
    """The time of a whole batch, and the mean ACT that it costs, under ``objective: step`` over those under ``act``."""
    ratios: dict[str, Row] = {}
    for name, (make, size) in STEPS.items():
        of = table(seeds, make, size, named(ADAPTIVE, STEP), OVERLOAD_DOPS)
        ratios[name] = {f"{key}_over_act": of[STEP][key] / of[ADAPTIVE][key] for key in ("makespan", "mean", "p99")}
    report.figure("step_over_act", shown(ratios))
    bursts = [row["makespan_over_act"] for name, row in ratios.items() if name.startswith("burst")]
    report.check("step_burst_time_over_act", max(bursts), 0.96, "lower")
    report.check("step_time_over_act", max(row["makespan_over_act"] for row in ratios.values()), 1.0, "lower")


def overload_figures(report: BenchReport, seeds: Sequence[int]) -> None:
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


def wide_figures(report: BenchReport, seeds: Sequence[int]) -> None:
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
    report.check("wide_rigid_act_ratio", rows[ADAPTIVE]["others"] / alone[ADAPTIVE]["mean"], 1.3, "lower")
    report.check("wide_rigid_wait_over_fcfs", rows[ADAPTIVE]["wide_wait"] / rows[FCFS]["wide_wait"], 1.5, "lower")


#: Devices, and the seconds over which narrow actions come to them.
DEVICES, NARROW_SPAN_S = Size(nodes=1, cores=0, gpus=16), 300.0
#: First come first served on devices.
STRICT = Contender(policy="fixed", strict=True)


def device_figures(report: BenchReport, seeds: Sequence[int]) -> None:
    """Rare actions of eight devices among many of one, on sixteen; and the longest wait where all are elastic."""
    rows: dict[str, Row] = {}
    contenders = {**named(PRICE, "fixed"), **PAPERS}
    worst = 0.0
    for load in (0.9, 1.05):
        of = table(seeds, lambda seed: _with_wide(load, seed), DEVICES, {**contenders, "strict": STRICT}, (1,), _waits)  # noqa: B023
        rows.update({f"load {load}, {policy}": row for policy, row in of.items()})
        worst = max(worst, *(of[name]["wide_wait"] / of["strict"]["wide_wait"] for name in contenders))
    report.figure("gpu_wide", shown(rows))
    report.check("gpu_wide_wait_over_fcfs", worst, 5.0, "lower")
    size = Size(nodes=1, cores=0, gpus=40)
    elastic = table(seeds, lambda seed: mopd(2048, seed), size, {**named(PRICE, "fixed:8"), **PAPERS}, (1, 2, 4, 8))
    report.figure("gpu_elastic", shown(elastic))
    report.check("gpu_max_wait_over_fixed8", elastic[PRICE]["max_wait"] / elastic["fixed:8"]["max_wait"], 2.0, "lower")


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


#: Runs of one suite, one after the other, on an idle node.
IDLE_RUNS, IDLE_NODE = 20, Size(nodes=1, cores=32)


def idle_figures(report: BenchReport) -> None:
    """A suite that nothing is known of on an idle node: the core-seconds and the seconds that learning it takes."""
    rows: dict[str, Row] = {}
    contenders = {"known": Contender(policy=ADAPTIVE), "learned": Contender(policy=ADAPTIVE, learned=True)}
    worst = 0.0
    for name, t_ori_s, serial in (("no gain", 3.0, 1.0), ("some gain", 30.0, 0.3), ("scales", 80.0, 0.05)):
        work = _suite_runs(t_ori_s, serial)
        of = table((0,), lambda _: work, IDLE_NODE, contenders, (1, 4, 8, 16, 32), _core_s)  # noqa: B023
        rows.update({f"{name}, {knowledge}": row for knowledge, row in of.items()})
        worst = max(worst, of["learned"]["core_s"] / of["known"]["core_s"])
    report.figure("idle_learning", shown(rows))
    report.check("idle_learning_core_s_over_known", worst, 2.0, "lower")


def _core_s(run: SimulationRun) -> Row:
    return {"core_s": run.ledger.used["cpu"]}


def _suite_runs(t_ori_s: float, serial: float) -> Workload:
    step = TraceStep(
        think_s=1.0,
        function="unit_tests",
        cost={"cpu": UnitSet.span(1, IDLE_NODE.cores)},
        key="cpu",
        t_ori_s=t_ori_s,
        elasticity=Amdahl(serial),
        malleable=True,
        profile_key="suite",
    )
    return Workload(name="idle", trajectories=(TracedTrajectory(id="one", steps=(step,) * IDLE_RUNS),))
