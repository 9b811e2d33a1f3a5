"""What durability costs and keeps: acceptance, kill -9 under load, restarts, a long queue, and many old records."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.gateway import CONNECTIONS, per_second
from bench.report import BenchReport, median, parser, percentile, play
from bench.serving import ECHO, GATEWAY, ROOT, TOKEN, BenchConnection, ServerProcess, free_port, process
from gateway.config.schema import RetentionSection
from gateway.invocations.record import Mode, Record, new_id
from gateway.store.maintenance import prune
from gateway.store.store import LogRow, Store, StoreSpec
from manager.action import Action, Outcome, State, UnitSet
from manager.assembly import build_core
from manager.config import ManagerSpec, NodeSpec, SchedulerSpec, TaskSpec
from manager.core.core import Core
from manager.errors import Reason
from manager.events import Execute, Finished, Submitted

#: Limits.
ACCEPTED_PER_S, ACCEPT_P99_MS = 1500.0, 50.0
READY_MS, RESTART_S, FILTER_P99_MS, STALL_P999_MS = 1000.0, 5.0, 20.0, 100.0
#: A pass over 100 times the queue, and a write over so many old records, may cost so much more.
PASS_RATIO, HOT_PATH_RATIO = 2.0, 1.25
WORK_S, DRAIN_S = 0.01, 120.0
READY_ROUNDS, PAGES, KILLS, LOG_MB = 5, 4, 5, 100
CORES, PASSES = 16, 50
#: Invocations of which each goes through acceptance, start and end; and how many go at once.
HOT_ROUNDS, TOGETHER = 60, 16
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
  callbacks: {{allow: [127.0.0.0/8]}}
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
  once:
    runtime: api
    request: {{method: GET, url: "http://127.0.0.1:{upstream}/do?{{name}}"}}
    cost: {{cpu: 1}}
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
DONE = Outcome(state=State.SUCCEEDED, execution_s=0.01)
OLD = """
INSERT INTO invocations (
    seq, id, function, revision, task, trajectory, parent, mode, detached, accepted_s, options, state, reason, message,
    component, detail, retry_after_s, attempt, attempts, started_s, ended_s, queue_s, overhead_s, execution_s, node,
    units, usage, dead, callback, result
)
WITH RECURSIVE old(seq) AS (SELECT ? UNION ALL SELECT seq + 1 FROM old WHERE seq < ?)
SELECT seq, printf('%011x-%012x', seq, seq), 'f' || (seq % 20), 'r', 'default', 't' || (seq / 20), NULL, 'async', 1,
    seq * 0.01, '{}', 'succeeded', NULL, '', '', '{}', NULL, 1, '[]', seq * 0.01, seq * 0.01, 0.01, 0.001, 0.1,
    'local', '{"cpu":1}', '{}', 0, NULL, x'7b7d'
