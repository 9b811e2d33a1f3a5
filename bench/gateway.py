"""What the gateway adds: a no-op exec and handler through HTTP and gRPC, against a bare echo on the same server.

And how long one client can make the others wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from grpclib.client import Channel
from grpclib.health.v1.health_grpc import HealthStub
from grpclib.health.v1.health_pb2 import HealthCheckRequest

from bench.docker_exec import DockerExec
from bench.report import BenchReport, median, parser, percentile, play
from bench.serving import (
    ECHO,
    GATEWAY,
    IMAGE,
    LITSERVE,
    START_S,
    TOKEN,
    BenchConnection,
    ServerProcess,
    free_port,
    peer_python,
    process,
    process_cpu_s,
)
from gateway.app import gateway as opened_gateway
from gateway.config.load import load
from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.generated.tangram_grpc import GatewayStub
from gateway.invocations.logs import configure
from tangram import AsyncClient

CONNECTIONS = 32
NOOP = "/v1/functions/noop/invocations"
CONFIG = """
version: 1
server: {{token: bench-bench-bench, state_dir: {directory}/state, port: 0, grpc_port: 0}}
sandbox: {{image: "{image}"}}
functions:
  noop: {{runtime: handler, handler: "noop:handle", cost: {{cpu: 1}}, scale: {{min: 2, max: 4}}}}
  slow: {{runtime: handler, handler: "noop:sleep", cost: {{cpu: 1}}, max_queued: 16384}}
  shell: {{runtime: exec, cost: {{cpu: 1}}}}
"""
HANDLER = """
import time
def handle(event, context):
    return event
def sleep(event, context):
    time.sleep(600)
"""
#: Calls of one client that are in flight at once; those that wait while memory is looked at.
IN_FLIGHT, WAITING = 64, 4000
#: What the gateway is compared with, and calls in flight at once then.
PEER, IN_FLIGHT_MANY = "litserve==0.2.19", (32, 256)
Call = Callable[[], Awaitable[object]]
#: Clients that are processes of their own: a fork would have this one's loop.
CHILDREN = multiprocessing.get_context("spawn")


async def timed(call: Call, count: int) -> list[float]:
    """Milliseconds of each call, one after the other."""
    found = []
    for _ in range(count):
        began_s = time.perf_counter()
        await call()
        found.append((time.perf_counter() - began_s) * 1000)
    return found


async def per_second(
    port: int, each: int, call: Callable[[BenchConnection], Awaitable[object]], many: int = CONNECTIONS
) -> float:
    """Calls a second over ``many`` connections."""
    connections = [BenchConnection(port) for _ in range(many)]

    async def run(connection: BenchConnection) -> None:
        for _ in range(each):
            await call(connection)

    began_s = time.perf_counter()
    await asyncio.gather(*map(run, connections))
    took_s = time.perf_counter() - began_s
    for connection in connections:
        connection.close()
    return many * each / took_s


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
    try:
        yield lambda: asyncio.to_thread(engine.run, container, ["true"])
    finally:
        engine.close()
        subprocess.run(["docker", "rm", "--force", container], capture_output=True, timeout=START_S, check=False)


async def timed_in_turns(
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
def workplace() -> Iterator[str]:
    """The gateway's configuration and handler in a directory of their own."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        place.chmod(0o755)  # the sandbox's user reads the handler in it
        (place / "tangram.yaml").write_text(CONFIG.format(directory=directory, image=IMAGE))
        (place / "noop.py").write_text(HANDLER)
        yield str(place / "tangram.yaml")


@contextlib.asynccontextmanager
async def servers() -> AsyncIterator[tuple[ServerProcess, ServerProcess]]:
    """The bare echo and a gateway with the functions of this bench."""
    with workplace() as config:
        # SIGTERM would keep the trajectory's sandbox for a next gateway.
        async with process(ECHO) as echo, process(GATEWAY, config, ending=signal.SIGINT) as gateway:
            yield echo, gateway


