"""The wire types against a gateway that serves: what it answers is read whole, and written again it is the same."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import pytest

from gateway.invocations.record import Mode as RecordMode
from manager.action import State as ManagerState
from manager.action import UnitSet
from manager.errors import Reason as ManagerReason
from manager.resources.pools import ConcurrencySpec, QuotaSpec
from tangram import types
from tests.gateway.conftest import GatewayBench, RunningGateway, function, serving

T = TypeVar("T", bound=msgspec.Struct)


def same(left: Any, right: Any) -> bool:
    """Return whether two JSON values are equal; instants may be written with more or fewer digits."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, str) and isinstance(right, str):
        return left == right or _instant(left) == _instant(right) is not None
    if isinstance(left, Sequence) and isinstance(right, Sequence):
        return len(left) == len(right) and all(same(*pair) for pair in zip(left, right, strict=True))
    return bool(left == right)


def _instant(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def read(body: bytes, kind: type[T]) -> T:
    """Return the struct; fails where the type leaves anything out or adds anything."""
    found = msgspec.json.decode(body, type=kind)
    written = json.loads(msgspec.json.encode(found))
    assert same(written, json.loads(body)), f"{kind.__name__}:\n{written}\n{body.decode()}"
    return found


async def ask(gateway: RunningGateway, path: str, kind: type[T], **params: str) -> T:
    response = await gateway.http.get(path, params=params)
    assert response.status_code == 200, response.text
    return read(response.content, kind)


def test_states_reasons_and_modes_are_those_of_the_server() -> None:
    assert get_args(types.State) == tuple(state.value for state in ManagerState)
    assert get_args(types.Reason) == tuple(reason.value for reason in ManagerReason)
    assert get_args(types.Mode) == tuple(mode.value for mode in RecordMode)


def test_a_reason_that_a_newer_server_gives_and_a_field_that_it_adds_are_read() -> None:
    body = b'{"stream": "eof", "offset": 3, "state": "paused", "reason": "moon", "phase": 1}'
    end = types.read_log_record(body)
    assert isinstance(end, types.LogEnd)
    assert (end.state, end.reason) == ("paused", "moon")


@pytest.mark.parametrize("input", [{}, {"reason": "handler_error"}])
async def test_an_invocation_is_read_whole_in_every_place(gateway: RunningGateway, input: dict[str, object]) -> None:
    response = await gateway.invoke({"log": "hello", **input})
    invocation = read(response.content, types.Invocation)
    assert invocation.ended
    assert invocation.ok is (input == {})
    assert invocation.act_ms is not None
    assert invocation.act_s == pytest.approx(invocation.act_ms / 1000, abs=0.01)
    assert pickle.loads(pickle.dumps(invocation)) == invocation
    page = await ask(gateway, "/v1/invocations", types.InvocationPage)
    assert page.invocations[0].result is types.UNSET
    running = read((await gateway.invoke({"held": True}, mode="async")).content, types.Invocation)
    assert not running.ended
    assert running.result is None
    cancelled = await gateway.http.post(f"/v1/invocations/{running.id}/cancel")
    assert read(cancelled.content, types.Invocation).reason == "cancelled"


async def test_the_tries_of_an_invocation_are_read(gateway: RunningGateway) -> None:
    response = await gateway.invoke({"reason": "handler_error"}, function="retried", mode="async", wait="5s")
    invocation = read(response.content, types.Invocation)
    assert [attempt.attempt for attempt in invocation.attempts] == [1, 2]
    purged = await gateway.http.delete("/v1/dead-letters")
    assert read(purged.content, types.Purged).purged == 1


async def test_records_of_a_log_are_told_apart(gateway: RunningGateway) -> None:
    response = await gateway.invoke({"log": "hello"}, mode="stream")
    records = [types.read_log_record(line) for line in response.content.splitlines()]
    for line, record in zip(response.content.splitlines(), records, strict=True):
        read(line, type(record))
    assert [type(record) for record in records] == [types.LogAccepted, types.LogLine, types.LogResult]
    accepted, said, _ = records
    assert isinstance(said, types.LogLine)
    assert said.text == "hello"
    assert isinstance(accepted, types.LogAccepted)
    log = await gateway.http.get(f"/v1/invocations/{accepted.invocation.id}/logs")
    assert isinstance(types.read_log_record(log.content.splitlines()[-1]), types.LogEnd)
    assert types.read_log_record('{"stream": "heartbeat"}') == types.LogHeartbeat(stream="heartbeat")
    lag = types.read_log_record(b'{"stream": "dropped", "next_offset": 7, "data": "too slow"}')
    assert lag == types.LogLag(stream="dropped", next_offset=7, data="too slow")


async def test_problems_are_read_whole(gateway: RunningGateway) -> None:
    unknown = read((await gateway.http.get("/v1/functions/none")).content, types.Problem)
    assert (unknown.status, unknown.code) == (404, "not_found")
    odd = read((await gateway.invoke({}, function="strict")).content, types.Problem)
    assert odd.code == "invalid_input"
    late = read((await gateway.invoke({"hangs": True}, function="short")).content, types.Problem)
    assert isinstance(late.invocation, types.Invocation)
    assert late.invocation.reason == "timeout"


async def test_the_verdicts_of_a_batch_are_read_whole(gateway: RunningGateway) -> None:
    batch = types.BatchRequest(
        calls=(types.BatchItem(function="echo", input={"n": 1}, timeout="30s"), types.BatchItem(function="none"))
    )
    response = await gateway.http.post(
        "/v1/invocations:batch", content=msgspec.json.encode(batch), params={"wait": "all"}
    )
    fine, refused = read(response.content, types.BatchAnswer).results
    assert isinstance(fine.invocation, types.Invocation)
    assert (fine.status, fine.invocation.result) == (200, {"n": 1})
    assert isinstance(refused.problem, types.Problem)


async def test_functions_and_configurations_are_read_whole(gateway: RunningGateway) -> None:
    await gateway.invoke({})
    listed = await ask(gateway, "/v1/functions", types.FunctionList)
    assert {"echo", "shell", "strict"} <= {each.name for each in listed.functions}
    echo = await ask(gateway, "/v1/functions/echo", types.FunctionInfo)
    assert isinstance(echo.learned, Mapping)
    document = {"version": 1, "functions": {"more": {"runtime": "exec", "cost": {"cpu": {"min": 1, "max": 2}}}}}
    files = types.ConfigFiles(files=(types.ConfigFile(path="tangram.yaml", text=json.dumps(document)),))
    response = await gateway.http.put("/v1/config", content=msgspec.json.encode(files), params={"dry_run": "true"})
    assert response.status_code == 200, response.text
    assert read(response.content, types.ConfigDiff).added == ("more",)


async def test_the_scheduler_is_read_whole(gateway: RunningGateway) -> None:
    await gateway.invoke({}, headers={"X-Task": "t"})
    await gateway.http.put("/v1/trajectories/rollout", json={"function": "shell"})
    running = [gateway.invoke({"held": True}, headers={"X-Task": "t"}, mode="async") for _ in range(40)]
    await asyncio.gather(*running)
    resources = await ask(gateway, "/v1/resources", types.ResourcesInfo)
    assert any(pool.kind == "cpu" and pool.cores for pool in resources.pools.values())
    queue = await ask(gateway, "/v1/queue", types.QueuePage, limit="3")
    assert queue.waiting > 3
    assert queue.queue[0].cost == {"cpu": (1, 1)}
    tasks = await ask(gateway, "/v1/tasks", types.TaskList)
    assert "t" in [task.task for task in tasks.tasks]
    page = await ask(gateway, "/v1/trajectories", types.TrajectoryPage)
    assert [each.trajectory for each in page.trajectories] == ["rollout"]
    for path in ("/healthz", "/readyz"):
        await ask(gateway, path, types.Health)


async def test_pools_of_every_kind_are_read_whole(tmp_path: Path) -> None:
    bench = GatewayBench(
        tmp_path,
        resources={"search": QuotaSpec(limit=3, period_s=60.0), "judge": ConcurrencySpec(limit=2)},
        functions={"searching": function("searching", cost={"search": UnitSet.fixed(1), "judge": UnitSet.fixed(1)})},
    )
    async with serving(bench) as gateway:
        await gateway.invoke({}, function="searching")
        pools = (await ask(gateway, "/v1/resources", types.ResourcesInfo)).pools
        tasks = await ask(gateway, "/v1/tasks", types.TaskList)
    assert {pool.kind for pool in pools.values()} >= {"cpu", "search", "judge"}
    assert pools["search"].period_s == 60.0
    assert tasks.tasks[0].quota_units == {"search": 1.0}


async def test_trajectories_and_files_are_read_whole(gateway: RunningGateway) -> None:
    opening = types.TrajectoryOpening(function="shell")
    response = await gateway.http.put("/v1/trajectories/rollout", content=msgspec.json.encode(opening))
    assert read(response.content, types.TrajectoryInfo).state == "idle"
    files = "/v1/trajectories/rollout/files"
    written = await gateway.http.put(f"{files}/workspace/notes.txt", content=b"notes")
    assert read(written.content, types.FileWritten).size_bytes == 5
    listed = await ask(gateway, f"{files}/workspace", types.FileList, list="true")
    assert [entry.size_bytes for entry in listed.files if entry.path.endswith("notes.txt")] == [5]
