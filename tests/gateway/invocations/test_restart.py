"""What a restart does with the work of a gateway that was killed, and with that of one that was told to stop."""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.cluster.cluster import Cluster
from gateway.invocations.invocations import GONE
from gateway.invocations.restart import RESTARTED, Reattachment
from gateway.store.maintenance import StateDirectory
from manager.action import State
from manager.engine import Engine
from manager.errors import Conflict
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.sandbox import Sandbox
from tests.gateway.conftest import GatewayBench, RunningGateway, serving, until


def crash(directory: Path, after: Path) -> GatewayBench:
    """A bench on the files of a gateway as they are now: what kill -9 leaves."""
    (after / "state").mkdir(parents=True)
    for file in (directory / "state").glob("tangram.sqlite*"):
        shutil.copy(file, after / "state")
    return GatewayBench(after)


async def ended(gateway: RunningGateway, invocation_id: str) -> dict[str, object]:
    body: dict[str, object] = (await gateway.http.get(f"/v1/invocations/{invocation_id}?wait=5s")).json()
    return body


async def fill(gateway: RunningGateway) -> list[str]:
    """As many hanging invocations as there are cores."""
    cores = gateway.app.node.cores
    return [(await gateway.invoke({"hangs": True}, mode="async")).json()["id"] for _ in range(cores)]


async def test_after_a_kill_queued_work_runs_in_its_order_and_running_work_is_lost(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path / "first")) as first:
        running = await fill(first)
        queued = [(await first.invoke({"n": n}, mode="async")).json()["id"] for n in range(5)]
        await until(lambda: len(first.runtime.running) == len(running))
        bench = crash(tmp_path / "first", tmp_path / "second")
    async with serving(bench) as second:
        for invocation_id in running:
            record = await ended(second, invocation_id)
            assert (record["state"], record["reason"], record["dead"]) == ("lost", "gateway_restart", True)
        results = [(await ended(second, invocation_id))["result"] for invocation_id in queued]
        assert results == [{"n": n} for n in range(5)]
        executed = [action_id for verb, action_id in second.runtime.seen if verb == "execute"]
        assert executed == queued


async def test_after_a_kill_an_idempotent_function_runs_again_and_its_first_try_is_on_record(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path / "first")) as first:
        accepted = await first.invoke({"held": True, "log": "try"}, mode="async", function="again")
        invocation_id = accepted.json()["id"]
        await first.executing(invocation_id)
        await first.app.store.commit()
        bench = crash(tmp_path / "first", tmp_path / "second")
    async with serving(bench) as second:
        await second.executing(f"{invocation_id}.2")
        second.runtime.finish(f"{invocation_id}.2")
        record = await ended(second, invocation_id)
        assert (record["state"], record["attempt"]) == ("succeeded", 2)
        assert [attempt["reason"] for attempt in record["attempts"]] == ["gateway_restart"]  # type: ignore[attr-defined]
        log = (await second.http.get(f"/v1/invocations/{invocation_id}/logs")).text
        assert log.count('"data":"try"') == 2


async def test_after_a_kill_a_sync_call_is_not_run_for_a_caller_that_is_gone(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path / "first")) as first:
        call = asyncio.create_task(first.invoke({"hangs": True}))
        await until(lambda: bool(first.runtime.running))
        invocation_id = next(iter(first.runtime.running))
        await first.app.store.commit()
        bench = crash(tmp_path / "first", tmp_path / "second")
        call.cancel()
    async with serving(bench) as second:
        record = await ended(second, invocation_id)
        assert record["state"] == "cancelled"
        assert not [verb for verb, _ in second.runtime.seen if verb == "execute"]


