"""What durability costs: acceptance beside a bare echo, the start of a gateway, and how long its loop stands still.

What a kill loses is counted by ``bench.kills``, and what a long queue costs by ``bench.scheduler``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from bench.gateway import CONNECTIONS, per_second
from bench.report import BenchReport, median, parser, percentile, play
from bench.serving import ECHO, GATEWAY, ROOT, TOKEN, BenchConnection, ServerProcess, free_port, process

#: Limits.
ACCEPTED_PER_S, ACCEPT_P99_MS, READY_MS, STALL_P999_MS = 1500.0, 50.0, 1000.0, 100.0
READY_ROUNDS, LOG_MB = 5, 100
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
  durability: {durability}
  retention: {{records_age: 100000d, logs_age: 100000d}}
sandbox: {{provider: process}}
scheduler: {{max_queued: 2000000}}
tasks: {{default: {{max_queued: 2000000}}}}
resources: {{slot: {{kind: concurrency, limit: 1}}}}
functions:
  shell: {{runtime: exec, timeout: 300s, log_limit: 256Mi, max_queued: 2000000, idempotent: true}}
  waits:
    runtime: api
    request: {{method: GET, url: "http://127.0.0.1:{upstream}/wait"}}
    cost: {{slot: 1}}
    timeout: 3600s
    queue_timeout: 3600s
    max_queued: 2000000
"""
HANDLERS = """
  one: {runtime: handler, handler: "work:one", scale: {min: 1, max: 2}}
  two: {runtime: handler, handler: "work:two", scale: {min: 1, max: 2}}
  three: {runtime: handler, handler: "work:three", scale: {min: 1, max: 2}}
  judge: {runtime: model, model: {path: CHECKPOINT, action: score}}
"""
#: A gateway beside a task that notes by how much each of its naps is too long, and tells it at its end.
WATCHED = GATEWAY.replace(
    "        await app.serve()\n",
    """        watching = asyncio.create_task(nap())
        await app.serve()
        watching.cancel()
    late.sort()
    shares = {f"p{share:g}_ms".replace(".", ""): late[int(len(late) * share / 100)] for share in (99, 99.9)}
    print(json.dumps({**shares, "max_ms": late[-1], "naps": len(late)}), flush=True)
""",
).replace(
    "async def main():",
    """import time
late = []
async def nap():
    while True:
        due = time.perf_counter() + 0.005
        await asyncio.sleep(0.005)
        late.append((time.perf_counter() - due) * 1000)
async def main():""",
)


@asynccontextmanager
async def never_answering() -> AsyncIterator[int]:
    """The port of a server that reads and never answers: calls to it stay accepted."""

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    async with await asyncio.start_server(read, "127.0.0.1", 0) as server:
        yield int(server.sockets[0].getsockname()[1])
        server.close()


@asynccontextmanager
async def served(
    directory: Path,
    more: str = "",
    *,
    upstream_port: int = 0,
    durability: str = "process",
    end: signal.Signals = signal.SIGINT,
    code: str = GATEWAY,
) -> AsyncIterator[ServerProcess]:
    """A gateway on the state of the directory; ``more`` are further functions."""
    config = directory / "tangram.yaml"
    text = CONFIG.format(directory=directory, port=free_port(), durability=durability, upstream=upstream_port)
    config.write_text(text + more)
    server = ServerProcess(code, str(config), environment=COMPILED)
    try:
        await server.start()
        yield server
    finally:
        if server.process.returncode is None:
            await server.end(end)


async def submitted(connection: BenchConnection) -> str:
    return await connection.submit("waits", {})


async def latencies_ms(port: int, rate: float, seconds: float, echo: bool = False) -> list[float]:
    """Milliseconds from the instant at which each call was due, at a steady rate."""
    clients = [BenchConnection(port) for _ in range(CONNECTIONS)]
    period_s = CONNECTIONS / rate
    begin_s = time.perf_counter() + 0.05
    found: list[float] = []

    async def run(number: int, client: BenchConnection) -> None:
        due_s = begin_s + number * period_s / CONNECTIONS
        while due_s < begin_s + seconds:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if echo:
                await client.send("POST", "/echo", b"{}")
            else:
                await submitted(client)
            found.append((time.perf_counter() - due_s) * 1000)
            due_s += period_s

    await asyncio.gather(*(run(number, client) for number, client in enumerate(clients)))
    for client in clients:
        client.close()
    return found


