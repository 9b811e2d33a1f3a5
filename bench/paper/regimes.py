"""Outside the regime that the policies were built in: overload, whole steps, wide actions, and quotas.

Constants were chosen on seeds 1 to 3; the figures are medians over other seeds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bench.paper.simulated import (
    PAPERS,
    SEEDS,
    Contender,
    Row,
    bound_s,
    named,
    shown,
    table,
    trajectory_tail_of,
)
from bench.report import BenchReport, median
from manager.action import UnitSet
from manager.assembly import STEP_BIAS
from manager.scheduler.price import cheapest
from manager.scheduler.rank import shape_of
from manager.simulation.simulate import Size
from manager.simulation.simulator import SimulationRun
from manager.simulation.workloads import (
    CODING_BURST,
    Coding,
    Search,
    TracedTrajectory,
    TraceStep,
    Workload,
    coding,
    mixed,
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
    ideal = [(work, ideal_act_s(work, ONE_NODE.cores)) for work in (coding(160, seed) for seed in seeds)]
    report.figure("midload_ideal_over_bound", median([act_s / bound_s(work, ONE_NODE) for work, act_s in ideal]))
    paper_s = min(rows[name]["wide_wait"] for name in PAPERS)
    report.check("wide_over_paper", rows[ADAPTIVE]["wide_wait"] / paper_s, 1.2, "lower")
    report.check("midload_over_bound", alone[ADAPTIVE]["over_bound"], 1.3, "lower")
    report.check("wide_rigid_act_ratio", rows[ADAPTIVE]["others"] / alone[ADAPTIVE]["mean"], 1.3, "lower")
    report.check("wide_rigid_wait_over_fcfs", rows[ADAPTIVE]["wide_wait"] / rows[FCFS]["wide_wait"], 1.5, "lower")


#: Seconds between two looks of the ideal, and its price of a unit for each suite a unit.
LOOK_S, IDEAL_PRICE = 0.1, 2.0


def ideal_act_s(workload: Workload, cores: int) -> float:
    """Return the mean ACT of coding if suites could be stopped and resized at any instant, and workers cost nothing.

    Commands never wait. Of the suites the one with the least work left goes first, each at its cheapest width, and
    what is left over goes in the same order. No policy of ours could do as much: whoever runs holds a core here.
    """
    ready = [(one.arrival_s + one.steps[0].think_s, 0, number) for number, one in enumerate(workload.trajectories)]
    heapq.heapify(ready)
    left_s: dict[int, float] = {}
    commands_end_s: list[float] = []
    total_s, now_s = 0.0, 0.0
    while ready or left_s:
        while ready and ready[0][0] <= now_s:
            at_s, step, number = heapq.heappop(ready)
            steps = workload.trajectories[number].steps
            if step == len(steps) - 1:
                left_s[number] = steps[step].t_ori_s
                total_s += now_s - at_s
                continue
            seconds = steps[step].t_ori_s
            total_s += seconds
            heapq.heappush(commands_end_s, at_s + seconds)
            heapq.heappush(ready, (at_s + seconds + steps[step + 1].think_s, step + 1, number))
        while commands_end_s and commands_end_s[0] <= now_s:
            heapq.heappop(commands_end_s)
        free, price = cores - len(commands_end_s), IDEAL_PRICE * len(left_s) / cores
        shares: dict[int, int] = {}
        for number in sorted(left_s, key=left_s.__getitem__):
            suite = workload.trajectories[number].steps[-1]
            wide, _ = cheapest(shape_of(suite.cost["cpu"], suite.elasticity), 1.0, price, suite.cost["cpu"].maximum)
            shares[number] = max(0, min(wide, free))
            free -= shares[number]
        for number, share in shares.items():
            suite = workload.trajectories[number].steps[-1]
            units = min(suite.cost["cpu"].maximum, share + max(0, free))
            free -= units - share
            total_s += LOOK_S
            if units and suite.elasticity is not None:
                left_s[number] -= LOOK_S * units * suite.elasticity.efficiency(units)
            if left_s[number] <= 0:
                del left_s[number]
        now_s += LOOK_S
    return total_s / len(workload.trajectories)


def _once(name: str, arrival_s: float, cost: Mapping[str, UnitSet], seconds: float) -> TracedTrajectory:
    """A trajectory of one rigid action."""
    step = TraceStep(think_s=0.0, function="once", cost=cost, t_ori_s=seconds)
    return TracedTrajectory(id=name, arrival_s=arrival_s, steps=(step,))


MIXED = Size(nodes=5, cores=640, gpus=16)
#: Searches a second of a third of a mixed batch of 1,200: below and above what they ask for at their peak.
QUOTAS = {"moderate": 55, "tight": 25}


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
