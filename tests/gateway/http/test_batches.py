"""Batches and dead letters over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gateway.invocations.invocations import DeadLetters
from manager.action import Action
from manager.formulation import formulate
from manager.function import FunctionSpec
from tests.gateway.conftest import RunningGateway


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


async def test_a_batch_may_wait_for_its_first_end(gateway: RunningGateway) -> None:
    calls = [{"function": "echo", "input": {"hangs": True}}, {"function": "echo", "input": {"n": 2}}]
    body = (await gateway.http.post("/v1/invocations:batch?wait=any&timeout=5s", json={"calls": calls})).json()
    assert [verdict["status"] for verdict in body["results"]] == [202, 200]


async def test_a_batch_that_is_none_is_refused(gateway: RunningGateway) -> None:
    bodies: list[object] = [{}, {"calls": {}}, []]
    for body in bodies:
        assert (await gateway.http.post("/v1/invocations:batch", json=body)).status_code == 422
    assert (await gateway.http.post("/v1/invocations:batch?wait=some", json={"calls": []})).status_code == 422


async def test_a_dead_letter_is_sent_again_once_or_let_go_of(gateway: RunningGateway) -> None:
    dead = []
    for n in range(3):
        accepted = await gateway.invoke({"reason": "handler_error", "n": n}, mode="async", wait="5s")
        dead.append(accepted.json()["id"])
    redriven = await gateway.http.post(f"/v1/dead-letters/{dead[0]}/redrive")
    assert redriven.status_code == 202
    assert redriven.json()["input"] == {"reason": "handler_error", "n": 0}
    again = await gateway.http.post(f"/v1/dead-letters/{dead[0]}/redrive")
    assert (again.status_code, again.json()["code"]) == (409, "conflict")
    assert (await gateway.http.delete(f"/v1/dead-letters/{dead[1]}")).json() == {"purged": 1}
    await gateway.http.get(f"/v1/invocations/{redriven.json()['id']}?wait=5s")
    assert (await gateway.http.delete("/v1/dead-letters?function=echo")).json() == {"purged": 2}
    left = (await gateway.http.get("/v1/invocations?dead=true")).json()["invocations"]
    assert left == []
    assert (await gateway.http.get(f"/v1/invocations/{dead[1]}")).json()["state"] == "failed"


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


STRICT = b"version: 1\nfunctions:\n  echo: {runtime: exec, cost: {cpu: 1}, description: now strict}\n"


async def test_a_dead_letter_is_sent_again_to_its_function_as_it_is_now(gateway: RunningGateway) -> None:
    letters = []
    for _ in range(2):
        accepted = await gateway.invoke({"reason": "handler_error"}, mode="async", wait="5s")
        letters.append(accepted.json())
    assert (await gateway.http.put("/v1/config", content=STRICT)).status_code == 200
    refused = await gateway.http.post(f"/v1/dead-letters/{letters[0]['id']}/redrive")
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_input"), "its input does not fit any more"
    gone = b"version: 1\nfunctions:\n  other: {runtime: exec, cost: {cpu: 1}}\n"
    assert (await gateway.http.put("/v1/config?prune=true", content=gone)).status_code == 200
    assert (await gateway.http.post(f"/v1/dead-letters/{letters[0]['id']}/redrive")).status_code == 404
    dead = (await gateway.http.get("/v1/invocations?dead=true")).json()["invocations"]
    assert [each["id"] for each in dead] == [each["id"] for each in reversed(letters)], "none was let go of"


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


async def test_a_dead_letter_that_two_send_again_at_once_runs_once(gateway: RunningGateway) -> None:
    dead = (await gateway.invoke({"reason": "handler_error"}, mode="async", wait="5s")).json()["id"]
    letters = DeadLetters(gateway.app.invocations, gateway.app.store)
    (again,) = {each.record.id for each in await asyncio.gather(*(letters.redrive(dead) for _ in range(4)))}
    await gateway.http.get(f"/v1/invocations/{again}?wait=5s")
    assert gateway.runtime.leases.keys() == {dead, again}
