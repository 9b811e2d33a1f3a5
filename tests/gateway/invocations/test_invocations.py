"""Invocations: bounds, tries, times, and their logs."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import sqlite3
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from gateway import serialization
from gateway.config.load import load
from gateway.config.schema import ServerConfig
from gateway.invocations.invocations import (
    INLINE_MAX_BYTES,
    Admission,
    Inputs,
    InvocationRequest,
    Keys,
    LiveInvocation,
    _additional,
    _items,
    next_try_s,
)
from gateway.invocations.logs import DROPPED, TRUNCATED, Logs
from gateway.invocations.record import Mode, Record
from gateway.store.store import LogRow, Store, StoreSpec
from manager.action import Action, Lease, Outcome, Settlement, State
from manager.config import TaskSpec
from manager.errors import CANCEL_ASKED, NOT_BEGUN, CapacityExceeded, Draining, InvalidInput, QuotaExceeded, Reason
from manager.function import FunctionSpec, RetrySpec
from tangram.types import BatchItem, FileEntry, FileList
from tests.gateway.conftest import DEADLINE_S, GatewayBench, RunningGateway, serving, until
from tests.gateway.invocations.test_restart import crash, ended
from tests.gateway.records import accepted

FUNCTIONS = """
version: 1
functions:
  shell: {runtime: exec}
  scored:
    runtime: exec
    input: {type: object, properties: {n: {type: integer}}, required: [n]}
