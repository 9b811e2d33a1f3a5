"""The store: durable when it says so, one write for many changes, and honest about a disk that refuses."""

from __future__ import annotations

import asyncio
import errno
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gateway.invocations.record import Record, new_id, seq_of
from gateway.store import store as store_module
from gateway.store.store import Durability, Filter, LogRow, Store, StoreSpec, mended_by, row_of
from manager.action import State
from manager.errors import InvalidInput, NotFound, Reason, StorageUnavailable
from runtimes.sandbox.disk import REMEDY as ROOM
from tests.gateway.records import accepted


def spec(directory: Path, **given: object) -> StoreSpec:
    return StoreSpec(path=directory / "db.sqlite", retry_s=0.01, **given)  # type: ignore[arg-type]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = Store(spec(tmp_path))
    await opened.open()
    yield opened
    await opened.close()


def crash_image(directory: Path) -> Path:
    """What a killed process leaves: the files as they are."""
    image = directory / "image"
    image.mkdir()
    for file in directory.glob("db.sqlite*"):
        shutil.copy(file, image)
    return image


@pytest.mark.parametrize("durability", list(Durability))
async def test_a_committed_record_survives_the_death_of_the_process(tmp_path: Path, durability: Durability) -> None:
    store = Store(spec(tmp_path, durability=durability))
    await store.open()
    kept = accepted(store, input=b'{"a":1}')
    await store.commit()
    image = crash_image(tmp_path)
    await store.close()
    survivor = Store(spec(image))
    await survivor.open()
    found = await survivor.get(kept.seq)
    assert found == kept
    assert survivor.next_seq() == kept.seq + 1
    await survivor.close()


async def test_changes_that_nobody_waits_for_become_one_row_written_once(store: Store) -> None:
    changed = accepted(store)
    changed.move(State.RUNNING)
    store.save(changed)
    changed.end(State.LOST, Reason.NODE_LOST, "gone", 5.0)
    store.save(changed)
    found = await store.get(changed.seq)
    assert found == changed
    assert (store.commits, store.rows_written) == (1, 1)


async def test_a_burst_shares_its_commits(store: Store) -> None:
    async def accept() -> None:
        accepted(store)
        await store.commit()

    await asyncio.gather(*(accept() for _ in range(200)))
    assert sum((await store.counts()).values()) == 200
    assert store.commits <= 5


async def test_a_listing_filters_and_pages_newest_first(store: Store) -> None:
    made = [accepted(store, function=f"f{n % 2}", trajectory="t" if n < 4 else None) for n in range(6)]
    made[0].end(State.CANCELLED, Reason.CANCELLED, "", 9.0)
    store.save(made[0])
    evens = await store.find(Filter(function="f0"))
    assert [each.seq for each in evens.records] == [made[4].seq, made[2].seq, made[0].seq]
    page = await store.find(Filter(trajectory="t", before=made[3].seq, limit=2))
    assert [each.seq for each in page.records] == [made[2].seq, made[1].seq]
    assert [each.seq for each in (await store.find(Filter(state=State.CANCELLED))).records] == [made[0].seq]
    assert [each.seq for each in await store.unfinished()] == [each.seq for each in made[1:]]


def test_a_full_disk_is_told_with_what_mends_it() -> None:
    for error in (sqlite3.OperationalError("database or disk is full"), OSError(errno.ENOSPC, "No space left")):
        assert mended_by(error, Path("/state/db.sqlite")) == f" (/state): {ROOM}"
    assert not mended_by(sqlite3.OperationalError("database is locked"), Path("/state/db.sqlite"))