async def latencies(report: BenchReport, rounds: int, count: int) -> None:
    """One call at a time, by every way."""
    async with servers() as (echo, gateway):
        bare, door = BenchConnection(echo.port), BenchConnection(gateway.port)
        channel = Channel("127.0.0.1", int(str(gateway.announced["grpc"])))
        stub, health = GatewayStub(channel), HealthStub(channel)
        message = pb.InvokeRequest(function="noop", input_json=b'{"a":1}')
        command = b'{"argv":["true"]}'
        calls: dict[str, Call] = {
            "http echo": lambda: bare.post("/echo", b'{"a":1}'),
            "http handler": lambda: door.post(NOOP, b'{"a":1}'),
            "http exec": lambda: door.post("/v1/functions/shell/invocations", command, "X-Trajectory-Id: bench"),
            "grpc echo": lambda: health.Check(HealthCheckRequest()),
            "grpc handler": lambda: stub.Invoke(message, metadata={"authorization": f"Bearer {TOKEN}"}),
        }
        with docker_exec() as docker:
            await timed_in_turns(calls, docker, 1, 20)
            found = await timed_in_turns(calls, docker, rounds, count)
        for connection in (bare, door, channel):
            connection.close()
        report.figure("sandboxes", str(gateway.announced["sandboxes"]))
    if docker is None:
        report.note("no Docker engine here: no `docker exec` to compare with")
    report.figure("latency", {name: dict(row) for name, row in found.items()})
    p50 = {name: row["p50_ms"] for name, row in found.items()}
    report.check("exec_overhead_p50_ms", p50["http exec"] - p50["http echo"], limit=5.0, better="lower")
    report.check("handler_overhead_p50_ms", p50["http handler"] - p50["http echo"], limit=2.0, better="lower")
    report.check("grpc_overhead_p50_ms", p50["grpc handler"] - p50["grpc echo"], limit=2.0, better="lower")
    report.note("echo: Starlette on Hypercorn, and grpclib's health check; each in the same run, rounds interleaved")


async def processor(report: BenchReport, rounds: int, each: int) -> None:
    """Processor time of a no-op call over that of an echo, in turns; that of the handler's workers does not count."""
    rates: dict[str, list[float]] = {"echo": [], "handler": []}
    cpu_us: dict[str, list[float]] = {name: [] for name in rates}
    async with servers() as (echo, gateway):
        sides = {
            "echo": (echo, lambda connection: connection.post("/echo", b'{"a":1}')),
            "handler": (gateway, lambda connection: connection.post(NOOP, b'{"a":1}')),
        }
        for round_ in range(rounds + 1):
            for name, (server, call) in sides.items():
                before_s = process_cpu_s(server.pid)
                rate = await per_second(server.port, each, call)
                if round_:  # the first warms up
                    rates[name].append(rate)
                    cpu_us[name].append((process_cpu_s(server.pid) - before_s) / (CONNECTIONS * each) * 1e6)
    for name in rates:
        report.figure(f"{name}_per_s", median(rates[name]))
        report.figure(f"{name}_cpu_us", median(cpu_us[name]))
    ratios = [ours / floor for ours, floor in zip(cpu_us["handler"], cpu_us["echo"], strict=True)]
    report.check("sync_cpu_over_echo", median(ratios), limit=3.0, better="lower")


#: What one client sends to hold up the others: method, path and body, made in its own process.
MANY = 100_000
HOGS: dict[str, Callable[[], tuple[str, str, object]]] = {
    "arguments": lambda: ("POST", "/v1/functions/shell/invocations", {"argv": ["x"] * MANY}),
    "variables": lambda: ("POST", "/v1/functions/shell/invocations", {"command": "true", "env": _keys("x")}),
    "wrong variables": lambda: ("POST", "/v1/functions/shell/invocations", {"command": "true", "env": _keys(1)}),
    "fields": lambda: ("POST", "/v1/functions/noop/invocations", _keys(1)),
    "objects": lambda: ("POST", "/v1/functions/listed/invocations", {"all": [{"n": 1}] * MANY}),
    "an opening": lambda: ("PUT", "/v1/trajectories/hog", {"function": "shell", "sandbox": {"env": _keys("x")}}),
    "a fork": lambda: ("POST", "/v1/trajectories/hog/fork", {"to": list(_keys(1))}),
    "a definition": lambda: ("PUT", "/v1/functions/hog", {"definition": {"runtime": "exec", **_keys(1)}}),
}
#: Connections that each ask for something long, and go.
GONE = 200
LISTED = """  listed:
    runtime: handler
    handler: "noop:handle"
    input: {type: object, properties: {all: {type: array, items: {type: object, properties: {n: {type: integer}}}}}}
"""


