"""What one gateway leaves to the next: how soon it serves, a million records, callbacks, the disk; and a busy loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path

from bench.durable_core import fill
from bench.gateway import ROOT, START_S
from bench.report import BenchReport, median, percentile
from gateway.config.sections import RetentionSection
from gateway.invocations.record import Mode, Record, new_id
from gateway.store.retention import prune
from gateway.store.store import LogRow, Store, StoreSpec
from manager.errors import Reason
from manager.outcome import State

READY_MS, RESTART_S, FILTER_P99_MS, STALL_P999_MS = 1000.0, 5.0, 20.0, 100.0
READY_ROUNDS, FILTER_ROUNDS, KILLS = 5, 40, 5
LOG_MB = 100
BEARER = "Authorization: Bearer bench-bench-bench"
#: An installed gateway has its bytecode: pip compiles it. Here the first start does, into a place of its own.
COMPILED = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(ROOT / ".cache" / "bytecode")}

CONFIG = """
version: 1
server:
  token: bench-bench-bench
  state_dir: {directory}/state
  port: {port}
  grpc_port: 0
  drain_grace: 100ms
  retention: {{records_age: 100000d, logs_age: 100000d}}
  callbacks: {{allow: [127.0.0.0/8], backoff: 100ms}}
sandbox: {{provider: process}}
scheduler: {{max_queued: 2000000}}
tasks: {{default: {{max_queued: 2000000}}}}
functions:
  shell: {{runtime: exec, timeout: 300s, log_limit: 256Mi, max_queued: 2000000, idempotent: true}}
"""
HANDLERS = """
  one: {runtime: handler, handler: "work:one", scale: {min: 1, max: 2}}
  two: {runtime: handler, handler: "work:two", scale: {min: 1, max: 2}}
  three: {runtime: handler, handler: "work:three", scale: {min: 1, max: 2}}
  judge: {runtime: model, model: {path: CHECKPOINT, action: score}}
"""
#: `tangram serve` beside a task that notes by how much each of its naps is too long, told on SIGINT.
WATCHED = """
import asyncio, json, os, sys, time
from pathlib import Path
import uvloop
from gateway.app import gateway
from gateway.config.load import load
from gateway.invocations.logs import configure
configure("error")
late = []
async def nap():
    while True:
        due = time.perf_counter() + 0.005
        await asyncio.sleep(0.005)
        late.append((time.perf_counter() - due) * 1000)
async def main():
    async with gateway(load([Path(sys.argv[1])], os.environ)) as app:
        watching = asyncio.create_task(nap())
        await app.serve()
        watching.cancel()
    late.sort()
    print(json.dumps({"p999_ms": late[int(len(late) * 0.999)], "max_ms": late[-1], "naps": len(late)}), flush=True)
