"""What user namespaces and the filter of system calls cost: the same sandbox with both and without, in turn.

`python -m bench.isolation` as root, with bubblewrap. A pair is one measurement of each, the order drawn anew; a figure
is the median of the pairs' ratios, isolated over plain.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from bench.report import BenchReport, arguments, median
from manager.function import SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.creation_gate import CreationGate
from runtimes.sandbox.process.ids import IdBlocks, IdSettings
from runtimes.sandbox.process.means import Means
from runtimes.sandbox.process.provider import ProcessProvider
from runtimes.sandbox.sandbox import Sandbox

PAIRS, QUICK_PAIRS = 200, 20
SPEC = SandboxSpec(pids=512)
#: What is run in a sandbox that lives: the cheapest command, one that makes processes, and one that makes calls.
COMMANDS = {
    "true": Command(argv=("/usr/bin/true",)),
    "100 processes": Command(shell="for i in $(seq 100); do /usr/bin/true; done"),
    "20,000 files": Command(argv=("python3", "-c", "import os\nfor i in range(20000): os.stat('/usr')")),
}
Once = Callable[[], Awaitable[None]]


async def ratios(isolated: Once, plain: Once, pairs: int) -> tuple[float, float, float]:
    """Return the median of the ratios, and the medians of both in seconds."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs):
        for which in random.sample((0, 1), 2):
            begun_s = time.perf_counter()
            await (isolated, plain)[which]()
            taken[which].append(time.perf_counter() - begun_s)
    return median([one / other for one, other in zip(*taken, strict=True)]), median(taken[0]), median(taken[1])


async def runner_isolated_over_plain(
    isolated: ProcessProvider, plain: ProcessProvider, pairs: int
) -> dict[str, tuple[float, float, float]]:
    """Return by command what `ratios` returns of it in two sandboxes that live."""
    sandboxes = [await each.create(SPEC, name="bench", labels={}, mounts={}) for each in (isolated, plain)]

    def run(sandbox: Sandbox, command: Command) -> Once:
        async def once() -> None:
            assert (await sandbox.run(command)).exit_code == 0

        return once

    try:
        return {
            name: await ratios(
                run(sandboxes[0], command), run(sandboxes[1], command), pairs if name == "true" else max(20, pairs // 5)
            )
            for name, command in COMMANDS.items()
        }
    finally:
        for sandbox in sandboxes:
            await sandbox.close()


async def start_isolated_over_plain(
    isolated: ProcessProvider, plain: ProcessProvider, pairs: int
) -> tuple[float, float, float]:
    """Return what `ratios` returns of making a sandbox and removing it."""
    made = 0

    def start(provider: ProcessProvider) -> Once:
        async def once() -> None:
            nonlocal made
            made += 1
            await (await provider.create(SPEC, name=f"bench-{made}", labels={}, mounts={})).close()

        return once

    return await ratios(start(isolated), start(plain), pairs)


async def measure(report: BenchReport, pairs: int) -> None:
    found = Means.discover(IdBlocks(IdSettings()))
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as scratch:
        gate, cores = CreationGate(1), tuple(sorted(os.sched_getaffinity(0)))
        isolated = ProcessProvider(state_dir=Path(scratch, "isolated"), gate=gate, shared_cores=cores, means=found)
        bare = replace(found, ids=None)
        plain = ProcessProvider(
            state_dir=Path(scratch, "plain"), gate=gate, shared_cores=cores, means=bare, seccomp="none"
        )
        rows = await runner_isolated_over_plain(isolated, plain, pairs)
        rows["start and removal"] = await start_isolated_over_plain(isolated, plain, max(20, pairs // 5))
        report.figure(
            "isolated over plain",
            {
                name: {"ratio": ratio, "isolated_ms": on * 1e3, "plain_ms": off * 1e3}
                for name, (ratio, on, off) in rows.items()
            },
        )
        report.check("runner_isolated_over_plain_p50", rows["true"][0], limit=1.05, better="lower")
        await isolated.close()
        await plain.close()


def main() -> int:
    chosen = arguments("isolation")
    report = BenchReport("isolation")
    if os.geteuid() != 0:
        report.note("left out: only root gives sandboxes user namespaces of their own")
    else:
        asyncio.run(measure(report, QUICK_PAIRS if chosen.quick else PAIRS))
    return report.print(as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
