"""The simulator held against this machine: real rollouts, their trace as `tangram trace export` has it, and its replay.

Three mixes run against a real gateway with real sandboxes: commands that compute, suites of tests that take more than
one core, and calls under a quota. What the scheduler had to wait for, and in which order it began, comes from the
simulator alone; durations, overheads and pauses are the measured ones.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench.report import BenchReport, Figure, percentile
from bench.serving import GATEWAY, IMAGE, TOKEN, process
from gateway.cli.simulate import recorded
from gateway.config.load import load
from gateway.limits import describe
from manager.simulation.simulate import Size, simulate
from manager.simulation.simulator import Learning, SimulatedAction
from manager.simulation.workloads import Workload
from tangram import AsyncClient, InvocationResult

SEED = 11
#: Seconds within which trajectories begin anew.
MIX_S = 45.0
#: Trajectories at once.
COMMANDS, SUITES, SEARCHES = 8, 6, 12
CALL_S = 0.05
#: Further invocations than a mix can have.
RECORDS_MAX = 10000
CONFIG = """
version: 1
server: {{state_dir: {directory}/state, port: 0, grpc_port: 0, token: bench-bench-bench}}
sandbox: {{image: "{image}", memory: 128Mi}}
resources: {{searches: {{kind: quota, limit: 10, period: 1s}}}}
functions:
  shell: {{runtime: exec, cost: {{cpu: 1}}}}
  suite:
    runtime: pytest
    cost: {{cpu: {{min: 1, max: 2}}}}
    pytest: {{args: ["-p", "no:cacheprovider"]}}
  search:
    runtime: api
    request: {{method: GET, url: "http://127.0.0.1:{port}/"}}
    cost: {{searches: 1}}
"""
BURN = "import time; end = time.process_time() + {seconds}\nwhile time.process_time() < end: pass"
TESTS = """import time
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_it(number):
    end = time.process_time() + {seconds}
    while time.process_time() < end:
        pass
"""
Rollout = Callable[[AsyncClient, str, random.Random], Awaitable[None]]


async def commands(client: AsyncClient, trajectory: str, draw: random.Random) -> None:
    """Commands that compute, with generation between them."""
    for _ in range(draw.randint(4, 12)):
        await asyncio.sleep(draw.lognormvariate(0.0, 0.5))
        seconds = min(2.0, draw.lognormvariate(-2.0, 0.8))
        await client.invoke("shell", {"argv": ["python3", "-c", BURN.format(seconds=seconds)]}, trajectory=trajectory)


async def suites(client: AsyncClient, trajectory: str, draw: random.Random) -> None:
    """Commands, and then a suite of tests as the reward."""
    for _ in range(draw.randint(1, 3)):
        await asyncio.sleep(draw.lognormvariate(0.3, 0.5))
        await client.invoke("shell", {"command": "true"}, trajectory=trajectory)
    tests = TESTS.format(count=draw.randint(4, 12), seconds=round(draw.uniform(0.05, 0.2), 3))
    await client.invoke("suite", {"tests": {"test_it.py": tests}}, trajectory=trajectory)


async def searches(client: AsyncClient, trajectory: str, draw: random.Random) -> None:
    """Calls of a service that may begin ten in a second."""
    for _ in range(draw.randint(4, 12)):
        await asyncio.sleep(draw.lognormvariate(-0.2, 0.5))
        await client.invoke("search", {}, trajectory=trajectory)


#: The mixes: how many trajectories at once, and what each does.
MIXES: dict[str, tuple[int, Rollout]] = {
    "commands": (COMMANDS, commands),
    "suites": (SUITES, suites),
    "searches": (SEARCHES, searches),
}


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each request on a connection after a while."""
    try:
        while await reader.readuntil(b"\r\n\r\n"):
            await asyncio.sleep(CALL_S)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
    except (OSError, EOFError):
        writer.close()


@dataclass(frozen=True, slots=True)
class TimedStart:
    """When an action began, and how long it took in all, in seconds."""

    key: tuple[str, int]
    start_s: float
    act_s: float