"""
#: Milliseconds by which rounding may be off: three times and two instants.
ROUNDING_MS = 0.01


def function(**given: object) -> FunctionSpec:
    return FunctionSpec(name="f", runtime="handler", **given)  # type: ignore[arg-type]


def failed(
    reason: Reason, retry_after_s: float | None = None, detail: Mapping[str, object] = MappingProxyType({})
) -> Outcome:
    return Outcome(state=State.FAILED, reason=reason, retry_after_s=retry_after_s, detail=detail)


def test_each_bound_refuses_with_its_own_error_and_frees_its_place() -> None:
    admission = Admission(lambda: 0.0, total_max=3, task=lambda task: TaskSpec(max_queued=2))
    narrow = function(max_queued=1)
    admission.enter("f", "a")
    with pytest.raises(QuotaExceeded, match="function 'f'"):
        admission.check(narrow, "b")
    admission.enter("g", "a")
    with pytest.raises(QuotaExceeded, match="task 'a'"):
        admission.check(function(), "a")
    admission.enter("g", "b")
    with pytest.raises(CapacityExceeded):
        admission.check(function(), "c")
    admission.leave("f", "a")
    admission.check(narrow, "a")
    admission.draining = True
    with pytest.raises(Draining):
        admission.check(function(), "c")


def test_retry_after_follows_the_pace_at_which_places_become_free() -> None:
    now_s = 0.0
    admission = Admission(lambda: now_s, total_max=20, task=lambda task: TaskSpec(max_queued=20))
    for _ in range(20):
        admission.enter("f", "a")
    for _ in range(10):
        now_s += 5.0
        admission.leave("f", "a")
        admission.enter("f", "a")
    with pytest.raises(CapacityExceeded) as refused:
        admission.check(function(), "a")
    assert refused.value.retry_after_s == pytest.approx(5.0)


def test_a_try_is_repeated_only_for_its_reasons_and_within_its_count() -> None:
    spec = function(retry=RetrySpec(max_attempts=3, backoff_s=2.0, backoff_max_s=5.0, on=(Reason.UPSTREAM,)))
    assert next_try_s(spec, 1, failed(Reason.UPSTREAM), 0.5) == 1.0
    assert next_try_s(spec, 2, failed(Reason.UPSTREAM), 0.5) == 2.0
    assert next_try_s(spec, 2, failed(Reason.UPSTREAM, retry_after_s=30.0), 0.5) == 30.0
    assert next_try_s(spec, 2, failed(Reason.UPSTREAM, retry_after_s=1e9), 0.5) is None, "nobody waits for ever"
    assert next_try_s(spec, 2, failed(Reason.UPSTREAM, retry_after_s=30.0), 0.5, left_s=20.0) is None
    assert next_try_s(spec, 2, failed(Reason.UPSTREAM, retry_after_s=7200.0), 0.5, left_s=86400.0) == 7200.0
    assert next_try_s(spec, 3, failed(Reason.UPSTREAM), 0.5) is None
    assert next_try_s(spec, 1, failed(Reason.HANDLER_ERROR), 0.5) is None
    assert next_try_s(spec, 1, failed(Reason.ENVIRONMENT_LOST), 0.5) is None


def test_the_machinery_s_faults_are_retried_for_idempotent_functions_only() -> None:
    assert next_try_s(function(idempotent=True), 1, failed(Reason.NODE_LOST), 0.0) == 0.0
    assert next_try_s(function(idempotent=True), 3, failed(Reason.NODE_LOST), 0.0) is None
    unwanted = Outcome(state=State.LOST, reason=Reason.NODE_LOST, detail={CANCEL_ASKED: True})
    assert next_try_s(function(idempotent=True), 1, unwanted, 0.0) is None, "it was to end"
    assert next_try_s(function(idempotent=True), 1, failed(Reason.CANCELLED), 0.0) is None
    assert next_try_s(function(idempotent=True), 1, Outcome(state=State.SUCCEEDED), 0.0) is None


def test_what_has_not_begun_is_tried_as_long_as_it_may_wait_whatever_it_is() -> None:
    short = failed(Reason.ENVIRONMENT_LOST, retry_after_s=5.0, detail={NOT_BEGUN: True})
    assert next_try_s(function(), 1, short, 0.0, patience_s=600.0) == 5.0
    assert next_try_s(function(), 40, short, 0.0, patience_s=600.0, alone=False) == 5.0
    assert next_try_s(function(), 1, short, 0.0, patience_s=4.0) is None
    assert next_try_s(function(), 1, short, 0.0) is None, "a caller who waits is told"
    assert next_try_s(function(), 1, failed(Reason.ENVIRONMENT_LOST, retry_after_s=5.0), 0.0, patience_s=600.0) is None


def test_what_json_cannot_hold_is_repaired_and_encoded_json_is_not_parsed_again() -> None:
    assert serialization.dumps({"a": 1, 1: {2}}) == b'{"a":1,"1":"{2}"}'
    assert serialization.dumps({"c": "\ud800"}) == b'{"c":"?"}'
    lost = FileEntry(path="/a\udcff", size_bytes=1, directory=False, mode="644")
    assert serialization.encode(lost) == b'{"path":"/a?","size_bytes":1,"directory":false,"mode":"644"}'
    whole = {"a": Raw(b'{"b": 1}'), "c": ["\ud800", FileList(files=(lost,))], "d": None}
    told = b'{"a":{"b": 1},"c":["?",{"files":[{"path":"/a?","size_bytes":1,"directory":false,"mode":"644"}]}],"d":null}'
    assert serialization.encode(whole) == told


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"colour": "red", "function": "f"}, "$.calls[3].colour"),
        ({}, "$.calls[3].function"),
        ({"function": "f", "task": "a b"}, "$.calls[3].task"),
        (7, "$.calls[3]"),
    ],
)
def test_what_does_not_fit_a_type_is_refused_with_its_path(value: object, path: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        serialization.read(value, BatchItem, "$.calls[3]")
    assert refused.value.detail == {"path": path}
    assert refused.value.message.startswith(path)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tangram.yaml"
    path.write_text(FUNCTIONS)
    return path


def test_long_lists_are_checked_together_and_the_first_that_does_not_fit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tangram.yaml"
    fields = (
        "argv: {type: array, items: {type: string}}, ids: {type: array, items: {type: integer, minimum: 0}},"
        "env: {type: object, additionalProperties: {type: string}}"
    )
    path.write_text(
        f"version: 1\nfunctions: {{box: {{runtime: exec, input: {{type: object, properties: {{{fields}}}}}}}}}"
    )
    box, inputs = load([path], {}).functions["box"], Inputs()
    for wrong, message in (
        ({"argv": ["a", 1, 2]}, r"\$.argv\[1\]: 1 is not of type 'string'"),
        ({"ids": [0, True]}, r"\$.ids\[1\]: True is not of type 'integer'"),
        ({"ids": [3, -1, -2]}, r"\$.ids\[1\]: -1 is less than the minimum of 0"),
        ({"env": {"A": "a", "B": 1}}, r"\$.env.B: 1 is not of type 'string'"),
    ):
        with pytest.raises(InvalidInput, match=message):
            inputs.check(box, wrong)
    validator = inputs._validator(box)
    monkeypatch.setattr(type(validator), "descend", None)  # which looks at one item after the other
    assert not list(_items(validator, {"type": "string"}, ["a"] * 1000, {}))
    assert not list(_items(validator, {"type": "number", "maximum": 2}, [1, 2.0], {}))
    assert not list(_additional(validator, {"type": "string"}, {"A": "a"}, {}))


@pytest.mark.promise("A large input is checked while others are served.")
async def test_a_large_input_is_checked_aside_and_judged_as_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    check = Inputs.check

    def seen(self: Inputs, function: FunctionSpec, input: Mapping[str, object]) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        check(self, function, input)

    monkeypatch.setattr(Inputs, "check", seen)
    async with serving(GatewayBench(tmp_path)) as gateway:
        for padding, inline in (("", True), ("x" * INLINE_MAX_BYTES, False)):
            for n, status in ((1, 200), ("one", 422)):
                threads.clear()
                answer = await gateway.invoke({"n": n, "padding": padding}, function="strict")
                assert (answer.status_code, threads) == (status, [inline]), answer.text
                assert status == 200 or "$.n: 'one' is not of type 'integer'" in answer.json()["detail"]


def test_for_an_unknown_field_the_nearest_and_all_known_ones_are_named(config: Path) -> None:
    shell = load([config], {}).functions["shell"]
    with pytest.raises(InvalidInput) as raised:
        Inputs().check(shell, {"cmd": "true"})
    assert raised.value.message == (
        "$: no field is called 'cmd'; did you mean 'command'? It takes argv, command, cwd, env, merge, session, stdin, "
        "stdin_base64, user; tangram functions show shell says what it takes"
    )


LOST = Outcome(state=State.LOST, reason=Reason.NODE_LOST)


def age_ms(record: dict[str, Any]) -> float:
    accepted, over = (datetime.fromisoformat(record[name]) for name in ("accepted_at", "ended_at"))
    return (over - accepted).total_seconds() * 1000


def assert_whole(record: dict[str, Any]) -> None:
    parts = [record[name] for name in ("queue_ms", "overhead_ms", "execution_ms")]
    assert min(parts) >= 0, record
    assert abs(sum(parts) - age_ms(record)) < ROUNDING_MS, (parts, age_ms(record))
    assert abs(record["act_ms"] - sum(parts)) < ROUNDING_MS


#: Seconds that pass, what happens then, and how much of the time since the start of the work its runtime measured.
STEPS = st.lists(
    st.tuples(
        st.floats(0, 500), st.sampled_from(["lease", "begin", "take back", "retry", "die", "wait"]), st.floats(0, 1)
    ),
    max_size=12,
)


@pytest.mark.promise("ACT is queue + overhead + execution, from acceptance to the end, over all tries and restarts.")
@given(steps=STEPS, last=st.sampled_from(["settle", "end", "shut down"]), share=st.floats(0, 1))
def test_whatever_happens_to_it_they_sum_to_its_age(
    steps: list[tuple[float, str, float]], last: str, share: float
) -> None:
    record = Record(
        seq=1, id="i", function="f", revision="r", task="t", trajectory=None, parent=None, mode=Mode.ASYNC,
        accepted_s=1_790_000_000.0, input=None,
    )  # fmt: skip
    now_s, began_s = record.accepted_s, None
    for passed_s, what, part in steps:
        now_s += passed_s
        running = record.state is State.RUNNING
        if what == "lease" and not running:
            record.start(now_s, begun=False)
        elif what == "begin" and running and not record.begun:
            record.begin(now_s)
            began_s = now_s
        elif running and (what in ("retry", "die") or (what == "take back" and not record.begun)):
            if what != "take back":
                ran_s = part * (now_s - began_s) if began_s is not None and what == "retry" else 0.0
                record.attempts = (*record.attempts, record.tried(LOST, now_s, ran_s))
                record.attempt += 1
            record.take_back()
            began_s = None
        shown = record.as_of(now_s).as_wire()
        assert sum((shown.queue_ms or 0, shown.overhead_ms or 0, shown.execution_ms or 0)) == pytest.approx(
            1000 * (now_s - record.accepted_s), abs=ROUNDING_MS
        )
    now_s += 1.0
    if last == "settle":
        ran_s = 0.0 if began_s is None else share * (now_s - began_s)
        action = Action(id="i", function="f")
        lease = None if record.state is State.QUEUED else Lease(action_id="i", node="n")
        record.settle(
            Settlement(action=action, outcome=LOST, lease=lease, queue_s=0.0, overhead_s=0.0, execution_s=ran_s), now_s
        )
    else:
        record.end(State.LOST, Reason.GATEWAY_RESTART, "", now_s, ran=last == "shut down")
    tries = record.attempts
    assert_whole(
        {
            "accepted_at": "2026-01-01T00:00:00+00:00",
            "ended_at": datetime.fromtimestamp(1767225600 + now_s - record.accepted_s).astimezone().isoformat(),
            "queue_ms": 1000 * (record.queue_s or 0.0),
            "overhead_ms": 1000 * (record.overhead_s or 0.0),
            "execution_ms": 1000 * (record.execution_s or 0.0),
            "act_ms": record.as_wire().act_ms,
        }
    )
    assert sum(each.execution_ms or 0.0 for each in tries) <= 1000 * (record.execution_s or 0.0) + ROUNDING_MS


async def over(gateway: RunningGateway, invocation_id: str) -> dict[str, Any]:
    record: dict[str, Any] = await ended(gateway, invocation_id)
    assert record["ended_at"] is not None, record
    assert_whole(record)
    return record


async def submitted(gateway: RunningGateway, body: dict[str, object], function: str = "echo") -> str:
    return str((await gateway.invoke(body, mode="async", function=function)).json()["id"])


async def passing(seconds: float = 0.03) -> None:
    """Time itself is what is measured here."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    await over.wait()


