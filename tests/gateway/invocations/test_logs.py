"""Logs: bounded, in order, from any thread, and never a burden to the action."""

from __future__ import annotations

import asyncio
import itertools
import math
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.config.schema import ServerConfig
from gateway.invocations.logs import DROPPED, TRUNCATED, Logs
from gateway.store.store import LogRow, Store, StoreSpec
from manager.errors import CapacityExceeded
from tests.gateway.conftest import DEADLINE_S


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = Store(StoreSpec(path=tmp_path / "db.sqlite", log_backlog_bytes=1000))
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def logs(store: Store, monkeypatch: pytest.MonkeyPatch) -> Logs:
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
