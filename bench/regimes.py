"""Outside the regime that the policies were built in: overload, wide actions, weights, and learning on an idle node."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bench.report import BenchReport, median
from bench.simulated import act_s, best_fixed_s, bound_s, mean_act_s, over_seeds, row_of, trajectory_tail_of
from manager.action import Amdahl, UnitSet
from manager.simulation.duration_model import Learning
from manager.simulation.simulate import Size, simulate
from manager.simulation.trace import TracedTrajectory, TraceStep
from manager.simulation.workloads import CODING_BURST, Coding, Workload, coding, mopd

ADAPTIVE, PRICE, PAPER, FCFS = "adaptive", "price", "paper", "fixed:1"
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


def overload_figures(report: BenchReport, seeds: Sequence[int]) -> None:
    """Too few cores: ours against first come first served with one core each, in the mean and in the tail."""
    table: dict[str, dict[str, float]] = {}
    ratios: dict[str, dict[str, float]] = {}
    for name, (make, size) in OVERLOADS.items():
        rows: dict[str, dict[str, float]] = {}
        for policy in (ADAPTIVE, PRICE, PAPER, FCFS):
            rows[policy] = over_seeds(seeds, lambda seed: _overload_row(make(seed), policy, size))  # noqa: B023
        works = [make(seed) for seed in seeds]
        bound = median([bound_s(work, size) for work in works])
        best_fixed = median([best_fixed_s(work, size, OVERLOAD_DOPS) for work in works])
        for policy, row in rows.items():
            table[f"{name}, {policy}"] = {**row, "over_bound": row["mean"] / bound, "best_fixed": best_fixed}
        ratios[name] = {key: rows[ADAPTIVE][key] / rows[FCFS][key] for key in OVERLOAD_KEYS}
    worst = {key: max(row[key] for row in ratios.values()) for key in OVERLOAD_KEYS}
    report.figure("overload_s", {name: dict(row) for name, row in table.items()})
    report.figure("overload_over_fcfs", {name: dict(row) for name, row in ratios.items()})
    report.figure("overload_single_action_p99_over_fcfs", worst["p99"])
    report.figure("overload_single_action_max_wait_over_fcfs", worst["max_wait"])
    report.check("overload_mean_over_fcfs", worst["mean"], 0.8, "lower")
    report.check("overload_p99_over_fcfs", worst["trajectory_p99"], 1.1, "lower")
    report.check("overload_max_over_fcfs", worst["trajectory_max"], 1.1, "lower")
    report.check("overload_max_wait_over_fcfs", worst["trajectory_wait"], 1.1, "lower")


def _overload_row(work: Workload, policy: str, size: Size) -> dict[str, float]:
    run = simulate(work, policy, size)
    return {**row_of(run), **trajectory_tail_of(run)}


#: A rigid action for a whole node, and when it comes.
WIDE_S, WIDE_AT_S = 10.0, 60.0


def wide_figures(report: BenchReport, seeds: Sequence[int]) -> None:
    """One action for all cores of a node among narrow ones: what it costs the others, and how long it waits."""

    def of(policy: str, seed: int) -> dict[str, float]:
        work = coding(160, seed)
        wide = _once("wide", WIDE_AT_S, {"cpu": UnitSet.fixed(ONE_NODE.cores)}, WIDE_S)
        run = simulate(replace(work, trajectories=(*work.trajectories, wide)), policy, ONE_NODE)
        others = [record.act_s for record in run.records if record.trajectory != "wide"]
        without_s = act_s(work, policy, ONE_NODE)
        wait_s = next(record.queue_s for record in run.records if record.trajectory == "wide")
        return {"ratio": sum(others) / len(work.trajectories) / without_s, "alone": without_s, "wait": wait_s}

    rows = {policy: over_seeds(seeds, lambda seed: of(policy, seed)) for policy in (ADAPTIVE, PRICE, FCFS)}  # noqa: B023
    report.figure("wide_rigid", {policy: dict(row) for policy, row in rows.items()})
    report.check("wide_rigid_act_ratio", rows[ADAPTIVE]["ratio"], 1.3, "lower")
    report.check("wide_rigid_wait_over_fcfs", rows[ADAPTIVE]["wait"] / rows[FCFS]["wait"], 1.5, "lower")


#: Devices, and the seconds over which narrow actions come to them.
DEVICES, NARROW_SPAN_S = Size(nodes=1, cores=0, gpus=16), 300.0


def device_figures(report: BenchReport, seeds: Sequence[int]) -> None:
    """Rare actions of eight devices among many of one, on sixteen; and the longest wait where all are elastic."""
    rows: dict[str, dict[str, float]] = {}
    for load in (0.9, 1.05):
        for policy in (PRICE, PAPER, "fixed", "strict"):
            rows[f"load {load}, {policy}"] = over_seeds(seeds, lambda seed: _wide_row(policy, load, seed))  # noqa: B023
    report.figure("gpu_wide", {name: dict(row) for name, row in rows.items()})
    worst = max(
        rows[f"load {load}, {policy}"]["wide_wait"] / rows[f"load {load}, strict"]["wide_wait"]
        for load in (0.9, 1.05)
        for policy in (PRICE, PAPER, "fixed")
    )
    report.check("gpu_wide_wait_over_fcfs", worst, 5.0, "lower")
    size = Size(nodes=1, cores=0, gpus=40)
    elastic = {
        policy: over_seeds(seeds, lambda seed: row_of(simulate(mopd(2048, seed), policy, size)))  # noqa: B023
        for policy in (PRICE, PAPER, "fixed:8")
    }
    report.figure("gpu_elastic", {policy: dict(row) for policy, row in elastic.items()})
    report.check("gpu_max_wait_over_fixed8", elastic[PRICE]["max_wait"] / elastic["fixed:8"]["max_wait"], 2.0, "lower")


def _wide_row(policy: str, load: float, seed: int) -> dict[str, float]:
    """The mean over narrow actions, and the longest wait of a wide and of a narrow one."""
    chance = random.Random(seed)
    narrow: list[TracedTrajectory] = []
    at_s = 0.0
    while at_s < NARROW_SPAN_S:
        at_s += chance.expovariate(load * DEVICES.gpus)
        narrow.append(_once(f"n{len(narrow)}", at_s, {"gpu": UnitSet.fixed(1)}, chance.gammavariate(4.0, 0.25)))
    wide = [_once(f"wide{index}", 30.0 + 60.0 * index, {"gpu": UnitSet.fixed(8)}, 2.0) for index in range(4)]
    strict = policy == "strict"
    run = simulate(
        Workload(name="wide", trajectories=(*narrow, *wide)), "fixed" if strict else policy, DEVICES, strict=strict
    )
    waits = {record.trajectory: record.queue_s for record in run.records}
    return {
        "mean": mean_act_s(run),
        "wide_wait": max(waits[one.id] for one in wide),
        "narrow_wait": max(waits[one.id] for one in narrow),
    }


def _once(name: str, arrival_s: float, cost: Mapping[str, UnitSet], seconds: float) -> TracedTrajectory:
    """A trajectory of one rigid action."""
    step = TraceStep(think_s=0.0, function="once", cost=cost, t_ori_s=seconds)
    return TracedTrajectory(id=name, arrival_s=arrival_s, steps=(step,))


#: Runs of one suite, one after the other, on an idle node.
IDLE_RUNS, IDLE_NODE = 20, Size(nodes=1, cores=32)


def idle_figures(report: BenchReport) -> None:
    """A suite that nothing is known of on an idle node: the core-seconds and the seconds that learning it takes."""
    rows: dict[str, dict[str, float]] = {}
    for name, t_ori_s, serial in (("no gain", 3.0, 1.0), ("some gain", 30.0, 0.3), ("scales", 80.0, 0.05)):
        work = _suite_runs(t_ori_s, serial)
        known = simulate(work, ADAPTIVE, IDLE_NODE)
        learned = simulate(work, ADAPTIVE, IDLE_NODE, knowledge=Learning())
        rows[name] = {
            "known_core_s": known.ledger.used["cpu"],
            "learned_core_s": learned.ledger.used["cpu"],
            "known_act_s": mean_act_s(known) / IDLE_RUNS,
            "learned_act_s": mean_act_s(learned) / IDLE_RUNS,
        }
    report.figure("idle_learning", {name: dict(row) for name, row in rows.items()})
    worst = max(row["learned_core_s"] / row["known_core_s"] for row in rows.values())
    report.check("idle_learning_core_s_over_known", worst, 2.0, "lower")


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
