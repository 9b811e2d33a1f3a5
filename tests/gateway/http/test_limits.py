"""Bounds at the HTTP door: what is refused, before any work, with which status and when to come again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.gateway.conftest import Bench, function, serving


async def test_a_trajectory_too_many_is_refused_and_those_that_live_go_on(tmp_path: Path) -> None:
    async with serving(Bench(tmp_path, scheduler={"trajectories_max": 1})) as gateway:
        first = {"X-Trajectory-Id": "first"}
        assert (await gateway.invoke({}, headers=first)).status_code == 200
        refused = await gateway.invoke({}, headers={"X-Trajectory-Id": "second"})
        assert (refused.status_code, refused.json()["code"]) == (503, "capacity_exceeded")
        assert int(refused.headers["Retry-After"]) >= 1 and "trajectories_max" in refused.json()["detail"]
        opened = await gateway.http.put("/v1/trajectories/second", json={"function": "shell"})
        assert opened.status_code == 503
        assert (await gateway.invoke({}, headers=first)).status_code == 200
        assert (await gateway.http.delete("/v1/trajectories/first")).status_code == 204
        assert (await gateway.invoke({}, headers={"X-Trajectory-Id": "second"})).status_code == 200


async def test_ten_times_what_may_wait_is_refused_before_any_work_and_leaves_nothing_behind(tmp_path: Path) -> None:
    bounded = {"bounded": function("bounded", max_queued=16)}
    async with serving(Bench(tmp_path, functions=bounded)) as gateway:
        assert gateway.app.node is not None
        capacity = 16 + gateway.app.node.cores
        calls = [gateway.invoke({"held": True}, function="bounded", mode="async") for _ in range(10 * capacity)]
        answers = await asyncio.gather(*calls)
        refused = [answer for answer in answers if answer.status_code == 429]
        accepted = [answer.json()["id"] for answer in answers if answer.status_code == 202]
        assert len(accepted) + len(refused) == len(answers) and 16 <= len(accepted) <= capacity
        assert all(answer.json()["code"] == "quota_exceeded" and "Retry-After" in answer.headers for answer in refused)
        assert {each.record.id for each in gateway.app.invocations.living} == set(accepted)
        assert sum((await gateway.app.store.counts()).values()) == len(accepted), "a refused call leaves no record"
