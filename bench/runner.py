"""The resident runner under its fuzzer: ``python -m bench.runner --json``; a minute, five seeds.

Every answer is compared with a model (`tests.runtimes.sandbox.runner.fuzzer`). A seed ends with its first finding.
"""

from __future__ import annotations

import asyncio
import sys
import time

from bench.report import BenchReport, parser
from tests.runtimes.sandbox.runner.fuzzer import Findings, fuzz

SECONDS, QUICK_S = 60.0, 5.0
SEEDS, QUICK_SEEDS = 5, 1


def main() -> int:
    options = parser("runner")
    options.add_argument("--seconds", type=float, help="for all seeds together")
    options.add_argument("--seed", type=int, default=1, help="the first one")
    given = options.parse_args()
    seconds = given.seconds or (QUICK_S if given.quick else SECONDS)
    seeds = range(given.seed, given.seed + (QUICK_SEEDS if given.quick else SEEDS))
    report, all_found, started_s = BenchReport("runner"), Findings(), time.monotonic()
    for seed in seeds:
        found = asyncio.run(fuzz(seed, seconds / len(seeds)))
        all_found.add(found)
        for told in [*found.wrong, *found.deaths]:
            report.note(f"seed {seed}: {told}")
    report.figure("seeds", len(seeds))
    report.figure("exchanges", all_found.exchanges)
    report.figure("gateways_cut_off", all_found.cuts)
    report.figure("seconds", round(time.monotonic() - started_s, 1))
    report.check("wrong_answers", len(all_found.wrong), limit=0, better="lower")
    report.check("runner_deaths", len(all_found.deaths), limit=0, better="lower")
    report.check("descriptors_left", all_found.descriptors_left, limit=0, better="lower")
    report.check("processes_left", all_found.processes_left, limit=0, better="lower")
    return report.print(as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
