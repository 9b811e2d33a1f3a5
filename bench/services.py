"""Servers in sandboxes: what a request costs, and what they cost while nobody asks.

Every figure is of real process sandboxes behind a gateway in a process of its own. Peers run in the same run: the same
server is asked from inside its sandbox, awake.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import websockets
from websockets.asyncio.client import ClientConnection, connect

from bench.report import BenchReport, median, parser, percentile, play
from bench.serving import GATEWAY, TOKEN, ServerProcess, process, process_cpu_s
from tangram import AsyncClient, AsyncPort, AsyncTrajectory

CONFIG = f"""
version: 1
server: {{state_dir: ROOT/state, port: 0, grpc_port: 0, token: {TOKEN}, ports: {{port: 0}}}}
sandbox: {{provider: process, memory: 48Mi, idle_ttl: 2h}}
node: {{memory: 64Gi}}
scheduler: {{memory_reserve: 0}}
functions:
  shell: {{runtime: exec, cost: {{cpu: 1}}, timeout: 60s}}
"""
#: HTTP at 8000, one answer for each request, and WebSockets at 8001, where a message is a step of so many seconds of
#: work, as uvicorn serves them: with pings.
SERVER = """
import asyncio, sys, time
sys.path.insert(0, "packages")
from websockets.asyncio.server import serve

async def answer(reader, writer):
    while True:
        try:
            await reader.readuntil(b"\\r\\n\\r\\n")
        except asyncio.IncompleteReadError:
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")

async def step(socket):
    async for message in socket:
        until = time.process_time() + float(message)
        while time.process_time() < until:
            pass
        await socket.send(message)

async def main():
    await asyncio.start_server(answer, "127.0.0.1", 8000)
    async with serve(step, "127.0.0.1", 8001, ping_interval=PING, ping_timeout=PING):
        await asyncio.Event().wait()

asyncio.run(main())
"""
#: The same server, asked from inside: seconds of each request, and of each step.
DIRECT = """
import http.client, json, sys, time
sys.path.insert(0, "packages")
from websockets.sync.client import connect
times, steps = [], []
for _ in range(ROUNDS):
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", 8000)
    connection.request("GET", "/")
    assert connection.getresponse().read() == b"ok"
    connection.close()
    times.append(time.perf_counter() - began)
with connect("ws://127.0.0.1:8001") as socket:
    for _ in range(20):
        began = time.perf_counter()
        socket.send("STEP")
        socket.recv()
        steps.append(time.perf_counter() - began)
print(json.dumps([times, steps]))
"""
#: Seconds of work of a step, and of thinking between two; uvicorn's seconds between pings.
STEP_S, THINK_S, PING_S = 0.05, 5.0, 20.0
#: Longer than servers keep their cores for what may follow.
REST_S = 0.3
#: Sandboxes that are begun at a time.
AT_ONCE = 8


def packages() -> bytes:
    """Return the library of WebSockets as an archive: what is pure Python of it."""
    place, buffer = Path(websockets.__file__).parent, io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in place.rglob("*.py"):
            archive.add(path, Path("packages/websockets") / path.relative_to(place))
    return buffer.getvalue()


@dataclass(slots=True)
class ServiceRig:
    """A gateway, and trajectories whose servers are ready."""

    gateway: ServerProcess
    client: AsyncClient
    trajectories: list[AsyncTrajectory]

    async def used_core_s(self) -> float:
        """Return the core-seconds that all actions have held so far."""
        return sum(task.core_s for task in await self.client.tasks())

    async def all_rest(self) -> None:
        """Return once no action runs."""
        while any(each.state != "idle" for each in await self.client.trajectories()):  # noqa: ASYNC110 (a gateway's)
            await asyncio.sleep(0.05)


@asynccontextmanager
async def serving_sandboxes(count: int, ping_s: float = PING_S) -> AsyncIterator[ServiceRig]:
    async with AsyncExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="tangram-services-"))
        gateway = await stack.enter_async_context(process(GATEWAY, _configured(root)))
        client = await stack.enter_async_context(AsyncClient(f"http://127.0.0.1:{gateway.port}", token=TOKEN))
        archive, gate = packages(), asyncio.Semaphore(AT_ONCE)

        async def begin(number: int) -> AsyncTrajectory:
            async with gate:
                made = await client.trajectory(f"s{number}", function="shell").open()
                await made.upload_archive(".", archive)
                await made.upload("server.py", SERVER.replace("PING", str(ping_s)))
                await made.exec("setsid python3 server.py >log 2>&1 </dev/null &")
                async with await made.port(8000) as port:
                    await port.wait_ready()
                return made

        yield ServiceRig(gateway, client, list(await asyncio.gather(*map(begin, range(count)))))


def _configured(root: str) -> str:
    path = Path(root, "tangram.yaml")
    path.write_text(CONFIG.replace("ROOT", root), encoding="utf-8")
    return str(path)


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Return the milliseconds that it takes."""
    began_s = time.perf_counter()
    await work()
    return (time.perf_counter() - began_s) * 1e3


