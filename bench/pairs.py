"""Two checkouts in turn: whether a change made anything slower, as the median of paired ratios.

``python -m bench.pairs --before DIRECTORY [--after DIRECTORY] [--pairs 20] [--only startup,scheduler] [--json]`` runs
each part on one checkout and then on the other, the order changing from pair to pair, so that a machine whose speed
drifts does not decide. A ratio above 1 means that the later checkout is worse, whichever side is the better one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from bench.report import BenchReport, median, parser

#: Worse than this, a check has become slower.
LIMIT = 1.05
#: Seconds that one run of a part may take.
RUN_S = 300.0
START_S = 120.0
POLL_S = 0.002
CONFIG = """
version: 1
server: {{state_dir: {directory}/state, port: {port}, grpc_port: 0}}
sandbox: {{provider: process}}
functions:
  shell: {{runtime: exec, cost: {{cpu: 1}}}}
"""

#: Name of a value -> the value, and whether a lower one is better.
Values = Mapping[str, tuple[float, bool]]
Part = Callable[[Path], Values]


def main() -> int:
    flags = parser("pairs")
    flags.add_argument("--before", type=Path, required=True, help="checkout of the earlier commit")
    flags.add_argument("--after", type=Path, default=Path.cwd(), help="checkout of the later one; this directory")
    flags.add_argument("--pairs", type=int, default=20, help="runs of each part on each checkout")
    flags.add_argument("--only", default=",".join(PARTS), help=f"comma-separated parts: {', '.join(PARTS)}")
    given = flags.parse_args()
    report = BenchReport("pairs")
    for name in given.only.split(","):
        compare(name, PARTS[name], given, report)
    return report.print(as_json=given.json)


def compare(name: str, part: Part, given: argparse.Namespace, report: BenchReport) -> None:
    """Run one part on both checkouts, and record the median ratio of each of its values."""
    ratios: dict[str, list[float]] = {}
    lost = 0
    for index in range(given.pairs):
        order = (given.before, given.after) if index % 2 == 0 else (given.after, given.before)
        try:
            measured = {checkout: part(checkout.resolve()) for checkout in order}
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            lost += 1
            print(f"{name}: pair {index + 1} was lost: {error}", file=sys.stderr)
            continue
        for key, (before, lower) in measured[given.before].items():
            after = measured[given.after].get(key)
            if after is not None:
                ratios.setdefault(key, []).append(_ratio(*((after[0], before) if lower else (before, after[0]))))
        print(f"{name}: pair {index + 1} of {given.pairs}", file=sys.stderr)
    for key, found in ratios.items():
        report.figure(f"{name}_{key}_pairs", len(found))
        report.check(f"{name}_{key}_worse", median(found), limit=LIMIT, better="lower")
    if lost:
        report.note(f"{name}: {lost} of {given.pairs} pairs were lost")
    if not ratios:
        report.check(f"{name}_ran", 0, limit=1, better="higher")


def _ratio(worse_if_high: float, base: float) -> float:
    """Return the ratio of two values; nothing out of nothing is 1, something out of nothing is infinite."""
    if base == 0:
        return 1.0 if worse_if_high == 0 else math.inf
    return worse_if_high / base


def startup(checkout: Path) -> Values:
    """Seconds from the start of ``tangram serve`` to its first answer on /healthz."""
    with tempfile.TemporaryDirectory(prefix="tangram-pairs-") as directory:
        port = _free_port()
        config = Path(directory) / "tangram.yaml"
        config.write_text(CONFIG.format(directory=directory, port=port), encoding="utf-8")
        began_s = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", str(config)],
            cwd=checkout,
            env=_environment(checkout),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                while not _answers(port):
                    if process.poll() is not None or time.monotonic() - began_s > START_S:
                        raise ValueError(f"the gateway of {checkout} did not start")
                    time.sleep(POLL_S)
                return {"s": (time.monotonic() - began_s, True)}
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(timeout=START_S)


def bench(module: str, *options: str) -> Part:
    """The checks of a bench, run as a program in the checkout."""

    def part(checkout: Path) -> Values:
        ran = subprocess.run(
            [sys.executable, "-m", f"bench.{module}", "--json", *options],
            cwd=checkout,
            env=_environment(checkout),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=RUN_S,
            check=False,  # a check of the bench that does not hold is not our question
        )
        return _checks(ran.stdout.splitlines())

    return part


def _checks(lines: Sequence[bytes]) -> Values:
    if not lines:
        raise ValueError("it printed nothing")
    body = cast(dict[str, list[dict[str, object]]], json.loads(lines[-1]))
    return {
        str(check["name"]): (float(cast(float, check["value"])), check["better"] == "lower")
        for check in body["checks"]
        if check["value"] is not None
    }


def _environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout)}


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


PARTS: Mapping[str, Part] = {
    "startup": startup,
    "scheduler": bench("scheduler"),
    "gateway": bench("gateway", "--quick"),
    "sandbox": bench("sandbox", "--quick"),
}


if __name__ == "__main__":
    sys.exit(main())
