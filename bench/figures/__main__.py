"""Our policies outside the paper's figures (`bench.paper`), by simulation on the real core, each against a bound.

Constants were chosen on seed 1; the figures are medians over other seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from bench.figures.regimes import device_figures, idle_figures, overload_figures, step_figures, wide_figures
from bench.figures.simulated import (
    PAPERS,
    SEEDS,
    Contender,
    Row,
    named,
    over_seeds,
    row_of,
    shown,
    table,
)
from bench.figures.traces import SAMPLE, trace_figures
from bench.figures.weights import weight_figures
from bench.report import BenchReport, parser, play
from manager.simulation.simulate import Size, run, simulate
from manager.simulation.simulator import Learning
from manager.simulation.workloads import CODING_BURST, Coding, Search, Workload, coding, mixed

CORES = Size(nodes=5, cores=1280)
MIXED = Size(nodes=5, cores=640, gpus=16)
#: Ours, and the one that it has to beat.
ADAPTIVE = "adaptive"
PRICE = "price"
DOPS = (2, 4, 8, 16, 32)
DEVICE_DOPS = (1, 2, 4, 8)
#: Searches a second of a third of a mixed batch of 1,200: below and above what they ask for at their peak.
QUOTAS = {"moderate": 55, "tight": 25}


def burst_figures(report: BenchReport, seeds: Sequence[int], batch: int) -> None:
    """All rewards at once."""
    contenders = {**named(ADAPTIVE, PRICE), **PAPERS}
    rows = table(seeds, lambda seed: coding(batch, seed, CODING_BURST), CORES, contenders, DOPS)
    report.figure("burst_act_s", shown(rows))
    ours = rows[ADAPTIVE]
    report.check(f"burst_{batch}_adaptive_over_best_fixed", ours["mean"] / ours["best_fixed"], 1.05, "lower")


def unprofiled_figures(report: BenchReport, seeds: Sequence[int], batch: int) -> None:
    """No profile at all, after one training step of learning, against exact profiles; tasks repeat as in GRPO."""
    parameters = Coding(suites=max(1, batch // 16))

    def learned(seed: int) -> Row:
        learning = Learning()
        simulate(coding(batch, seed, parameters), ADAPTIVE, CORES, knowledge=learning)
        return row_of(simulate(coding(batch, seed, parameters), ADAPTIVE, CORES, knowledge=learning))

    rows = table(seeds, lambda seed: coding(batch, seed, parameters), CORES, named(ADAPTIVE), DOPS)
    exact, after = rows.pop(ADAPTIVE), over_seeds(seeds, learned)
    after["over_bound"] = after["mean"] * exact["over_bound"] / exact["mean"]
    report.figure("unprofiled_act_s", shown({"oracle": exact, "learned": {**after, "best_fixed": exact["best_fixed"]}}))
    report.check(f"coding_{batch}_unprofiled_over_oracle", after["mean"] / exact["mean"], 1.03, "lower")


def mixed_figures(report: BenchReport, seeds: Sequence[int], batch: int) -> None:
    """Coding, distillation and search together: reservation per resource against one strict queue."""
    limits = {"moderate": 1.4, "tight": 2.5}
    contenders = {"reserved": Contender(policy=ADAPTIVE), "strict": Contender(policy=ADAPTIVE, strict=True)}
    apart: dict[str, Row] = {}
    rows: dict[str, Row] = {}
    for name, quota in QUOTAS.items():
        search = Search(quota=quota * batch // 1200 or 1)
        of = table(seeds, lambda seed: mixed(batch, seed, search), MIXED, contenders, DEVICE_DOPS)  # noqa: B023
        rows.update({f"{name}, {how}": row for how, row in of.items()})
        report.check(
            f"mixed_{name}_strict_over_reserved", of["strict"]["mean"] / of["reserved"]["mean"], limits[name], "higher"
        )
        apart[name] = over_seeds(seeds[:1], lambda seed: _baselines_apart(mixed(batch, seed, search)))  # noqa: B023
    report.figure("mixed_act_s", shown(rows))
    report.figure("mixed_baseline_over_adaptive", shown(apart))


def _baselines_apart(work: Workload) -> Row:
    """How many times ours each baseline takes for the actions of the kind that it manages."""
    result = run(work, [ADAPTIVE, "k8s", "static-gpu", "serverless-llm", "uncontrolled"], MIXED)
    return {name: act_s / ours_s for name, _, actions, act_s, ours_s in result.on_the_same() if actions}


#: The parts of a full run, by name.
PARTS: Mapping[str, Callable[[BenchReport, Sequence[int]], None]] = {
    "burst": lambda report, seeds: burst_figures(report, seeds, 1280),
    "unprofiled": lambda report, seeds: unprofiled_figures(report, seeds, 1280),
    "mixed": lambda report, seeds: mixed_figures(report, seeds, 1200),
    "overload": overload_figures,
    "step": step_figures,
    "wide": wide_figures,
    "devices": device_figures,
    "idle": lambda report, seeds: idle_figures(report),
    "weights": weight_figures,
    "traces": trace_figures,
}
#: Those of ``--quick``.
QUICK_PARTS: dict[str, Callable[[BenchReport, Sequence[int]], None]] = {
    "mixed": lambda report, seeds: mixed_figures(report, seeds, 60),
}


def main(argv: Sequence[str] | None = None) -> int:
    flags = parser("figures", parts=True)
    flags.add_argument("--seeds", default="", help="comma-separated, instead of the built-in ones")
    flags.add_argument("--sample", type=int, default=SAMPLE, help="calls of each recording that `traces` plays")
    flags.add_argument("--skip", type=int, default=0, help="requests to a model that `traces` passes over before")
    flags.add_argument("--row", default="", help="what the names of the rows begin with that `traces` plays")
    options = flags.parse_args(argv)
    if options.sample < 1:
        flags.error(f"--sample: {options.sample} calls are none to play")
    if options.skip < 0:
        flags.error(f"--skip: {options.skip} requests cannot be passed over")
    seeds = tuple(int(seed) for seed in options.seeds.split(",") if seed) or SEEDS
    report = BenchReport("figures")
    parts: dict[str, Callable[[BenchReport, Sequence[int]], None]] = {**PARTS}
    parts["traces"] = partial(trace_figures, sample=options.sample, skip=options.skip, row=options.row)
    if options.quick:
        parts, seeds = QUICK_PARTS, seeds[:1]
        report.note("--quick: small batches, which are not under load; its checks say little, and fail nothing")
    status = play(report, options, {name: partial(part, report, seeds) for name, part in parts.items()})
    return 0 if options.quick else status


if __name__ == "__main__":
    sys.exit(main())
