"""What a pytest worker costs, on real suites: the measurement from which the cap on workers is chosen.

A malleable suite starts more workers than it has cores, in order to use cores that it is given later. Each worker
imports the suite once more, and xdist's controller talks to each: this bench says how many CPU seconds that is, and
what a run with 1.5 times as many workers as cores loses against one with as many.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.inputs import OWN_PATH
from bench.report import BenchReport, Figure, arguments, median
from manager.action import Action
from manager.executor import Call
from manager.function import FunctionSpec, PytestSpec, SandboxSpec
from manager.lease import Grant, Lease
from runtimes.runtime import Execution
from runtimes.sandbox.environments import Environments, EnvironmentSettings
from runtimes.sandbox.provider import ProviderSettings, make_provider
from runtimes.sandbox.pytest.runtime import PytestRuntime
from scripts.swe_task import download, files_of, unpack

#: Requirement -> what is run of it.
SUITES = {"lark==1.3.1": ["tests"], "more-itertools==11.2.1": ["tests"]}
#: (cores, workers)
WIDTHS = ((1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (2, 4))
FUNCTION = FunctionSpec(
    name="suite",
    runtime="pytest",
    timeout_s=600.0,
    pytest=PytestSpec(
        args=("-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:asyncio", "-p", "no:anyio")
    ),
)
SPEC = SandboxSpec(memory_bytes=2 * 2**30, disk_bytes=4 * 2**30)


class DiscardedLog:
    """A log that keeps nothing."""

    def write(self, stream: str, data: str) -> None:
        pass

    def omit(self, size_bytes: int) -> None:
        pass


def generated(tests: int = 60, spin: int = 1_000_000) -> Iterator[tuple[str, bytes]]:
    """A suite that is nothing but work: what xdist itself costs shows best here."""
    source = (
        f"import pytest\n@pytest.mark.parametrize('n', range({tests}))\ndef test_spin(n):\n"
        f"    assert sum(i * i for i in range({spin})) > n\n"
    )
    yield "test_spin.py", source.encode()


async def run_once(
    runtime: PytestRuntime, trajectory: str, targets: list[str], cores: int, workers: int
) -> tuple[float, float]:
    """Seconds of one run, and its CPU seconds."""
    ids = tuple(sorted(os.sched_getaffinity(0))[:cores])
    lease = Lease(action_id="b", node="local", grants={"cpu": Grant(pool="cpu:local", units=cores, cores=ids)})
    action = Action(id="b", function="suite", trajectory=trajectory, timeout_s=FUNCTION.timeout_s)
    value = {"targets": targets, "workers": workers}
    execution = Execution(action=action, lease=lease, call=Call(function=FUNCTION, input=value, log=DiscardedLog()))
    result = await runtime.execute(execution)
    assert isinstance(result.value, dict) and result.value["tests"], f"nothing ran: {result.value}"
    return execution.execution_s, result.usage["cpu_s"]


async def measure_suite(
    runtime: PytestRuntime, environments: Environments, name: str, root: Path | None, rounds: int
) -> dict[str, dict[str, float]]:
    """Median seconds and CPU seconds of each width, the rounds interleaved."""
    sandbox = await environments.ensure(name, SPEC)
    for path, data in generated() if root is None else files_of(root):
        await sandbox.write_file(path, data)
    targets = SUITES.get(name, ["."])
    await run_once(runtime, name, targets, 1, 1)  # compiles what is imported
    runs: dict[tuple[int, int], list[tuple[float, float]]] = {width: [] for width in WIDTHS}
    for _ in range(rounds):
        for cores, workers in WIDTHS:
            if cores <= len(os.sched_getaffinity(0)):
                runs[cores, workers].append(await run_once(runtime, name, targets, cores, workers))
    await environments.end(name)
    return {
        f"{cores} cores, {workers} workers": {
            "seconds": median([seconds for seconds, _ in found]),
            "cpu_s": median([cpu_s for _, cpu_s in found]),
        }
        for (cores, workers), found in runs.items()
        if found
    }


def conclude(report: BenchReport, name: str, widths: dict[str, dict[str, float]]) -> None:
    """The figures that the cap is chosen from; needs two cores."""
    if "2 cores, 4 workers" not in widths:
        return
    one, two, three, four = (widths[f"2 cores, {workers} workers"] for workers in (1, 2, 3, 4))
    report.figure(
        f"{name}: conclusions",
        {
            "speedup_2": widths["1 cores, 1 workers"]["seconds"] / two["seconds"],
            "first_worker_cpu_s": (two["cpu_s"] - one["cpu_s"]) / 2,
            "further_worker_cpu_s": (four["cpu_s"] - two["cpu_s"]) / 2,
            "three_workers_over_two": three["seconds"] / two["seconds"],
            "two_workers_on_one_core_over_one": (
                widths["1 cores, 2 workers"]["seconds"] / widths["1 cores, 1 workers"]["seconds"]
            ),
        },
    )


async def measure(report: BenchReport, *, quick: bool) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        provider = make_provider(ProviderSettings(kind="process", state_dir=directory / "state", path=OWN_PATH))
        environments = Environments(provider, EnvironmentSettings(default=SPEC))
        runtime = PytestRuntime(environments)
        for name in ("generated", *(() if quick else SUITES)):
            try:
                root = None if name == "generated" else unpack(download(name, directory), directory / name)
            except RuntimeError as error:
                report.note(f"{name} left out: {error}")
                continue
            widths = await measure_suite(runtime, environments, name, root, rounds=1 if quick else 2)
            figures: dict[str, Figure] = {width: dict(values) for width, values in widths.items()}
            report.figure(name, figures)
            conclude(report, name, widths)
        await environments.close()
        await provider.close()


def main() -> int:
    options = arguments("pytest_width")
    report = BenchReport("pytest_width")
    asyncio.run(measure(report, quick=options.quick))
    return report.print(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