async def test_a_full_disk_refuses_what_waits_keeps_what_happened_and_recovers(store: Store, tmp_path: Path) -> None:
    running = accepted(store)
    await store.commit()
    full = sqlite3.connect(tmp_path / "db.sqlite", isolation_level=None)
    full.execute("BEGIN EXCLUSIVE")  # nobody else can write
    assert store._connection is not None
    store._connection.execute("PRAGMA busy_timeout = 1")
    refused = accepted(store)
    with pytest.raises(StorageUnavailable):
        await store.commit()
    refused.end(State.FAILED, Reason.INTERNAL, "refused", 2.0)
    store.save(refused)
    with pytest.raises(StorageUnavailable):
        store.check()
    running.end(State.FAILED, Reason.INTERNAL, "while the disk was full", 3.0)
    store.save(running)
    full.execute("ROLLBACK")
    full.close()
    await store.commit()
    store.check()
    found = await store.get(running.seq)
    assert found is not None
    assert found.message == "while the disk was full"
    waiting = [each.seq for each in await store.unfinished()]
    assert refused.seq not in waiting


async def test_a_corrupt_database_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "db.sqlite").write_bytes(b"no database at all" * 1000)
    with pytest.raises(StorageUnavailable, match="not a database"):
        await Store(spec(tmp_path)).open()


async def test_a_key_is_found_until_it_expires(tmp_path: Path) -> None:
    now_s = 100.0
    store = Store(spec(tmp_path), wall=lambda: now_s)
    await store.open()
    store.save_key("f\nk", b"digest", 7, 200.0)
    assert await store.key("f\nk") == (b"digest", 7)
    now_s = 200.0
    assert await store.key("f\nk") is None
    await store.close()


async def test_log_records_beyond_the_backlog_are_refused_not_held(tmp_path: Path) -> None:
    store = Store(spec(tmp_path, log_backlog_bytes=10))
    await store.open()
    rows = [LogRow(seq=1, position=n, time_s=1.0, stream="stdout", data="x" * 8) for n in range(3)]
    assert [store.save_log(row) for row in rows] == [True, True, False]
    await store.commit()
    assert store.save_log(rows[2])
    assert store.log_records_dropped == 1
    await store.close()


def test_an_id_tells_its_row_and_odd_ones_are_refused() -> None:
    assert seq_of(new_id(77)) == 77
    for odd in ("", "../1", "a b", "\x00", "x" * 200):
        with pytest.raises(InvalidInput):
            seq_of(odd)
    with pytest.raises(NotFound):
        seq_of("abc")


def _with_message(store: Store, record: Record) -> None:
    record.message = "a\udcffb"


def _with_attempt(store: Store, record: Record) -> None:
    record.attempt = 2**64


def _with_log(store: Store, record: Record) -> None:
    store.save_log(LogRow(seq=record.seq, position=0, time_s=0.0, stream="stdout", data="a\udcff"))


def _with_delivery(store: Store, record: Record) -> None:
    store.note("save_delivery", record.seq, "a\udcff", 0.0, 0)


@pytest.mark.parametrize("spoil", [_with_message, _with_attempt, _with_log, _with_delivery])
async def test_a_row_that_cannot_be_written_is_told_and_keeps_no_other_from_the_disk(
    store: Store, spoil: Callable[[Store, Record], None]
) -> None:
    accepted(store)
    await store.commit()
    bad, innocent = accepted(store), accepted(store)
    spoil(store, bad)
    async with asyncio.timeout(30):
        with pytest.raises(StorageUnavailable, match="not all of it can be written"):
            await store.commit()
        later = accepted(store)
        await store.commit()
    assert store.failure is None
    on_disk = [row["seq"] for row in await store.read("unfinished", ())]
    assert {innocent.seq, later.seq} <= set(on_disk)


async def test_memory_that_runs_short_for_one_record_leaves_the_others_their_transaction(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, innocent = accepted(store), accepted(store)

    def short(record: Record) -> list[object]:
        if record is bad:
            raise MemoryError
        return row_of(record)

    monkeypatch.setattr(store_module, "row_of", short)
    with pytest.raises(StorageUnavailable, match="MemoryError"):
        await store.commit()
    assert [row["seq"] for row in await store.read("unfinished", ())] == [innocent.seq]
    monkeypatch.undo()
    store.save(bad)
    await store.commit()
    assert [row["seq"] for row in await store.read("unfinished", ())] == [bad.seq, innocent.seq]