class SlowProvider:
    """A provider whose sandboxes are not ready before they are let go."""

    def __init__(self, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
        self.making, self.gate = asyncio.Event(), asyncio.Event()
        self._create = gateway.app.runtimes.provider.create
        monkeypatch.setattr(gateway.app.runtimes.provider, "create", self.create)

    async def create(self, *args: Any, **kwargs: Any) -> Sandbox:
        self.making.set()
        await self.gate.wait()
        return await self._create(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("trajectory", [None, "t"])
async def test_what_was_being_made_ready_at_a_kill_is_queued_again_whatever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trajectory: str | None
) -> None:
    headers = {} if trajectory is None else {"X-Trajectory-Id": trajectory}
    async with serving(GatewayBench(tmp_path / "first")) as first:
        slow = SlowProvider(first, monkeypatch)
        body = {"command": "echo ran"}
        accepted = await first.invoke(body, mode="async", function="shell", headers=headers)
        await slow.making.wait()
        await first.app.store.commit()
        assert (await first.http.get(f"/v1/invocations/{accepted.json()['id']}")).json()["state"] == "running"
        bench = crash(tmp_path / "first", tmp_path / "second")
        slow.gate.set()
    async with serving(bench) as second:
        record = await ended(second, accepted.json()["id"])
        assert (record["state"], record["reason"], record["attempt"]) == ("succeeded", None, 1), record


@pytest.mark.slow
async def test_what_is_being_made_ready_when_it_is_told_to_stop_waits_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = GatewayBench(tmp_path)
    async with serving(bench) as first:
        slow = SlowProvider(first, monkeypatch)
        accepted = await first.invoke({"command": "echo ran"}, mode="async", function="shell")
        await slow.making.wait()
    async with serving(bench) as second:
        record = await ended(second, accepted.json()["id"])
        assert (record["state"], record["attempt"]) == ("succeeded", 1), record


@pytest.mark.parametrize("certain", [False, True])
async def test_what_has_begun_and_is_not_held_is_never_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certain: bool
) -> None:
    async with serving(GatewayBench(tmp_path / "first")) as first:
        headers = {"X-Trajectory-Id": "t"}
        body = {"command": "until [ -e never ]; do sleep 0.01; done"}
        accepted = await first.invoke(body, mode="async", function="shell", headers=headers)
        invocation_id = accepted.json()["id"]
        await until(lambda: first.app.invocations.living[0].record.begun)
        await first.app.store.commit()
        bench = crash(tmp_path / "first", tmp_path / "second")
        await first.http.post(f"/v1/invocations/{invocation_id}/cancel")
    if certain:  # a sandbox that lives, and knows of none of its commands
        monkeypatch.setattr(Environments, "never_started", lambda *_: True)
    async with serving(bench) as second:
        record = await ended(second, invocation_id)
        again = ("failed", "environment_lost")  # it is begun again, where there is no sandbox any more
        assert (record["state"], record["reason"]) == (again if certain else ("lost", "gateway_restart")), record


