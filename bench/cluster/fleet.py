"""A real gateway and many nodes: how long a thousand take to join, what their beats cost, and what a loss costs."""

from __future__ import annotations

import asyncio
import json
import resource
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import yaml

from bench.cluster.channel import stub_node
from bench.cluster.children import child
from bench.report import BenchReport
from gateway.app import App, gateway
from gateway.config.load import load
from tangram import AsyncClient

TOKEN = "bench-bench-bench"
JOIN_S, END_S = 120.0, 120.0
LOOK_S = 0.001
#: Nodes of the run in which one is lost, actions in flight, and seconds that each takes.
NODES, AT_ONCE, ACTION_S = 3, 48, 0.1
LOST_AFTER_S = 2.0
#: Actions that wait while a machine joins, and the cores of the machine that was there and of those that join.
WAITING, SMALL, LARGE = 1000, 1, 16


def document(directory: Path, **cluster: object) -> dict[str, object]:
    """A gateway that only schedules."""
    shell = {"runtime": "exec", "cost": {"cpu": 1}, "timeout": "1m", "queue_timeout": "5m", "idempotent": True}
    return {
        "version": 1,
        "server": {"token": TOKEN, "port": 0, "grpc_port": 0, "state_dir": str(directory / "state")},
        "cluster": {"listen": "127.0.0.1:0", "local": "none", **cluster},
        "functions": {"shell": shell},
    }


@asynccontextmanager
async def serving(directory: Path, written: Mapping[str, object]) -> AsyncIterator[App]:
    """A gateway on this loop."""
    config = directory / "tangram.yaml"
    config.write_text(yaml.safe_dump(dict(written)))
    async with gateway(load([config], {})) as app:
        server = asyncio.create_task(app.serve())
        try:
            yield app
        finally:
            app.stop()
            await server


def ready(app: App) -> int:
    """How many nodes serve."""
    return app.machines.serving


async def until_ready(app: App, count: int, look_s: float) -> float:
    """Wait until so many nodes serve; return when that was."""
    async with asyncio.timeout(JOIN_S):
        while ready(app) < count:  # noqa: ASYNC110
            await asyncio.sleep(look_s)
    return time.monotonic()


async def until_able(app: App, name: str) -> None:
    """Wait until a node is able to run the function."""
    async with asyncio.timeout(JOIN_S):
        while not [each for each in app.machines.info().nodes if each.node == name and each.able]:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)


async def crowd(report: BenchReport, count: int, seconds: float) -> None:
    """Many agents join at once, and beat."""
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as place:
        directory = Path(place)
        written = document(directory, handshakes_max=256)
        async with serving(directory, written) as app:
            tickets = {f"n{number}": app.machines.ticket(f"n{number}") for number in range(count)}
            host, _, port = next(iter(tickets.values())).gateway.rpartition(":")
            given = json.dumps({"tickets": {name: each.ticket for name, each in tickets.items()}}) + "\n"
            cpu_s = time.process_time()
            async with child("-m", "bench.cluster.stub_agents", host, port) as agents:
                assert agents.stdin is not None
                await asyncio.sleep(1.0)  # its interpreter has started: what is measured is the joining
                began_s = time.monotonic()
                agents.stdin.write(given.encode())
                ended_s = await until_ready(app, count, 0.05)
                report.figure("join_cpu_s", round(time.process_time() - cpu_s, 3))
                name = "join_1000_s" if count == 1000 else f"join_{count}_s"
                limit = 3.0 * count / 1000
                report.check(name, round(ended_s - began_s, 3), limit, "lower")
                await _beats(report, count, seconds)
                assert ready(app) == count, "some are gone again"


async def _beats(report: BenchReport, count: int, seconds: float) -> None:
    """What it takes this process to be heard by and to hear them all, once a second."""
    await asyncio.sleep(2.0)  # what joining still leaves to do
    began_s, spent_s = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    share = (time.process_time() - spent_s) / (time.monotonic() - began_s)
    report.check(f"beats_{count}_core_share", round(share, 4), round(0.06 * count / 1000, 4), "lower")
    report.figure("rss_max_mb", round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


async def losses(report: BenchReport, actions: int) -> None:
    """The first lease on a node that joins while many wait, and idempotent actions while one of three is killed."""
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as place:
        directory = Path(place)
        written = document(directory, lost_after=f"{LOST_AFTER_S}s", beat="200ms", silent="1s")
        async with serving(directory, written) as app, AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncClient(f"http://127.0.0.1:{app.http_port}", token=TOKEN))
            await started_node(stack, app, directory, "n0", SMALL)
            await until_ready(app, 1, 0.05)
            await client.invoke("shell", {"command": "true"})
            given = {"command": f"sleep {ACTION_S}"}
            waiting = await asyncio.gather(*[client.submit("shell", given) for _ in range(WAITING)])
            joining = await started_node(stack, app, directory, "n1", LARGE)
            ready_s = await until_ready(app, 2, LOOK_S)
            assert joining.stdout is not None
            begun_s = float(await asyncio.wait_for(joining.stdout.readline(), JOIN_S))
            report.check("first_lease_after_join_ms", round((begun_s - ready_s) * 1e3, 2), 100.0, "lower")
            await asyncio.gather(*[client.wait(each.id) for each in waiting])
            victim = await started_node(stack, app, directory, "n2", LARGE)
            await until_able(app, "n2")
            states, repeated = await _killed_in_the_middle(client, app, victim, actions)
    report.figure("node_loss", {**states, "run_elsewhere": repeated})
    lost = sum(number for state, number in states.items() if state != "succeeded")
    report.check("node_loss_lost_idempotent", lost, 0, "lower")


async def started_node(
    stack: AsyncExitStack, app: App, directory: Path, name: str, cores: int
) -> asyncio.subprocess.Process:
    """A daemon whose actions do nothing, which joins a gateway and is killed with the stack."""
    ticket = app.machines.ticket(name)
    host, _, port = ticket.gateway.rpartition(":")
    words = stub_node((host, port), ticket.fingerprint, name, ticket.ticket, directory, cores)
    return await stack.enter_async_context(child(*words))


async def _killed_in_the_middle(
    client: AsyncClient, app: App, victim: asyncio.subprocess.Process, actions: int
) -> tuple[Counter[str], int]:
    """Idempotent actions on all nodes; one of those is killed when a third has ended.

    Return how they ended, and how many had to run elsewhere.
    """
    gate, states, repeated = asyncio.Semaphore(AT_ONCE), Counter[str](), list[str]()
    third = asyncio.Event()

    async def one(number: int) -> None:
        async with gate:  # of seven lengths, so that some run at any time
            result = await client.invoke("shell", {"command": f"sleep {ACTION_S * (1 + number % 7)}"})
        states[result.state] += 1
        repeated.extend([result.id] if result.attempts else [])
        if states.total() >= actions // 3:
            third.set()

    async def kill() -> None:
        await third.wait()
        while app.engine.held_on("n2")[0] == 0 and states.total() < actions:  # noqa: ASYNC110  # it has nothing to lose
            await asyncio.sleep(LOOK_S)
        victim.kill()

    async with asyncio.timeout(END_S):
        await asyncio.gather(*[one(number) for number in range(actions)], kill())
    if not repeated:
        raise RuntimeError("the killed node had nothing to lose: nothing was measured")
    return states, len(repeated)
