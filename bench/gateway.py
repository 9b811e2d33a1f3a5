"""What the gateway adds: a no-op exec and handler through HTTP and gRPC, against a bare echo on the same server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from grpclib.client import Channel
from grpclib.health.v1.health_grpc import HealthStub
from grpclib.health.v1.health_pb2 import HealthCheckRequest

from bench.docker_exec import DockerExec
from bench.report import BenchReport, arguments, median, percentile
from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.generated.tangram_grpc import GatewayStub

ROOT = Path(__file__).parent.parent
IMAGE = os.environ.get("TANGRAM_BASE_IMAGE", "tangram-base:bookworm")
#: What Ray Serve's no-op reaches of the same echo (240 of 4,400 requests a second), four times over.
THROUGHPUT_SHARE = 4 * 240 / 4400
CONNECTIONS = 32
START_S = 120

CONFIG = """
version: 1
server: {{token: bench-bench-bench, state_dir: {directory}/state, port: 0, grpc_port: 0}}
sandbox: {{image: "{image}"}}
functions:
  noop: {{runtime: handler, handler: "noop:handle", cost: {{cpu: 1}}, scale: {{min: 2, max: 4}}}}
  shell: {{runtime: exec, cost: {{cpu: 1}}}}
"""
HANDLER = "def handle(event, context):\n    return event\n"

GATEWAY = """
import asyncio, json, os, sys
from pathlib import Path
import uvloop
from gateway.app import gateway
from gateway.config.load import load
from gateway.invocations.logs import configure
configure("warning")
async def main():
    async with gateway(load([Path(sys.argv[1])], os.environ)) as app:
        described = {"http": app.http_port, "grpc": app.grpc_port, "sandboxes": app.runtimes.provider.info.engine}
        print(json.dumps(described), flush=True)
        await app.serve()
uvloop.run(main())
"""
ECHO = """
import asyncio, json
import uvloop
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from gateway.http.server import listen, serve
async def echo(request):
    return JSONResponse(await request.json())
async def main():
    listener = listen("127.0.0.1", 0)
    print(json.dumps({"http": listener.getsockname()[1]}), flush=True)
    app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
    await serve(app, listener, asyncio.Event().wait, 1.0)
uvloop.run(main())
"""

Call = Callable[[], Awaitable[None]]


class BenchConnection:
    """One keep-alive HTTP connection, as thin as a client can be."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> BenchConnection:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def post(self, path: str, body: bytes, headers: str = "") -> bytes:
        """The body of a 200; anything else fails the bench."""
        about = f"Host: bench\r\nAuthorization: Bearer bench-bench-bench\r\nContent-Length: {len(body)}"
        head = f"POST {path} HTTP/1.1\r\n{about}\r\n{headers}\r\n"
        self._writer.write(head.encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        data = await self._reader.readexactly(length)
        if b" 200 " not in answer.partition(b"\r\n")[0] + b" ":
            raise RuntimeError(f"{path}: {answer.decode()}{data.decode()}")
        return data

    def close(self) -> None:
        self._writer.close()


async def timed(call: Call, count: int) -> list[float]:
    """Milliseconds of each call, one after the other."""
    found = []
    for _ in range(count):
        began_s = time.perf_counter()
        await call()
        found.append((time.perf_counter() - began_s) * 1000)
    return found


async def per_second(port: int, path: str, each: int) -> float:
    """Requests a second over `CONNECTIONS` connections."""
    connections = [await BenchConnection.open(port) for _ in range(CONNECTIONS)]

    async def run(connection: BenchConnection) -> None:
        for _ in range(each):
            await connection.post(path, b'{"a":1}')

    began_s = time.perf_counter()
    await asyncio.gather(*map(run, connections))
    took_s = time.perf_counter() - began_s
    for connection in connections:
        connection.close()
    return CONNECTIONS * each / took_s


@contextlib.asynccontextmanager
async def process(
    code: str, *arguments: str, ending: signal.Signals = signal.SIGTERM
) -> AsyncIterator[dict[str, object]]:
    """A server in a process of its own; yields the line with which it announces itself."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *arguments, stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert server.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            line = await server.stdout.readline()
        yield dict(json.loads(line))
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.send_signal(ending)
        try:
            await asyncio.wait_for(server.wait(), 30)
        except TimeoutError:
            server.kill()


@contextlib.contextmanager
def docker_exec() -> Iterator[Call | None]:
    """`docker exec true` through the engine's API, in a container of its own; None without engine or base image."""
    command = ["docker", "run", "--detach", "--rm", "--network", "none", IMAGE, "sleep", "600"]
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=True)
    except (OSError, subprocess.SubprocessError):
        yield None
        return
    container, engine = made.stdout.strip(), DockerExec()

    async def call() -> None:
        await asyncio.to_thread(engine.run, container, ["true"])

    try:
        yield call
    finally:
        engine.close()
        subprocess.run(["docker", "rm", "--force", container], capture_output=True, timeout=START_S, check=False)