def _keys(value: object) -> dict[str, object]:
    return {f"key{number}": value for number in range(MANY)}


def hog(name: str, port: int) -> None:
    """Do what one client does of `HOGS`, or open and leave many connections."""
    if name in HOGS:
        method, path, body = HOGS[name]()
        connection = BenchConnection(port)
        asyncio.run(connection.send(method, path, json.dumps(body).encode()))
        return
    body = json.dumps({"function": "shell", "command": "sleep 9"}).encode()
    about = f"Host: bench\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    open_ = [socket.create_connection(("127.0.0.1", port)) for _ in range(GONE)]
    for number, each in enumerate(open_):
        line = "POST /v1/functions/shell/invocations" if number % 2 else f"PUT /v1/trajectories/gone-{number}"
        each.sendall(f"{line} HTTP/1.1\r\n".encode() + about + body)
    for each in open_:
        each.close()


def held(report: BenchReport) -> None:
    """How long one client keeps the loop from all others at most: processor time of one turn, whatever else runs."""
    turns: list[float] = []
    run = asyncio.events.Handle._run

    def timed_run(handle: asyncio.Handle) -> None:
        began_s = time.thread_time()
        run(handle)
        turns.append(time.thread_time() - began_s)

    async def measure(config: Path) -> dict[str, float]:
        worst = {}
        async with opened_gateway(load([config], os.environ)) as app:
            serving = asyncio.create_task(app.serve())
            for name in (*HOGS, "gone clients"):
                turns.clear()
                child = CHILDREN.Process(target=hog, args=(name, app.http_port))
                child.start()
                await asyncio.to_thread(child.join)
                while app.invocations.living:  # noqa: ASYNC110  (of those who have gone)
                    await asyncio.sleep(0.05)
                worst[name] = max(turns) * 1000
            app.stop()
            await serving
        return worst

    configure("critical")
    asyncio.events.Handle._run = timed_run  # type: ignore[method-assign, assignment]
    try:
        with workplace() as place:
            config = Path(place)
            config.write_text(config.read_text() + LISTED)
            worst = asyncio.run(measure(config))
    finally:
        asyncio.events.Handle._run = run  # type: ignore[method-assign]
    for name, worst_ms in worst.items():
        report.figure(f"held by {name}, ms", worst_ms)
    report.check("held_max_ms", max(worst.values()), limit=100.0, better="lower")


