"""What scheduling costs: whole steps of a core under load (`bench.core_steps`), and bursts of submissions.

Times are of this thread on its processor: what else runs on the machine does not count. Steps are checked against the
reading of a fixed document in the same run, so that a slow machine does not decide.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from bench.core_steps import LoadedCore, arrivals, burst
from bench.report import BenchReport, median, parser, play
from gateway.app import COLLECT_EVERY
from manager.simulation.simulator import cluster

#: The state that steps are timed in, a longer queue, and a burst of new trajectories.
QUEUED = 1536
UNITS = 1280
LONG_QUEUE = 100_000
BURST = 3072
#: Nodes that share the cores, and whether actions belong to trajectories, which are pinned to a node. No machine has so
#: many cores: how one node fares is a figure without a limit.
ONE_NODE = "one_node"
LAYOUTS = {ONE_NODE: (1, False), "any_of_five": (5, False), "pinned_to_five": (5, True)}


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
        rows[name] = {
            "p50_over_json": usual.over_document(0.5),
            "p99_over_json": usual.over_document(0.99),
            "100k_over_1536": long.over_document(0.5) / usual.over_document(0.5),
            "100k_p99_over_json": long.over_document(0.99),
            "p50_ms": 1e3 * median(usual.steps_s),
            "ends_per_s": len(usual.steps_s) / sum(usual.steps_s),
            "json_ms": usual.document_ms,
        }
    report.figure("steps", {name: dict(row) for name, row in rows.items()})
    checked = [row for name, row in rows.items() if name != ONE_NODE]
    worst = {column: max(row[column] for row in checked) for column in checked[0]}
    report.check("step_p50_over_json", worst["p50_over_json"], limit=0.4, better="lower")
    report.check("step_p99_over_json", worst["p99_over_json"], limit=1.0, better="lower")
    report.check("step_100k_over_1536", worst["100k_over_1536"], limit=1.5, better="lower")


def bursts(report: BenchReport, quick: bool) -> None:
    """One step over many new trajectories, and over one."""
    small = [burst(5, UNITS, 1536, seed) for seed in range(2 if quick else 5)]
    large = [burst(2000, 16_000, 16_000, seed) for seed in range(1 if quick else 2)]
    report.figure("burst_step_ms", 1e3 * median([burst(5, UNITS, BURST, seed).steps_s[0] for seed in range(2)]))
    report.figure("burst_16000_s", median([one.steps_s[0] for one in large]))
    report.check("burst_1536_over_json", median([one.over_document(0.5) for one in small]), limit=20, better="lower")
    report.check("burst_16000_over_json", median([one.over_document(0.5) for one in large]), limit=600, better="lower")
    one = arrivals(1000, 50 if quick else 500).over_document(0.5)
    report.check("new_trajectory_over_json", one, limit=0.05, better="lower")


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("scheduler", parts=True).parse_args(argv)
    report = BenchReport("scheduler")
    gc.set_threshold(*COLLECT_EVERY)
    report.figure("queued", QUEUED)
    report.figure("units", UNITS)
    return play(
        report,
        options,
        {
            "steps": lambda: steps(report, options.quick),
            "bursts": lambda: bursts(report, options.quick),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
