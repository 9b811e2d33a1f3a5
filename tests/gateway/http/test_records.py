"""Records, logs, trajectories, single functions and the gateway itself over HTTP."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.config.schema import RetentionSection
from gateway.errors import ERROR_STATUSES, REASON_STATUSES
from gateway.http.app import operations
from gateway.store.maintenance import prune
from manager.errors import CodedError, Reason
from manager.function import SandboxSpec
from tangram import AsyncClient, ConflictError, InvalidConfigError, NotFoundError
from tangram.types import ValueChange
from tests.gateway.conftest import FUNCTIONS, GatewayBench, RunningGateway, serving

EXEC: dict[str, Any] = {"runtime": "exec", "timeout": "30s"}
HANDLER: dict[str, Any] = {"runtime": "handler", "handler": "mine:reward"}
SOURCE = "def reward(event, context):\n    return {'doubled': 2 * event['n']}\n"
FACTOR = 3


def subclasses(kind: type[CodedError]) -> list[type[CodedError]]:
    return [kind, *(deeper for each in kind.__subclasses__() for deeper in subclasses(each))]


@pytest.mark.promise("A failure has a reason from a closed list, with a status for each.")
def test_every_error_and_every_reason_has_a_face() -> None:
    crossing = subclasses(CodedError)
    assert {kind.code for kind in crossing} <= ERROR_STATUSES.keys()
    assert REASON_STATUSES.keys() == set(Reason)


async def test_a_listing_is_newest_first_filtered_and_paged(gateway: RunningGateway) -> None:
    ids = [(await gateway.invoke({"n": n})).json()["id"] for n in range(5)]
    failed = (await gateway.invoke({"reason": "handler_error"})).json()["id"]
    seen: list[str] = []
    cursor: str | None = None
    while True:
        params = {"limit": "2", "state": "succeeded"} | ({"cursor": cursor} if cursor else {})
        page = (await gateway.http.get("/v1/invocations", params=params)).json()
        seen += [record["id"] for record in page["invocations"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == ids[::-1]
    bad = (await gateway.http.get("/v1/invocations", params={"state": "failed"})).json()["invocations"]
    assert [record["id"] for record in bad] == [failed]
    assert "result" not in bad[0]


async def test_odd_queries_are_422_and_unknown_ids_404(gateway: RunningGateway) -> None:
    odd = ["limit=0", "limit=x", "state=done", "cursor=..", "function=a%20b", "dead=maybe"]
    statuses = [(await gateway.http.get(f"/v1/invocations?{query}")).status_code for query in odd]
    assert statuses == [422] * len(odd)
    assert (await gateway.http.get("/v1/invocations/%00")).status_code == 422
    record_id = (await gateway.invoke({})).json()["id"]
    guessed = record_id[:-1] + ("0" if record_id[-1] != "0" else "1")
    assert (await gateway.http.get(f"/v1/invocations/{guessed}")).status_code == 404
    assert (await gateway.http.get("/v1/nowhere")).status_code == 404
    wrong = await gateway.http.delete("/v1/functions/echo/invocations")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


@pytest.mark.promise("A log can be read again from any offset, and ends with `eof`.")
async def test_a_log_is_read_again_from_any_offset_and_ends_with_eof(gateway: RunningGateway) -> None:
    record_id = (await gateway.invoke({"log": "x" * 20_000})).json()["id"]
    whole = await gateway.http.get(f"/v1/invocations/{record_id}/logs")
    lines = [orjson.loads(line) for line in whole.text.splitlines()]
    assert [line["stream"] for line in lines] == ["stdout", "stdout", "eof"]
    assert "".join(line["data"] for line in lines[:-1]) == "x" * 20_000
    rest = await gateway.http.get(f"/v1/invocations/{record_id}/logs", params={"offset": 1})
    assert [orjson.loads(line).get("offset") for line in rest.text.splitlines()] == [1, 2]
    assert lines[-1]["state"] == "succeeded"


@pytest.mark.promise("A log that retention removed reads as `expired`.")
async def test_a_log_that_retention_removed_says_so_to_every_reader(gateway: RunningGateway) -> None:
    record_id = (await gateway.invoke({"log": "x" * 20_000})).json()["id"]
    await gateway.app.store.commit()
    await prune(gateway.app.store, RetentionSection(logs_bytes=0), time.time, pause_s=0.0)
    for query, streams in (("", ["expired", "eof"]), ("?follow=true", ["expired", "eof"]), ("?offset=2", ["eof"])):
        text = (await gateway.http.get(f"/v1/invocations/{record_id}/logs{query}")).text
        lines = [orjson.loads(line) for line in text.splitlines()]
        assert [line["stream"] for line in lines] == streams
        assert lines[-1]["offset"] == 2
    async with AsyncClient(str(gateway.http.base_url)) as client:
        (told,) = [line async for line in client.logs(record_id)]
        assert told.stream == "expired" and "server.retention" in told.text


@pytest.mark.promise("Server-Sent Events are resumed by `Last-Event-ID`.")
async def test_a_reconnecting_event_source_goes_on_after_its_last_event(gateway: RunningGateway) -> None:
    record_id = (await gateway.invoke({"log": "x" * 20_000})).json()["id"]
    headers = {"Accept": "text/event-stream", "Last-Event-ID": "0"}
    text = (await gateway.http.get(f"/v1/invocations/{record_id}/logs", headers=headers)).text
    assert [line for line in text.splitlines() if line.startswith("id: ")] == ["id: 1", "id: 2"]


@pytest.mark.promise("A path of a file is absolute, or begins at the sandbox's own working directory.")
async def test_a_relative_path_begins_at_the_sandboxs_own_working_directory(tmp_path: Path) -> None:
    bed = replace(FUNCTIONS["shell"], name="bed", sandbox=SandboxSpec(workdir="/testbed"))
    async with serving(GatewayBench(tmp_path, functions={"bed": bed})) as gateway:
        files = "/v1/trajectories/t/files"
        await gateway.http.put("/v1/trajectories/t", json={"function": "bed"})
        put = await gateway.http.put(files, params={"path": "sub/a b", "mode": "755"}, content=b"1")
        assert (put.status_code, put.json()["path"]) == (201, "/testbed/sub/a b")
        async with AsyncClient(str(gateway.http.base_url)) as client:
            trajectory = client.trajectory("t", function="bed")
            await trajectory.upload("c", "2")
            assert [entry.path.rsplit("/", 1)[-1] for entry in await trajectory.list()] == ["c", "sub"]
            assert await trajectory.download("sub/a b") == b"1"
            result = (await trajectory.exec("pwd; test -x 'sub/a b' && cat 'sub/a b' c")).result
        assert result["stdout"].endswith("/testbed\n12")
        for path in ("/testbed/c", "./c"):
            assert (await gateway.http.get(files, params={"path": path})).content == b"2"
        assert (await gateway.http.get(f"{files}/testbed/c")).content == b"2"
        for odd in ({}, {"path": ""}, {"path": "\0"}):
            assert (await gateway.http.get(files, params=odd)).status_code == 422


async def test_the_document_holds_every_route_and_its_answers(gateway: RunningGateway) -> None:
    document = (await gateway.http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    ids = [row["operationId"] for methods in document["paths"].values() for row in methods.values()]
    assert len(ids) == len(set(ids))
    served = {(row.method.lower(), row.path.replace(":path}", "}")) for row in operations(gateway.app.api)}
    listed = {(method, path) for path, methods in document["paths"].items() for method in methods}
    functions = {("post", f"/v1/functions/{name}/invocations") for name in FUNCTIONS}
    assert listed == served | {("get", "/openapi.json")} | functions
    record = (await gateway.invoke({})).json()
    schema = document["components"]["schemas"]["Invocation"]
    assert set(schema["required"]) <= record.keys()
    assert record.keys() <= schema["properties"].keys()


async def test_metrics_break_the_act_down_and_gauges_return_to_zero(gateway: RunningGateway) -> None:
    await asyncio.gather(*(gateway.invoke({}) for _ in range(3)))
    await gateway.invoke({"reason": "handler_error"})
    text = (await gateway.http.get("/metrics")).text
    assert 'tangram_invocations_accepted_total{function="echo"} 4.0' in text
    assert 'tangram_invocations_ended_total{function="echo",reason="handler_error",state="failed"} 1.0' in text
    for part in ("queue", "overhead", "execution"):
        assert f'tangram_act_{part}_seconds_count{{function="echo"}} 4.0' in text
    assert 'tangram_invocations_running{function="echo"} 0.0' in text
    assert 'tangram_invocations_queued{function="echo"} 0.0' in text
    assert 'tangram_units{pool="cpu:local",state="total"}' in text


async def test_failures_and_rates_are_told_and_the_list_finds_them_by_reason_and_time(gateway: RunningGateway) -> None:
    await gateway.invoke({"n": 1})
    failed = (await gateway.invoke({"reason": "handler_error"})).json()["id"]
    told = (await gateway.http.get("/v1/activity")).json()
    assert (told["accepted"], told["ended"], told["failed"], told["failed_15min"]) == (2, 2, 1, 1)
    (row,) = told["failures"]
    assert (row["function"], row["reason"], row["task"], row["count"]) == ("echo", "handler_error", "default", 1)

    async def listed(query: str) -> list[str]:
        answer = (await gateway.http.get(f"/v1/invocations?{query}")).raise_for_status()
        return [each["id"] for each in answer.json()["invocations"]]

    assert await listed("reason=handler_error&since=15m") == [failed]
    assert await listed("reason=timeout") == []
    newest = await listed("since=15m")
    assert len(newest) == 2 and await listed("order=oldest") == newest[::-1]
    assert await listed("until=2020-01-01T00:00:00Z") == []
    assert await listed("since=2020-01-01T00:00:00%2B01:00") == newest
    assert await listed("since=2023-02-31T00:00:00.25Z") == newest
    for odd in ("since=yesterday", "since=2020-13-01T00:00:00Z", "order=random", "reason=odd"):
        assert (await gateway.http.get(f"/v1/invocations?{odd}")).status_code == 422, odd


async def test_the_queue_says_for_what_it_waits_as_data(gateway: RunningGateway) -> None:
    held = [(await gateway.invoke({"held": True}, mode="async", headers={"X-Trajectory-Id": "t"})).json()["id"]]
    held.append((await gateway.invoke({"held": True}, mode="async", headers={"X-Trajectory-Id": "t"})).json()["id"])
    await gateway.executing(held[0])
    page = (await gateway.http.get("/v1/queue")).json()
    (entry,) = page["queue"]
    assert (entry["cause"]["kind"], entry["cause"]["behind"]) == ("trajectory", held[0])
    assert [(each["cause"]["kind"], each["task"], each["count"]) for each in page["causes"]] == [
        ("trajectory", "default", 1)
    ]
    pools = (await gateway.http.get("/v1/resources")).json()["pools"]
    (holders,) = [pool["holders"] for pool in pools.values() if pool["held"]]
    assert holders[held[0]]["function"] == "echo" and holders[held[0]]["trajectory"] == "t"
    for one in held:
        gateway.runtime.finish(one)


def reward(event: dict[str, Any], context: object) -> dict[str, Any]:
    """What a training script may have."""
    return {"tripled": FACTOR * event["n"]}


def client_of(gateway: RunningGateway) -> AsyncClient:
    return AsyncClient(f"http://127.0.0.1:{gateway.app.http_port}", token="")


async def test_a_function_is_added_changed_and_removed(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        assert (await client.put_function("mine", EXEC, dry_run=True)).added == ("mine",)
        with pytest.raises(NotFoundError):
            await client.function("mine")
        assert (await client.put_function("mine", EXEC)).applied
        diff = await client.put_function("mine", EXEC | {"timeout": "1m"})
        assert diff.changed == {"mine": ("timeout_s",)}
        assert diff.values["mine"] == {"timeout_s": ValueChange(was="30.0", now="60.0")}, "old and new are told"
        assert (await client.function("mine")).timeout_s == 60.0
        assert (await client.put_function("mine", EXEC | {"timeout": "1m"})).empty
        planned = await client.remove_function("mine", dry_run=True)
        assert (planned.removed, planned.applied) == (("mine",), False) and (
            await client.function("mine")
        ).name == "mine"
        assert (await client.remove_function("mine")).removed == ("mine",)


async def test_what_is_of_the_files_or_no_function_is_refused(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        with pytest.raises(ConflictError):
            await client.put_function("echo", EXEC)
        with pytest.raises(InvalidConfigError, match="runtim"):
            await client.put_function("mine", {"runtim": "exec"})
        with pytest.raises(InvalidConfigError, match="has no 'other'"):
            await client.put_function("mine", HANDLER | {"handler": "mine:other"}, sources={"mine.py": SOURCE})
        for path in ("../mine.py", "/mine.py", "a/../mine.py", "mine.so", "", "a\x00.py", "./mine.py"):
            with pytest.raises(InvalidConfigError, match="sources"):
                await client.put_function("mine", HANDLER, sources={path: SOURCE})
        with pytest.raises(InvalidConfigError, match="at most"):
            await client.put_function("mine", HANDLER, sources={f"m{each}.py": "" for each in range(201)})
        assert "mine" not in [each.name for each in await client.functions()]
    answer = await gateway.http.put("/v1/functions/mine", json={"definitions": {}})
    assert answer.status_code == 422


async def test_a_handler_of_a_script_is_kept_over_a_restart_and_its_files_go_with_it(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path)
    async with serving(bench) as gateway, client_of(gateway) as client:
        diff = await client.register(reward, cost={"cpu": 1}, timeout="20s")
        assert diff.added == ("reward",)
        assert (await client.put_function("gone", HANDLER, sources={"mine.py": SOURCE})).applied
        await client.remove_function("gone")
        assert len(list((tmp_path / "state" / "handlers").iterdir())) == 2
    async with serving(bench) as gateway, client_of(gateway) as client:
        found = await client.function("reward")
        assert (found.source, found.timeout_s) == ("applied", 20.0)
        (directory,) = (tmp_path / "state" / "handlers").iterdir()
        assert "FACTOR = 3" in (directory / "registered.py").read_text(), "and what it needs of its module"


async def test_many_at_once_are_one_after_the_other(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        await asyncio.gather(
            *(client.put_function("mine", HANDLER, sources={"mine.py": f"{SOURCE}# {n}\n"}) for n in range(20))
        )
        found = await client.function("mine")
        assert found.source == "applied"
