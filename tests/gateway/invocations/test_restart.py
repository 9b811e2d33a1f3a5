"""What a restart does with accepted work, losses, tries and quotas, and clocks that are set under a gateway."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from gateway.app import gateway as opened_gateway
from gateway.cluster.cluster import Cluster
from gateway.config.load import load
from gateway.invocations.invocations import GONE
from gateway.invocations.restart import RESTARTED, QuotaRecord, Reattachment
from gateway.store.maintenance import StateDirectory
from gateway.store.store import Store, StoreSpec
from manager.action import Grant, Lease, State
from manager.assembly import build_core
from manager.clock import WallClock
from manager.config import ManagerSpec, NodeSpec
from manager.engine import Engine
from manager.errors import Conflict
from manager.resources.pools import QuotaSpec
from runtimes.executor import LocalExecutor
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.sandbox import Sandbox
from runtimes.testing import ScriptedRuntime
from tests.gateway.conftest import DEADLINE_S, FUNCTIONS, GatewayBench, RunningGateway, serving, until
from tests.listening import listening
from tests.virtual_clock import VirtualClock

HEADERS = {"X-Trajectory-Id": "t"}
LOST = ("failed", "environment_lost")
DAY_S = 86400.0
KEY = {"Idempotency-Key": "k"}


def crash(directory: Path, after: Path) -> GatewayBench:
    """A bench on the files of a gateway as they are now: what kill -9 leaves."""
    (after / "state").mkdir(parents=True)
    for file in (directory / "state").glob("tangram.sqlite*"):
        shutil.copy(file, after / "state")
    return GatewayBench(after)


async def ended(gateway: RunningGateway, invocation_id: str) -> dict[str, Any]:
    body: dict[str, Any] = (await gateway.http.get(f"/v1/invocations/{invocation_id}?wait=5s")).json()
    return body


async def fill(gateway: RunningGateway) -> list[str]:
    """As many hanging invocations as there are cores."""
    cores = gateway.app.node.cores
    return [(await gateway.invoke({"hangs": True}, mode="async")).json()["id"] for _ in range(cores)]


@pytest.mark.promise(
    "After a kill waiting work runs in its order; begun work that is not idempotent ends `lost` and never runs twice."
)
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


@pytest.mark.promise("After a kill idempotent work runs again, with its first try on record.")
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
        assert [attempt["reason"] for attempt in record["attempts"]] == ["gateway_restart"]
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


async def test_the_end_of_a_trajectory_that_was_told_outlasts_a_kill(tmp_path: Path) -> None:
    body: dict[str, object] = {"command": "true"}
    async with serving(GatewayBench(tmp_path / "first")) as first:
        await first.invoke(body, function="shell", headers=HEADERS)
        assert (await first.http.delete("/v1/trajectories/t")).status_code == 204
        bench = crash(tmp_path / "first", tmp_path / "second")
    async with serving(bench) as second:
        again = await second.invoke(body, function="shell", headers=HEADERS)
        assert again.status_code == 200 and again.json()["state"] == "succeeded", again.json()


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


@pytest.mark.promise("Work that was being made ready at a kill is queued again in its place.")
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


@pytest.mark.promise("An action on a node that is not back yet keeps its trajectory's turn.")
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


@pytest.mark.promise("A key still latches on after a restart.")
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


@pytest.mark.promise("One gateway at a time serves from a state directory.")
def test_one_gateway_at_a_time_serves_from_a_state_directory(tmp_path: Path) -> None:
    with StateDirectory(tmp_path), pytest.raises(Conflict, match="another gateway"):
        StateDirectory(tmp_path)
    with StateDirectory(tmp_path):
        pass


SAFE = replace(FUNCTIONS["shell"], name="safe", idempotent=True)


async def submit_command(gateway: RunningGateway, command: str, function: str = "shell") -> str:
    answer = await gateway.invoke({"command": command}, mode="async", function=function, headers=HEADERS)
    return str(answer.json()["id"])


async def end_of(gateway: RunningGateway, invocation_id: str) -> tuple[Any, Any]:
    record = await ended(gateway, invocation_id)
    return record["state"], record["reason"]


@pytest.mark.promise(
    "A lost sandbox is reported to every action accepted before that, and none of them runs in an empty one instead."
)
async def test_all_that_waited_for_a_lost_sandbox_is_told_and_later_work_begins_anew(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, functions={"safe": SAFE})) as gateway:
        running = await submit_command(gateway, "touch made; until [ -e never ]; do sleep 0.01; done")
        behind = [await submit_command(gateway, "ls", function) for function in ("shell", "safe", "shell")]
        outside = (await gateway.invoke({}, mode="async", headers=HEADERS)).json()["id"]
        await until(lambda: gateway.app.invocations.living[0].record.begun)
        sandbox = gateway.app.runtimes.environments.get("t")
        assert sandbox is not None
        await sandbox.kill_for("by a test")
        assert [await end_of(gateway, each) for each in (running, *behind)] == [LOST] * 4
        assert (await end_of(gateway, outside))[0] == "succeeded", "it needs no sandbox"
        again = await ended(gateway, await submit_command(gateway, "ls"))
        assert (again["state"], again["result"]["stdout"]) == ("succeeded", "")


async def test_a_sandbox_that_died_with_its_gateway_or_under_a_read_is_lost_for_all(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path / "first", functions={"safe": SAFE})) as first:
        await ended(first, await submit_command(first, "touch made"))
        held = await submit_command(first, "until [ -e never ]; do sleep 0.01; done")
        behind = [await submit_command(first, "ls", function) for function in ("shell", "safe")]
        await until(lambda: first.app.invocations.living[0].record.begun)
        await first.app.store.commit()
        bench = replace(crash(tmp_path / "first", tmp_path / "second"), functions={"safe": SAFE})
        await first.http.post(f"/v1/invocations/{held}/cancel")
    async with serving(bench) as second:
        assert await end_of(second, held) == ("lost", "gateway_restart")
        assert [await end_of(second, each) for each in behind] == [LOST] * 2
        made = await ended(second, await submit_command(second, "touch made"))
        assert made["state"] == "succeeded"
        sandbox = second.app.runtimes.environments.get("t")
        assert sandbox is not None
        await sandbox.kill_for("by a test")
        for asked in ({"path": "made"}, {"path": ".", "list": "true"}):
            read = await second.http.get("/v1/trajectories/t/files", params=asked)
            assert (read.status_code, read.json()["code"]) == (409, "conflict"), read.text
            assert "its files and processes are lost" in read.json()["detail"], read.text
        written = await second.http.put("/v1/trajectories/t/files", params={"path": "new"}, content=b"new")
        assert (written.status_code, written.json()["code"]) == (409, "conflict"), written.text
        assert await end_of(second, await submit_command(second, "ls", "safe")) == LOST
        assert (await end_of(second, await submit_command(second, "ls", "safe")))[0] == "succeeded"


async def submitted(gateway: RunningGateway, body: dict[str, object], function: str = "echo") -> str:
    answer = await gateway.invoke(body, mode="async", function=function, headers=HEADERS)
    return str(answer.json()["id"])


def executed(gateway: RunningGateway) -> list[str]:
    return [action_id for verb, action_id in gateway.runtime.seen if verb == "execute"]


@pytest.mark.promise("An action is tried again before what is behind it runs.")
async def test_a_functions_own_retries_run_before_what_is_behind_it(gateway: RunningGateway) -> None:
    first = await submitted(gateway, {"reason": "handler_error", "held": True}, "retried")
    behind = await submitted(gateway, {"n": 1})
    for attempt in (first, f"{first}.2", f"{first}.3"):
        await gateway.executing(attempt)
        gateway.runtime.finish(attempt)
    assert (await ended(gateway, behind))["state"] == "succeeded"
    assert executed(gateway) == [first, f"{first}.2", f"{first}.3", behind]


SEARCH = QuotaSpec(limit=5, period_s=60.0)


@asynccontextmanager
async def gateway_of(directory: Path, wall: VirtualClock) -> AsyncIterator[tuple[Store, QuotaRecord, Engine]]:
    """What a gateway has of quotas; left as a kill leaves it, but for what is on disk."""
    store = Store(StoreSpec(path=directory / "db.sqlite"), wall=wall)
    await store.open()
    node = NodeSpec(name="n", numa=((0, 1),), memory_bytes=2**30)
    engine = Engine(
        build_core(ManagerSpec(nodes=(node,), resources={"search": SEARCH})), LocalExecutor({"exec": ScriptedRuntime()})
    )
    await engine.start()
    record = QuotaRecord(store, lambda: {"search": SEARCH}, wall)
    await record.take_up(engine)
    yield store, record, engine
    await engine.close()
    await store.close()


def free(engine: Engine) -> int:
    pools = engine.resources()["pools"]
    assert isinstance(pools, dict)
    return int(pools["search"]["free"])


def lease(units: int) -> Lease:
    return Lease(
        action_id="a",
        node="n",
        grants={"search": Grant(pool="search", units=units), "cpu": Grant(pool="cpu:n", units=1)},
    )


async def test_a_restart_goes_on_in_the_window_and_what_ran_at_the_kill_ends_now(tmp_path: Path) -> None:
    wall = VirtualClock(1e6)
    async with gateway_of(tmp_path, wall) as (store, record, engine):
        assert free(engine) == 5
        record.end(record.begin(lease(1)))
        wall.now_s += 30
        record.begin(lease(2))
        await store.commit()
    wall.now_s += 20
    async with gateway_of(tmp_path, wall) as (_, _, engine):
        assert free(engine) == 2
    wall.now_s += 11.5
    async with gateway_of(tmp_path, wall) as (_, _, engine):
        assert free(engine) == 3, "61 s after the first ended"
    wall.now_s += 40
    async with gateway_of(tmp_path, wall) as (_, _, engine):
        assert free(engine) == 3, "what ran may have arrived at any time before the kill was known"
    wall.now_s += 10
    async with gateway_of(tmp_path, wall) as (_, _, engine):
        assert free(engine) == 5


async def test_what_is_kept_of_a_quota_is_bounded(tmp_path: Path) -> None:
    wall = VirtualClock(1e6)
    async with gateway_of(tmp_path, wall) as (store, record, _):
        for _ in range(2000):
            wall.now_s += 0.1
            record.end(record.begin(lease(1)))
        kept = orjson.loads(await store.document("quota/search") or "")
        assert kept["running"] == 0
        assert len(kept["ended"]) <= 102
        assert sum(units for _, units in kept["ended"]) >= 600


async def arrivals_of(directory: Path, limit: int, calls: int, fails: Callable[[int], bool]) -> list[float]:
    """Make so many calls at once of a service that counts its requests, and refuses some; return when they came."""
    arrivals: list[float] = []
    loop = asyncio.get_running_loop()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(200 if len(arrivals) % 3 == 0 else 0):  # some connections are slow to be taken
            await asyncio.sleep(0)
        while (await reader.readline()).startswith(b"GET"):
            arrivals.append(loop.time())
            await reader.readuntil(b"\r\n\r\n")
            status = b"503 Busy" if fails(len(arrivals)) else b"200 OK"
            writer.write(b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}" % status)

    async with listening(answer) as port:
        (directory / "tangram.yaml").write_text(f"""
