"""Actions that invoke others, through HTTP: under a full cap and on a full machine the child still runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from manager.config import TaskSpec
from tests.gateway.conftest import DEADLINE_S, Bench, serving


async def test_a_child_runs_although_its_parent_holds_all_that_its_task_may_have(tmp_path: Path) -> None:
    bench = Bench(tmp_path, tasks={"rl": TaskSpec(caps={"cpu": 1})})
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
