"""Batches and dead letters over HTTP."""

from __future__ import annotations

from tests.gateway.conftest import Running


async def test_each_call_of_a_batch_has_its_own_verdict(gateway: Running) -> None:
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


async def test_a_thousand_calls_share_a_few_commits(gateway: Running) -> None:
    before = gateway.app.store.commits
    calls = [{"function": "echo", "input": {"n": n}} for n in range(1000)]
    accepted = (await gateway.http.post("/v1/invocations:batch", json={"calls": calls})).json()["results"]
    assert [verdict["status"] for verdict in accepted] == [202] * 1000
    assert gateway.app.store.commits - before < 100
    last = accepted[-1]["invocation"]["id"]
    assert (await gateway.http.get(f"/v1/invocations/{last}?wait=10s")).json()["result"] == {"n": 999}


async def test_a_batch_may_wait_for_its_first_end(gateway: Running) -> None:
    calls = [{"function": "echo", "input": {"hangs": True}}, {"function": "echo", "input": {"n": 2}}]
    body = (await gateway.http.post("/v1/invocations:batch?wait=any&timeout=5s", json={"calls": calls})).json()
    assert [verdict["status"] for verdict in body["results"]] == [202, 200]


async def test_a_batch_that_is_none_is_refused(gateway: Running) -> None:
    bodies: list[object] = [{}, {"calls": {}}, []]
    for body in bodies:
        assert (await gateway.http.post("/v1/invocations:batch", json=body)).status_code == 422
    assert (await gateway.http.post("/v1/invocations:batch?wait=some", json={"calls": []})).status_code == 422


async def test_a_dead_letter_is_sent_again_once_or_let_go_of(gateway: Running) -> None:
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
