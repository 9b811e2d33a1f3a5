"""Quotas as who is called sees them: in any window of his, over kills, and whatever his calls take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import orjson

from gateway.app import gateway
from gateway.config.load import load
from gateway.invocations.restart import QuotaRecord
from gateway.store.store import Store, StoreSpec
from manager.action import Grant, Lease
from manager.assembly import build_core
from manager.config import ManagerSpec, NodeSpec
from manager.engine import Engine
from manager.resources.pools import QuotaSpec
from runtimes.executor import LocalExecutor
from runtimes.testing import ScriptedRuntime

SEARCH = QuotaSpec(limit=5, period_s=60.0)


class Wall:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def gateway_of(directory: Path, wall: Wall) -> AsyncIterator[tuple[Store, QuotaRecord, Engine]]:
    """What a gateway has of quotas; left as a kill leaves it, but for what is on disk."""
    store = Store(StoreSpec(path=directory / "db.sqlite"), wall=wall)
    await store.open()
    node = NodeSpec(name="n", numa=((0, 1),), memory_bytes=2**30)
    engine = Engine(
        build_core(ManagerSpec(nodes=(node,), resources={"search": SEARCH})), LocalExecutor({"exec": ScriptedRuntime()})
    )
    await engine.start()
    record = QuotaRecord(store, lambda: {"search": SEARCH}, wall)
    await record.take_up(engine)
    yield store, record, engine
    await engine.close()
    await store.close()


def free(engine: Engine) -> int:
    pools = engine.resources()["pools"]
    assert isinstance(pools, dict)
    return int(pools["search"]["free"])


def lease(units: int) -> Lease:
    return Lease(
        action_id="a",
        node="n",
        grants={"search": Grant(pool="search", units=units), "cpu": Grant(pool="cpu:n", units=1)},
    )


async def test_a_restart_goes_on_in_the_window_and_what_ran_at_the_kill_ends_now(tmp_path: Path) -> None:
    wall = Wall()
    async with gateway_of(tmp_path, wall) as (store, record, engine):
        assert free(engine) == 5
        record.end(record.begin(lease(1)))
        wall.now_s += 30
        record.begin(lease(2))
        await store.commit()
    wall.now_s += 20
    async with gateway_of(tmp_path, wall) as (_, _, engine):
        assert free(engine) == 2
    wall.now_s += 11.5
    async with gateway_of(tmp_path, wall) as (_, _, engine):
        assert free(engine) == 3, "61 s after the first ended"
    wall.now_s += 40
    async with gateway_of(tmp_path, wall) as (_, _, engine):
        assert free(engine) == 3, "what ran may have arrived at any time before the kill was known"
    wall.now_s += 10
    async with gateway_of(tmp_path, wall) as (_, _, engine):
        assert free(engine) == 5


async def test_a_further_try_consumes_beside_the_one_before(tmp_path: Path) -> None:
    wall = Wall()
    async with gateway_of(tmp_path, wall) as (store, record, _):
        used = record.begin(lease(1))
        record.again(used)
        record.again(used)
        await store.commit()
    async with gateway_of(tmp_path, wall) as (_, _, engine):
        assert free(engine) == 2, "three of five, one of which may still have been on its way"
    wall.now_s += 61
    async with gateway_of(tmp_path, wall) as (_, _, engine):
        assert free(engine) == 5


async def test_what_is_kept_of_a_quota_is_bounded(tmp_path: Path) -> None:
    wall = Wall()
    async with gateway_of(tmp_path, wall) as (store, record, _):
        for _ in range(2000):
            wall.now_s += 0.1
            record.end(record.begin(lease(1)))
        kept = orjson.loads(await store.document("quota/search") or "")
        assert kept["running"] == 0
        assert len(kept["ended"]) <= 102
        assert sum(units for _, units in kept["ended"]) >= 600


async def arrivals_of(directory: Path, limit: int, calls: int, fails: Callable[[int], bool]) -> list[float]:
    """Make so many calls at once of a service that counts its requests, and refuses some; return when they came."""
    arrivals: list[float] = []
    loop = asyncio.get_running_loop()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(200 if len(arrivals) % 3 == 0 else 0):  # some connections are slow to be taken
            await asyncio.sleep(0)
        while (await reader.readline()).startswith(b"GET"):
            arrivals.append(loop.time())
            await reader.readuntil(b"\r\n\r\n")
            status = b"503 Busy" if fails(len(arrivals)) else b"200 OK"
            writer.write(b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}" % status)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    (directory / "tangram.yaml").write_text(f"""
server: {{port: 0, grpc_port: 0, state_dir: state}}
sandbox: {{provider: process}}
resources: {{search: {{kind: quota, limit: {limit}, period: 300ms}}}}
functions:
  search:
    runtime: api
    cost: {{search: 1}}
    retry: {{on: [503], max_attempts: 3, backoff: 1ms}}
    request: {{method: GET, url: "http://127.0.0.1:{port}/"}}
""")
    async with gateway(load([directory], {})) as app:
        serving = asyncio.create_task(app.serve())
        address = f"http://127.0.0.1:{app.http_port}/v1/functions/search/invocations"
        assert app.tokens is not None
        headers = {"Authorization": f"Bearer {app.tokens.invoke}"}
        async with httpx.AsyncClient(timeout=60.0, headers=headers) as client:
            answers = await asyncio.gather(*(client.post(address, json={}) for _ in range(calls)))
        app.stop()
        await serving
    assert [each.status_code for each in answers] == [200] * calls
    server.close()
    return arrivals


async def test_who_is_called_sees_no_window_with_more_than_the_limit(tmp_path: Path) -> None:
    arrivals = await arrivals_of(tmp_path, 5, 20, lambda number: False)
    assert len(arrivals) == 20
    assert max(sum(first <= each < first + 0.3 for each in arrivals) for first in arrivals) <= 5


async def test_each_try_within_a_call_counts_as_who_is_called_counts_it(tmp_path: Path) -> None:
    arrivals = await arrivals_of(tmp_path, 2, 4, lambda number: number <= 4)
    assert len(arrivals) == 8
    assert max(sum(first <= each < first + 0.3 for each in arrivals) for first in arrivals) <= 2