async def test_of_every_way_to_end(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path)) as gateway:
        running = await submitted(gateway, {"held": True, "overhead_s": 0.03})
        await gateway.runtime.begun(running)
        await passing()
        live = (await gateway.http.get(f"/v1/invocations/{running}")).json()
        (listed,) = (await gateway.http.get("/v1/invocations")).json()["invocations"]
        for shown in (live, listed):
            assert (shown["act_ms"], shown["execution_ms"] >= 30, shown["overhead_ms"] >= 30) == (None, True, True)
        await gateway.http.post(f"/v1/invocations/{running}/cancel")
        cancelled = await over(gateway, running)
        assert (cancelled["state"], cancelled["execution_ms"] >= 30) == ("cancelled", True)
        assert cancelled["overhead_ms"] >= 30
        fill = [await submitted(gateway, {"held": True}) for _ in range(gateway.app.node.cores)]
        for each in fill:
            await gateway.executing(each)
        waiting = await submitted(gateway, {})
        impatient = await submitted(gateway, {}, "impatient")
        await passing()
        assert (await gateway.http.get(f"/v1/invocations/{waiting}")).json()["queue_ms"] >= 30
        await gateway.http.post(f"/v1/invocations/{waiting}/cancel")
        assert (await over(gateway, waiting))["state"] == "cancelled"
        assert (await over(gateway, impatient))["reason"] == "queue_timeout"
        for each in fill:
            gateway.runtime.finish(each)
            await over(gateway, each)
        timed_out = await over(gateway, await submitted(gateway, {"hangs": True}, "short"))
        assert (timed_out["state"], timed_out["execution_ms"] >= 50) == ("timed_out", True)
        retried = await over(
            gateway, await submitted(gateway, {"reason": "handler_error", "overhead_s": 0.02}, "retried")
        )
        assert (retried["attempt"], retried["overhead_ms"] >= 60) == (3, True)
        batch = {"calls": [{"function": "echo", "input": {"n": n}} for n in range(5)]}
        for verdict in (await gateway.http.post("/v1/invocations:batch?wait=all", json=batch)).json()["results"]:
            await over(gateway, verdict["invocation"]["id"])


