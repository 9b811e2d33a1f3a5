"""Strains on a gateway: files beside actions, a node that freezes or does not read, strangers at its door.

What each costs the others is measured in the same run with and without it.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from bench.cluster.channel import SHELL, Way, join_words, joined, opened_door
from bench.cluster.children import child
from bench.cluster.fleet import JOIN_S, LOOK_S, document, serving, started_node, until_ready
from bench.report import BenchReport, percentile
from gateway.app import App
from runtimes.node import protocol

#: Bytes of the file, and of one read of it.
FILE_BYTES, PIECE_BYTES = 64 * 2**20, 256 * 2**10
#: Seconds between two looks at the loop: what comes later is lag.
TICK_S = 0.005
#: Strangers, places for them at the door, and seconds for which the loop is watched.
STRANGERS, HANDSHAKES_MAX = 10_000, 64
#: What is sent to a node that does not read, more than it may leave unread.
DEAF_BYTES, DEAF_PIECE = 192 * 2**20, 64 * 2**10
NOTICED_S, STOP_S = 60.0, 30.0


class LoopLag:
    """How late the loop of this process is, and how much of that it worked itself: the rest is the machine's load."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self._worked: list[float] = []

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            began_s, spent_s = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK_S)
            self.found.append((time.perf_counter() - began_s - TICK_S) * 1e3)
            self._worked.append((time.thread_time() - spent_s) * 1e3)

    def figures(self) -> dict[str, float | int]:
        return {
            "max_ms": round(max(self.found), 2),
            "max_worked_ms": round(max(self._worked), 2),
            "p99_ms": round(percentile(self.found, 0.99), 2),
            "looks": len(self.found),
        }


async def files(report: BenchReport, rounds: int) -> None:
    """Commands on a node with and without files of 64 MB that go to and fro beside them, by turns."""
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as place:
        directory = Path(place)
        async with opened_door(directory) as door:
            node = door.expect("node")
            async with child(*join_words(door, directory)) as process:
                await joined(door, "node")
                way = Way("node", node, node.acknowledge)
                for trajectory in ("acts", "files"):
                    await way.act(SHELL, {"argv": ["true"]}, trajectory)
                there = node.files("files")
                assert there is not None

                async def transfer() -> None:
                    await there.write("large", _zeros())
                    async with there.open("large", limit_bytes=2 * FILE_BYTES) as stream:
                        async for _ in stream.chunks():
                            pass

                quiet, loud, transfers = [], [], 0
                for _ in range(max(1, rounds // 50)):
                    quiet += await _acts(way, 50, lambda: True)
                    task = asyncio.create_task(transfer())
                    loud += await _acts(way, 10_000, lambda: not task.done())  # noqa: B023
                    await task
                    transfers += 1
                for trajectory in ("acts", "files"):
                    await node.end_trajectory(trajectory)
                process.terminate()
                async with asyncio.timeout(STOP_S):
                    await process.wait()
    figures: dict[str, float | int] = {"quiet_n": len(quiet), "loud_n": len(loud), "transfers": transfers}
    for name, times in (("quiet", quiet), ("loud", loud)):
        figures |= {
            f"{name}_p50_ms": round(percentile(times, 0.5), 3),
            f"{name}_p99_ms": round(percentile(times, 0.99), 3),
        }
    report.figure("files", dict(figures))
    report.check("file_slowdown_p99", round(percentile(loud, 0.99) / percentile(quiet, 0.99), 3), 2.0, "lower")


async def _acts(way: Way, most: int, go_on: Callable[[], bool]) -> list[float]:
    times: list[float] = []
    while len(times) < most and go_on():
        began_s = time.perf_counter()
        await way.act(SHELL, {"argv": ["true"]}, "acts")
        times.append((time.perf_counter() - began_s) * 1e3)
    return times


async def _zeros() -> AsyncIterator[bytes]:
    for _ in range(FILE_BYTES // PIECE_BYTES):
        yield bytes(PIECE_BYTES)


async def frozen(report: BenchReport, rounds: int) -> None:
    """How long a node that stands still is taken for one that serves, with the bounds as they are by default."""
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as place:
        directory = Path(place)
        async with serving(directory, document(directory)) as app, AsyncExitStack() as stack:
            noticed: list[float] = []
            for number in range(rounds):
                name = f"n{number}"
                process = await started_node(stack, app, directory, name, 1)
                await until_ready(app, 1, LOOK_S)
                await asyncio.sleep(1.0 + 0.37 * number)  # anywhere between two beats
                process.send_signal(signal.SIGSTOP)
                began_s = time.monotonic()
                await _until_state(app, name, "suspect")
                noticed.append(time.monotonic() - began_s)
                process.kill()
    report.figure("frozen_node_noticed", [round(each, 3) for each in noticed])
    report.check("frozen_node_noticed_s", round(max(noticed), 3), 4.0, "lower")


async def _until_state(app: App, name: str, state: str) -> None:
    async with asyncio.timeout(NOTICED_S):
        while not [each for each in app.machines.info().nodes if (each.node, each.state) == (name, state)]:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)


async def strangers(report: BenchReport, count: int, seconds: float) -> None:
    """How late the gateway's loop is while strangers stand at the nodes' door, and a node joins meanwhile."""
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as place:
        directory = Path(place)
        written = document(directory, handshakes_max=HANDSHAKES_MAX, handshake="5s")
        async with serving(directory, written) as app, AsyncExitStack() as stack:
            host, _, port = app.machines.ticket("n0").gateway.rpartition(":")
            quiet, loud = LoopLag(), LoopLag()
            async with quiet.watched():
                await asyncio.sleep(seconds)
            async with child("-m", "bench.cluster.flood", host, port, str(count)) as flood, loud.watched():
                assert flood.stdout is not None
                dialled = json.loads(await asyncio.wait_for(flood.stdout.readline(), JOIN_S))["dialled"]
                await started_node(stack, app, directory, "n0", 1)
                await until_ready(app, 1, LOOK_S)
                await asyncio.sleep(seconds)
    report.figure("strangers", {"dialled": dialled, "quiet": dict(quiet.figures()), "loud": dict(loud.figures())})
    report.check("strangers_loop_lag_ms", round(max(loud.found), 2), 50.0, "lower")


async def deaf(report: BenchReport) -> None:
    """How late the loop is while a node is sent more than it may leave unread, until it is cut."""
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as place:
        async with opened_door(Path(place)) as door:
            door.expect("deaf")
            async with child("-m", "bench.cluster.stub_agents", *door.place, given=b'{"deaf": true}\n'):
                await joined(door, "deaf")
                link = door.links["deaf"]
                lag, piece = LoopLag(), protocol.AttemptLog("deaf.1/", 0, bytes(DEAF_PIECE))
                async with lag.watched():
                    for _ in range(DEAF_BYTES // DEAF_PIECE):
                        link.send(piece)
                        await asyncio.sleep(0)
                        if link.closed.is_set():
                            break
                    await asyncio.sleep(10 * TICK_S)
                if not link.closed.is_set():
                    raise RuntimeError("a node that does not read was not cut")
    report.figure("deaf_node", {"why": link.why, **lag.figures()})
    report.check("deaf_node_loop_lag_ms", round(max(lag.found), 2), 50.0, "lower")
