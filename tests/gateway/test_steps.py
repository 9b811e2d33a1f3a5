"""Steps of tasks: told and never guessed, counted as rollouts live and end, shown, bounded, and kept over a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway import steps
from tests.gateway.conftest import GatewayBench, RunningGateway, function, serving
from tests.gateway.test_registry import SlowToPrepare


async def told(gateway: RunningGateway, step: int, expected: int, task: str = "math") -> dict[str, object]:
    """The step as the gateway answers when it is told of it."""
    answer = await gateway.http.put(f"/v1/tasks/{task}/steps/{step}", json={"expected": expected})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def counts(gateway: RunningGateway, step: int, task: str = "math") -> tuple[object, object, object]:
    """Expected, living and ended rollouts of a step."""
    found = (await gateway.http.get(f"/v1/tasks/{task}/steps")).json()["steps"]
    (shown,) = [each for each in found if each["step"] == step]
    return shown["expected"], shown["living"], shown["ended"]


async def opened(gateway: RunningGateway, name: str, step: int | None, task: str = "math") -> None:
    body = {"function": "echo", "task": task} | ({} if step is None else {"step": step})
    answer = await gateway.http.put(f"/v1/trajectories/{name}", json=body)
    assert answer.status_code == 200, answer.text


async def submitted(gateway: RunningGateway, trajectory: str, step: int, **given: object) -> str:
    """The id of an asynchronous call of ``slow`` under a step, which waits until that is ready."""
    headers = {"X-Task": "math", "X-Trajectory-Id": trajectory, "X-Step": str(step)}
    return str((await gateway.invoke(given, function="slow", headers=headers, mode="async")).json()["id"])


async def test_a_step_counts_the_trajectories_that_were_opened_under_it(gateway: RunningGateway) -> None:
    first = await told(gateway, 7, 2)
    assert (first["task"], first["step"], first["expected"], first["living"], first["ended"]) == ("math", 7, 2, 0, 0)
    await opened(gateway, "t1", 7)
    await opened(gateway, "t2", 7)
    await opened(gateway, "other", None)
    await gateway.invoke({}, headers={"X-Task": "math", "X-Trajectory-Id": "t1", "X-Step": "8"})
    assert await counts(gateway, 7) == (2, 2, 0)
    await gateway.http.delete("/v1/trajectories/t1")
    await gateway.http.delete("/v1/trajectories/other")
    assert await counts(gateway, 7) == (2, 1, 1)
    assert [each["step"] for each in (await gateway.http.get("/v1/tasks/math/steps")).json()["steps"]] == [7]
    await gateway.http.delete("/v1/trajectories/t2")
    (step,) = (await gateway.http.get("/v1/tasks/math/steps")).json()["steps"]
    assert (step["ended"], step["ends_in_s"]) == (2, None)
    assert step["ended_at"] >= step["opened_at"]


async def test_a_header_tells_the_step_on_opening_and_on_the_first_action(gateway: RunningGateway) -> None:
    headers = {"X-Task": "math", "X-Step": "3"}
    await gateway.http.put("/v1/trajectories/t1", json={"function": "echo", "task": "math"}, headers=headers)
    await gateway.invoke({}, headers={**headers, "X-Trajectory-Id": "t2"})
    await gateway.invoke({}, headers={**headers, "X-Trajectory-Id": "t2"})
    assert await counts(gateway, 3) == (None, 2, 0)
    await gateway.http.delete("/v1/trajectories/t2")
    assert await counts(gateway, 3) == (None, 1, 1)


async def test_calls_of_no_trajectory_count_one_each(gateway: RunningGateway) -> None:
    headers = {"X-Task": "math", "X-Step": "3"}
    held = (await gateway.invoke({"held": True}, headers=headers, mode="async")).json()["id"]
    await gateway.invoke({"reason": "handler_error"}, headers=headers)
    calls = [{"function": "echo", "input": {}, "task": "math", "step": 3} for _ in range(2)]
    await gateway.http.post("/v1/invocations:batch", json={"calls": calls}, params={"wait": "all"})
    assert await counts(gateway, 3) == (None, 1, 3)
    await gateway.http.post(f"/v1/invocations/{held}/cancel")
    assert await counts(gateway, 3) == (None, 0, 4)


async def test_what_the_scheduler_never_took_is_no_rollout(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, scheduler={"trajectories_max": 1})) as gateway:
        calls = [{"function": "echo", "task": "math", "step": 1, "trajectory": name} for name in ("t1", "t2")]
        batch = await gateway.http.post("/v1/invocations:batch", json={"calls": calls}, params={"wait": "all"})
        states = [each["invocation"]["state"] for each in batch.json()["results"]]
        assert states == ["succeeded", "failed"], "both were accepted, and the scheduler had room for one"
        assert await counts(gateway, 1) == (None, 1, 0)
        assert len(await gateway.app.store.read("step_trajectories", ())) == 1


async def test_an_odd_step_is_refused_by_name(gateway: RunningGateway) -> None:
    for path, body, field in [
        ("/v1/tasks/math/steps/-1", {"expected": 1}, "step"),
        ("/v1/tasks/math/steps/seven", {"expected": 1}, "step"),
        ("/v1/tasks/math/steps/2147483648", {"expected": 1}, "step"),
        ("/v1/tasks/no%20name/steps/1", {"expected": 1}, "task"),
        ("/v1/tasks/math/steps/1", {"expected": 0}, "expected"),
        ("/v1/tasks/math/steps/1", {"expected": 1000001}, "expected"),
        ("/v1/tasks/math/steps/1", {}, "expected"),
        ("/v1/tasks/math/steps/1", {"expected": 1, "more": 2}, "more"),
    ]:
        answer = await gateway.http.put(path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")
        assert field in answer.json()["detail"]
        assert (await gateway.http.get("/v1/tasks/math/steps")).json() == {"steps": []}


async def test_a_task_shows_its_steps_before_its_first_call(tmp_path: Path) -> None:
    async def shown(gateway: RunningGateway) -> list[dict[str, Any]]:
        return list((await gateway.http.get("/v1/tasks")).json()["tasks"])

    async with serving(GatewayBench(tmp_path)) as gateway:
        await told(gateway, 1, 4)
        tasks = await shown(gateway)
        assert [each["task"] for each in tasks] == ["default", "math"]
        assert [each["step"] for each in tasks[1]["steps"]] == [1]
        assert (tasks[1]["weight"], tasks[1]["running"], tasks[1]["core_s"]) == (1.0, 0, 0.0)
    async with serving(GatewayBench(tmp_path)) as gateway:
        assert [(each["task"], len(each["steps"])) for each in await shown(gateway)] == [("default", 0), ("math", 1)]


async def test_the_end_is_told_once_a_step_of_the_task_has_shown_how_long_its_rollouts_take(tmp_path: Path) -> None:
    now_s = 1000.0
    async with serving(GatewayBench(tmp_path), wall=lambda: now_s) as gateway:
        assert (await told(gateway, 1, 4))["ends_in_s"] is None
        for name in ("a", "b", "c", "d"):
            await opened(gateway, name, 1)
        assert (await told(gateway, 1, 4))["ends_in_s"] is None, "none has ended"
        now_s += 60.0
        for name in ("a", "b", "c", "d"):
            await gateway.http.delete(f"/v1/trajectories/{name}")
        assert (await told(gateway, 2, 4))["ends_in_s"] == pytest.approx(60.0, abs=0.1), "all begin now"
        for name in ("a", "b", "c", "d"):
            await opened(gateway, name, 2)
        now_s += 20.0
        assert (await told(gateway, 2, 4))["ends_in_s"] == pytest.approx(40.0, abs=0.1)
        assert (await told(gateway, 2, 8))["ends_in_s"] == pytest.approx(100.0, abs=0.1), "four more, four at a time"
        now_s += 41.0
        assert (await told(gateway, 2, 4))["ends_in_s"] is None, "longer than any before"


async def test_steps_and_tasks_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "TASKS_MAX", 2)
    monkeypatch.setattr(steps, "STEPS_MAX", 2)
    async with serving(GatewayBench(tmp_path)) as gateway:
        await opened(gateway, "t", 1)
        for step in (2, 3):
            await told(gateway, step, 1)
        shown = (await gateway.http.get("/v1/tasks/math/steps")).json()["steps"]
        assert [each["step"] for each in shown] == [3, 2]
        await gateway.http.delete("/v1/trajectories/t")
        await told(gateway, 1, 1, task="code")
        await told(gateway, 3, 2)
        await told(gateway, 1, 1, task="search")
        kept = gateway.app.steps
        assert [len(kept.of(task)) for task in ("math", "code", "search")] == [2, 0, 1], "told of least recently"
        rows = await gateway.app.store.read("steps", ())
        assert sorted((row["task"], row["number"]) for row in rows) == [("math", 2), ("math", 3), ("search", 1)]
        assert list(await gateway.app.store.read("step_trajectories", ())) == []


async def test_steps_outlive_the_gateway_and_what_did_not_outlive_it_has_ended(tmp_path: Path) -> None:
    headers = {"X-Task": "math", "X-Step": "4"}
    async with serving(GatewayBench(tmp_path)) as gateway:
        await told(gateway, 4, 5)
        await gateway.invoke({}, headers=headers)
        await opened(gateway, "t1", 4)
        await gateway.invoke({}, headers={**headers, "X-Trajectory-Id": "t2"})
        waiting = (await gateway.invoke({"held": True}, function="again", headers=headers, mode="async")).json()["id"]
        await gateway.executing(waiting)
        assert await counts(gateway, 4) == (5, 3, 1)
    async with serving(GatewayBench(tmp_path)) as gateway:
        await gateway.executing(f"{waiting}.2")
        assert await counts(gateway, 4) == (5, 2, 2), "t2 had no files, of which the next gateway would know"
        gateway.runtime.finish(f"{waiting}.2")
        await gateway.http.get(f"/v1/invocations/{waiting}", params={"wait": "30s"})
        await gateway.http.delete("/v1/trajectories/t1")
        assert await counts(gateway, 4) == (5, 0, 4)


async def test_what_waits_for_its_function_when_the_gateway_starts_has_not_ended(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path, functions={"slow": function("slow")})
    async with serving(bench, runtime=SlowToPrepare()) as gateway:
        waiting = await submitted(gateway, "t1", 4)
        assert await counts(gateway, 4) == (None, 1, 0)
    runtime = SlowToPrepare()
    async with serving(bench, runtime=runtime) as gateway:
        assert await counts(gateway, 4) == (None, 1, 0), "its function is not ready, so the scheduler has none of it"
        runtime.gate.set()
        await gateway.http.get(f"/v1/invocations/{waiting}", params={"wait": "30s"})
        assert await counts(gateway, 4) == (None, 1, 0)
        await gateway.http.delete("/v1/trajectories/t1")
        assert await counts(gateway, 4) == (None, 0, 1)


@pytest.mark.parametrize("cancelled", [True, False])
async def test_what_ends_before_the_scheduler_hears_of_it_is_no_rollout(tmp_path: Path, cancelled: bool) -> None:
    slow = function("slow", queue_timeout_s=30.0 if cancelled else 0.05)
    async with serving(GatewayBench(tmp_path, functions={"slow": slow}), runtime=SlowToPrepare()) as gateway:
        first, second = await submitted(gateway, "t1", 4), await submitted(gateway, "t1", 4)
        if cancelled:
            await gateway.http.post(f"/v1/invocations/{first}/cancel")
            assert await counts(gateway, 4) == (None, 1, 0), "the other is to begin it"
            await gateway.http.post(f"/v1/invocations/{second}/cancel")
        ends = [
            (await gateway.http.get(f"/v1/invocations/{each}", params={"wait": "30s"})).json()["state"]
            for each in (first, second)
        ]
        assert ends == ["cancelled" if cancelled else "timed_out"] * 2
        assert await counts(gateway, 4) == (None, 0, 0)
        assert await gateway.app.store.read("step_trajectories", ()) == []


async def test_a_trajectory_that_ended_while_it_was_opened_is_of_no_step(gateway: RunningGateway) -> None:
    await gateway.app.steps.opened("gone", "math", 4)
    assert (await gateway.http.get("/v1/tasks/math/steps")).json() == {"steps": []}
    await opened(gateway, "t1", 4)
    assert await counts(gateway, 4) == (None, 1, 0)


async def test_a_step_that_was_abandoned_has_no_expected_end_and_leaves_the_screen(tmp_path: Path) -> None:
    now_s = 1000.0

    async def end_expected(gateway: RunningGateway) -> object:
        (step,) = (await gateway.http.get("/v1/tasks/math/steps")).json()["steps"]
        return step["ends_in_s"]

    async with serving(GatewayBench(tmp_path), wall=lambda: now_s) as gateway:
        await told(gateway, 1, 4)
        for name in ("a", "b"):
            await opened(gateway, name, 1)
        now_s += 60.0
        await gateway.http.delete("/v1/trajectories/a")
        now_s += 1900.0
        assert [each.step for each in gateway.app.steps.recent()] == [1], "one lives"
        await gateway.http.delete("/v1/trajectories/b")
        now_s += 1750.0
        assert await end_expected(gateway) is not None, "others may still begin"
        assert [each.step for each in gateway.app.steps.recent()] == [1]
        now_s += 60.0
        assert gateway.app.steps.recent() == []
        now_s += 200.0
        assert await end_expected(gateway) is None, "nothing began for longer than any took"
        await told(gateway, 1, 4)
        assert await end_expected(gateway) is not None
        assert [each.step for each in gateway.app.steps.recent()] == [1]
        now_s += 1810.0
    async with serving(GatewayBench(tmp_path), wall=lambda: now_s) as gateway:
        assert [each.step for each in gateway.app.steps.recent()] == [1], "a gateway counts from its start"
