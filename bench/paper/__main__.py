"""The paper's evaluation in one command, played on the real scheduler in virtual time; and parts beyond it.

``make paper`` writes ``out/paper/index.html``, and keeps the factors that ``docs/PAPER.md`` shows. ``--only`` names
figures, or parts that the paper does not have: `PARTS`.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from bench.paper.figures import (
    BOUND,
    CONSTANT,
    GREEDY,
    OURS,
    PAPER,
    Measures,
    PaperFigure,
    Play,
    factors_of,
    figures,
    ratio,
    sensitivity,
    value_of,
)
from bench.paper.page import page
from bench.paper.reality import reality_figures
from bench.paper.regimes import (
    mixed_figures,
    overload_figures,
    step_figures,
    wide_figures,
)
from bench.paper.windows import window_figures
from bench.report import BenchReport, Figure, parser, play

ROOT = Path(__file__).resolve().parents[2]
#: Seconds after which nothing further is begun; what is then missing is named.
BUDGET_S = 570.0
#: The same with five seeds, and their number.
FULL_BUDGET_S, FULL_SEEDS = 3600.0, 5
#: Student's t of a 95 % interval by the number of seeds.
STUDENT = {FULL_SEEDS: 2.776}
#: Beyond the paper, each by its name alone: minutes, and what most people need not play.
PARTS: Mapping[str, Callable[[BenchReport], None]] = {
    "windows": window_figures,
    "overload": overload_figures,
    "wide": wide_figures,
    "mixed": mixed_figures,
    "step": step_figures,
    "reality": reality_figures,
}


def play_all(report: BenchReport, plays: Sequence[Play], ends_s: float) -> dict[Play, Measures]:
    """Play each once, as many at a time as there are cores, until the budget is up; say how far it is."""
    done: dict[Play, Measures] = {}
    unique = list(dict.fromkeys(plays))
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(each.measure): each for each in unique}
        for number, future in enumerate(as_completed(running), start=1):
            if future.cancelled():
                continue
            each = running[future]
            done[each] = future.result()
            report.progress(f"{number} of {len(unique)}: {each.workload} {each.batch}, {each.policy}")
            if time.monotonic() > ends_s:
                for waiting in running:
                    waiting.cancel()
    return done


def of_seed(figure: PaperFigure, number: int) -> PaperFigure:
    """Return the figure with its factors played on other random values."""

    def moved(play: Play) -> Play:
        return replace(play, seed=play.seed + 100 * number)

    factors = {name: (moved(over), moved(under), *more) for name, (over, under, *more) in figure.factors.items()}
    return replace(figure, lines={}, factors=factors)  # type: ignore[arg-type]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean, and the low and the high end of its 95 % confidence interval."""
    mean = statistics.fmean(values)
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def play_figures(report: BenchReport, drawn: Mapping[str, PaperFigure], out: Path, *, quick: bool, full: bool) -> None:
    """Play what the figures need, and write the page; ``full``: the factors on five seeds."""
    began_s = time.monotonic()
    more = [
        {name: of_seed(each, number) for name, each in drawn.items()} for number in range(1, FULL_SEEDS if full else 1)
    ]
    plays = [each for figures_ in (drawn, *more) for figure in figures_.values() for each in figure.plays()]
    if not quick and len(drawn) > 1:
        plays += CONSTANT
        plays += [each for row in sensitivity().values() for pair in row for each in pair]
    done = play_all(report, plays, began_s + (FULL_BUDGET_S if full else BUDGET_S))
    whole = [name for name, figure in drawn.items() if set(figure.plays()) <= done.keys()]
    spreads: dict[str, dict[str, tuple[float, float, float]]] = {}
    for name, figure in drawn.items():
        factors = factors_of(figure, done)
        shown: dict[str, Figure] = {key: {"paper": paper, "here": here} for key, (here, paper) in factors.items()}
        others = [factors_of(figures_[name], done) for figures_ in more]
        for key, (here, paper) in factors.items() if full else ():
            if all(key in each for each in others):
                mean, low, high = interval([here, *(each[key][0] for each in others)])
                spreads.setdefault(name, {})[key] = mean, low, high
                shown[key] = {"paper": paper, "here": mean, "low": low, "high": high}
        report.figure(figure.title.partition(":")[0], shown)
    report.check("figures_played", len(whole), limit=len(drawn), better="higher")
    for name in drawn.keys() - set(whole):
        report.note(f"{name} is not whole: the time was up")
    _checks(report, done)
    if not full and len(drawn) == len(figures(quick)):
        report.check("wall_s", time.monotonic() - began_s, limit=600, better="lower")
    out.mkdir(parents=True, exist_ok=True)
    (out / "index.html").write_text(page(drawn, done, report.notes, spreads), encoding="utf-8")
    report.note(f"the page: {out / 'index.html'}")


def _checks(report: BenchReport, done: Mapping[Play, Measures]) -> None:
    """What is held of ours, as far as it was played."""
    if (over := ratio(done, Play("AI coding", OURS, 1280), Play("AI coding", BOUND, 1280))) is not None:
        report.check("coding_1280_adaptive_over_bound", over, limit=1.15, better="lower")
    for name, workload, batch, limit in (("coding_1280", "AI coding", 1280, 1.05), ("mopd_3072", "MOPD", 3072, 1.0)):
        mine = Play(workload, OURS, batch)
        rivals = {
            "paper": ([Play(workload, policy, batch) for policy in (PAPER, GREEDY)], 1.0),
            "best_fixed": ([each for each in CONSTANT if each.workload == workload], limit),
        }
        for rival, (plays, most) in rivals.items():
            if {mine, *plays} <= done.keys():
                times = value_of(done[mine], "act") / min(value_of(done[each], "act") for each in plays)
                report.check(f"{name}_over_{rival}", times, limit=most, better="lower")


def main(argv: Sequence[str] | None = None) -> int:
    flags = parser("paper", parts=True)
    flags.add_argument("--out", type=Path, default=ROOT / "out" / "paper", help="where index.html is written")
    flags.add_argument("--full", action="store_true", help="five seeds and their 95 %% intervals: an hour at most")
    flags.add_argument("--row", default="", help="what the names of the windows begin with that `windows` plays")
    options = flags.parse_args(argv)
    report = BenchReport("paper")
    drawn = figures(options.quick)
    chosen = frozenset(filter(None, options.only.split(","))) or drawn.keys()
    if unknown := sorted(set(chosen) - drawn.keys() - PARTS.keys()):
        known = ", ".join([*drawn, *PARTS])
        raise SystemExit(f"--only: no figure or part is named {', '.join(unknown)}; known are {known}")
    drawn = {name: each for name, each in drawn.items() if name in chosen}
    options.only = ""
    parts: dict[str, Callable[[], object]] = {}
    if drawn:
        parts["figures"] = lambda: play_figures(report, drawn, options.out, quick=options.quick, full=options.full)
    for name in [name for name in PARTS if name in chosen]:
        parts[name] = lambda name=name: PARTS[name](report)  # type: ignore[misc]
    if "windows" in parts:
        parts["windows"] = lambda: window_figures(report, count=1 if options.quick else None, row=options.row)
    status = play(report, options, parts)
    return 0 if options.quick else status


if __name__ == "__main__":
    sys.exit(main())