async def _recorded(mix: str, seconds: float, directory: Path) -> tuple[list[InvocationResult], dict[str, Any]]:
    """Play a mix on a gateway of its own; return what it recorded, and its functions."""
    upstream = await asyncio.start_server(_answer, "127.0.0.1", 0)
    config = directory / "tangram.yaml"
    config.write_text(CONFIG.format(directory=directory, image=IMAGE, port=upstream.sockets[0].getsockname()[1]))
    at_once, rollout = MIXES[mix]
    async with (
        upstream,
        process(GATEWAY, str(config), ending=signal.SIGINT) as server,
        AsyncClient(f"http://127.0.0.1:{server.port}", token=TOKEN) as client,
    ):
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + seconds

        async def slot(number: int) -> None:
            draw, played = random.Random(SEED * 1000 + number), 0
            while loop.time() < ends_s:
                name = f"{mix}-{number}-{played}"
                await rollout(client, name, draw)
                if mix != "searches":
                    await client.end_trajectory(name)
                played += 1

        await asyncio.gather(*[slot(number) for number in range(at_once)])
        names = [each.name for each in await client.functions()]
        functions = {name: msgspec.to_builtins(await client.function(name)) for name in names}
        records = [each async for each in client.list(limit=RECORDS_MAX)]
    if bad := [each for each in records if each.state != "succeeded"]:
        raise RuntimeError(f"{len(bad)} of {len(records)} did not succeed, as {bad[0]}")
    return records, functions


def _as_recorded(records: Sequence[InvocationResult]) -> list[TimedStart]:
    lanes: dict[str, list[TimedStart]] = {}
    for record in sorted(records, key=lambda each: (_accepted_s(each), each.id)):
        lane = lanes.setdefault(name := record.trajectory or record.id, [])
        lane.append(TimedStart((name, len(lane)), _accepted_s(record) + record.queue_s, record.act_s))
    return list(itertools.chain.from_iterable(lanes.values()))


def _accepted_s(record: InvocationResult) -> float:
    assert record.accepted_at is not None
    return record.accepted_at.timestamp()


def _as_simulated(actions: Sequence[SimulatedAction]) -> list[TimedStart]:
    return [TimedStart((each.trajectory, each.number), each.submitted_s + each.queue_s, each.act_s) for each in actions]


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the share of pairs in the same order less that of those in the other; 1 for the same order."""
    agree = sum(
        (left[0] - right[0]) * (left[1] - right[1]) > 0 for index, left in enumerate(pairs) for right in pairs[:index]
    )
    total = len(pairs) * (len(pairs) - 1) // 2
    return 1.0 if total == 0 else 2 * agree / total - 1


def reality_figures(report: BenchReport, seconds: float = MIX_S, mixes: Sequence[str] = tuple(MIXES)) -> None:
    """Play each mix, then its trace; the worst mix is what is checked."""
    mean_errors, tail_errors, taus = [0.0], [0.0], [1.0]
    for mix in mixes:
        with tempfile.TemporaryDirectory(prefix="tangram-bench-") as name:
            directory = Path(name)
            directory.chmod(0o755)
            records, functions = uvloop.run(_recorded(mix, seconds, directory))
            configured = load([directory / "tangram.yaml"], {}, look=False)
            base = configured.manager_spec((describe(configured),))
        workload = Workload(name=mix, trajectories=tuple(recorded(records, functions)))
        run = simulate(workload, "adaptive", Size(), base=base, knowledge=Learning())
        real, simulated = _as_recorded(records), _as_simulated(run.records)
        started = {each.key: each.start_s for each in simulated}
        figures: dict[str, Figure] = {
            "actions": len(real),
            "tau": kendall_tau([(each.start_s, started[each.key]) for each in real]),
        }
        sides = {"real": [each.act_s for each in real], "simulated": [each.act_s for each in simulated]}
        for side, acts_s in sides.items():
            figures |= {f"{side}_act_s": statistics.fmean(acts_s)}
            figures |= {f"{side}_p{share}_s": percentile(acts_s, share / 100) for share in (50, 90, 99)}
        report.figure(f"reality_{mix}", figures)
        mean_errors.append(_error(figures, "act_s"))
        tail_errors += [_error(figures, f"p{share}_s") for share in (50, 90, 99)]
        taus.append(float(str(figures["tau"])))
        report.progress(f"{mix}: {len(real)} actions, mean off by {mean_errors[-1]:.1%}")
    report.check("reality_mean_error", max(mean_errors), limit=0.05, better="lower")
    report.check("reality_tail_error", max(tail_errors), limit=0.15, better="lower")
    report.check("reality_order_tau", min(taus), limit=0.9, better="higher")


def _error(figures: dict[str, Figure], name: str) -> float:
    return abs(float(str(figures[f"simulated_{name}"])) / float(str(figures[f"real_{name}"])) - 1)