FROM old
"""
FILL_ROWS = 500_000


@dataclass(slots=True)
class Upstream:
    """The world that the calls change: ``/do?NAME`` is counted and answered, ``/wait`` is never answered."""

    port: int
    done: Counter[str]


@asynccontextmanager
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


async def first_202_s(directory: Path, more: str = "", *, end: signal.Signals = signal.SIGINT) -> float:
    """Seconds from exec to the first acceptance."""
    began_s = time.perf_counter()
    async with served(directory, more, end=end) as server:
        connection = BenchConnection(server.port)
        await connection.submit("shell", {"command": "true"})
        took_s = time.perf_counter() - began_s
        connection.close()
    return took_s


async def submitted(connection: BenchConnection) -> str:
    return await connection.submit("waits", {})


# Acceptance


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
        world = await stack.enter_async_context(upstream())
        ports = {"echo": (await stack.enter_async_context(process(ECHO))).port}
        for name in ("process", "power"):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            gateway = served(directory, upstream_port=world.port, durability=name, end=signal.SIGTERM)
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


# kill -9


async def submit_until_killed(gateway: ServerProcess, accepted: dict[str, str], round_: int, goal: int) -> None:
    """Submit over some connections; kill -9 when so many more are accepted."""
    enough, known = asyncio.Event(), len(accepted)

    async def run(number: int) -> None:
        client, count = BenchConnection(gateway.port), 0
        with contextlib.suppress(OSError, EOFError):
            while True:
                name = f"r{round_}c{number}n{count}"
                accepted[name] = await client.submit("once", {"name": name})
                count += 1
                if len(accepted) >= known + goal:
                    enough.set()

    runs = [asyncio.create_task(run(number)) for number in range(8)]
    await enough.wait()
    await gateway.end(signal.SIGKILL)
    await asyncio.gather(*runs)


async def kills(report: BenchReport, rounds: int, goal: int) -> None:
    """Every accepted call has one end, and none was done twice."""
    accepted: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        async with upstream() as world, served(Path(directory), upstream_port=world.port) as gateway:
            for round_ in range(rounds):
                await submit_until_killed(gateway, accepted, round_, goal)
                await gateway.start()
            states = await ends(gateway, accepted)
    twice = sum(count > 1 for count in world.done.values())
    report.figure("after_kills", {"kills": rounds, "accepted": len(accepted), **states})
    lost = len(accepted) - states.get("succeeded", 0) - states.get("lost", 0)
    report.check("lost_after_kill", lost, limit=0, better="lower")
    report.check("run_twice_after_kill", twice, limit=0, better="lower")
    report.note("after_kills: a call that ran when it was killed ends `lost`, with its reason, and is not done again")


async def ends(gateway: ServerProcess, accepted: dict[str, str]) -> Counter[str]:
    """How the accepted calls ended; ``missing`` where there is no record, and the state where there is no end."""
    client = BenchConnection(gateway.port)
    states: Counter[str] = Counter()
    for invocation_id in accepted.values():
        status, body = await client.send("GET", f"/v1/invocations/{invocation_id}?wait={DRAIN_S}s")
        states["missing" if status != 200 else str(json.loads(body)["state"])] += 1
    client.close()
    return states


# Two sizes of one thing


def measured(report: BenchReport, name: str, limit: float, rows: dict[str, dict[str, float]]) -> None:
    """A table of two sizes, and the ratio of the larger to the smaller in its first column."""
    small, large = (next(iter(row.values())) for row in rows.values())
    report.figure(name, {size: dict(row) for size, row in rows.items()})
    report.check(name, large / small, limit=limit, better="lower")


def queue_lengths() -> dict[str, dict[str, float]]:
    """Milliseconds of a pass after one end, and resident memory of the core, by the queue's length."""
    return {f"{length:,} queued": _queue(length) for length in (1_000, 100_000)}


def _queue(length: int) -> dict[str, float]:
    gc.collect()
    before = _resident_bytes()
    core = _core(length)
    running = _submit(core, length)
    resident_mib = (_resident_bytes() - before) / 2**20
    times_ms = []
    for number in range(PASSES):
        action_id = running.pop(0)
        began_s = time.perf_counter()
        commands = core.step([Finished(action_id=action_id, outcome=DONE)], 1.0 + number)
        times_ms.append((time.perf_counter() - began_s) * 1000)
        running += [command.action.id for command in commands if isinstance(command, Execute)]
    return {"pass_ms": median(times_ms), "resident_mib": resident_mib}


def _core(length: int) -> Core:
    node = NodeSpec(name="n", numa=(tuple(range(CORES)),), memory_bytes=2**40)
    bound = 2 * length + CORES
    return build_core(
        ManagerSpec(
            nodes=(node,),
            tasks={"default": TaskSpec(max_queued=bound)},
            scheduler=SchedulerSpec(max_queued=bound),
        )
    )


def _submit(core: Core, length: int) -> list[str]:
    """Fill the cores, then the queue; the actions that run."""
    cost = {"cpu": UnitSet.fixed(1)}
    running: list[str] = []
    for begin in range(0, length + CORES, 1000):
        numbers = range(begin, min(begin + 1000, length + CORES))
        events = [Submitted(action=Action(id=str(number), function="f", cost=cost, t_ori_s=1.0)) for number in numbers]
        commands = core.step(list(events), 0.0)
        running += [command.action.id for command in commands if isinstance(command, Execute)]
    return running


