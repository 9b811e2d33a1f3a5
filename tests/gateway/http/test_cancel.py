"""Cancel and disconnect in every state: the end is typed and prompt, and all that was held or waited for is free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gateway.invocations.invocations import LiveInvocation
from manager.action import State, UnitSet
from manager.errors import Draining, Reason
from manager.events import NodeLost
from manager.function import RetrySpec
from manager.resources.pools import ConcurrencySpec, QuotaSpec
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, function, serving, until

HOUR_S = 3600.0
FUNCTIONS = {
    "searches": function("searches", cost={"search": UnitSet.fixed(1)}),
    "slots": function("slots", cost={"slot": UnitSet.fixed(1)}),
    "patient": function(
        "patient", retry=RetrySpec(max_attempts=2, backoff_s=HOUR_S, jitter="none", on=(Reason.HANDLER_ERROR,))
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """How an invocation comes to be where it is ended: what runs before it, and what is asked of itself."""

    function: str = "echo"
    input: Mapping[str, object] = field(default_factory=dict)
    trajectory: str | None = None
    #: Held calls of the same function and trajectory before it; -1: one for each core.
    before: int = 0
    #: Calls of the same function that have ended before it.
    ended: int = 0
    state: State = State.QUEUED
    attempt: int = 1


SITUATIONS = {
    "queued": Situation(before=-1),
    "behind its trajectory": Situation(trajectory="t", before=1),
    "waiting for a quota": Situation(function="searches", ended=1),
    "waiting for a slot": Situation(function="slots", before=1),
    "between two tries": Situation(function="patient", input={"reason": "handler_error"}, attempt=2),
    "being made ready": Situation(input={"overhead_s": HOUR_S}, state=State.RUNNING),
    "running": Situation(input={"hangs": True}, state=State.RUNNING),
}


@asynccontextmanager
async def in_situation(directory: Path, situation: Situation) -> AsyncIterator[RunningGateway]:
    bench = GatewayBench(
        directory,
        functions=FUNCTIONS,
        resources={"search": QuotaSpec(limit=1, period_s=HOUR_S), "slot": ConcurrencySpec(limit=1)},
    )
    async with serving(bench) as gateway:
        headers = {} if situation.trajectory is None else {"X-Trajectory-Id": situation.trajectory}
        for _ in range(situation.ended):
            assert (await gateway.invoke({}, function=situation.function, headers=headers)).status_code == 200
        for _ in range(gateway.app.node.cores if situation.before < 0 else situation.before):
            given = {"held": True}
            held = await gateway.invoke(given, function=situation.function, headers=headers, mode="async")
            await gateway.executing(held.json()["id"])
        yield gateway


def call(gateway: RunningGateway, situation: Situation, mode: str) -> asyncio.Task[Any]:
    headers = {} if situation.trajectory is None else {"X-Trajectory-Id": situation.trajectory}
    return asyncio.create_task(gateway.invoke(situation.input, function=situation.function, headers=headers, mode=mode))


async def arrived(gateway: RunningGateway, situation: Situation) -> LiveInvocation:
    """The invocation, once it is where it is to be ended."""
    before = len(gateway.runtime.running)

    def newest() -> LiveInvocation:
        return gateway.app.invocations.living[-1]

    def there() -> bool:
        if not gateway.app.invocations.living:
            return False
        record = newest().record
        if (record.state, record.attempt) != (situation.state, situation.attempt):
            return False
        if situation.attempt > 1:
            return newest().action_id is not None
        return record.id in gateway.runtime.running or situation.state is State.QUEUED

    await until(there)
    assert situation.state is State.RUNNING or len(gateway.runtime.running) == before
    return newest()


async def at_rest(gateway: RunningGateway) -> None:
    """Let what was there before go, and see that nothing is left of anything."""
    for invocation_id in list(gateway.runtime.running):
        gateway.runtime.finish(invocation_id)
    await until(lambda: gateway.app.invocations.living == ())
    pools = (await gateway.http.get("/v1/resources")).json()["pools"]
    assert all(pool["free"] == pool["total"] for name, pool in pools.items() if name != "search"), pools
    assert not any(pool["held"] for pool in pools.values()), pools
    assert (await gateway.http.get("/v1/queue")).json()["waiting"] == 0
    for line in (await gateway.http.get("/metrics")).text.splitlines():
        if line.startswith(("tangram_invocations_queued{", "tangram_invocations_running{", "tangram_living ")):
            assert line.endswith(" 0.0"), line
    assert (gateway.app.admission.queued, gateway.app.held.bytes) == (0, 0)


async def test_a_cancel_that_a_gateway_does_not_live_to_see_is_to_be_sent_again(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next gateway has the invocation, and knows of no cancel."""
    accepted = (await gateway.invoke({"held": True}, mode="async")).json()
    await gateway.executing(accepted["id"])
    asked = asyncio.Event()

    def stop(*_: object) -> bool:
        asked.set()
        return True

    monkeypatch.setattr(gateway.app.invocations, "stop", stop)
    answer = asyncio.create_task(gateway.http.post(f"/v1/invocations/{accepted['id']}/cancel"))
    await asked.wait()
    (invocation,) = gateway.app.invocations.living
    invocation.leave_behind(Draining("the next one goes on with the call", retry_after_s=1.0))
    assert ((await answer).status_code, answer.result().headers["retry-after"]) == (503, "1")
    gateway.runtime.finish(accepted["id"])


