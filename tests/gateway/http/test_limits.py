"""Bounds at the HTTP door: what is refused, before any work, with which status and when to come again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.grpc.generated import tangram_pb2 as pb
from gateway.http.server import listen
from manager.config import TaskSpec
from manager.errors import Conflict
from tests.gateway.conftest import GatewayBench, RunningGateway, function, serving, until
from tests.gateway.grpc.peer import framed, head, peer


async def test_a_trajectory_too_many_is_refused_and_those_that_live_go_on(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, scheduler={"trajectories_max": 1})) as gateway:
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


@pytest.mark.slow
async def test_ten_times_what_may_wait_is_refused_before_any_work_and_leaves_nothing_behind(tmp_path: Path) -> None:
    bounded = {"bounded": function("bounded", max_queued=16)}
    async with serving(GatewayBench(tmp_path, functions=bounded)) as gateway:
        capacity = 16 + gateway.app.node.cores
        calls = [gateway.invoke({"held": True}, function="bounded", mode="async") for _ in range(10 * capacity)]
        answers = await asyncio.gather(*calls)
        refused = [answer for answer in answers if answer.status_code == 429]
        accepted = [answer.json()["id"] for answer in answers if answer.status_code == 202]
        assert len(accepted) + len(refused) == len(answers) and 16 <= len(accepted) <= capacity
        assert all(answer.json()["code"] == "quota_exceeded" and "Retry-After" in answer.headers for answer in refused)
        assert {each.record.id for each in gateway.app.invocations.living} == set(accepted)
        assert sum((await gateway.app.store.counts()).values()) == len(accepted), "a refused call leaves no record"


LARGE = {"x": "y" * 600}


async def refused(gateway: RunningGateway) -> None:
    """No door takes so much more: typed, and with a time to come back."""
    answer = await gateway.invoke(LARGE)
    assert (answer.status_code, answer.json()["code"], answer.headers["retry-after"]) == (503, "capacity_exceeded", "1")
    assert "inputs_max" in answer.json()["detail"]
    request = pb.InvokeRequest(function="echo", input_json=b'{"x": "%s"}' % (b"y" * 600))
    async with peer(gateway) as other:
        status = await other.ask(head(), framed(request.SerializeToString()))
    assert (status.status, status.headers["tangram-code"], status.headers["retry-after-s"]) == (
        "14",
        "capacity_exceeded",
        "1",
    )
    assert (await gateway.invoke({})).status_code == 200, "there is room for a small one"


async def test_undeclared_tasks_are_taken_or_refused_with_the_one_that_was_meant(tmp_path: Path) -> None:
    tasks = {"small": TaskSpec(max_queued=3)}
    async with serving(GatewayBench(tmp_path / "a", tasks=tasks)) as gateway:
        assert (await gateway.invoke({}, headers={"X-Task": "smal"})).json()["task"] == "smal"
    bench = GatewayBench(tmp_path / "b", tasks=tasks, scheduler={"undeclared_tasks": "refuse"})
    async with serving(bench) as gateway:
        for task in ("small", "default"):
            assert (await gateway.invoke({}, headers={"X-Task": task})).json()["task"] == task
        refused = [
            await gateway.invoke({}, headers={"X-Task": "smal"}),
            await gateway.invoke({}, headers={"X-Task": "smal"}, mode="async"),
            await gateway.http.put("/v1/trajectories/t", json={"function": "shell", "task": "smal"}),
            await gateway.http.put("/v1/tasks/smal/steps/1", json={"expected": 4}),
        ]
        for answer in refused:
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")
            assert "task 'smal' is not declared; did you mean 'small'?" in answer.json()["detail"]
        assert [each["task"] for each in (await gateway.http.get("/v1/tasks")).json()["tasks"]] == ["default", "small"]


async def test_inputs_that_live_are_bounded_in_bytes(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, server={"inputs_max": 1000})) as gateway:
        calls = [{"function": "echo", "input": LARGE | {"held": True}}] * 3
        batch = await gateway.http.post("/v1/invocations:batch", json={"calls": calls})
        assert batch.status_code == 503, "all of it is too much while it arrives"
        held = (await gateway.invoke(LARGE | {"held": True}, mode="async")).json()["id"]
        await gateway.executing(held)
        await refused(gateway)
        gateway.runtime.finish(held)
        await gateway.http.get(f"/v1/invocations/{held}?wait=5s")
        assert (await gateway.invoke(LARGE)).status_code == 200
        assert gateway.app.held.bytes == 0


async def test_files_are_written_as_they_come_and_hold_nothing_here(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, server={"inputs_max": 1000})) as gateway:
        assert (await gateway.http.put("/v1/trajectories/t", json={"function": "shell"})).status_code == 200
        written = await gateway.http.put("/v1/trajectories/t/files/workspace/x", content=b"x" * 100_000)
        assert (written.status_code, written.json()["size_bytes"]) == (201, 100_000)


@pytest.mark.parametrize("path", ["functions/echo/invocations", "invocations:batch"])
async def test_inputs_that_arrive_are_bounded_in_bytes(tmp_path: Path, path: str) -> None:
    async with serving(GatewayBench(tmp_path, server={"inputs_max": 1000})) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.app.http_port)
        about = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 900"
        writer.write(f"POST /v1/{path} HTTP/1.1\r\n{about}\r\n\r\n{'x' * 600}".encode())
        await until(lambda: gateway.app.held.bytes == 600)
        await refused(gateway)
        writer.transport.abort()
        await until(lambda: gateway.app.held.bytes == 0)
        assert (await gateway.invoke(LARGE)).status_code == 200


async def test_what_a_killed_gateway_left_is_held_again_and_bounds_what_is_new(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path, server={"inputs_max": 1000})
    async with serving(bench) as first:
        assert first.app.node is not None
        for _ in range(first.app.node.cores):
            await first.executing((await first.invoke({"hangs": True}, mode="async")).json()["id"])
        waits = (await first.invoke(LARGE | {"held": True}, mode="async")).json()["id"]
    async with serving(bench) as second:
        await second.executing(waits)
        await refused(second)
        second.runtime.finish(waits)


def test_a_port_in_use_is_told_by_its_number_with_the_remedy() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Conflict, match=f"port {port} of 127.0.0.1 is in use; .* choose another"):
            listen("127.0.0.1", port)
