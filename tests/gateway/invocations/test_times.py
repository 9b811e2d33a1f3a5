"""The three times of an invocation sum to the time from its acceptance to its end, whatever happens to it."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.invocations.record import Mode, Record
from manager.action import Action, Lease, Outcome, Settlement, State
from manager.errors import Reason
from tests.gateway.conftest import GatewayBench, RunningGateway, serving, until
from tests.gateway.invocations.test_restart import crash, ended

LOST = Outcome(state=State.LOST, reason=Reason.NODE_LOST)
#: Milliseconds by which rounding may be off: three times and two instants.
ROUNDING_MS = 0.01


def age_ms(record: dict[str, Any]) -> float:
    accepted, over = (datetime.fromisoformat(record[name]) for name in ("accepted_at", "ended_at"))
    return (over - accepted).total_seconds() * 1000


def assert_whole(record: dict[str, Any]) -> None:
    parts = [record[name] for name in ("queue_ms", "overhead_ms", "execution_ms")]
    assert min(parts) >= 0, record
    assert abs(sum(parts) - age_ms(record)) < ROUNDING_MS, (parts, age_ms(record))
    assert abs(record["act_ms"] - sum(parts)) < ROUNDING_MS


#: Seconds that pass, what happens then, and how much of the time since the start of the work its runtime measured.
STEPS = st.lists(
    st.tuples(
        st.floats(0, 500), st.sampled_from(["lease", "begin", "take back", "retry", "die", "wait"]), st.floats(0, 1)
    ),
    max_size=12,
)


@given(steps=STEPS, last=st.sampled_from(["settle", "end", "shut down"]), share=st.floats(0, 1))
def test_whatever_happens_to_it_they_sum_to_its_age(
    steps: list[tuple[float, str, float]], last: str, share: float
) -> None:
    record = Record(
        seq=1, id="i", function="f", revision="r", task="t", trajectory=None, parent=None, mode=Mode.ASYNC,
        accepted_s=1_790_000_000.0, input=None,
    )  # fmt: skip
    now_s, began_s = record.accepted_s, None
    for passed_s, what, part in steps:
        now_s += passed_s
        running = record.state is State.RUNNING
        if what == "lease" and not running:
            record.start(now_s, begun=False)
        elif what == "begin" and running and not record.begun:
            record.begin(now_s)
            began_s = now_s
        elif running and (what in ("retry", "die") or (what == "take back" and not record.begun)):
            if what != "take back":
                ran_s = part * (now_s - began_s) if began_s is not None and what == "retry" else 0.0
                record.attempts = (*record.attempts, record.tried(LOST, now_s, ran_s))
                record.attempt += 1
            record.take_back()
            began_s = None
        shown = record.as_of(now_s).as_wire()
        assert sum((shown.queue_ms or 0, shown.overhead_ms or 0, shown.execution_ms or 0)) == pytest.approx(
            1000 * (now_s - record.accepted_s), abs=ROUNDING_MS
        )
    now_s += 1.0
    if last == "settle":
        ran_s = 0.0 if began_s is None else share * (now_s - began_s)
        action = Action(id="i", function="f")
        lease = None if record.state is State.QUEUED else Lease(action_id="i", node="n")
        record.settle(
            Settlement(action=action, outcome=LOST, lease=lease, queue_s=0.0, overhead_s=0.0, execution_s=ran_s), now_s
        )
    else:
        record.end(State.LOST, Reason.GATEWAY_RESTART, "", now_s, ran=last == "shut down")
    tries = record.attempts
    assert_whole(
        {
            "accepted_at": "2026-01-01T00:00:00+00:00",
            "ended_at": datetime.fromtimestamp(1767225600 + now_s - record.accepted_s).astimezone().isoformat(),
            "queue_ms": 1000 * (record.queue_s or 0.0),
            "overhead_ms": 1000 * (record.overhead_s or 0.0),
            "execution_ms": 1000 * (record.execution_s or 0.0),
            "act_ms": record.as_wire().act_ms,
        }
    )
    assert sum(each.execution_ms or 0.0 for each in tries) <= 1000 * (record.execution_s or 0.0) + ROUNDING_MS


async def over(gateway: RunningGateway, invocation_id: str) -> dict[str, Any]:
    record: dict[str, Any] = await ended(gateway, invocation_id)
    assert record["ended_at"] is not None, record
    assert_whole(record)
    return record


async def submitted(gateway: RunningGateway, body: dict[str, object], function: str = "echo") -> str:
    return str((await gateway.invoke(body, mode="async", function=function)).json()["id"])


async def passing(seconds: float = 0.03) -> None:
    """Time itself is what is measured here."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    await over.wait()