@pytest.mark.promise("An invocation that is reported as cancelled has ended.")
@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
async def test_a_cancelled_invocation_has_ended_when_it_is_told_so(tmp_path: Path, situation: Situation) -> None:
    async with in_situation(tmp_path, situation) as gateway:
        accepted = await call(gateway, situation, "async")
        invocation = await arrived(gateway, situation)
        assert invocation.record.id == accepted.json()["id"]
        answer = await gateway.http.post(f"/v1/invocations/{invocation.record.id}/cancel")
        record = answer.json()
        assert (answer.status_code, record["state"], record["reason"]) == (200, "cancelled", "cancelled")
        assert not record["dead"], "a caller's wish is no dead letter"
        assert record["id"] not in gateway.runtime.running
        await at_rest(gateway)
        executed = [verb for verb, action_id in gateway.runtime.seen if action_id == record["id"] and verb == "execute"]
        assert len(executed) == (situation.state is State.RUNNING or situation.attempt > 1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "stream"])
@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
async def test_a_caller_that_goes_away_takes_its_invocation_with_it(
    tmp_path: Path, situation: Situation, mode: str
) -> None:
    async with in_situation(tmp_path, situation) as gateway:
        calling = call(gateway, situation, mode)
        invocation = await arrived(gateway, situation)
        calling.cancel()
        await asyncio.wait_for(invocation.ended.wait(), DEADLINE_S)
        record = invocation.record
        assert (record.state, record.reason, record.message) == (
            State.CANCELLED,
            Reason.CANCELLED,
            "its caller went away",
        )
        await at_rest(gateway)


async def test_one_whose_node_is_lost_before_it_ended_is_lost_no_dead_letter_and_runs_no_more(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path)) as gateway:
        accepted = (await gateway.invoke({"hangs": True}, function="again", mode="async")).json()
        await gateway.executing(accepted["id"])
        await gateway.app.invocations.cancel(accepted["id"])
        gateway.app.engine.tell(NodeLost(node=gateway.app.node.name))
        await until(lambda: gateway.app.invocations.living == ())
        record = (await gateway.http.get(f"/v1/invocations/{accepted['id']}")).json()
        assert (record["state"], record["reason"]) == ("lost", "node_lost"), "what is told as cancelled has ended"
        assert "cancelled by request" in record["message"] and not record["dead"]
        assert record["attempt"] == 1


async def test_a_call_whose_log_too_many_follow_already_does_not_go_on_without_its_caller(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path)) as gateway:
        gateway.app.api.logs.settings = replace(gateway.app.api.logs.settings, followers_max=0)
        refused = await gateway.invoke({"hangs": True}, mode="stream")
        assert refused.status_code == 503 and "followed already" in refused.text
        await until(lambda: gateway.app.invocations.living == ())
        (record,) = (await gateway.http.get("/v1/invocations")).json()["invocations"]
        assert (record["state"], record["message"]) == ("cancelled", "its caller went away")
