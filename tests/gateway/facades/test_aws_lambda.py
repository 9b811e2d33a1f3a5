"""AWS Lambda's Invoke, as its clients send it and as they read the answer."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from manager.errors import Reason
from tests.gateway.conftest import DEADLINE_S, RunningGateway, step_of, until
from tests.gateway.facades.world import doors

FUNCTIONS = "/lambda/2015-03-31/functions"


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with doors(tmp_path, {"lambda": {}}, step_of) as running:
        yield running


async def invoke(running: RunningGateway, payload: object = None, name: str = "echo", **headers: str) -> httpx.Response:
    body = b"" if payload is None else json.dumps(payload).encode()
    sent = {key.replace("_", "-"): value for key, value in headers.items()}
    return await running.http.post(f"{FUNCTIONS}/{name}/invocations", content=body, headers=sent)


async def test_the_answer_is_the_bare_result(door: RunningGateway) -> None:
    answer = await invoke(door, {"a": 1})
    assert (answer.status_code, answer.json()) == (200, {"a": 1})
    assert answer.headers["x-amz-executed-version"] == "$LATEST"
    assert answer.headers["x-amzn-requestid"] == answer.headers["x-invocation-id"]
    assert "x-amz-function-error" not in answer.headers
    assert (await invoke(door)).json() == {}
    root = await door.http.post("/2015-03-31/functions/echo/invocations", json={"a": 2})
    assert root.json() == {"a": 2}


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("echo:$LATEST", 200),
        ("arn%3Aaws%3Alambda%3Aus-east-1%3A123456789012%3Afunction%3Aecho", 200),
        ("arn:aws:lambda:us-east-1:123456789012:function:echo:$LATEST", 200),
        ("123456789012:function:echo", 200),
        ("echo:prod", 404),
        ("arn:aws:lambda:us-east-1:123456789012:function:echo:prod", 404),
        ("nowhere", 404),
    ],
)
async def test_a_function_has_its_name_and_its_arn(door: RunningGateway, name: str, status: int) -> None:
    answer = await invoke(door, {"a": 1}, name)
    assert answer.status_code == status
    if status == 404:
        assert answer.headers["x-amzn-errortype"] == "ResourceNotFoundException"
        assert answer.json()["Type"] == "User"


async def test_a_function_that_failed_is_an_answer(door: RunningGateway) -> None:
    failed = await invoke(door, {"reason": "handler_error", "message": "why"})
    assert (failed.status_code, failed.headers["x-amz-function-error"]) == (200, "Unhandled")
    assert failed.json() == {"errorMessage": "why", "errorType": "handler_error", "stackTrace": []}
    late = await invoke(door, {"hangs": True}, "short")
    assert (late.status_code, late.headers["x-amz-function-error"]) == (200, "Unhandled")
    assert late.json()["errorType"] == "Sandbox.Timedout"
    assert "Task timed out" in late.json()["errorMessage"]


@pytest.mark.parametrize(
    ("reason", "status", "name"),
    [
        (Reason.ENVIRONMENT_LOST, 502, "ServiceException"),
        (Reason.QUOTA, 429, "TooManyRequestsException"),
        (Reason.INVALID_INPUT, 400, "InvalidRequestContentException"),
    ],
)
async def test_what_is_not_the_functions_own_failure_is_the_services(
    door: RunningGateway, reason: Reason, status: int, name: str
) -> None:
    answer = await invoke(door, {"reason": reason.value})
    assert (answer.status_code, answer.headers["x-amzn-errortype"]) == (status, name)


async def test_five_tries_of_one_call_run_it_once(door: RunningGateway) -> None:
    """The first breaks off while it runs, as after a read time-out; the others join it."""
    call = {"payload": {"held": True}, "amz_sdk_invocation_id": "0ae0ce2b-1d78-4df8-9a62-06e13bd06ca4"}
    async with httpx.AsyncClient(base_url=door.http.base_url, timeout=DEADLINE_S) as leaving:
        url = f"{FUNCTIONS}/echo/invocations"
        headers = {"amz-sdk-invocation-id": call["amz_sdk_invocation_id"], "content-type": "application/json"}
        first = asyncio.create_task(leaving.post(url, content=b'{"held": true}', headers=headers))  # type: ignore[arg-type]
        await until(lambda: bool(door.runtime.running))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    tries = [asyncio.create_task(invoke(door, **call)) for _ in range(4)]  # type: ignore[arg-type]
    (running,) = door.runtime.running
    await until(lambda: door.app.invocations.living[0].callers >= 4)
    door.runtime.finish(running)
    answers = await asyncio.gather(*tries)
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-amzn-requestid"] for answer in answers} == {running}
    assert [verb for verb, _ in door.runtime.seen].count("execute") == 1
    again = await invoke(door, **call)  # type: ignore[arg-type]
    assert again.headers["x-amzn-requestid"] == running, "also when it has ended"


async def test_a_try_that_waited_to_its_end_is_told_to_come_again_and_the_work_goes_on(tmp_path: Path) -> None:
    async with doors(tmp_path, {"lambda": {"client_timeout": "60ms"}}, step_of) as door:
        late = await invoke(door, {"held": True}, amz_sdk_invocation_id="one")
        assert (late.status_code, late.headers["x-amzn-errortype"]) == (429, "TooManyRequestsException")
        await until(lambda: bool(door.runtime.running))
        (running,) = door.runtime.running
        assert late.headers["x-amzn-requestid"] == running
        door.runtime.finish(running)
        await until(lambda: not door.app.invocations.living)
        assert (await invoke(door, {"held": True}, amz_sdk_invocation_id="one")).json() == {"held": True}


async def test_events_are_accepted_and_dry_runs_run_nothing(door: RunningGateway) -> None:
    event = await invoke(door, {"a": 1}, x_amz_invocation_type="Event")
    assert (event.status_code, event.content) == (202, b"")
    record = await door.http.get(f"/v1/invocations/{event.headers['x-amzn-requestid']}", params={"wait": "5s"})
    assert (record.json()["mode"], record.json()["state"]) == ("async", "succeeded")
    old = await door.http.post("/lambda/2014-11-13/functions/echo/invoke-async", json={"a": 1})
    assert (old.status_code, old.json()) == (202, {})
    dry = await invoke(door, {"a": 1}, x_amz_invocation_type="DryRun")
    assert (dry.status_code, dry.content) == (204, b"")
    assert (await invoke(door, {}, "nowhere", x_amz_invocation_type="DryRun")).status_code == 404
    odd = await invoke(door, {}, x_amz_invocation_type="Sideways")
    assert (odd.status_code, "Sideways" in odd.json()["Message"]) == (400, True)


async def test_the_end_of_the_log_comes_along_where_it_is_asked_for(door: RunningGateway) -> None:
    answer = await invoke(door, {"log": "é" * 3000 + "end\n"}, x_amz_log_type="Tail")
    tail = base64.b64decode(answer.headers["x-amz-log-result"]).decode()
    assert tail.endswith("éend\n")
    assert 4000 < len(tail.encode()) <= 4096


async def test_the_client_context_chooses_trajectory_and_task(door: RunningGateway) -> None:
    custom = {"custom": {"trajectory": "t1", "task": "math", "timeout": "5s", "mine": 1}}
    context = base64.b64encode(json.dumps(custom).encode()).decode()
    answer = await invoke(door, {"a": 1}, x_amz_client_context=context)
    record = (await door.http.get(f"/v1/invocations/{answer.headers['x-amzn-requestid']}")).json()
    assert (record["trajectory"], record["task"]) == ("t1", "math")
    for odd in ("%", base64.b64encode(b"[]").decode(), base64.b64encode(b'{"custom": 1}').decode()):
        assert (await invoke(door, {}, x_amz_client_context=odd)).status_code == 400


async def test_functions_are_told_page_by_page(door: RunningGateway) -> None:
    page = (await door.http.get(FUNCTIONS, params={"MaxItems": "2"})).json()
    assert [each["FunctionName"] for each in page["Functions"]] == ["again", "echo"]
    following = (await door.http.get(f"{FUNCTIONS}/", params={"Marker": page["NextMarker"]})).json()
    assert following["Functions"][0]["FunctionName"] > "echo"
    assert following["NextMarker"] is None
    one = (await door.http.get(f"{FUNCTIONS}/echo")).json()
    assert (one["Configuration"]["State"], one["Configuration"]["Timeout"]) == ("Active", 30)
    assert (await door.http.get(f"{FUNCTIONS}/echo/configuration")).json() == one["Configuration"]


async def test_what_is_not_served_is_refused_by_name(door: RunningGateway) -> None:
    streaming = await door.http.post("/lambda/2021-11-15/functions/echo/response-streaming-invocations", json={})
    assert (streaming.status_code, streaming.headers["x-amzn-errortype"]) == (501, "UnsupportedOperationException")
    create = await door.http.post(FUNCTIONS, json={})
    assert (create.status_code, create.headers["x-amzn-errortype"]) == (405, "UnknownOperationException")
    assert (await door.http.get("/lambda/2018-10-31/layers")).status_code == 404
    tenant = await invoke(door, {}, x_amz_tenant_id="t")
    assert (tenant.status_code, "x-amz-tenant-id" in tenant.json()["Message"]) == (400, True)
    number = await invoke(door, [1])
    assert (number.status_code, number.headers["x-amzn-errortype"]) == (400, "InvalidRequestContentException")
