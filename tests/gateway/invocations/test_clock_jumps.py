"""The machine's clock is set by days, under a running gateway and between two: nothing is lost or runs twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.config.schema import RetentionSection
from gateway.store.maintenance import prune
from manager.clock import WallClock
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving, until

DAY_S = 86400.0
JUMPS = pytest.mark.parametrize("jump_s", [3 * DAY_S, -3 * DAY_S], ids=["forward", "back"])
KEY = {"Idempotency-Key": "k"}


class JumpingClock:
    """A time of day that is set by hand; time itself passes as it does."""

    def __init__(self) -> None:
        self.set_s = 0.0

    def time(self) -> float:
        return time.time() + self.set_s

    def clock(self) -> WallClock:
        return WallClock(self.time)


@pytest.fixture
def machine() -> JumpingClock:
    return JumpingClock()


@pytest.fixture
async def gateway(tmp_path: Path, machine: JumpingClock) -> AsyncIterator[RunningGateway]:
    async with serving(GatewayBench(tmp_path), machine.clock()) as running:
        yield running


async def fill(gateway: RunningGateway) -> list[str]:
    """A held invocation on each core."""
    ids = [(await gateway.invoke({"held": True}, mode="async")).json()["id"] for _ in range(gateway.app.node.cores)]
    for each in ids:
        await gateway.executing(each)
    return ids


async def ended(gateway: RunningGateway, invocation_id: str) -> dict[str, Any]:
    body: dict[str, Any] = (await gateway.http.get(f"/v1/invocations/{invocation_id}?wait=5s")).json()
    return body


def in_order(record: dict[str, Any]) -> bool:
    """Whether its instants follow one another, a few seconds apart at most, and no time of it is negative."""
    found = [datetime.fromisoformat(record[name]) for name in ("accepted_at", "started_at", "ended_at")]
    times = [record[name] for name in ("queue_ms", "overhead_ms", "execution_ms")]
    return found == sorted(found) and (found[-1] - found[0]).total_seconds() < DEADLINE_S and min(times) >= 0


@JUMPS
async def test_a_key_latches_on_although_the_clock_says_that_it_is_long_over(
    gateway: RunningGateway, machine: JumpingClock, jump_s: float
) -> None:
    first = (await gateway.invoke({"n": 1}, headers=KEY)).json()
    machine.set_s += jump_s
    assert (await gateway.invoke({"n": 1}, headers=KEY)).json()["id"] == first["id"]
    assert (await gateway.invoke({"n": 2}, headers=KEY)).status_code == 422
    assert len(gateway.runtime.leases) == 1


@JUMPS
async def test_what_waits_neither_ages_nor_grows_young(
    gateway: RunningGateway, machine: JumpingClock, jump_s: float
) -> None:
    held = await fill(gateway)
    age = {"X-Max-Age": "1h"}
    before = (await gateway.invoke({"n": 1}, mode="async", headers=age)).json()["id"]
    machine.set_s += jump_s
    after = (await gateway.invoke({"n": 2}, mode="async", headers=age)).json()["id"]
    impatient = await gateway.invoke({}, function="impatient")
    assert (impatient.status_code, impatient.json()["code"]) == (408, "queue_timeout")
    aged = await gateway.invoke({}, mode="async", wait="5s", headers={"X-Max-Age": "50ms"})
    assert (aged.json()["state"], aged.json()["reason"]) == ("timed_out", "queue_timeout")
    assert (await gateway.http.get("/v1/queue")).json()["waiting"] == 2
    for each in held:
        gateway.runtime.finish(each)
    for each in (*held, before, after):
        record = await ended(gateway, each)
        assert record["state"] == "succeeded" and in_order(record), record


@JUMPS
async def test_bounds_of_the_execution_and_waits_between_tries_are_of_time_that_passes(
    gateway: RunningGateway, machine: JumpingClock, jump_s: float
) -> None:
    running = asyncio.create_task(gateway.invoke({"hangs": True}, function="short"))
    await until(lambda: bool(gateway.runtime.running))
    machine.set_s += jump_s
    assert (await running).json()["code"] == "timeout"
    retried = (await gateway.invoke({"reason": "handler_error"}, mode="async", function="retried", wait="5s")).json()
    assert (retried["state"], retried["attempt"]) == ("failed", 3) and in_order(retried)


@JUMPS
async def test_retention_takes_nothing_before_its_time(
    gateway: RunningGateway, machine: JumpingClock, jump_s: float
) -> None:
    kept = (await gateway.invoke({"log": "x"}, mode="async", wait="5s")).json()["id"]
    machine.set_s += jump_s
    spec = RetentionSection(records_age_s=DAY_S, logs_age_s=DAY_S)
    assert await prune(gateway.app.store, spec, gateway.app.wall) == {"logs": 0, "records": 0}
    assert '"data":"x"' in (await gateway.http.get(f"/v1/invocations/{kept}/logs")).text


@JUMPS
async def test_a_callback_is_tried_again_after_time_that_passes(
    tmp_path: Path, machine: JumpingClock, jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.invocations.callbacks.BACKOFF_S", 0.001)
    tried = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tried
        tried += 1
        machine.set_s += jump_s  # between two tries
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: 0\r\n\r\n" % (b"503 Busy" if tried < 3 else b"200 OK"))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    callbacks = {"allow": ["127.0.0.1/32"]}
    async with serving(GatewayBench(tmp_path, server={"callbacks": callbacks}), machine.clock()) as gateway:
        await gateway.invoke({}, mode="async", headers={"X-Callback-Url": url})
        await until(lambda: gateway.app.callbacks.delivered == 1)
    assert tried == 3
    server.close()
    await server.wait_closed()


@pytest.mark.slow
@JUMPS
async def test_across_a_restart_the_machine_is_believed_and_nothing_is_lost(
    tmp_path: Path, machine: JumpingClock, jump_s: float
) -> None:
    bench = GatewayBench(tmp_path)
    async with serving(bench, machine.clock()) as first:
        keyed = (await first.invoke({"n": 1}, headers=KEY)).json()["id"]
        running = await fill(first)
        waiting = [(await first.invoke({"n": n}, mode="async")).json()["id"] for n in range(3)]
    machine.set_s += jump_s
    async with serving(bench, machine.clock()) as second:
        records = [await ended(second, each) for each in waiting]
        if jump_s > 0:  # max_age is a day: it is over by the clock, and that is said
            assert {(each["state"], each["reason"], each["dead"]) for each in records} == {
                ("timed_out", "queue_timeout", True)
            }
        else:
            assert [each["result"] for each in records] == [{"n": n} for n in range(3)]
            executed = [action_id for verb, action_id in second.runtime.seen if verb == "execute"]
            assert executed == waiting, "in their order"
        assert all(each["act_ms"] >= 0 and each["queue_ms"] >= 0 for each in records)
        assert {(await ended(second, each))["reason"] for each in running} == {"gateway_restart"}
        again = (await second.invoke({"n": 1}, headers=KEY)).json()["id"]
        assert (again == keyed) is (jump_s < 0), "a key lives for a day of the machine's clock"
        listed = (await second.http.get("/v1/invocations")).json()["invocations"]
        assert [each["id"] for each in listed] == sorted((each["id"] for each in listed), reverse=True)
        assert {keyed, again, *running, *waiting} == {each["id"] for each in listed}
