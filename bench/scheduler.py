"""What scheduling costs: steps of a core under load and of a full cluster (`bench.core_steps`), and bursts.

Times are of this thread on its processor: what else runs on the machine does not count. Steps are checked against the
reading of a fixed document in the same run, so that a slow machine does not decide.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from functools import partial

from bench.core_steps import FullCluster, LoadedCore, burst_s, reading_s
from bench.report import BenchReport, median, parser, percentile, play
from gateway.app import COLLECT_EVERY
from manager.simulation.simulator import cluster

#: The state that steps are timed in, and a longer queue.
QUEUED = 1536
UNITS = 1280
LONG_QUEUE = 100_000
#: Nodes that share the cores, and whether actions belong to trajectories, which are pinned to a node.
LAYOUTS = {"any_of_five": (5, False), "pinned_to_five": (5, True)}
#: The full cluster: what waits for its nodes of 16 cores, and which of it has no trajectory (`FullCluster`).
FULL_QUEUED = 4000
LONE = {"none": 0, "all": 1, "one in a hundred": 100}
FEW, MANY = 10, 1000
PINNED = (10_000, 50_000)


def steps(report: BenchReport, quick: bool) -> None:
    """Whole steps under load: an end and a submission at 1,536 and at 100,000 queued, in the worst of the layouts."""
    events = 100 if quick else 600
    rows: dict[str, dict[str, float]] = {}
    for name, (nodes, trajectories) in LAYOUTS.items():
        spec = cluster(policy="adaptive", nodes=nodes, cores=UNITS)
        times = []
        for queued in (QUEUED, LONG_QUEUE // (10 if quick else 1)):
            core = LoadedCore(spec, queued, seed=7, trajectories=trajectories)
            core.turn_over(events // 4)
            gc.collect()
            times.append(core.turn_over(events))
            core.check()
        usual, long = times
        document_s = reading_s()
        rows[name] = {
            "step_p50_over_json": median(usual) / document_s,
            "step_p99_over_json": percentile(usual, 0.99) / document_s,
            "step_100k_over_1536": median(long) / median(usual),
        }
    report.figure("steps", {name: dict(row) for name, row in rows.items()})
    for name, limit in {"step_p50_over_json": 0.4, "step_p99_over_json": 1.0, "step_100k_over_1536": 1.5}.items():
        report.check(name, max(row[name] for row in rows.values()), limit, better="lower")


def full(report: BenchReport, quick: bool) -> None:
    """Steps of a cluster of which every core is used: what they cost hangs on what changed, not on its size."""
    times = 100 if quick else 400
    rows: dict[str, dict[str, float]] = {}

    def measure(name: str, nodes: int, queued: int, lone: int) -> None:
        core = FullCluster(nodes, queued, lone)
        core.time(times // 5, 1)
        gc.collect()
        rows[name] = {what: 1e3 * median(found) for what, found in core.time(times, 8).items()}
        report.progress(f"{name}: {rows[name]['end']:.3g} ms an end")

    for name, lone in LONE.items():
        for nodes in (FEW, 100, MANY):
            measure(f"{name} of no trajectory, {nodes} nodes", nodes, FULL_QUEUED, lone)
    for queued in PINNED:
        measure(f"{queued} queued, {MANY} nodes", MANY, queued, 0)
    report.figure("full_ms", {name: dict(row) for name, row in rows.items()})
    ends = {n: [rows[f"{name} of no trajectory, {n} nodes"]["end"] for name in LONE] for n in (FEW, MANY)}
    report.check("end_1000_nodes_p50_ms", max(ends[MANY]), limit=1.0, better="lower")
    ratios = [many / few for few, many in zip(ends[FEW], ends[MANY], strict=True)]
    report.check("end_1000_over_10_nodes", max(ratios), limit=2.0, better="lower")
    few, many = (rows[f"{queued} queued, {MANY} nodes"]["end"] for queued in PINNED)
    report.check("end_50k_over_10k_queued", many / few, limit=1.5, better="lower")
    submission_s = rows[f"none of no trajectory, {MANY} nodes"]["submission"] / 1e3
    report.check("new_trajectory_over_json", submission_s / reading_s(), limit=0.05, better="lower")


def bursts(report: BenchReport, quick: bool) -> None:
    """One step over many new trajectories."""
    small = median([burst_s(5, UNITS, QUEUED, seed) for seed in range(2 if quick else 5)])
    large = median([burst_s(2000, 16_000, 16_000, seed) for seed in range(1 if quick else 2)])
    report.figure("burst_16000_s", large)
    report.check("burst_1536_over_json", small / reading_s(), limit=20, better="lower")
    report.check("burst_16000_over_json", large / reading_s(), limit=600, better="lower")


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("scheduler", parts=True).parse_args(argv)
    report = BenchReport("scheduler")
    gc.set_threshold(*COLLECT_EVERY)
    parts = {part.__name__: partial(part, report, options.quick) for part in (steps, full, bursts)}
    return play(report, options, parts)


if __name__ == "__main__":
    sys.exit(main())