async def acceptance(report: BenchReport, rounds: int, each: int, seconds: float) -> None:
    """Both durabilities against a bare echo, in turns; calls that are accepted wait."""
    rates: dict[str, list[float]] = {"echo": [], "process": [], "power": []}
    p99_ms: dict[str, list[float]] = {name: [] for name in rates}
    async with AsyncExitStack() as stack:
        upstream_port = await stack.enter_async_context(never_answering())
        ports = {"echo": (await stack.enter_async_context(process(ECHO))).port}
        for name in ("process", "power"):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            gateway = served(directory, upstream_port=upstream_port, durability=name, end=signal.SIGTERM)
            ports[name] = (await stack.enter_async_context(gateway)).port
        for _ in range(rounds):
            rates["echo"].append(await per_second(ports["echo"], each, lambda client: client.post("/echo", b"{}")))
            for name in ("process", "power"):
                rates[name].append(await per_second(ports[name], each, submitted))
        wanted = min(ACCEPTED_PER_S, 0.5 * median(rates["echo"]))
        for _ in range(rounds):
            for name, port in ports.items():
                found = await latencies_ms(port, wanted / 2, seconds, echo=name == "echo")
                p99_ms[name].append(percentile(found, 0.99))
    rows = {name: {"per_s": median(rates[name]), "p99_ms_at_half": median(p99_ms[name])} for name in rates}
    report.figure("acceptance", {name: dict(row) for name, row in rows.items()})
    report.check("accepted_per_s", rows["process"]["per_s"], limit=wanted, better="higher")
    report.check("accept_p99_ms", rows["process"]["p99_ms_at_half"], limit=ACCEPT_P99_MS, better="lower")
    report.note("accepted_per_s: durability process; the limit is the lower of 1,500 and half of the echo's rate")
    report.note("accept_p99_ms: at half of that limit; the median of the rounds' own p99")


async def ready(report: BenchReport) -> None:
    """From exec to the first 202, with three handlers and a model to be made ready."""
    from bench.model.checkpoints import TINY, write_checkpoint
    from runtimes.model.checkpoint import Head

    took_ms = []
    for _ in range(1 + READY_ROUNDS):
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            checkpoint = write_checkpoint(directory, "llama", Head.SCORE, TINY, dtype="float32", device="cpu", seed=1)
            (directory / "work.py").write_text("def one(event, context):\n    return event\n\n\ntwo = three = one\n")
            more = HANDLERS.replace("CHECKPOINT", str(checkpoint))
            began_s = time.perf_counter()
            async with served(directory, more, end=signal.SIGKILL) as server:
                connection = BenchConnection(server.port)
                await connection.submit("shell", {"command": "true"})
                took_ms.append(1000 * (time.perf_counter() - began_s))
                connection.close()
    took_ms = took_ms[1:]  # the first writes the bytecode
    report.figure("ready_ms_each", [round(each) for each in took_ms])
    report.check("ready_ms", median(took_ms), limit=READY_MS, better="lower")


async def stalls(report: BenchReport, accepts: int, followers: int) -> None:
    """How long the loop stands still under many accepts, followers and a log of 100 MB that is written and read."""
    with tempfile.TemporaryDirectory() as name:
        async with served(Path(name), code=WATCHED) as server:
            port, client = server.port, BenchConnection(server.port)
            ticking = await client.submit("shell", {"command": "while sleep 0.2; do echo tick; done"})
            large = await client.submit("shell", {"command": f"base64 -w 1000 /dev/zero | head -c {LOG_MB}000000"})
            async with AsyncExitStack() as stack:
                for _ in range(followers):
                    await stack.enter_async_context(_following(port, ticking))
                read = asyncio.create_task(_read_all(port, large))
                per_client = [accepts // 16] * 16

                async def submit(count: int) -> None:
                    mine = BenchConnection(port)
                    for _ in range(count):
                        await mine.submit("shell", {"command": "true"})
                    mine.close()

                await asyncio.gather(*(submit(count) for count in per_client))
                report.figure("log_bytes_read", await read)
            client.close()
            server.process.send_signal(signal.SIGINT)
            assert server.process.stdout is not None
            found = json.loads(await server.process.stdout.readline())
    report.figure("loop_stalls", {name: float(value) for name, value in found.items()})
    report.check("loop_stall_p999_ms", found["p999_ms"], limit=STALL_P999_MS, better="lower")


async def _follow(port: int, invocation_id: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    path = f"/v1/invocations/{invocation_id}/logs?follow=true"
    writer.write(f"GET {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    return reader, writer


@asynccontextmanager
async def _following(port: int, invocation_id: str) -> AsyncIterator[None]:
    """A follower that reads and forgets."""
    reader, writer = await _follow(port, invocation_id)
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
    reader, writer = await _follow(port, invocation_id)
    async with asyncio.timeout(300):
        size_bytes = await _drained(reader)
    writer.close()
    return size_bytes


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("durable", parts=True).parse_args(argv)
    report, quick = BenchReport("durable"), options.quick
    rounds, each, seconds = (3, 40, 1.5) if quick else (5, 150, 5.0)
    return play(
        report,
        options,
        {
            "acceptance": lambda: acceptance(report, rounds, each, seconds),
            "ready": lambda: ready(report),
            "stalls": lambda: stalls(report, 1000 if quick else 10_000, 100 if quick else 1000),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
