"""Retention: what is old or too much goes, oldest first; what lives or waits for somebody stays."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.config.schema import RetentionSection
from gateway.invocations.record import Record
from gateway.store import maintenance
from gateway.store.maintenance import prune
from gateway.store.store import LogRow, Store, StoreSpec
from manager.action import State
from manager.errors import Reason
from tests.gateway.records import accepted

NOW_S = 1000.0
KEEP = RetentionSection(records_age_s=1e6, logs_age_s=1e6)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = Store(StoreSpec(path=tmp_path / "db.sqlite"))
    await opened.open()
    yield opened
    await opened.close()


def record(store: Store, *, ended_s: float | None, dead: bool = False, log: str = "x" * 100) -> Record:
    """An invocation with a log, ended at ``ended_s`` if at all."""
    made = accepted(store, dead=dead)
    if ended_s is not None:
        made.end(State.FAILED, Reason.INTERNAL, "", ended_s)
    store.save_log(LogRow(seq=made.seq, position=0, time_s=1.0, stream="stdout", data=log))
    return made


async def pruned(store: Store, **bounds: float) -> dict[str, int]:
    await store.commit()
    return await prune(store, replace(KEEP, **bounds), lambda: NOW_S, pause_s=0.0)  # type: ignore[arg-type]  # a test's bounds


async def streams(store: Store, record: Record) -> list[str]:
    return [row.stream for row in await store.logs(record.seq, 0, 10)]


async def kept(store: Store, *records: Record) -> list[bool]:
    return [await store.get(each.seq) is not None for each in records]


async def test_old_records_go_with_their_logs_and_living_or_dead_letters_stay(store: Store) -> None:
    dead, living = record(store, ended_s=10.0, dead=True), record(store, ended_s=None)
    old, young = record(store, ended_s=10.0), record(store, ended_s=990.0)
    assert await pruned(store, records_age_s=100.0) == {"records": 1, "logs": 0}
    assert await kept(store, dead, living, old, young) == [True, True, False, True]
    assert await store.logs(old.seq, 0, 10) == []
    assert await pruned(store, records_bytes=0) == {"records": 2, "logs": 0}
    assert await kept(store, dead, living, young) == [False, True, False]


async def test_many_that_must_stay_do_not_shield_those_behind_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "PRUNE_ROWS", 2)
    for _ in range(5):
        record(store, ended_s=10.0, dead=True)
    old = [record(store, ended_s=10.0) for _ in range(5)]
    assert await pruned(store, records_age_s=100.0) == {"records": 5, "logs": 0}
    assert not any(await kept(store, *old))


async def test_logs_go_by_age_before_their_records(store: Store) -> None:
    living, old, young = record(store, ended_s=None), record(store, ended_s=10.0), record(store, ended_s=990.0)
    assert await pruned(store, logs_age_s=100.0) == {"records": 0, "logs": 1}
    assert [await streams(store, each) for each in (living, old, young)] == [["stdout"], ["expired"], ["stdout"]]
    assert await kept(store, living, old, young) == [True, True, True]


async def test_a_log_that_is_gone_says_so_in_the_place_of_its_last_record_until_its_record_goes_too(
    store: Store,
) -> None:
    old = record(store, ended_s=10.0)
    for position in (1, 2):
        store.save_log(LogRow(seq=old.seq, position=position, time_s=1.0, stream="stdout", data="x"))
    assert await pruned(store, logs_age_s=100.0) == {"records": 0, "logs": 1}
    for offset in (0, 1, 2):
        (told,) = await store.logs(old.seq, offset, 10)
        assert (told.position, told.stream, told.time_s) == (2, "expired", NOW_S) and "3 records" in told.data
    assert await store.logs(old.seq, 3, 10) == [], "who has read it all missed nothing"
    assert await pruned(store, logs_age_s=100.0) == {"records": 0, "logs": 0}, "it goes once"
    assert await pruned(store, records_age_s=100.0) == {"records": 1, "logs": 0}
    assert await store.logs(old.seq, 0, 10) == []


async def test_logs_go_by_size_the_oldest_first_until_the_rest_fits(store: Store) -> None:
    records = [record(store, ended_s=990.0, log="é" * 50) for _ in range(4)]
    assert await pruned(store, logs_bytes=250) == {"records": 0, "logs": 2}
    assert [await streams(store, each) for each in records] == [["expired"], ["expired"], ["stdout"], ["stdout"]]
    record(store, ended_s=990.0)
    assert await pruned(store, logs_bytes=250) == {"records": 0, "logs": 1}, "what went is no longer counted"
    assert await pruned(store, logs_bytes=250) == {"records": 0, "logs": 0}


async def test_the_file_gives_back_what_its_records_took_but_for_a_spare(store: Store, tmp_path: Path) -> None:
    for _ in range(200):
        record(store, ended_s=10.0, log="x" * 100_000)
    living = record(store, ended_s=None)
    await store.commit()
    await store.close()
    file, reopened = tmp_path / "db.sqlite", Store(StoreSpec(path=tmp_path / "db.sqlite", checkpoint_s=0.001))
    before_bytes = file.stat().st_size
    await reopened.open()
    told = await pruned(reopened, records_age_s=100.0)
    assert told["records"] == 200 and told["pages"] > 1000
    assert await kept(reopened, living) == [True]
    await reopened.close()
    spare_bytes = 4096 * maintenance.SPARE_PAGES
    assert file.stat().st_size < spare_bytes + 2**20 < before_bytes / 3