async def test_who_asks_again_is_told_an_end_once_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(GatewayBench(tmp_path)) as gateway:
        calls, store, loop = gateway.app.invocations, gateway.app.store, asyncio.get_running_loop()
        request = InvocationRequest(
            function="echo", input={"held": True}, body=b'{"held":true}', mode=Mode.ASYNC, key="k"
        )
        first = await calls.invoke(request)
        await gateway.runtime.begun(first.record.id)
        await store.commit()
        written, begun, free = store._write, asyncio.Queue[None](), threading.Semaphore(0)

        def slow(*batch: Any) -> Any:
            loop.call_soon_threadsafe(begun.put_nowait, None)
            assert free.acquire(timeout=DEADLINE_S)
            return written(*batch)

        monkeypatch.setattr(store, "_write", slow)
        again = asyncio.ensure_future(calls.invoke(replace(request)))
        await begun.get()
        gateway.runtime.finish(first.record.id)
        await until(lambda: first.record.terminal)
        free.release()
        await begun.get()
        assert not again.done(), "a restart could still tell another end"
        free.release(1000)
        assert (await again).ended.is_set()


async def test_across_a_restart(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path / "first")) as first:
        running = [await submitted(first, {"held": True}, "again") for _ in range(first.app.node.cores)]
        queued = await submitted(first, {})
        await until(lambda: len(first.runtime.running) == len(running))
        await first.app.store.commit()
        await passing()
        bench = crash(tmp_path / "first", tmp_path / "second")
        for each in running:
            first.runtime.finish(each)
    async with serving(bench) as second:
        for each in running:
            await second.executing(f"{each}.2")
        await passing()
        for each in running:
            second.runtime.finish(f"{each}.2")
            again = await over(second, each)
            (lost,) = again["attempts"]
            assert (again["state"], lost["overhead_ms"] >= 30) == ("succeeded", True)
            assert again["execution_ms"] >= 30
        assert (await over(second, queued))["queue_ms"] >= 60


