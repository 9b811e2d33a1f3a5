"""The handle of a trajectory: after its end it raises, whoever ended it, and never acts in a new, empty sandbox."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from manager.function import SandboxSpec
from tangram import AsyncClient, Client, NotFoundError, TrajectoryEndedError
from tangram.client.aio import AsyncTrajectory
from tangram.testing import ScriptedGateway
from tests.gateway.conftest import DEADLINE_S, FUNCTIONS, GatewayBench, RunningGateway, serving, until


async def everything_raises(trajectory: AsyncTrajectory) -> None:
    for refused in (
        trajectory.exec("pwd"),
        trajectory.invoke("echo", {}),
        trajectory.upload("x", "1"),
        trajectory.download("x"),
        trajectory.list(),
    ):
        with pytest.raises(TrajectoryEndedError, match="'t'"):
            await refused


async def test_a_closed_handle_says_so_without_asking_anybody() -> None:
    gateway = ScriptedGateway({"shell": {}})
    async with AsyncClient(transport=gateway) as client:
        async with client.trajectory("t") as trajectory:
            await trajectory.exec("true")
        asked = len(gateway.requests)
        await everything_raises(trajectory)
        assert len(gateway.requests) == asked


async def test_an_end_by_another_client_is_noticed(gateway: RunningGateway) -> None:
    async with AsyncClient(f"http://127.0.0.1:{gateway.app.http_port}") as client, client.trajectory("t") as trajectory:
        assert (await trajectory.exec("pwd")).ok
        await client.end_trajectory("t")
        await everything_raises(trajectory)
        assert await client.trajectories() == [], "nothing began anew"


async def test_an_end_by_silence_is_noticed(tmp_path: Path) -> None:
    shell = replace(FUNCTIONS["shell"], sandbox=SandboxSpec(image="", idle_ttl_s=3.0))
    async with (
        serving(GatewayBench(tmp_path, functions={"shell": shell})) as running,
        AsyncClient(f"http://127.0.0.1:{running.app.http_port}") as client,
    ):
        trajectory = client.trajectory("t")
        async with asyncio.timeout(DEADLINE_S):
            while not await opened(trajectory):
                pass
        await until(lambda: running.app.api.engine.trajectory("t") is None)
        await everything_raises(trajectory)


async def opened(trajectory: AsyncTrajectory) -> bool:
    """Whether it was; on a slow machine it may end while its sandbox is being made."""
    try:
        await trajectory.open()
    except NotFoundError:
        return False
    return True


async def test_an_end_is_noticed_while_another_goes_on_in_a_new_one(gateway: RunningGateway) -> None:
    async with AsyncClient(f"http://127.0.0.1:{gateway.app.http_port}") as client:
        first = client.trajectory("t")
        await first.open()
        await first.close()
        async with client.trajectory("t") as second:
            assert (await second.exec("pwd")).ok
            await everything_raises(first)
            # A closed handle that is opened again begins anew, or joins what lives.
            assert (await (await first.open()).exec("pwd")).ok


async def test_a_handle_that_was_never_opened_begins_with_its_first_action(gateway: RunningGateway) -> None:
    async with AsyncClient(f"http://127.0.0.1:{gateway.app.http_port}") as client:
        trajectory = client.trajectory("t")
        with pytest.raises(NotFoundError):
            await trajectory.download("/tmp/x")
        assert (await trajectory.exec("pwd")).ok
        assert [each.trajectory for each in await client.trajectories()] == ["t"]
        await trajectory.close()


async def test_what_is_expected_of_a_trajectory_must_be_known(gateway: RunningGateway) -> None:
    answer = await gateway.invoke({}, headers={"X-Trajectory-Id": "t", "X-Trajectory-Expect": "dead"})
    assert (answer.status_code, answer.json()["errors"]["path"]) == (422, "X-Trajectory-Expect")
    answer = await gateway.invoke({}, headers={"X-Trajectory-Id": "t", "X-Trajectory-Expect": "living"})
    assert (answer.status_code, answer.json()["code"]) == (410, "trajectory_ended")


def test_a_copy_of_a_handle_knows_that_it_was_opened() -> None:
    gateway = ScriptedGateway({"shell": {}})
    with Client(transport=gateway) as client, client.trajectory("t") as trajectory:
        state = pickle.loads(pickle.dumps({k: v for k, v in vars(trajectory).items() if k != "_client"}))
        assert (state["_opened"], state["_closed"]) == (True, False)
        gateway.end_trajectory("t")
        with pytest.raises(TrajectoryEndedError):
            trajectory.exec("pwd")


async def test_a_handle_is_a_rollout_of_its_step(gateway: RunningGateway) -> None:
    async with AsyncClient(f"http://127.0.0.1:{gateway.app.http_port}") as client:
        told = await client.tell_step("math", 5, expected=4)
        assert (told.step, told.expected, told.ends_in_s) == (5, 4, None)
        async with client.trajectory("t", task="math", step=5) as trajectory:
            await trajectory.exec("true")
        await client.invoke("echo", {}, task="math", step=5)
        await client.map("echo", [{}], task="math", step=5)
        (step,) = await client.steps("math")
        assert (step.living, step.ended) == (0, 3)
        assert [each.step for task in await client.tasks() for each in task.steps] == [5]


def test_a_scripted_gateway_is_told_of_steps() -> None:
    gateway = ScriptedGateway({"echo": {}})
    with Client(transport=gateway) as client:
        assert client.tell_step("math", 5, expected=4).expected == 4
        client.invoke("echo", {}, task="math", step=5)
        assert [step.step for step in client.steps("math")] == [5]
    assert gateway.steps == {("math", 5): 4}
    assert gateway.calls[0].headers["x-step"] == "5"
