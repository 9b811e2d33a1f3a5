"""What durability costs and keeps: acceptance, kill -9 under load, a long queue, and a database full of old records."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from bench.durable_core import old_records, queue_lengths
from bench.durable_restart import restarts
from bench.gateway import ECHO, GATEWAY, ROOT, START_S, per_second, process
from bench.report import BenchReport, arguments, median, percentile

ACCEPTED_PER_S, ACCEPT_P99_MS = 1500.0, 50.0
#: A pass over 100 times the queue, and a write over so many old records, may cost so much more.
PASS_RATIO, HOT_PATH_RATIO = 2.0, 1.25
CONNECTIONS = 32
WORK_S = 0.01
DRAIN_S = 120.0

CONFIG = """
version: 1
server:
  {{token: bench-bench-bench, state_dir: {directory}/state, port: 0, grpc_port: 0, drain_grace: 100ms,
  durability: {durability}}}
sandbox: {{provider: process}}
scheduler: {{max_queued: 2000000}}
tasks: {{default: {{max_queued: 2000000}}}}
resources: {{slot: {{kind: concurrency, limit: 1}}}}
functions:
  waits:
    runtime: api
    request: {{method: GET, url: "http://127.0.0.1:{port}/wait"}}
    cost: {{slot: 1}}
    timeout: 3600s
    queue_timeout: 3600s
    max_queued: 2000000
  once:
    runtime: api
    request: {{method: GET, url: "http://127.0.0.1:{port}/do?{{name}}"}}
    cost: {{cpu: 1}}
    max_queued: 2000000