@pytest.mark.promise("A stream has the three times in its last record.")
async def test_streams_carry_them(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path)) as gateway:
        answer = await gateway.invoke({"log": "x"}, mode="stream")
        record = json.loads(answer.text.splitlines()[-1])["invocation"]
        assert_whole(record)
        log = await gateway.http.get(f"/v1/invocations/{record['id']}/logs?follow=true")
        end = json.loads(log.text.splitlines()[-1])
        assert {name: end[name] for name in ("queue_ms", "overhead_ms", "execution_ms")} == {
            name: record[name] for name in ("queue_ms", "overhead_ms", "execution_ms")
        }


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = Store(StoreSpec(path=tmp_path / "db.sqlite", log_backlog_bytes=1000))
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def logs(store: Store, monkeypatch: pytest.MonkeyPatch) -> Logs:
    monkeypatch.setattr("gateway.invocations.logs.TAIL_BYTES", 20)
    return Logs(store, ServerConfig(heartbeat_s=0.01, followers_max=2))


async def whole(logs: Logs, seq: int) -> list[LogRow]:
    return [row async for page in logs.follow(seq, 0) for row in page]


@pytest.mark.promise("A log is kept to its own bound, and its end counts the missing bytes.")
async def test_a_log_is_filled_to_its_bound_and_ends_with_what_is_missing(logs: Logs) -> None:
    log = logs.open(1, limit_bytes=303)
    for _ in range(10):
        log.write("stdout", "x" * 46 + "ä" * 2)
    log.omit(7)
    logs.close(1)
    rows = await whole(logs, 1)
    assert [(row.stream, len(row.data.encode())) for row in rows[:-1]] == [
        ("stdout", 50),
        ("stdout", 50),
        ("stdout", 11),
    ]
    assert rows[-1].stream == TRUNCATED
    assert "300 bytes" not in rows[-1].data
    assert rows[-1].data == f"the log reached its limit of 303 bytes; {10 * 50 - 111 + 7} bytes are missing"


async def test_a_follower_reads_what_left_memory_and_what_is_still_there(logs: Logs) -> None:
    log = logs.open(1, limit_bytes=10_000)
    for n in range(10):
        log.write("stdout", f"line {n}\n")
    pages = logs.follow(1, 0)
    first = await anext(pages)
    assert first[0].data == "line 0\n"
    log.write("stderr", "late")
    logs.close(1)
    rest = [row.data async for page in pages for row in page]
    assert [row.data for row in first] + rest == [*(f"line {n}\n" for n in range(10)), "late"]