async def hot_path(report: BenchReport, count: int) -> None:
    """Milliseconds from acceptance to a durable end, over an empty database and one full of old records, in turns."""
    with tempfile.TemporaryDirectory() as directory:
        paths = {"empty": Path(directory) / "empty.sqlite", f"{count:,} old records": Path(directory) / "old.sqlite"}
        stores = {name: Store(StoreSpec(path=path)) for name, path in paths.items()}
        for name, store in stores.items():
            await store.open()
            if name != "empty":
                await store.close()
                fill(paths[name], count)
                stores[name] = Store(StoreSpec(path=paths[name]))
                await stores[name].open()
        found: dict[str, list[float]] = {name: [] for name in stores}
        for _ in range(HOT_ROUNDS):
            for name, store in stores.items():
                found[name].append(await _hot_path(store))
        for store in stores.values():
            await store.close()
        rows = {
            name: {"commit_ms": median(found[name][5:]), "file_mib": paths[name].stat().st_size / 2**20}
            for name in stores
        }
    measured(report, "hot_path_10m_over_empty", HOT_PATH_RATIO, rows)


async def _hot_path(store: Store) -> float:
    """Milliseconds for some invocations to be accepted, started and ended, each step committed, and read again."""
    began_s = time.perf_counter()
    records = [_accept(store) for _ in range(TOGETHER)]
    await store.commit()
    for record in records:
        record.move(State.RUNNING)
        store.save(record)
    await store.commit()
    for record in records:
        record.end(State.LOST, Reason.NODE_LOST, "", time.time())
        store.save(record)
    await store.commit()
    for record in records:
        await store.get(record.seq)
    return (time.perf_counter() - began_s) * 1000


def _accept(store: Store) -> Record:
    seq = store.next_seq()
    record = Record(
        seq=seq,
        id=new_id(seq),
        function="f1",
        revision="r",
        task="default",
        trajectory="t1",
        parent=None,
        mode=Mode.ASYNC,
        accepted_s=time.time(),
        input=b'{"a":1}',
        detached=True,
    )
    store.create(record)
    store.save_key(f"f1\n{record.id}", b"digest", seq, time.time() + 86400)
    return record


def fill(path: Path, count: int) -> None:
    """Old, ended records, as a gateway of weeks ago would have left them."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    for begin in range(1, count + 1, FILL_ROWS):
        connection.execute(OLD, (begin, min(count, begin + FILL_ROWS - 1)))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# What one gateway leaves to the next


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
            took_ms.append(1000 * await first_202_s(directory, more, end=signal.SIGKILL))
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
        took_s = await first_202_s(directory)
        report.check("restart_1m_records_s", took_s, limit=RESTART_S, better="lower")
        async with served(directory) as server:
            times_ms = await _filters_ms(server.port)
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
    client, times_ms = BenchConnection(port), []
    for chosen in itertools.product(*choices):
        cursor = ""
        for _ in range(PAGES):
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

    receiver = await asyncio.start_server(receive, "127.0.0.1", 0)
    header = f"X-Callback-Url: http://127.0.0.1:{receiver.sockets[0].getsockname()[1]}/"
    accepted: set[str] = set()
    with tempfile.TemporaryDirectory() as name:
        for round_ in range(KILLS + 1):
            end = signal.SIGINT if round_ == KILLS else signal.SIGKILL
            async with served(Path(name), end=end) as server:
                client = BenchConnection(server.port)
                for _ in range(60 if round_ < KILLS else 0):
                    accepted.add(await client.submit("shell", {"command": "true"}, header))
                wanted = len(accepted) if round_ == KILLS else len(told) + 20
                async with asyncio.timeout(120):
                    while len(told) < wanted:
                        heard.clear()
                        await heard.wait()
                client.close()
    receiver.close()
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
    restarted, old = (100_000, 200_000) if quick else (1_000_000, 10_000_000)
    if quick:
        report.note(f"--quick: only {restarted:,} records at a restart, and {old:,} old ones on the hot path")
    return play(
        report,
        options,
        {
            "acceptance": lambda: acceptance(report, rounds, each, seconds),
            "kills": lambda: kills(report, 1 if quick else 4, 200),
            "queue": lambda: measured(report, "pass_ms_100k_over_1k", PASS_RATIO, queue_lengths()),
            "ready": lambda: ready(report),
            "restart": lambda: million(report, restarted),
            "callbacks": lambda: callbacks(report),
            "shrinks": lambda: shrinks(report),
            "stalls": lambda: stalls(report, 1000 if quick else 10_000, 100 if quick else 1000),
            "hot_path": lambda: hot_path(report, old),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