@pytest.fixture
def nodes_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ran runs on a node that is not back yet, which holds what the scripted runtime executes."""
    monkeypatch.setattr(Cluster, "awaits", lambda _, record: record.state is State.RUNNING)
    monkeypatch.setattr(Reattachment, "may_hold", lambda *_: True)


@pytest.mark.usefixtures("nodes_are_awaited")
@pytest.mark.parametrize("function", ["echo", "again"])
async def test_what_runs_on_a_node_that_is_not_back_keeps_its_trajectorys_turn(tmp_path: Path, function: str) -> None:
    async with serving(GatewayBench(tmp_path / "first")) as first:
        call = partial(first.invoke, mode="async", headers={"X-Trajectory-Id": "t"})
        running = (await call({"held": True}, function=function)).json()["id"]
        await first.executing(running)
        behind = (await call({"n": 1})).json()["id"]
        bench = crash(tmp_path / "first", tmp_path / "second")
    async with serving(bench) as second:
        call = partial(second.invoke, mode="async", headers={"X-Trajectory-Id": "t"})
        later = (await call({"n": 2})).json()["id"]
        await second.executing(running)
        for waiting in (behind, later):
            record = (await second.http.get(f"/v1/invocations/{waiting}")).json()
            assert record["state"] == "queued", record
        second.runtime.finish(running)
        ends = [await ended(second, each) for each in (running, behind, later)]
        assert [(each["state"], each["attempt"]) for each in ends] == [("succeeded", 1)] * 3
        executed = [action_id for verb, action_id in second.runtime.seen if verb == "execute"]
        assert executed == [running, behind, later]


@pytest.mark.usefixtures("nodes_are_awaited")
async def test_what_runs_on_a_node_that_is_not_back_is_cancelled_there_when_its_caller_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: list[str] = []
    cancel = Engine.cancel

    def note(engine: Engine, action_id: str, message: str = "") -> bool:
        cancelled.append(action_id)
        return cancel(engine, action_id, message)

    monkeypatch.setattr(Engine, "cancel", note)
    async with serving(GatewayBench(tmp_path / "first")) as first:
        call = asyncio.create_task(first.invoke({"hangs": True}, headers={"X-Trajectory-Id": "t"}))
        await until(lambda: bool(first.runtime.running))
        invocation_id = next(iter(first.runtime.running))
        await first.app.store.commit()
        bench = crash(tmp_path / "first", tmp_path / "second")
        call.cancel()
    async with serving(bench) as second:
        record = await ended(second, invocation_id)
        assert (record["state"], record["message"]) == ("cancelled", f"{RESTARTED} and {GONE}")
        assert cancelled.count(invocation_id) == 2, "by each gateway, and the second has its executor end it"


async def test_a_key_still_latches_on_after_a_restart(tmp_path: Path) -> None:
    key = {"Idempotency-Key": "k"}
    async with serving(GatewayBench(tmp_path / "first")) as first:
        invocation_id = (await first.invoke({"n": 1}, headers=key)).json()["id"]
        bench = crash(tmp_path / "first", tmp_path / "second")
    async with serving(bench) as second:
        assert (await second.invoke({"n": 1}, headers=key)).json()["id"] == invocation_id
        assert (await second.invoke({"n": 2}, headers=key)).status_code == 422


@pytest.mark.slow
async def test_a_trajectory_that_was_opened_before_its_first_action_keeps_its_task_after_a_kill(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path / "first")) as first:
        for name, body in (("t", {"function": "shell", "task": "rl"}), ("u", {"function": "echo", "task": "rl"})):
            assert (await first.http.put(f"/v1/trajectories/{name}", json=body)).json()["task"] == "rl"
        bench = crash(tmp_path / "first", tmp_path / "second")
    async with serving(bench) as second:
        for name in ("t", "u"):
            assert (await second.http.get(f"/v1/trajectories/{name}")).json()["task"] == "rl"


@pytest.mark.slow
async def test_a_gateway_that_is_told_to_stop_leaves_what_waits_for_the_next(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path)
    async with serving(bench) as first:
        running = await fill(first)
        queued = (await first.invoke({"n": 1}, mode="async")).json()["id"]
        await until(lambda: len(first.runtime.running) == len(running))
    async with serving(bench) as second:
        assert (await ended(second, queued))["result"] == {"n": 1}
        assert [(await ended(second, each))["reason"] for each in running] == ["gateway_restart"] * len(running)


async def test_a_try_that_fails_while_the_gateway_drains_is_not_the_last_one(tmp_path: Path) -> None:
    failing = {"held": True, "reason": "handler_error"}
    async with serving(GatewayBench(tmp_path, server={"drain_grace": "5s"})) as first:
        accepted = (await first.invoke(failing, mode="async", function="retried")).json()["id"]
        await first.executing(accepted)
        first.app.stop()
        first.runtime.finish(accepted)
    async with serving(GatewayBench(tmp_path)) as second:
        for attempt in (2, 3):
            await second.executing(f"{accepted}.{attempt}")
            second.runtime.finish(f"{accepted}.{attempt}")
        record = await ended(second, accepted)
        assert (record["state"], record["attempt"], record["dead"]) == ("failed", 3, True)
        tries = record["attempts"]
        assert isinstance(tries, list)
        assert [each["reason"] for each in tries] == ["handler_error"] * 2, "each try is on record, none twice"


def test_one_gateway_at_a_time_serves_from_a_state_directory(tmp_path: Path) -> None:
    with StateDirectory(tmp_path), pytest.raises(Conflict, match="another gateway"):
        StateDirectory(tmp_path)
    with StateDirectory(tmp_path):
        pass