async def stream(report: BenchReport, rounds: int, each: int) -> None:
    """Many calls of one client over its stream: processor time over an echo's, a single call, and one that waits."""
    found: dict[str, list[float]] = {"echo": [], "stream": []}
    singles: dict[str, list[float]] = {"http": [], "stream": []}
    per_s = list[float]()
    async with servers() as (echo, gateway):
        address = f"http://127.0.0.1:{gateway.port}"
        async with AsyncClient(address, token=TOKEN) as many, AsyncClient(address, token=TOKEN) as alone:
            count = each * CONNECTIONS
            for round_ in range(rounds + 1):
                before_s = process_cpu_s(echo.pid)
                await per_second(echo.port, each, lambda connection: connection.post("/echo", b'{"a":1}'))
                between_s = process_cpu_s(gateway.pid)
                began_s, echo_s = time.perf_counter(), process_cpu_s(echo.pid) - before_s
                await many.map("noop", [{"a": 1}] * count, concurrency=IN_FLIGHT)
                per_s.append(count / (time.perf_counter() - began_s))
                stream_s = process_cpu_s(gateway.pid) - between_s
                times = {
                    name: await timed(lambda: client.invoke("noop", {"a": 1}), each)  # noqa: B023 (at once)
                    for name, client in (("http", alone), ("stream", many))
                }
                if round_:  # the first warms up
                    found["echo"].append(echo_s / count * 1e6)
                    found["stream"].append(stream_s / count * 1e6)
                    singles = {name: singles[name] + more for name, more in times.items()}
            resident = resident_kib(gateway.pid)
            waiting = [asyncio.create_task(many.invoke("slow", {"a": 1})) for _ in range(WAITING)]
            while await queued(gateway) < WAITING - CONNECTIONS:  # noqa: ASYNC110 (of another process)
                await asyncio.sleep(0.2)
            held_kib = resident_kib(gateway.pid) - resident
            for call in waiting:
                call.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
    report.figure("stream_cpu_us", median(found["stream"]))
    report.figure("stream_per_s", median(per_s))
    report.figure("stream_single_p50_ms", {name: median(times) for name, times in singles.items()})
    ratios = [ours / floor for ours, floor in zip(found["stream"], found["echo"], strict=True)]
    report.check("stream_cpu_over_echo", median(ratios), limit=1.0, better="lower")
    single = median(singles["stream"]) / median(singles["http"])
    report.check("stream_single_p50_over_http", single, limit=1.0, better="lower")
    report.check("waiting_call_kib", held_kib / WAITING, limit=2.0, better="lower")


async def peer(report: BenchReport, rounds: int, each: int) -> None:
    """Calls a second beside LitServe's on the same cores: ours through `AsyncClient`, its through bare connections."""
    try:
        python = await asyncio.to_thread(peer_python, PEER)
    except subprocess.CalledProcessError:
        report.note(f"{PEER} could not be installed: there is nothing to compare with")
        return
    found: dict[str, list[float]] = {f"{name}, {many}": [] for many in IN_FLIGHT_MANY for name in ("ours", "litserve")}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "litserve_noop.py").write_text(LITSERVE)
        code = f"import litserve_noop; litserve_noop.main({free_port()})"
        async with (
            servers() as (_, gateway),
            process(code, python=python, ending=signal.SIGINT, PYTHONPATH=directory) as litserve,
            AsyncClient(f"http://127.0.0.1:{gateway.port}", token=TOKEN) as client,
        ):
            for round_ in range(rounds + 1):
                for many in IN_FLIGHT_MANY:
                    theirs = await per_second(
                        litserve.port, each, lambda connection: connection.post("/predict", b'{"a":1}'), many
                    )
                    began_s, count = time.perf_counter(), each * many
                    await client.map("noop", [{"a": 1}] * count, concurrency=many)
                    ours = count / (time.perf_counter() - began_s)
                    if round_:  # the first warms up
                        found[f"ours, {many}"].append(ours)
                        found[f"litserve, {many}"].append(theirs)
    report.figure("calls_per_s", {name: median(rates) for name, rates in found.items()})
    ratios = [median(found[f"ours, {many}"]) / median(found[f"litserve, {many}"]) for many in IN_FLIGHT_MANY]
    report.check("calls_per_s_over_litserve", min(ratios), limit=2.0, better="higher")


async def queued(gateway: ServerProcess) -> int:
    connection = BenchConnection(gateway.port)
    _, body = await connection.send("GET", "/v1/queue?limit=1")
    connection.close()
    return int(json.loads(body)["waiting"])


def resident_kib(pid: int) -> int:
    """KiB of a process that are in memory."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0])


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("gateway", parts=True).parse_args(argv)
    report = BenchReport("gateway")
    rounds, count = (3, 100) if options.quick else (7, 400)
    return play(
        report,
        options,
        {
            "latencies": lambda: latencies(report, rounds, count),
            "processor": lambda: processor(report, rounds, count // 4),
            "held": lambda: held(report),
            "stream": lambda: stream(report, rounds, count // 4),
            "peer": lambda: peer(report, rounds, count // 20),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
