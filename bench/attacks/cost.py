"""What a reward costs: with the strongest settings over the plain ones, and in this tree over an older one.

``python -m bench.attacks.cost [--provider process|container] [--before TREE] [--quick] [--json]``. TREE is a checkout
of another commit. Both trees grade the same right solution of one test, in turns, each in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from bench.attacks.play import FRESH, SAME, graded, play
from bench.attacks.rewards import LISTED, NOTHING, PROJECT, TEST
from bench.inputs import OWN_PATH
from bench.report import BenchReport, median, parser
from manager.function import FunctionSpec, SandboxSpec
from runtimes.sandbox.environments import Environments, EnvironmentSettings
from runtimes.sandbox.provider import ProviderSettings, make_provider

SPEC = SandboxSpec(image="tangram-base:bookworm", memory_bytes=256 * 2**20, pids=512)
#: Plain, and with the strongest settings.
FUNCTIONS = {"plain": SAME, "strongest": FRESH}
ROUNDS, ROUNDS_QUICK = 40, 3
TREE = Path(__file__).resolve().parents[2]


async def solved(environments: Environments) -> Callable[[FunctionSpec], Awaitable[float]]:
    """Have an agent solve the task; return what grades it once more, and returns the seconds that it took."""
    value = await play(NOTHING[1], environments, SPEC, SAME, trajectory="timed", solved=True)
    assert value["reward"] == 1.0
    given = {"fail_to_pass": [LISTED], "tests": {TEST: PROJECT[TEST]}}

    async def timed(function: FunctionSpec) -> float:
        began_s = time.perf_counter()
        value = await graded(environments, function, "timed", given)
        took_s = time.perf_counter() - began_s
        assert value["reward"] == 1.0, value
        return took_s

    return timed


async def serve(kind: str) -> None:
    """Grade by the function that each line of standard input names, and print the seconds."""
    with tempfile.TemporaryDirectory(prefix="tangram-cost-") as place:
        await asyncio.to_thread(Path(place).chmod, 0o755)
        path = OWN_PATH if kind == "process" else ""
        provider = make_provider(ProviderSettings(kind=kind, state_dir=Path(place) / "state", path=path))  # type: ignore[arg-type]
        async with AsyncExitStack() as stack:
            stack.push_async_callback(provider.close)
            environments = Environments(provider, EnvironmentSettings(default=SPEC))
            stack.push_async_callback(environments.close)
            timed = await solved(environments)
            while name := (await asyncio.to_thread(sys.stdin.readline)).strip():
                print(f"took {await timed(FUNCTIONS[name])}", flush=True)


def measure(report: BenchReport, kinds: list[str], before: str, rounds: int) -> None:
    """Grade in turns in each kind of sandboxes, by each function and in each tree."""
    trees = {"now": str(TREE), **({"before": before} if before else {})}
    for kind in kinds:
        servers = {
            name: subprocess.Popen(
                [sys.executable, __file__, "--serve", kind],
                cwd=tree,
                env={"PATH": OWN_PATH, "PYTHONPATH": tree},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name, tree in trees.items()
        }
        took: dict[str, list[float]] = {f"{function}_{tree}": [] for function in FUNCTIONS for tree in trees}
        for _ in range(rounds + 1):
            for function in FUNCTIONS:
                for tree, server in servers.items():
                    took[f"{function}_{tree}"].append(_answer(server, function))
        for server in servers.values():
            server.communicate()
        took = {name: times[1:] for name, times in took.items()}  # the first brings what stays
        for name, times in took.items():
            report.figure(f"reward_p50_ms_{kind}_{name}", round(median(times) * 1e3, 1))
        pairs = {"strongest_over_plain": ("strongest_now", "plain_now")}
        if before:
            pairs |= {f"{each}_over_before": (f"{each}_now", f"{each}_before") for each in FUNCTIONS}
        for name, (one, other) in pairs.items():
            ratios = [one_s / other_s for one_s, other_s in zip(took[one], took[other], strict=True)]
            report.figure(f"{name}_{kind}", round(median(ratios), 3))


def _answer(server: subprocess.Popen[str], function: str) -> float:
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(function + "\n")
    server.stdin.flush()
    while not (line := server.stdout.readline()).startswith("took "):
        assert line, "a tree's server has ended"
    return float(line.split()[1])


def main() -> int:
    flags: argparse.ArgumentParser = parser("attacks.cost")
    flags.add_argument("--provider", choices=("process", "container"), help="both by default")
    flags.add_argument("--before", default="", metavar="TREE", help="a checkout of the commit to compare with")
    flags.add_argument("--serve", help=argparse.SUPPRESS)
    given = flags.parse_args()
    if given.serve:
        asyncio.run(serve(given.serve))
        return 0
    report = BenchReport("attacks.cost")
    kinds = [given.provider] if given.provider else ["process", "container"]
    rounds = ROUNDS_QUICK if given.quick else ROUNDS
    return report.run(lambda: measure(report, kinds, given.before, rounds), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
