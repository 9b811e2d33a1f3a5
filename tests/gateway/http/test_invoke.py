"""Invocation over HTTP: the three modes, their statuses, and what happens when the caller goes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import orjson
import pytest
from grpclib.client import Channel

from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.generated.tangram_grpc import GatewayStub
from gateway.invocations.invocations import InvocationRequest
from manager.errors import Reason
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving, until


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


async def test_a_stream_sends_the_first_line_before_the_action_ends(gateway: RunningGateway) -> None:
    async with gateway.http.stream(
        "POST", "/v1/functions/echo/invocations?mode=stream", json={"held": True, "log": "hello\n"}
    ) as response:
        lines = response.aiter_lines()
        accepted = orjson.loads(await anext(lines))
        assert orjson.loads(await anext(lines))["data"] == "hello\n"
        gateway.runtime.finish(accepted["invocation"]["id"])
        last = orjson.loads(await anext(lines))
    assert last["stream"] == "result"
    assert last["invocation"]["state"] == "succeeded"


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (Reason.HANDLER_ERROR, 200),
        (Reason.OUT_OF_MEMORY, 200),
        (Reason.INVALID_INPUT, 422),
        (Reason.ENVIRONMENT_LOST, 502),
        (Reason.UPSTREAM, 502),
        (Reason.MODEL_ERROR, 500),
    ],
)
async def test_a_failure_has_the_status_of_its_reason(gateway: RunningGateway, reason: Reason, status: int) -> None:
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


async def test_the_same_key_latches_on_and_another_body_is_refused(gateway: RunningGateway) -> None:
    key = {"Idempotency-Key": "k-1"}
    first = asyncio.create_task(gateway.invoke({"held": True}, headers=key))
    await until(lambda: bool(gateway.runtime.running))
    invocation_id = next(iter(gateway.runtime.running))
    second = await gateway.invoke({"held": True}, mode="async", headers=key)
    assert second.json()["id"] == invocation_id
    other = await gateway.invoke({"held": False}, headers=key)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    gateway.runtime.finish(invocation_id)
    assert (await first).json()["id"] == invocation_id
    later = await gateway.invoke({"held": True}, headers=key)
    assert later.json()["id"] == invocation_id
    assert [verb for verb, _ in gateway.runtime.seen].count("execute") == 1


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


def test_the_digest_of_a_key_is_of_the_bodys_value_and_the_trajectory() -> None:
    request = InvocationRequest(function="f", input={"b": 1, "a": 2}, body=b'{"b": 1, "a": 2}', key="k")
    assert replace(request, body=b'{"a":2,"b":1}').digest == request.digest
    assert replace(request, body=b"no JSON").digest == replace(request, body=b"no JSON").digest
    others = ({"body": b'{"a":1,"b":2}'}, {"body": b"no JSON"}, {"trajectory": "t"}, {"trajectory": "u"})
    assert len({request.digest, *(replace(request, **other).digest for other in others)}) == 5


async def test_a_key_latches_on_in_every_mode_and_on_every_door(gateway: RunningGateway) -> None:
    key, body = {"Idempotency-Key": "k-1"}, {"held": True, "log": "once"}
    calls = [asyncio.create_task(gateway.invoke(body, headers=key, mode=mode)) for mode in ("stream", "sync", "stream")]
    await until(lambda: bool(gateway.runtime.running))
    (invocation_id,) = gateway.runtime.running
    accepted = await gateway.invoke(body, headers=key, mode="async")
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


async def test_cancel_ends_a_running_invocation_and_is_409_afterwards(gateway: RunningGateway) -> None:
    invocation_id = (await gateway.invoke({"hangs": True}, mode="async")).json()["id"]
    await gateway.executing(invocation_id)
    cancelled = await gateway.http.post(f"/v1/invocations/{invocation_id}/cancel")
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    assert not gateway.runtime.running
    again = await gateway.http.post(f"/v1/invocations/{invocation_id}/cancel")
    assert (again.status_code, again.json()["code"]) == (409, "conflict")


async def test_a_full_function_is_429_with_a_time_to_come_back(gateway: RunningGateway) -> None:
    cores = gateway.app.node.cores
    for _ in range(cores):
        await gateway.invoke({"hangs": True}, mode="async")
    assert (await gateway.invoke({}, mode="async", function="narrow")).status_code == 202
    refused = await gateway.invoke({}, mode="async", function="narrow")
    assert (refused.status_code, refused.json()["code"]) == (429, "quota_exceeded")
    assert int(refused.headers["retry-after"]) >= 1


async def test_each_try_is_in_the_record_and_an_exhausted_one_is_a_dead_letter(gateway: RunningGateway) -> None:
    accepted = await gateway.invoke({"reason": "handler_error"}, mode="async", function="retried")
    ended = await gateway.http.get(f"/v1/invocations/{accepted.json()['id']}", params={"wait": "5s"})
    record = ended.json()
    assert (record["state"], record["attempt"], record["dead"]) == ("failed", 3, True)
    assert [attempt["reason"] for attempt in record["attempts"]] == ["handler_error", "handler_error"]
    dead = (await gateway.http.get("/v1/invocations", params={"dead": "true"})).json()["invocations"]
    assert [entry["id"] for entry in dead] == [record["id"]]


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
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
    ],
)
async def test_bad_input_is_a_problem_with_its_place(
    gateway: RunningGateway, path: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    response = await gateway.http.post(f"/v1/functions/{path}", content=body, headers=headers)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["status"] == status
    assert not gateway.runtime.seen[1 + len(gateway.app.config.functions) :]


async def test_the_path_of_what_does_not_fit_a_schema_is_told(gateway: RunningGateway) -> None:
    response = await gateway.invoke({"n": "x"}, function="strict")
    assert response.json()["errors"] == {"path": "$.n"}


async def test_a_body_over_the_bound_is_413_whether_announced_or_not(tmp_path: Path) -> None:
    async def chunks() -> object:
        for _ in range(3):
            yield b"x" * 600

    async with serving(GatewayBench(tmp_path, server={"body_limit": 1000})) as gateway:
        announced = await gateway.http.post("/v1/functions/echo/invocations", content=b"x" * 2000)
        streamed = await gateway.http.post("/v1/functions/echo/invocations", content=chunks())  # type: ignore[arg-type]
    assert (announced.status_code, streamed.status_code) == (413, 413)


async def test_a_token_is_asked_for_on_every_path_but_health(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, server={"auth": "token", "token": "s3cret"})) as gateway:
        assert (await gateway.invoke({})).status_code == 200
        async with httpx.AsyncClient(base_url=gateway.http.base_url, timeout=DEADLINE_S) as stranger:
            refused = await stranger.post("/v1/functions/echo/invocations", json={})
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            wrong = await stranger.get("/v1/functions", headers={"Authorization": "Bearer s3cre"})
            assert wrong.status_code == 401
            assert (await stranger.get("/healthz")).status_code == 200


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