async def test_of_every_way_to_end(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path)) as gateway:
        running = await submitted(gateway, {"held": True, "overhead_s": 0.03})
        await gateway.runtime.begun(running)
        await passing()
        live = (await gateway.http.get(f"/v1/invocations/{running}")).json()
        (listed,) = (await gateway.http.get("/v1/invocations")).json()["invocations"]
        for shown in (live, listed):
            assert (shown["act_ms"], shown["execution_ms"] >= 30, shown["overhead_ms"] >= 30) == (None, True, True)
        await gateway.http.post(f"/v1/invocations/{running}/cancel")
        cancelled = await over(gateway, running)
        assert (cancelled["state"], cancelled["execution_ms"] >= 30) == ("cancelled", True)
        assert cancelled["overhead_ms"] >= 30
        fill = [await submitted(gateway, {"held": True}) for _ in range(gateway.app.node.cores)]
        for each in fill:
            await gateway.executing(each)
        waiting = await submitted(gateway, {})
        impatient = await submitted(gateway, {}, "impatient")
        await passing()
        assert (await gateway.http.get(f"/v1/invocations/{waiting}")).json()["queue_ms"] >= 30
        await gateway.http.post(f"/v1/invocations/{waiting}/cancel")
        assert (await over(gateway, waiting))["state"] == "cancelled"
        assert (await over(gateway, impatient))["reason"] == "queue_timeout"
        for each in fill:
            gateway.runtime.finish(each)
            await over(gateway, each)
        timed_out = await over(gateway, await submitted(gateway, {"hangs": True}, "short"))
        assert (timed_out["state"], timed_out["execution_ms"] >= 50) == ("timed_out", True)
        retried = await over(
            gateway, await submitted(gateway, {"reason": "handler_error", "overhead_s": 0.02}, "retried")
        )
        assert (retried["attempt"], retried["overhead_ms"] >= 60) == (3, True)
        batch = {"calls": [{"function": "echo", "input": {"n": n}} for n in range(5)]}
        for verdict in (await gateway.http.post("/v1/invocations:batch?wait=all", json=batch)).json()["results"]:
            await over(gateway, verdict["invocation"]["id"])


async def test_across_a_restart(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path / "first")) as first:
        running = [await submitted(first, {"held": True}, "again") for _ in range(first.app.node.cores)]
        queued = await submitted(first, {})
        await until(lambda: len(first.runtime.running) == len(running))
        await first.app.store.commit()
        await passing()
        bench = crash(tmp_path / "first", tmp_path / "second")
        for each in running:
            first.runtime.finish(each)
    async with serving(bench) as second:
        for each in running:
            await second.executing(f"{each}.2")
        await passing()
        for each in running:
            second.runtime.finish(f"{each}.2")
            again = await over(second, each)
            (lost,) = again["attempts"]
            assert (again["state"], lost["overhead_ms"] >= 30) == ("succeeded", True)
            assert again["execution_ms"] >= 30
        assert (await over(second, queued))["queue_ms"] >= 60


async def test_streams_carry_them(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path)) as gateway:
        answer = await gateway.invoke({"log": "x"}, mode="stream")
        record = json.loads(answer.text.splitlines()[-1])["invocation"]
        assert_whole(record)
        log = await gateway.http.get(f"/v1/invocations/{record['id']}/logs?follow=true")
        end = json.loads(log.text.splitlines()[-1])
        assert {name: end[name] for name in ("queue_ms", "overhead_ms", "execution_ms")} == {
            name: record[name] for name in ("queue_ms", "overhead_ms", "execution_ms")
        }