async def latencies(
    calls: dict[str, Call], docker: Call | None, rounds: int, count: int
) -> dict[str, dict[str, float]]:
    """p50 and p95 of each call in milliseconds; all of them in each round, so that noise is shared."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name] += await timed(call, count)
        if docker is not None:
            found.setdefault("docker exec", []).extend(await timed(docker, max(3, count // 20)))
    return {name: {"p50_ms": median(times), "p95_ms": percentile(times, 0.95)} for name, times in found.items()}


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """The gateway's configuration in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)  # the sandbox's user reads the handler in it
        config = Path(directory) / "tangram.yaml"
        config.write_text(CONFIG.format(directory=directory, image=IMAGE))
        (Path(directory) / "noop.py").write_text(HANDLER)
        yield config


async def measure(report: BenchReport, *, rounds: int, count: int) -> None:
    with workplace() as config, docker_exec() as docker:
        # SIGTERM would keep the trajectory's sandbox for a next gateway.
        async with process(ECHO) as echo, process(GATEWAY, str(config), ending=signal.SIGINT) as gateway:
            await compare(report, echo, gateway, docker, rounds, count)


async def compare(
    report: BenchReport,
    echo: dict[str, object],
    gateway: dict[str, object],
    docker: Call | None,
    rounds: int,
    count: int,
) -> None:
    echo_port, http_port = int(str(echo["http"])), int(str(gateway["http"]))
    bare, door = await BenchConnection.open(echo_port), await BenchConnection.open(http_port)
    channel = Channel("127.0.0.1", int(str(gateway["grpc"])))
    stub, health = GatewayStub(channel), HealthStub(channel)
    message = pb.InvokeRequest(function="noop", input_json=b'{"a":1}')

    async def http_echo() -> None:
        await bare.post("/echo", b'{"a":1}')

    async def http_handler() -> None:
        await door.post("/v1/functions/noop/invocations", b'{"a":1}')

    async def http_exec() -> None:
        await door.post("/v1/functions/shell/invocations", b'{"argv":["true"]}', "X-Trajectory-Id: bench\r\n")

    async def grpc_echo() -> None:
        await health.Check(HealthCheckRequest())

    async def grpc_handler() -> None:
        await stub.Invoke(message, metadata={"authorization": "Bearer bench-bench-bench"})

    calls: dict[str, Call] = {
        "http echo": http_echo,
        "http handler": http_handler,
        "http exec": http_exec,
        "grpc echo": grpc_echo,
        "grpc handler": grpc_handler,
    }
    await latencies(calls, docker, 1, 20)
    found = await latencies(calls, docker, rounds, count)
    rates = [
        (
            await per_second(echo_port, "/echo", count // 4),
            await per_second(http_port, "/v1/functions/noop/invocations", count // 4),
        )
        for _ in range(rounds)
    ]
    for connection in (bare, door, channel):
        connection.close()
    report.figure("sandboxes", str(gateway["sandboxes"]))
    report.figure("latency", {name: dict(row) for name, row in found.items()})
    report.figure("echo_per_s", median([rate for rate, _ in rates]))
    report.figure("handler_per_s", median([rate for _, rate in rates]))
    p50 = {name: row["p50_ms"] for name, row in found.items()}
    report.check("exec_overhead_p50_ms", p50["http exec"] - p50["http echo"], limit=5.0, better="lower")
    report.check("handler_overhead_p50_ms", p50["http handler"] - p50["http echo"], limit=2.0, better="lower")
    report.check("grpc_overhead_p50_ms", p50["grpc handler"] - p50["grpc echo"], limit=2.0, better="lower")
    share = median([rate / floor for floor, rate in rates])
    report.check("requests_per_s_over_echo", share, limit=THROUGHPUT_SHARE, better="higher")
    report.note("echo: Starlette on Hypercorn, and grpclib's health check; each in the same run, rounds interleaved")
    if docker is None:
        report.note("no Docker engine here: no `docker exec` to compare with")


def main() -> int:
    given = arguments("gateway")
    report = BenchReport("gateway")
    rounds, count = (3, 100) if given.quick else (7, 400)
    asyncio.run(measure(report, rounds=rounds, count=count))
    return report.print(as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
