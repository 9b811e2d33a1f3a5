"""Two checkouts in turns: whether a change made a bench's checks worse, as the median of paired ratios.

``python -m bench.pairs --before DIRECTORY [--pairs 20] [--only scheduler,gateway] [-- OPTIONS]`` runs each bench in
one checkout and then in the other, the order changing from pair to pair, so that a machine whose speed drifts does not
decide. A ratio above 1 means that the later checkout is worse, whichever side is the better one. What follows ``--`` is
handed to the benches besides ``--json``; ``--quick`` without it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from bench.report import BenchReport, median, parser, play

#: Worse than this, a check has become slower; and seconds that one run of a bench may take.
LIMIT, RUN_S = 1.05, 600.0
BENCHES = ("scheduler", "gateway", "sandbox", "durable", "cluster", "attacks")
#: Name of a check -> its value, and whether a lower one is better.
Values = Mapping[str, tuple[float, bool]]


def main(argv: Sequence[str] | None = None) -> int:
    flags = parser("pairs", parts=True)
    flags.add_argument("--before", type=Path, required=True, help="checkout of the earlier commit")
    flags.add_argument("--after", type=Path, default=Path.cwd(), help="checkout of the later one; this directory")
    flags.add_argument("--pairs", type=int, default=20, help="runs of each bench in each checkout")
    flags.add_argument("options", nargs="*", default=["--quick"], help="of the benches, after --")
    given = flags.parse_args(argv)
    report = BenchReport("pairs")
    return play(report, given, {name: partial(compare, report, name, given) for name in BENCHES})


def compare(report: BenchReport, name: str, given: argparse.Namespace) -> None:
    """Run one bench in both checkouts by turns, and record the median ratio of each of its checks."""
    ratios: dict[str, list[float]] = {}
    for index in range(given.pairs):
        order = (given.before, given.after) if index % 2 == 0 else (given.after, given.before)
        try:
            measured = {checkout: values(name, checkout.resolve(), given.options) for checkout in order}
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            report.note(f"{name}: pair {index + 1} was lost: {error}")
            continue
        for key, (before, lower) in measured[given.before].items():
            after = measured[given.after].get(key)
            if after is not None:
                ratios.setdefault(key, []).append(_ratio(*((after[0], before) if lower else (before, after[0]))))
        report.figure(f"{name}_so_far", {key: median(found) for key, found in ratios.items()})
        report.progress(f"{name}: pair {index + 1} of {given.pairs}")
        report.keep()
    for key, found in ratios.items():
        report.check(f"{name}_{key}_worse", median(found), limit=LIMIT, better="lower")
    if not ratios:
        report.missing(name, "no pair came to an end")


def _ratio(worse_if_high: float, base: float) -> float:
    """Return the ratio of two values; nothing out of nothing is 1, something out of nothing is infinite."""
    if base == 0:
        return 1.0 if worse_if_high == 0 else math.inf
    return worse_if_high / base


def values(name: str, checkout: Path, options: Sequence[str]) -> Values:
    """The checks of a bench, run as a program in the checkout; raises ValueError where it printed none."""
    ran = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", "--json", *options],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=RUN_S,
        check=False,  # a check of the bench that does not hold is not our question
    )
    lines = ran.stdout.splitlines()
    if not lines:
        raise ValueError("it printed nothing")
    return {
        str(check["name"]): (float(check["value"]), check["better"] == "lower")
        for check in json.loads(lines[-1])["checks"]
        if check["value"] is not None
    }


if __name__ == "__main__":
    sys.exit(main())