async def requests(report: BenchReport, rounds: int) -> None:
    """One request: direct, through the gateway while the server is awake, and when it has to be thawed."""
    async with serving_sandboxes(1) as rig, httpx.AsyncClient() as http:
        trajectory = rig.trajectories[0]
        url = (await trajectory.port(8000)).url + "/"

        async def ask() -> None:
            (await http.get(url)).raise_for_status()

        await ask()
        direct = [1e3 * each for each in (await inside(trajectory, rounds))[0]]
        awake = [await timed(ask) for _ in range(rounds)]
        thawed = []
        for _ in range(rounds // 4):
            await asyncio.sleep(REST_S)
            thawed.append(await timed(ask))
    for name, values in (("direct", direct), ("awake", awake), ("thawed", thawed)):
        report.figure(name, {"p50_ms": round(median(values), 3), "p95_ms": round(percentile(values, 0.95), 3)})
    report.check("http_added_p50_ms", median(awake) - median(direct), limit=2.0, better="lower")
    report.check("thaw_added_p50_ms", median(thawed) - median(awake), limit=5.0, better="lower")


async def inside(trajectory: AsyncTrajectory, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of requests and of steps, as the sandbox itself asks them."""
    await trajectory.upload("direct.py", DIRECT.replace("ROUNDS", str(rounds)).replace("STEP", str(STEP_S)))
    asked = await trajectory.exec("python3 direct.py")
    result = asked.result
    assert isinstance(result, dict), asked
    times, steps = json.loads(str(result["stdout"]))
    return times, steps


async def idle(report: BenchReport, count: int, idle_s: float) -> None:
    """Many frozen servers with an open socket each: cores, the gateway's processor, and which sockets live on."""
    async with serving_sandboxes(count) as rig, AsyncExitStack() as stack:
        ports = [await each.port(8001) for each in rig.trajectories]
        sockets = [await stack.enter_async_context(opened(port)) for port in ports]
        await rig.all_rest()
        held_s, cpu_s, began_s = await rig.used_core_s(), process_cpu_s(rig.gateway.pid), time.monotonic()
        await asyncio.sleep(idle_s)
        lasted_s = time.monotonic() - began_s
        share = (process_cpu_s(rig.gateway.pid) - cpu_s) / lasted_s
        held = (await rig.used_core_s() - held_s) / lasted_s
        answers = await asyncio.gather(*[_step(socket, "0") for socket in sockets], return_exceptions=True)
    report.figure("idle", {"servers": count, "seconds": round(lasted_s, 1)})
    report.check("idle_cores", round(held, 6), limit=0.0, better="lower")
    report.check("idle_cpu_share", round(share, 4), limit=0.01, better="lower")
    broken = [each for each in answers if isinstance(each, BaseException)]
    if broken:
        report.note(f"a broken socket: {broken[0]!r}")
    report.check("broken_sockets", float(len(broken)), limit=0.0, better="lower")


def opened(port: AsyncPort) -> connect:
    """Return a socket to it, with pings as OpenEnv's client sends them."""
    return connect(port.ws_url + "/", proxy=None, ping_interval=PING_S, ping_timeout=PING_S)


async def _step(socket: ClientConnection, work: str) -> None:
    await socket.send(work)
    await asyncio.wait_for(socket.recv(), 120.0)


async def rollout(report: BenchReport, count: int, steps: int) -> None:
    """Environments that step and think: the core-seconds that they hold, and how long a step takes."""
    async with serving_sandboxes(count) as rig, AsyncExitStack() as stack:
        direct = 1e3 * median((await inside(rig.trajectories[0], 1))[1])
        sockets = [await stack.enter_async_context(opened(await each.port(8001))) for each in rig.trajectories]
        await rig.all_rest()
        held_s, began_s, times = await rig.used_core_s(), time.monotonic(), list[float]()

        async def play_one(number: int) -> None:
            await asyncio.sleep(THINK_S * number / count)
            for _ in range(steps):
                times.append(await timed(lambda: _step(sockets[number], str(STEP_S))))
                await asyncio.sleep(THINK_S)

        await asyncio.gather(*map(play_one, range(count)))
        lasted_s = time.monotonic() - began_s
        await rig.all_rest()
        held_s = await rig.used_core_s() - held_s
    report.figure("step_p50_ms", round(median(times), 2))
    report.figure("step_direct_p50_ms", round(direct, 2))
    report.check("cores_saved", held_s / (lasted_s * count), limit=0.05, better="lower")
    report.check("step_added_p50_ms", median(times) - direct, limit=10.0, better="lower")


def main() -> int:
    options = parser("services", parts=True)
    options.add_argument("--servers", type=int, default=500, help="frozen servers")
    options.add_argument("--idle", type=float, default=600.0, help="seconds for which they are idle")
    options.add_argument("--environments", type=int, default=64, help="environments of the rollout")
    options.add_argument("--steps", type=int, default=10, help="steps of each")
    options.add_argument("--rounds", type=int, default=400, help="requests")
    given = options.parse_args()
    if given.quick:
        given.servers, given.idle, given.environments, given.steps, given.rounds = 8, 5.0, 8, 2, 100
    report = BenchReport("services")
    parts: dict[str, Callable[[], object]] = {
        "requests": lambda: asyncio.run(requests(report, given.rounds)),
        "idle": lambda: asyncio.run(idle(report, given.servers, given.idle)),
        "rollout": lambda: asyncio.run(rollout(report, given.environments, given.steps)),
    }
    return play(report, given, parts)


if __name__ == "__main__":
    sys.exit(main())