uvloop.run(main())
"""


class BenchClient:
    """One connection to a gateway that may be starting, told apart by its port alone."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, method: str, path: str, body: bytes = b"", *headers: str) -> tuple[int, bytes]:
        """Status and body; raises OSError or EOFError if nobody answers."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        lines = [f"{method} {path} HTTP/1.1", "Host: bench", BEARER, f"Content-Length: {len(body)}", *headers, "", ""]
        try:
            writer.write("\r\n".join(lines).encode() + body)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            return int(head.split(b" ", 2)[1]), await reader.readexactly(length)
        except (OSError, EOFError):
            self.close()
            raise

    async def submit(self, body: dict[str, object], *headers: str, function: str = "shell") -> str:
        status, answer = await self.send(
            "POST", f"/v1/functions/{function}/invocations?mode=async", json.dumps(body).encode(), *headers
        )
        if status != 202:
            raise RuntimeError(f"{status}: {answer.decode()}")
        return str(json.loads(answer)["id"])

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


@contextlib.asynccontextmanager
async def served(
    directory: Path, more: str = "", *, end: signal.Signals = signal.SIGINT, code: str = ""
) -> AsyncIterator[tuple[int, float, asyncio.subprocess.Process]]:
    """A gateway on the directory: its port, seconds from exec to the first 202, and its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = directory / "tangram.yaml"
    config.write_text(CONFIG.format(directory=directory, port=port) + more)
    argv = ["-c", code, str(config)] if code else ["-m", "gateway", "serve", "--log-level", "error", str(config)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **COMPILED}
    began_s = time.perf_counter()
    server = await asyncio.create_subprocess_exec(
        sys.executable, *argv, env=environment, cwd=directory, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield port, await _first_202(port) - began_s, server
    finally:
        if server.returncode is None:
            server.send_signal(end)
        await server.wait()


async def _first_202(port: int) -> float:
    client = BenchClient(port)
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(OSError, EOFError, RuntimeError):
                await client.submit({"command": "true"})
                break
            await asyncio.sleep(0.005)
    now_s = time.perf_counter()
    client.close()
    return now_s


async def ready(report: BenchReport) -> None:
    """From exec to the first 202, with three handlers and a model to be made ready."""
    from bench.model.checkpoints import TINY, write_checkpoint
    from runtimes.model.checkpoint.skeleton import Head

    took_ms = []
    for _ in range(1 + READY_ROUNDS):
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            checkpoint = write_checkpoint(directory, "llama", Head.SCORE, TINY, dtype="float32", device="cpu", seed=1)
            (directory / "work.py").write_text("def one(event, context):\n    return event\n\n\ntwo = three = one\n")
            async with served(directory, HANDLERS.replace("CHECKPOINT", str(checkpoint)), end=signal.SIGKILL) as found:
                took_ms.append(found[1] * 1000)
    took_ms = took_ms[1:]  # the first writes the bytecode
    report.figure("ready_ms_each", [round(each) for each in took_ms])
    report.check("ready_ms", median(took_ms), limit=READY_MS, better="lower")


async def million(report: BenchReport, count: int) -> None:
    """A restart over so many records, and every filter and combination of it, page by page."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "state").mkdir()
        store = Store(StoreSpec(path=directory / "state" / "tangram.sqlite"))
        await store.open()
        await store.close()
        fill(directory / "state" / "tangram.sqlite", count)
        async with served(directory) as (port, took_s, _):
            report.check("restart_1m_records_s", took_s, limit=RESTART_S, better="lower")
            times_ms = await _filters_ms(port)
    report.figure("filter_p50_ms_at_1m", median(times_ms))
    report.figure("filters_asked", len(times_ms))
    report.check("filter_p99_ms_at_1m", percentile(times_ms, 0.99), limit=FILTER_P99_MS, better="lower")


async def _filters_ms(port: int) -> list[float]:
    choices = [
        ["", "function=f3", "function=none"],
        ["", "task=default", "task=none"],
        ["", "trajectory=t77", "parent=00000000001-000000000001"],
        ["", "state=succeeded", "state=running", "state=failed", "dead=true", "dead=false"],
    ]
    client, times_ms = BenchClient(port), []
    for chosen in itertools.product(*choices):
        cursor = ""
        for _ in range(FILTER_ROUNDS // 10):
            query = "&".join([*filter(None, chosen), *([f"cursor={cursor}"] if cursor else [])])
            began_s = time.perf_counter()
            status, body = await client.send("GET", f"/v1/invocations?{query}")
            times_ms.append((time.perf_counter() - began_s) * 1000)
            if status != 200:
                raise RuntimeError(f"{query}: {status} {body.decode()}")
            cursor = json.loads(body)["next_cursor"] or ""
            if not cursor:
                break
    client.close()
    return times_ms


async def callbacks(report: BenchReport) -> None:
    """kill -9 while records end: nobody is told two different ends."""
    told: dict[str, set[str]] = defaultdict(set)
    heard = asyncio.Event()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                record = json.loads(await reader.readexactly(length))
                told[record["id"]].add(record["state"])
                heard.set()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    header = f"X-Callback-Url: http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    accepted: set[str] = set()
    with tempfile.TemporaryDirectory() as name:
        for round_ in range(KILLS + 1):
            end = signal.SIGINT if round_ == KILLS else signal.SIGKILL
            async with served(Path(name), end=end) as (port, _, _):
                client = BenchClient(port)
                for _ in range(60 if round_ < KILLS else 0):
                    accepted.add(await client.submit({"command": "true"}, header))
                wanted = len(accepted) if round_ == KILLS else len(told) + 20
                async with asyncio.timeout(120):
                    while len(told) < wanted:
                        heard.clear()
                        await heard.wait()
                client.close()
    server.close()
    report.figure("callbacks_told", len(told))
    twice = sum(len(states) > 1 for states in told.values())
    report.check("callback_told_twice_differently", twice, limit=0, better="lower")


async def shrinks(report: BenchReport, records: int = 4000) -> None:
    """The file gives back what its deleted records took."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "db.sqlite"
        store = Store(StoreSpec(path=path, checkpoint_s=0.05))
        await store.open()
        for _ in range(records):
            seq = store.next_seq()
            record = Record(
                seq=seq,
                id=new_id(seq),
                function="f",
                revision="r",
                task="t",
                trajectory=None,
                parent=None,
                mode=Mode.ASYNC,
                accepted_s=1.0,
                input=b"{}",
            )
            record.end(State.FAILED, Reason.INTERNAL, "", 2.0)
            store.create(record)
            store.save_log(LogRow(seq=seq, position=0, time_s=1.0, stream="stdout", data="x" * 20_000))
            if seq % 200 == 0:
                await store.commit()
        await store.close()
        full_bytes = path.stat().st_size
        store = Store(StoreSpec(path=path, checkpoint_s=0.05))
        await store.open()
        await prune(store, RetentionSection(records_age_s=1.0), time.time, pause_s=0.0)
        await store.close()
        left_bytes = path.stat().st_size
    report.figure("file_mib", {"full": full_bytes / 2**20, "after its records were deleted": left_bytes / 2**20})
    report.check("file_shrinks", float(left_bytes < full_bytes / 4), limit=1.0, better="higher")


async def stalls(report: BenchReport, accepts: int, followers: int) -> None:
    """How long the loop stands still under many accepts, followers and a log of 100 MB that is written and read."""
    with tempfile.TemporaryDirectory() as name:
        async with served(Path(name), code=WATCHED) as (port, _, server):
            client = BenchClient(port)
            ticking = await client.submit({"command": "while sleep 0.2; do echo tick; done"})
            large = await client.submit({"command": f"base64 -w 1000 /dev/zero | head -c {LOG_MB}000000"})
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(followers):
                    await stack.enter_async_context(_following(port, ticking))
                read = asyncio.create_task(_read_all(port, large))
                per_client = [accepts // 16] * 16

                async def submit(count: int) -> None:
                    mine = BenchClient(port)
                    for _ in range(count):
                        await mine.submit({"command": "true"})
                    mine.close()

                await asyncio.gather(*(submit(count) for count in per_client))
                report.figure("log_bytes_read", await read)
            client.close()
            server.send_signal(signal.SIGINT)
            assert server.stdout is not None
            found = json.loads(await server.stdout.readline())
    report.figure("loop_stalls", {name: float(value) for name, value in found.items()})
    report.check("loop_stall_p999_ms", found["p999_ms"], limit=STALL_P999_MS, better="lower")


@contextlib.asynccontextmanager
async def _following(port: int, invocation_id: str) -> AsyncIterator[None]:
    """A follower that reads and forgets."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"GET /v1/invocations/{invocation_id}/logs?follow=true HTTP/1.1\r\nHost: bench\r\n{BEARER}\r\n\r\n".encode()
    )
    await reader.readuntil(b"\r\n\r\n")
    task = asyncio.create_task(_drained(reader))
    try:
        yield
    finally:
        task.cancel()
        writer.transport.abort()
        await asyncio.gather(task, return_exceptions=True)


async def _drained(reader: asyncio.StreamReader) -> int:
    size_bytes = 0
    while data := await reader.read(2**16):
        size_bytes += len(data)
        if b'"stream":"eof"' in data:
            break
    return size_bytes


async def _read_all(port: int, invocation_id: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"GET /v1/invocations/{invocation_id}/logs?follow=true HTTP/1.1\r\nHost: bench\r\n{BEARER}\r\n\r\n".encode()
    )
    async with asyncio.timeout(300):
        size_bytes = await _drained(reader)
    writer.close()
    return size_bytes


def restarts(report: BenchReport, *, quick: bool, only: Sequence[str] = ()) -> None:
    """Every part of it, or those of ``only``, into the report."""
    parts: dict[str, Callable[[], Coroutine[None, None, None]]] = {
        "ready": lambda: ready(report),
        "million": lambda: million(report, 100_000 if quick else 1_000_000),
        "callbacks": lambda: callbacks(report),
        "shrinks": lambda: shrinks(report),
        "stalls": lambda: stalls(report, 1000 if quick else 10_000, 100 if quick else 1000),
    }
    for name in only or parts:
        asyncio.run(parts[name]())
    if quick:
        report.note("restart_1m_records_s, filter_p99_ms_at_1m: only 100,000 records, for --quick")


if __name__ == "__main__":
    own = BenchReport("durable")
    restarts(own, quick=False, only=sys.argv[1:])
    sys.exit(own.print(as_json=False))
