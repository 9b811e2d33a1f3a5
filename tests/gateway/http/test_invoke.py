"""Invocation over HTTP: the three modes, batches, nested calls, and a caller or a gateway that goes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from grpclib.client import Channel

from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.generated.tangram_grpc import GatewayStub
from gateway.http import app as http_app
from gateway.invocations.invocations import DeadLetters
from manager.action import Action, UnitSet
from manager.config import TaskSpec
from manager.errors import Reason
from manager.formulation import formulate
from manager.function import FunctionSpec
from manager.resources.pools import ConcurrencySpec, QuotaSpec
from tangram.client.aio import AsyncClient
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, function, serving, until

STRICT = b"version: 1\nfunctions:\n  echo: {runtime: exec, cost: {cpu: 1}, description: now strict}\n"
KEY = {"Idempotency-Key": "k"}


async def test_a_sync_call_answers_with_the_record_and_its_times(gateway: RunningGateway) -> None:
    response = await gateway.invoke({"a": 1})
    record = response.json()
    assert response.status_code == 200
    assert record["state"] == "succeeded"
    assert record["result"] == {"a": 1}
    assert record["units"] == {"cpu": 1}
    assert response.headers["x-invocation-id"] == record["id"]
    parts = [float(response.headers[f"x-{part}-ms"]) for part in ("queue", "overhead", "execution")]
    assert sum(parts) == pytest.approx(record["act_ms"], abs=0.01)


@pytest.mark.promise("The record of an invocation exists from its acceptance on.")
async def test_an_async_call_is_accepted_and_can_be_waited_for(gateway: RunningGateway) -> None:
    accepted = await gateway.invoke({"held": True}, mode="async")
    assert accepted.status_code == 202
    invocation_id = accepted.json()["id"]
    await gateway.executing(invocation_id)
    assert (await gateway.http.get(f"/v1/invocations/{invocation_id}")).json()["state"] == "running"
    waiting = asyncio.create_task(gateway.http.get(f"/v1/invocations/{invocation_id}", params={"wait": "5s"}))
    gateway.runtime.finish(invocation_id)
    assert (await waiting).json()["state"] == "succeeded"


async def test_a_sync_call_that_takes_longer_than_wait_goes_on_without_its_caller(gateway: RunningGateway) -> None:
    response = await gateway.invoke({"held": True}, wait="20ms")
    assert response.status_code == 202
    invocation_id = response.json()["id"]
    gateway.runtime.finish(invocation_id)
    ended = await gateway.http.get(f"/v1/invocations/{invocation_id}", params={"wait": "5s"})
    assert ended.json()["state"] == "succeeded"


@pytest.mark.promise("A failure has a reason from a closed list, with a status for each.")
async def test_a_failure_has_the_status_of_its_reason(gateway: RunningGateway) -> None:
    for reason, status in [
        (Reason.HANDLER_ERROR, 200),
        (Reason.OUT_OF_MEMORY, 200),
        (Reason.INVALID_INPUT, 422),
        (Reason.ENVIRONMENT_LOST, 502),
        (Reason.UPSTREAM, 502),
        (Reason.MODEL_ERROR, 500),
    ]:
        response = await gateway.invoke({"reason": reason.value, "message": "why"})
        body = response.json()
        assert response.status_code == status
        assert response.headers["x-function-error"] == reason.value
        assert body["message" if status == 200 else "detail"] == "why"


async def test_an_execution_beyond_its_timeout_is_504_and_a_wait_beyond_its_own_408(gateway: RunningGateway) -> None:
    too_long = await gateway.invoke({"hangs": True}, function="short")
    assert (too_long.status_code, too_long.json()["code"]) == (504, "timeout")
    cores = gateway.app.node.cores
    for _ in range(cores):
        await gateway.invoke({"hangs": True}, mode="async")
    too_late = await gateway.invoke({}, function="impatient")
    assert (too_late.status_code, too_late.json()["code"]) == (408, "queue_timeout")


@pytest.mark.promise("A caller that disconnects cancels its invocation, unless it chose otherwise.")
async def test_a_client_that_disconnects_takes_its_invocation_with_it(gateway: RunningGateway) -> None:
    call = asyncio.create_task(gateway.invoke({"hangs": True}))
    await until(lambda: bool(gateway.runtime.running))
    invocation_id = next(iter(gateway.runtime.running))
    call.cancel()
    await until(lambda: not gateway.runtime.running)
    record = (await gateway.http.get(f"/v1/invocations/{invocation_id}", params={"wait": "5s"})).json()
    assert (record["state"], record["reason"]) == ("cancelled", "cancelled")


async def test_a_client_may_ask_that_its_invocation_goes_on(gateway: RunningGateway) -> None:
    call = asyncio.create_task(gateway.invoke({"held": True}, headers={"X-On-Disconnect": "continue"}))
    await until(lambda: bool(gateway.runtime.running))
    invocation_id = next(iter(gateway.runtime.running))
    call.cancel()
    await until(lambda: gateway.app.invocations._living[int(invocation_id[:11], 16)].callers == 0)
    gateway.runtime.finish(invocation_id)
    record = (await gateway.http.get(f"/v1/invocations/{invocation_id}", params={"wait": "5s"})).json()
    assert record["state"] == "succeeded"


async def test_a_key_is_of_one_trajectory(gateway: RunningGateway) -> None:
    key = {"Idempotency-Key": "k-1"}
    first = await gateway.invoke({"n": 1}, headers=key | {"X-Trajectory-Id": "t1"})
    again = await gateway.invoke({"n": 1}, headers=key | {"X-Trajectory-Id": "t1"})
    assert (first.status_code, again.json()["id"]) == (200, first.json()["id"])
    for elsewhere in ({"X-Trajectory-Id": "t2"}, {}):
        other = await gateway.invoke({"n": 1}, headers=key | elsewhere)
        assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused"), "another sandbox"
    assert [verb for verb, _ in gateway.runtime.seen].count("execute") == 1
    key = {"Idempotency-Key": "k-2"}
    assert (await gateway.invoke({"n": 1}, headers=key)).status_code == 200
    assert (await gateway.invoke({"n": 1}, headers=key | {"X-Trajectory-Id": "t1"})).status_code == 422


async def test_whole_numbers_stay_exact_on_their_way(gateway: RunningGateway) -> None:
    numbers = {"a": 2**70, "b": 2**70 + 1, "c": -(10**300)}
    assert (await gateway.invoke(numbers)).json()["result"] == numbers, "what the function was given"
    key = {"Idempotency-Key": "k"}
    assert (await gateway.invoke({"n": 2**70}, headers=key)).status_code == 200
    assert (await gateway.invoke({"n": 2**70 + 1}, headers=key)).status_code == 422


async def test_the_body_of_a_key_is_compared_by_its_value(gateway: RunningGateway) -> None:
    path, headers = "/v1/functions/echo/invocations", {"Idempotency-Key": "k-1", "Content-Type": "application/json"}
    first = await gateway.http.post(path, content=b'{"a": {"x": 1, "y": [1, 2]}, "b": "4"}', headers=headers)
    for body in (b'{"b":"4","a":{"y":[1,2],"x":1}}', b'{ "a" : {"y": [1, 2], "x": 1}, "b": "\\u0034" }'):
        again = await gateway.http.post(path, content=body, headers=headers)
        assert (again.status_code, again.json().get("id")) == (200, first.json()["id"])
        assert again.headers["X-Idempotent-Replay"] == "true"
    for body in (b'{"b":"4","a":{"y":[2,1],"x":1}}', b'{"b":4,"a":{"y":[1,2],"x":1}}'):
        other = await gateway.http.post(path, content=body, headers=headers)
        assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")


@pytest.mark.promise(
    "The same key and body return the first invocation, in every mode and over every API; another body is 422."
)
async def test_a_key_latches_on_in_every_mode_and_on_every_door(gateway: RunningGateway) -> None:
    key, body = {"Idempotency-Key": "k-1"}, {"held": True, "log": "once"}
    calls = [asyncio.create_task(gateway.invoke(body, headers=key, mode=mode)) for mode in ("stream", "sync", "stream")]
    await until(lambda: bool(gateway.runtime.running))
    (invocation_id,) = gateway.runtime.running
    accepted = await gateway.invoke(body, headers=key, mode="async")
    other = await gateway.invoke(body | {"log": "twice"}, headers=key)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    gateway.runtime.finish(invocation_id)
    calls.append(asyncio.create_task(gateway.invoke(body, headers=key, mode="stream")))
    channel = Channel("127.0.0.1", gateway.app.grpc_port)
    request = pb.InvokeRequest(function="echo", input_json=orjson.dumps(body), idempotency_key="k-1")
    ends = await asyncio.gather(GatewayStub(channel).Invoke(request), GatewayStub(channel).Submit(request))
    channel.close()
    answers = [await call for call in calls]
    assert [answer.headers["x-invocation-id"] for answer in answers] == [invocation_id] * 4
    assert sorted(answer.headers.get("x-idempotent-replay", "") for answer in answers) == ["", "true", "true", "true"]
    assert accepted.headers["x-idempotent-replay"] == "true"
    assert {accepted.json()["id"], *(end.id for end in ends)} == {invocation_id}
    for answer in (answers[0], answers[3]):
        lines = [orjson.loads(line) for line in answer.text.splitlines()]
        assert [line["stream"] for line in lines] == ["accepted", "stdout", "result"]
    assert [verb for verb, _ in gateway.runtime.seen].count("execute") == 1


@pytest.mark.promise("A refusal for lack of capacity is 429 or 503 with Retry-After, and nothing was started.")
async def test_a_full_function_is_429_with_a_time_to_come_back(gateway: RunningGateway) -> None:
    cores = gateway.app.node.cores
    for _ in range(cores):
        await gateway.invoke({"hangs": True}, mode="async")
    assert (await gateway.invoke({}, mode="async", function="narrow")).status_code == 202
    refused = await gateway.invoke({}, mode="async", function="narrow")
    assert (refused.status_code, refused.json()["code"]) == (429, "quota_exceeded")
    assert int(refused.headers["retry-after"]) >= 1


async def test_bad_input_is_a_problem_with_its_place(gateway: RunningGateway) -> None:
    for path, body, headers, status in [
        ("nope/invocations", b"{}", {}, 404),
        ("echo/invocations", b"{", {}, 422),
        ("echo/invocations", b"[1]", {}, 422),
        ("echo/invocations", b'"\xff"', {}, 422),
        ("echo/invocations?mode=later", b"{}", {}, 422),
        ("echo/invocations?wait=soon", b"{}", {}, 422),
        ("echo/invocations", b"{}", {"X-Timeout": "-1"}, 422),
        ("echo/invocations", b"{}", {"X-Trajectory-Id": "../x"}, 422),
        ("echo/invocations", b"{}", {"X-Task": "a b"}, 422),
        ("echo/invocations", b"{}", {"X-Parent-Id": "00000000001-000000000000"}, 422),
        ("strict/invocations", b'{"n": "x"}', {}, 422),
    ]:
        response = await gateway.http.post(f"/v1/functions/{path}", content=body, headers=headers)
        assert response.status_code == status
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["status"] == status
        assert not gateway.runtime.seen[1 + len(gateway.app.config.functions) :]


async def test_a_body_over_the_bound_is_413_whether_announced_or_not(tmp_path: Path) -> None:
    async def chunks() -> object:
        for _ in range(3):
            yield b"x" * 600

    async with serving(GatewayBench(tmp_path, server={"body_limit": 1000})) as gateway:
        announced = await gateway.http.post("/v1/functions/echo/invocations", content=b"x" * 2000)
        streamed = await gateway.http.post("/v1/functions/echo/invocations", content=chunks())  # type: ignore[arg-type]
    assert (announced.status_code, streamed.status_code) == (413, 413)


async def test_while_it_drains_new_work_is_503_and_running_work_ends(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, server={"drain_grace": "5s"})) as gateway:
        running = asyncio.create_task(gateway.invoke({"held": True}))
        await until(lambda: bool(gateway.runtime.running))
        gateway.app.stop()
        refused = await gateway.invoke({})
        assert (refused.status_code, refused.json()["code"]) == (503, "draining")
        assert (await gateway.http.get("/readyz")).status_code == 503
        gateway.runtime.finish(next(iter(gateway.runtime.running)))
        assert (await running).json()["state"] == "succeeded"


@pytest.mark.promise("A batch is accepted with one commit, and each call has its own verdict.")
async def test_each_call_of_a_batch_has_its_own_verdict(gateway: RunningGateway) -> None:
    calls: list[object] = [
        {"function": "echo", "input": {"n": 1}},
        {"function": "nope"},
        {"function": "echo", "input": []},
        {"function": "echo", "colour": "red"},
        7,
        {"function": "echo", "input": {"reason": "handler_error"}, "trajectory": "t-1", "key": "k"},
    ]
    response = await gateway.http.post("/v1/invocations:batch?wait=all", json={"calls": calls})
    verdicts = response.json()["results"]
    assert [verdict["status"] for verdict in verdicts] == [200, 404, 422, 422, 422, 200]
    assert verdicts[0]["invocation"]["result"] == {"n": 1}
    assert verdicts[3]["problem"]["errors"] == {"path": "$.calls[3].colour"}
    assert verdicts[5]["invocation"]["reason"] == "handler_error"


async def test_a_fault_in_one_call_of_a_batch_costs_no_other(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(function: FunctionSpec, *, input: Mapping[str, object], **more: Any) -> Action:
        if "absurd" in input:
            raise OverflowError("intermediate overflow in fsum")
        return formulate(function, input=input, **more)

    monkeypatch.setattr("gateway.invocations.invocations.formulate", faulty)
    calls = [{"function": "echo", "input": each} for each in ({"n": 1}, {"absurd": 1}, {"n": 2})]
    verdicts = (await gateway.http.post("/v1/invocations:batch?wait=all", json={"calls": calls})).json()["results"]
    assert [verdict["status"] for verdict in verdicts] == [200, 500, 200]
    assert "a fault of the gateway" in verdicts[1]["problem"]["detail"]


@pytest.mark.slow
async def test_a_thousand_calls_share_a_few_commits(gateway: RunningGateway) -> None:
    before = gateway.app.store.commits
    calls = [{"function": "echo", "input": {"n": n}} for n in range(1000)]
    accepted = (await gateway.http.post("/v1/invocations:batch", json={"calls": calls})).json()["results"]
    assert [verdict["status"] for verdict in accepted] == [202] * 1000
    assert gateway.app.store.commits - before < 100
    last = accepted[-1]["invocation"]["id"]
    assert (await gateway.http.get(f"/v1/invocations/{last}?wait=10s")).json()["result"] == {"n": 999}


async def test_a_batch_that_is_none_is_refused(gateway: RunningGateway) -> None:
    bodies: list[object] = [{}, {"calls": {}}, []]
    for body in bodies:
        assert (await gateway.http.post("/v1/invocations:batch", json=body)).status_code == 422
    assert (await gateway.http.post("/v1/invocations:batch?wait=some", json={"calls": []})).status_code == 422


async def verdicts(gateway: RunningGateway, query: str, calls: list[dict[str, object]]) -> list[int]:
    answer = await gateway.http.post(f"/v1/invocations:batch?{query}", json={"calls": calls})
    return [verdict["status"] for verdict in answer.json()["results"]]


async def test_waiting_for_any_ends_with_the_first_end_whenever_it_was_or_with_the_time(
    gateway: RunningGateway,
) -> None:
    hangs: dict[str, object] = {"function": "echo", "input": {"hangs": True}}
    keyed: dict[str, object] = {"function": "echo", "input": {"n": 1}, "key": "k"}
    assert await verdicts(gateway, "wait=any&timeout=5s", [hangs, {"function": "nope"}, keyed]) == [202, 404, 200]
    assert await verdicts(gateway, "wait=any&timeout=5s", [hangs, keyed]) == [202, 200], "it ended before this batch"
    assert await verdicts(gateway, "wait=any&timeout=10ms", [hangs, hangs]) == [202, 202]
    assert await verdicts(gateway, "wait=any", [{"function": "nope"}]) == [404], "nothing to wait for"
    assert await verdicts(gateway, "wait=all", []) == []


async def test_a_dead_letter_goes_to_the_new_revision_and_remembers_the_old_one(gateway: RunningGateway) -> None:
    dead = (await gateway.invoke({"reason": "handler_error", "n": 1}, mode="async", wait="5s")).json()
    registry = gateway.app.registry
    changed = {"echo": replace(registry.get("echo"), revision="next", timeout_s=7.0)}
    await registry.apply(replace(registry.config, functions=dict(registry.config.functions) | changed))
    redriven = (await gateway.http.post(f"/v1/dead-letters/{dead['id']}/redrive")).json()
    again = (await gateway.http.get(f"/v1/invocations/{redriven['id']}?wait=5s")).json()
    assert (dead["revision"] != again["revision"], again["revision"]) == (True, "next")
    assert gateway.runtime.leases.keys() == {dead["id"], again["id"]}
    assert gateway.app.invocations.living == ()
    record = await gateway.app.store.get(int(again["id"][:11], 16))
    assert record is not None
    assert record.options["redrive_of"] == dead["id"]


@pytest.mark.promise("A dead letter is sent again once, or removed from the list.")
async def test_a_dead_letter_that_two_send_again_at_once_runs_once(gateway: RunningGateway) -> None:
    dead = (await gateway.invoke({"reason": "handler_error"}, mode="async", wait="5s")).json()["id"]
    letters = DeadLetters(gateway.app.invocations, gateway.app.store)
    (again,) = {each.record.id for each in await asyncio.gather(*(letters.redrive(dead) for _ in range(4)))}
    await gateway.http.get(f"/v1/invocations/{again}?wait=5s")
    assert gateway.runtime.leases.keys() == {dead, again}


@pytest.mark.promise("A task's cap bounds it, and its children still run.")
async def test_a_child_runs_although_its_parent_holds_all_that_its_task_may_have(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path, tasks={"rl": TaskSpec(caps={"cpu": 1})})
    async with serving(bench) as gateway:
        task = {"X-Task": "rl"}
        parent = (await gateway.invoke({"held": True}, mode="async", headers=task)).json()["id"]
        await gateway.executing(parent)
        waiting = (await gateway.invoke({}, mode="async", headers=task)).json()["id"]
        child = await asyncio.wait_for(gateway.invoke({"n": 1}, headers=task | {"X-Parent-Id": parent}), DEADLINE_S)
        assert child.status_code == 200 and child.json()["parent"] == parent
        assert (await gateway.http.get(f"/v1/invocations/{waiting}")).json()["state"] == "queued", "the cap holds"
        await gateway.http.post(f"/v1/invocations/{parent}/cancel")
        assert (await gateway.http.get(f"/v1/invocations/{waiting}?wait=10s")).json()["state"] == "succeeded"
        (account,) = [each for each in (await gateway.http.get("/v1/tasks")).json()["tasks"] if each["task"] == "rl"]
    assert account["core_s"] > 0 and account["settled"] == {"succeeded": 2, "cancelled": 1}
    assert account["queued"] == account["running"] == 0


async def test_nobody_runs_on_the_units_of_another_task(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path)) as gateway:
        victim = {"X-Task": "swe", "X-Trajectory-Id": "t1"}
        parent = (await gateway.invoke({"held": True}, mode="async", headers=victim)).json()["id"]
        await gateway.executing(parent)
        for own in ({}, {"X-Task": "other"}, {"X-Task": "other", "X-Trajectory-Id": "t2"}):
            refused = await gateway.invoke({"n": 1}, headers=own | {"X-Parent-Id": parent})
            assert (refused.status_code, refused.json()["code"]) == (422, "invalid_input"), refused.text
        gateway.runtime.finish(parent)


async def test_a_child_works_in_its_parents_slot_and_a_grandchild_too(tmp_path: Path) -> None:
    bench = GatewayBench(
        tmp_path,
        functions={"slots": function("slots", cost={"slot": UnitSet.fixed(1)})},
        resources={"slot": ConcurrencySpec(limit=1)},
    )
    async with serving(bench) as gateway:
        parent = (await gateway.invoke({"held": True}, function="slots", mode="async")).json()["id"]
        await gateway.executing(parent)
        stranger = (await gateway.invoke({}, function="slots", mode="async")).json()["id"]
        headers = {"X-Parent-Id": parent}
        child = (await gateway.invoke({"held": True}, function="slots", mode="async", headers=headers)).json()["id"]
        await gateway.executing(child)
        headers = {"X-Parent-Id": child}
        grandchild = await asyncio.wait_for(gateway.invoke({}, function="slots", headers=headers), DEADLINE_S)
        assert grandchild.status_code == 200
        assert (await gateway.http.get(f"/v1/invocations/{stranger}")).json()["state"] == "queued", "the bound holds"
        for each in (child, parent):
            gateway.runtime.finish(each)
        assert (await gateway.http.get(f"/v1/invocations/{stranger}?wait=10s")).json()["state"] == "succeeded"


async def test_a_child_that_the_quota_has_nothing_left_for_ends_typed_and_its_parent_goes_on(tmp_path: Path) -> None:
    bench = GatewayBench(
        tmp_path,
        functions={"searches": function("searches", cost={"search": UnitSet.fixed(1)}, queue_timeout_s=0.05)},
        resources={"search": QuotaSpec(limit=1, period_s=3600.0)},
    )
    async with serving(bench) as gateway:
        parent = (await gateway.invoke({"held": True}, function="searches", mode="async")).json()["id"]
        await gateway.executing(parent)
        child = await gateway.invoke({}, function="searches", headers={"X-Parent-Id": parent})
        assert (child.status_code, child.json()["code"]) == (408, "queue_timeout"), "a rate is not lent"
        gateway.runtime.finish(parent)
        assert (await gateway.http.get(f"/v1/invocations/{parent}?wait=10s")).json()["state"] == "succeeded"


async def held(gateway: RunningGateway, *names: str) -> None:
    """Return when so many calls run, and the gateway has been told to stop with all of them under way."""
    await until(lambda: len(gateway.app.invocations.living) == len(names))
    gateway.app.stop()


async def test_who_waits_for_a_durable_call_is_told_to_come_again(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path)) as first:
        accepted = (await first.invoke({"held": True}, function="again", mode="async")).json()["id"]
        waiting = asyncio.create_task(first.http.get(f"/v1/invocations/{accepted}", params={"wait": "20s"}))
        keyed = asyncio.create_task(first.invoke({"held": True}, function="again", headers=KEY))
        batch = {"calls": [{"function": "again", "input": {"held": True}, "key": "b"}]}
        batched = asyncio.create_task(first.http.post("/v1/invocations:batch", json=batch, params={"wait": "all"}))
        await held(first, "accepted", "keyed", "batched")
        shown, refused, verdicts = await waiting, await keyed, await batched
    assert (shown.status_code, shown.json()["id"]) == (200, accepted)
    assert shown.json()["state"] in ("queued", "running")
    assert (refused.status_code, refused.json()["code"]) == (503, "draining")
    assert float(refused.headers["Retry-After"]) > 0
    (verdict,) = verdicts.json()["results"]
    assert (verdicts.status_code, verdict["status"]) == (200, 202)
    async with serving(GatewayBench(tmp_path)) as second:
        again = asyncio.create_task(second.invoke({"held": True}, function="again", headers=KEY))
        done: set[str] = set()
        while len(done) < 3:  # more than there are cores
            await until(lambda: bool(set(second.runtime.running) - done))
            for running in set(second.runtime.running) - done:
                second.runtime.finish(running)
                done.add(running)
        answer = await again
        assert (answer.status_code, answer.headers["X-Idempotent-Replay"]) == (200, "true")


async def test_a_call_that_has_not_begun_is_refused_and_one_that_has_is_lost(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path)
    async with serving(bench) as first:
        cores = first.app.node.cores
        running = [asyncio.create_task(first.invoke({"held": True})) for _ in range(cores)]
        await until(lambda: len(first.runtime.running) == len(running))
        waiting = asyncio.create_task(first.invoke({"held": True}))
        await held(first, *map(str, running), "waiting")
        refused = await waiting
        assert (refused.status_code, refused.json()["code"]) == (503, "draining"), "it may be sent again"
        for answer in await asyncio.gather(*running):
            assert answer.json()["code"] == "gateway_restart"


async def test_what_has_no_answer_when_the_grace_is_over_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_app, "CLOSE_GRACE_S", 0.2)
    async with serving(GatewayBench(tmp_path)) as gateway:
        begun = asyncio.Event()

        async def never(*_arguments: object, **_named: object) -> None:
            begun.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(gateway.app.engine, "open_trajectory", never)
        opening = asyncio.create_task(gateway.http.put("/v1/trajectories/t", json={"function": "echo"}))
        await begun.wait()
        gateway.app.stop()
        with pytest.raises(httpx.TransportError):  # no answer is an answer that the client tries again
            await opening


async def test_a_clients_calls_outlast_a_planned_restart(tmp_path: Path) -> None:
    async with AsyncExitStack() as clients:
        async with serving(GatewayBench(tmp_path)) as first:
            port = first.app.http_port
            client = await clients.enter_async_context(AsyncClient(f"http://127.0.0.1:{port}", token=""))
            job = await client.submit("again", {"held": True})
            waiting = asyncio.create_task(client.wait(job.id, timeout_s=60.0))
            keyed = asyncio.create_task(client.invoke("again", {"held": True}, key="k"))
            await until(lambda: len(first.runtime.running) == 2)
        async with serving(GatewayBench(tmp_path, server={"port": port})) as second:
            await until(lambda: len(second.runtime.running) == 2)
            for running in list(second.runtime.running):
                second.runtime.finish(running)
            assert (await waiting).ok
            assert (await keyed).ok