"""


class LoadClient:
    """One keep-alive connection that submits and says how it was answered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> LoadClient:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body; raises OSError or EOFError when the gateway is gone."""
        about = f"Host: bench\r\nAuthorization: Bearer bench-bench-bench\r\nContent-Length: {len(body)}"
        self._writer.write(f"{method} {path} HTTP/1.1\r\n{about}\r\n\r\n".encode())
        self._writer.write(body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head.split(b" ", 2)[1]), await self._reader.readexactly(length)

    async def submit(self, function: str, body: bytes) -> str:
        """The id under which it was accepted."""
        status, answer = await self.send("POST", f"/v1/functions/{function}/invocations?mode=async", body)
        if status != 202:
            raise RuntimeError(f"{status}: {answer.decode()}")
        return str(json.loads(answer)["id"])

    def close(self) -> None:
        self._writer.close()


@dataclass(slots=True)
class Upstream:
    """The world that the calls change: ``/do?NAME`` is counted and answered, ``/wait`` is never answered."""

    port: int
    done: Counter[str]


@contextlib.asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    done: Counter[str] = Counter()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                target = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1].decode()
                if target == "/wait":
                    await reader.read()
                    break
                done[target.partition("?")[2]] += 1
                await asyncio.sleep(WORK_S)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield Upstream(server.sockets[0].getsockname()[1], done)
        server.close()


def configure(directory: Path, port: int, durability: str) -> Path:
    config = directory / "tangram.yaml"
    config.write_text(CONFIG.format(directory=directory, port=port, durability=durability))
    return config


# Acceptance


async def accepted_per_s(port: int, each: int) -> float:
    """Acceptances a second over `CONNECTIONS` connections, each with its record committed."""
    clients = [await LoadClient.open(port) for _ in range(CONNECTIONS)]

    async def run(client: LoadClient) -> None:
        for _ in range(each):
            await client.submit("waits", b"{}")

    began_s = time.perf_counter()
    await asyncio.gather(*map(run, clients))
    took_s = time.perf_counter() - began_s
    for client in clients:
        client.close()
    return CONNECTIONS * each / took_s


async def latencies_ms(port: int, rate: float, seconds: float, echo: bool = False) -> list[float]:
    """Milliseconds from the instant at which each call was due, at a steady rate."""
    clients = [await LoadClient.open(port) for _ in range(CONNECTIONS)]
    period_s = CONNECTIONS / rate
    begin_s = time.perf_counter() + 0.05
    found: list[float] = []

    async def run(number: int, client: LoadClient) -> None:
        due_s = begin_s + number * period_s / CONNECTIONS
        while due_s < begin_s + seconds:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if echo:
                await client.send("POST", "/echo", b"{}")
            else:
                await client.submit("waits", b"{}")
            found.append((time.perf_counter() - due_s) * 1000)
            due_s += period_s

    await asyncio.gather(*(run(number, client) for number, client in enumerate(clients)))
    for client in clients:
        client.close()
    return found


@contextlib.asynccontextmanager
async def servers() -> AsyncIterator[dict[str, int]]:
    """Ports of a bare echo and of a gateway of each durability, whose calls all wait."""
    async with contextlib.AsyncExitStack() as stack:
        world = await stack.enter_async_context(upstream())
        ports = {"echo": int(str((await stack.enter_async_context(process(ECHO)))["http"]))}
        for durability in ("process", "power"):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            config = configure(directory, world.port, durability)
            gateway = await stack.enter_async_context(process(GATEWAY, str(config)))
            ports[durability] = int(str(gateway["http"]))
        yield ports


async def acceptance(report: BenchReport, *, rounds: int, each: int, seconds: float) -> None:
    """Both durabilities against a bare echo, in turns."""
    rates: dict[str, list[float]] = {"echo": [], "process": [], "power": []}
    p99_ms: dict[str, list[float]] = {name: [] for name in rates}
    async with servers() as ports:
        for _ in range(rounds):
            rates["echo"].append(await per_second(ports["echo"], "/echo", each))
            for durability in ("process", "power"):
                rates[durability].append(await accepted_per_s(ports[durability], each))
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


# kill -9


class KilledGateway:
    """A gateway that is killed and started again on the same state."""

    def __init__(self, config: Path) -> None:
        self._config = config
        self._server: asyncio.subprocess.Process | None = None
        self.port = 0

    async def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._server = await asyncio.create_subprocess_exec(
            sys.executable, "-c", GATEWAY, str(self._config), stdout=asyncio.subprocess.PIPE, env=environment
        )
        assert self._server.stdout is not None
        async with asyncio.timeout(START_S):
            self.port = int(json.loads(await self._server.stdout.readline())["http"])

    async def end(self, number: signal.Signals) -> None:
        assert self._server is not None
        self._server.send_signal(number)
        await self._server.wait()


async def submit_until_killed(gateway: KilledGateway, accepted: dict[str, str], round_: int, goal: int) -> None:
    """Submit over some connections; kill -9 when so many more are accepted."""
    enough, known = asyncio.Event(), len(accepted)

    async def run(number: int) -> None:
        client, count = await LoadClient.open(gateway.port), 0
        with contextlib.suppress(OSError, EOFError):
            while True:
                name = f"r{round_}c{number}n{count}"
                accepted[name] = await client.submit("once", json.dumps({"name": name}).encode())
                count += 1
                if len(accepted) >= known + goal:
                    enough.set()
        client.close()

    runs = [asyncio.create_task(run(number)) for number in range(8)]
    await enough.wait()
    await gateway.end(signal.SIGKILL)
    await asyncio.gather(*runs)


async def kills(report: BenchReport, *, rounds: int, goal: int) -> None:
    """Every accepted call has one end, and none was done twice."""
    async with upstream() as world:
        with tempfile.TemporaryDirectory() as directory:
            gateway = KilledGateway(configure(Path(directory), world.port, "process"))
            await gateway.start()
            accepted: dict[str, str] = {}
            for round_ in range(rounds):
                await submit_until_killed(gateway, accepted, round_, goal)
                await gateway.start()
            states = await ends(gateway, accepted)
            await gateway.end(signal.SIGINT)
    twice = sum(count > 1 for count in world.done.values())
    report.figure("after_kills", {"kills": rounds, "accepted": len(accepted), **states})
    lost = len(accepted) - states.get("succeeded", 0) - states.get("lost", 0)
    report.check("lost_after_kill", lost, limit=0, better="lower")
    report.check("run_twice_after_kill", twice, limit=0, better="lower")
    report.note("after_kills: a call that ran when it was killed ends `lost`, with its reason, and is not done again")


async def ends(gateway: KilledGateway, accepted: dict[str, str]) -> Counter[str]:
    """How the accepted calls ended; ``missing`` where there is no record, and the state where there is no end."""
    client = await LoadClient.open(gateway.port)
    states: Counter[str] = Counter()
    for invocation_id in accepted.values():
        status, body = await client.send("GET", f"/v1/invocations/{invocation_id}?wait={DRAIN_S}s")
        states["missing" if status != 200 else str(json.loads(body)["state"])] += 1
    client.close()
    return states


def measured(report: BenchReport, name: str, limit: float, rows: dict[str, dict[str, float]]) -> None:
    """A table of two sizes, and the ratio of the larger to the smaller in its first column."""
    small, large = (next(iter(row.values())) for row in rows.values())
    report.figure(name, {size: dict(row) for size, row in rows.items()})
    report.check(name, large / small, limit=limit, better="lower")


def main() -> int:
    given = arguments("durable")
    report = BenchReport("durable")
    rounds, each, seconds = (3, 40, 1.5) if given.quick else (5, 150, 5.0)
    asyncio.run(acceptance(report, rounds=rounds, each=each, seconds=seconds))
    asyncio.run(kills(report, rounds=1 if given.quick else 4, goal=200))
    measured(report, "pass_ms_100k_over_1k", PASS_RATIO, queue_lengths())
    restarts(report, quick=given.quick)
    records = 200_000 if given.quick else 10_000_000
    measured(report, "hot_path_10m_over_empty", HOT_PATH_RATIO, asyncio.run(old_records(records)))
    if given.quick:
        report.note(f"hot_path_10m_over_empty: only {records:,} old records, for --quick")
    return report.print(as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
