"""Actions that invoke others, through HTTP: under a full cap and on a full machine the child still runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from manager.action import UnitSet
from manager.config import TaskSpec
from manager.resources.pools import ConcurrencySpec, QuotaSpec
from tests.gateway.conftest import DEADLINE_S, GatewayBench, function, serving


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