server: {{port: 0, grpc_port: 0, state_dir: state}}
sandbox: {{provider: process}}
resources: {{search: {{kind: quota, limit: {limit}, period: 300ms}}}}
functions:
  search:
    runtime: api
    cost: {{search: 1}}
    retry: {{on: [503], max_attempts: 3, backoff: 1ms}}
    request: {{method: GET, url: "http://127.0.0.1:{port}/"}}
""")
        async with opened_gateway(load([directory], {})) as app:
            serving = asyncio.create_task(app.serve())
            address = f"http://127.0.0.1:{app.http_port}/v1/functions/search/invocations"
            assert app.tokens is not None
            headers = {"Authorization": f"Bearer {app.tokens.invoke}"}
            async with httpx.AsyncClient(timeout=60.0, headers=headers) as client:
                answers = await asyncio.gather(*(client.post(address, json={}) for _ in range(calls)))
            app.stop()
            await serving
    assert [each.status_code for each in answers] == [200] * calls
    return arrivals


@pytest.mark.promise("The called service sees no window with more than the limit, also over a restart.")
async def test_who_is_called_sees_no_window_with_more_than_the_limit(tmp_path: Path) -> None:
    arrivals = await arrivals_of(tmp_path, 5, 20, lambda number: False)
    assert len(arrivals) == 20
    assert max(sum(first <= each < first + 0.3 for each in arrivals) for first in arrivals) <= 5


@pytest.mark.promise(
    "Each try within one call takes its units of the quota, and goes before calls that have not begun."
)
async def test_each_try_within_a_call_counts_as_who_is_called_counts_it(tmp_path: Path) -> None:
    arrivals = await arrivals_of(tmp_path, 2, 4, lambda number: number <= 4)
    assert len(arrivals) == 8
    assert max(sum(first <= each < first + 0.3 for each in arrivals) for first in arrivals) <= 2


JUMPS = pytest.mark.parametrize("jump_s", [3 * DAY_S, -3 * DAY_S], ids=["forward", "back"])


class JumpingClock:
    """A time of day that is set by hand; time itself passes as it does."""

    def __init__(self) -> None:
        self.set_s = 0.0

    def time(self) -> float:
        return time.time() + self.set_s

    def clock(self) -> WallClock:
        return WallClock(self.time)


@pytest.fixture
def machine() -> JumpingClock:
    return JumpingClock()


@pytest.fixture
async def jumping_gateway(tmp_path: Path, machine: JumpingClock) -> AsyncIterator[RunningGateway]:
    async with serving(GatewayBench(tmp_path), machine.clock()) as running:
        yield running


async def hold(jumping_gateway: RunningGateway) -> list[str]:
    """A held invocation on each core."""
    ids = [
        (await jumping_gateway.invoke({"held": True}, mode="async")).json()["id"]
        for _ in range(jumping_gateway.app.node.cores)
    ]
    for each in ids:
        await jumping_gateway.executing(each)
    return ids


def in_order(record: dict[str, Any]) -> bool:
    """Whether its instants follow one another, a few seconds apart at most, and no time of it is negative."""
    found = [datetime.fromisoformat(record[name]) for name in ("accepted_at", "started_at", "ended_at")]
    times = [record[name] for name in ("queue_ms", "overhead_ms", "execution_ms")]
    return found == sorted(found) and (found[-1] - found[0]).total_seconds() < DEADLINE_S and min(times) >= 0


@pytest.mark.promise("The time of day never jumps: ages, keys and retention pass with time.")
@JUMPS
async def test_a_key_latches_on_although_the_clock_says_that_it_is_long_over(
    jumping_gateway: RunningGateway, machine: JumpingClock, jump_s: float
) -> None:
    first = (await jumping_gateway.invoke({"n": 1}, headers=KEY)).json()
    machine.set_s += jump_s
    assert (await jumping_gateway.invoke({"n": 1}, headers=KEY)).json()["id"] == first["id"]
    assert (await jumping_gateway.invoke({"n": 2}, headers=KEY)).status_code == 422
    assert len(jumping_gateway.runtime.leases) == 1


@JUMPS
async def test_a_clock_that_is_set_between_two_gateways_changes_no_times(
    tmp_path: Path, machine: JumpingClock, jump_s: float
) -> None:
    async with serving(GatewayBench(tmp_path / "first"), machine.clock()) as first:
        accepted = await first.invoke({"held": True}, mode="async", function="again")
        invocation_id = accepted.json()["id"]
        await first.executing(invocation_id)
        await first.app.store.commit()
        bench = crash(tmp_path / "first", tmp_path / "second")
    machine.set_s += jump_s
    async with serving(bench, machine.clock()) as second:
        await second.executing(f"{invocation_id}.2")
        second.runtime.finish(f"{invocation_id}.2")
        record = await ended(second, invocation_id)
        assert record["state"] == "succeeded" and in_order(record), record


@JUMPS
async def test_what_waits_neither_ages_nor_grows_young(
    jumping_gateway: RunningGateway, machine: JumpingClock, jump_s: float
) -> None:
    held = await hold(jumping_gateway)
    age = {"X-Max-Age": "1h"}
    before = (await jumping_gateway.invoke({"n": 1}, mode="async", headers=age)).json()["id"]
    machine.set_s += jump_s
    after = (await jumping_gateway.invoke({"n": 2}, mode="async", headers=age)).json()["id"]
    impatient = await jumping_gateway.invoke({}, function="impatient")
    assert (impatient.status_code, impatient.json()["code"]) == (408, "queue_timeout")
    aged = await jumping_gateway.invoke({}, mode="async", wait="5s", headers={"X-Max-Age": "50ms"})
    assert (aged.json()["state"], aged.json()["reason"]) == ("timed_out", "queue_timeout")
    assert (await jumping_gateway.http.get("/v1/queue")).json()["waiting"] == 2
    for each in held:
        jumping_gateway.runtime.finish(each)
    for each in (*held, before, after):
        record = await ended(jumping_gateway, each)
        assert record["state"] == "succeeded" and in_order(record), record


@JUMPS
async def test_bounds_of_the_execution_and_waits_between_tries_are_of_time_that_passes(
    jumping_gateway: RunningGateway, machine: JumpingClock, jump_s: float
) -> None:
    running = asyncio.create_task(jumping_gateway.invoke({"hangs": True}, function="short"))
    await until(lambda: bool(jumping_gateway.runtime.running))
    machine.set_s += jump_s
    assert (await running).json()["code"] == "timeout"
    retried = (
        await jumping_gateway.invoke({"reason": "handler_error"}, mode="async", function="retried", wait="5s")
    ).json()
    assert (retried["state"], retried["attempt"]) == ("failed", 3) and in_order(retried)