@pytest.mark.promise("A line of a log is sent once it is on disk, so that no offset holds two after a kill.")
async def test_nobody_is_told_of_a_line_before_it_stands_on_disk(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, busy, free = store._write, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(*batch: Any) -> Any:
        loop.call_soon_threadsafe(busy.set)
        assert free.wait(DEADLINE_S)
        return written(*batch)

    monkeypatch.setattr(store, "_write", slow)
    logs = Logs(store, ServerConfig(heartbeat_s=DEADLINE_S))
    log = logs.open(1, limit_bytes=1000)
    followed = asyncio.ensure_future(anext(logs.follow(1, 0)))
    log.write("stdout", "first")
    await busy.wait()
    log.write("stdout", "second")
    for _ in range(10):
        await asyncio.sleep(0)
    assert not followed.done()
    free.set()
    told = await asyncio.wait_for(followed, DEADLINE_S)
    with closing(sqlite3.connect(tmp_path / "db.sqlite")) as disk:
        on_disk = disk.execute("SELECT position, data FROM log_records ORDER BY position").fetchall()
    assert [(row.position, row.data) for row in told] == on_disk[: len(told)] != []
    assert [row.data for row in await logs.read(1, 0)] == ["first", "second"], "a reader waits for the disk"
    logs.close(1)


async def test_a_silent_log_beats_its_heart(logs: Logs) -> None:
    logs.open(1, limit_bytes=100)
    pages = logs.follow(1, 0)
    assert await anext(pages) == []
    logs.close(1)
    with pytest.raises(StopAsyncIteration):
        await anext(pages)


async def test_a_slow_disk_drops_records_and_says_how_many(logs: Logs, store: Store) -> None:
    log = logs.open(1, limit_bytes=100_000)
    for _ in range(5):
        log.write("stdout", "x" * 400)
    await store.commit()
    log.write("stdout", "after")
    logs.close(1)
    rows = await whole(logs, 1)
    assert [row.stream for row in rows] == ["stdout"] * 3 + [DROPPED, "stdout"]
    assert rows[3].data.startswith("2 records")
    assert [row.position for row in rows] == list(range(5))


async def test_a_log_may_be_written_from_another_thread(logs: Logs) -> None:
    log = logs.open(1, limit_bytes=1000)
    thread = threading.Thread(target=log.write, args=("stdout", "from afar"))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert [row.data for row in await anext(logs.follow(1, 0))] == ["from afar"]


async def test_text_that_is_no_unicode_is_kept_as_well_as_can_be(logs: Logs) -> None:
    logs.open(1, limit_bytes=1000).write("stdout", "a\ud800b")
    logs.close(1)
    assert [row.data for row in await whole(logs, 1)] == ["a?b"]


async def test_one_task_does_not_follow_all_logs(logs: Logs) -> None:
    logs.settings = replace(logs.settings, followers_max=4)
    logs.open(1, limit_bytes=100)
    open_pages = [logs.follow(1, 0, "a") for _ in range(3)]
    for pages in open_pages:
        await anext(pages)
    with pytest.raises(CapacityExceeded, match="task 'a'"):
        logs.follow(1, 0, "a")
    await anext(logs.follow(1, 0, "b"))
    logs.close(1)


@pytest.mark.promise("A log goes on over a restart without a line twice.")
async def test_what_is_said_once_more_after_a_restart_is_not_written_twice(store: Store) -> None:
    log = Logs(store, ServerConfig(), wall=itertools.count().__next__).open(1, limit_bytes=1000)
    for stream, text in (("stdout", "an earlier try"), ("system", "next try")):
        log.write(stream, text)
    began_s = 2.0
    for stream, text in (("stdout", "one, z"), ("stderr", "error"), ("stdout", "wölf\0, ")):
        log.write(stream, text)
    await store.commit()
    again = await Logs(store, ServerConfig()).resume(1, 1000, began_s)
    for stream, text in (("stdout", "one, "), ("stderr", "errors"), ("stdout", "zwölf\0, drei"), ("stdout", "!")):
        again.write(stream, text)
    written = [(row.stream, row.data) for row in await store.logs(1, 0, 20)]
    assert written[2:5] == [("stdout", "one, z"), ("stderr", "error"), ("stdout", "wölf\0, ")]
    assert written[5:] == [("stderr", "s"), ("stdout", "drei"), ("stdout", "!")]


async def test_the_bound_of_a_log_outlasts_a_restart(logs: Logs, store: Store) -> None:
    logs.open(1, limit_bytes=300).write("stdout", "x" * 150)
    await store.commit()
    log = await Logs(store, ServerConfig()).resume(1, 300, math.inf)
    log.write("stdout", "y" * 150)
    log.finish()
    await store.commit()
    rows = await store.logs(1, 0, 10)
    assert [(row.stream, len(row.data)) for row in rows[:2]] == [("stdout", 150), ("stdout", 22)]
    assert rows[2].data.endswith("128 bytes are missing")


async def test_a_key_of_what_ends_while_it_is_looked_up_gives_that_very_invocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart a key is on disk only, and its invocation may live."""
    store = Store(StoreSpec(path=tmp_path / "database"))
    await store.open()
    request = InvocationRequest(function="echo", input={}, body=b"{}", key="k")
    invocation = LiveInvocation(record=accepted(store))
    seq = invocation.record.seq
    store.save_key(request.scoped_key, request.digest, seq, 2**40)
    living, get = {seq: invocation}, store.get

    async def read(place: int) -> Record | None:
        found = await get(place)
        living.clear()  # it ends
        return found

    monkeypatch.setattr(store, "get", read)
    assert await Keys(store, 60.0, lambda: 0.0).latch(request, living) is invocation
    await store.close()
