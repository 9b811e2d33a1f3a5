"""Retention, and the state directory: one gateway's, checked after a kill, backed up while it serves."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.config.schema import RetentionSection
from gateway.invocations.record import Record
from gateway.store import maintenance
from gateway.store.maintenance import StateDirectory, backup, prune, quick_check, restore
from gateway.store.store import LogRow, Store, StoreSpec, schema
from manager.action import State
from manager.errors import Conflict, Reason, StorageUnavailable
from tests.gateway.conftest import GatewayBench, RunningGateway, serving
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


@pytest.mark.promise("Old records go with their logs; living ones and dead letters stay.")
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


@pytest.mark.promise("The database file shrinks when its records are removed.")
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


async def ready(gateway: RunningGateway) -> tuple[int, dict[str, object]]:
    answer = await gateway.http.get("/readyz")
    return answer.status_code, answer.json()


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_directory_that_goes_is_noticed_nothing_more_is_accepted_and_no_second_gateway_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    monkeypatch.setattr(maintenance, "LOOK_S", 0.01)
    async with serving(GatewayBench(tmp_path)) as gateway:
        assert (await gateway.invoke({"n": 1})).status_code == 200
        (tmp_path / "state").rename(tmp_path / "elsewhere")
        if replaced:
            (tmp_path / "state").mkdir()
        async with asyncio.timeout(60):
            # Before it is noticed, the room on its disk may be what cannot be measured.
            while "was removed or replaced under the gateway" not in str((found := await ready(gateway))[1]["status"]):
                pass
        assert found[0] == 503
        refused = await gateway.invoke({"n": 2}, mode="async")
        assert (refused.status_code, refused.json()["code"]) == (503, "storage_unavailable")
        for taken in ("state", "elsewhere"):
            with pytest.raises(Conflict, match="another gateway serves from"):
                StateDirectory(tmp_path / taken)
    with StateDirectory(tmp_path / "state"):
        pass


@pytest.mark.parametrize("gone", [False, True])
async def test_a_gateway_whose_record_is_gone_keeps_nothing_for_the_next_one(tmp_path: Path, gone: bool) -> None:
    async with serving(GatewayBench(tmp_path)) as gateway:
        if gone:
            (tmp_path / "state").rename(tmp_path / "elsewhere")
        gateway.app.stop(keep_environments=True)  # as SIGTERM does, sooner than it is looked
        assert gateway.app.runtimes.environments.settings.keep_on_close is not gone


async def test_after_an_unclean_end_the_database_is_checked_beside_the_work(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path)
    async with serving(bench) as gateway:
        assert "record" not in (await ready(gateway))[1], "there was no gateway before"
    async with serving(bench) as gateway:
        assert "record" not in (await ready(gateway))[1], "the one before ended well"
    (tmp_path / "state" / "serving").touch()
    async with serving(bench) as gateway:
        assert (await gateway.invoke({})).status_code == 200
        async with asyncio.timeout(60):
            while (found := await ready(gateway)) != (200, {**found[1], "record": "ok"}):
                assert found[1].get("record") in (None, "checking")


async def test_damage_is_told(tmp_path: Path) -> None:
    bench = GatewayBench(tmp_path)
    async with serving(bench) as gateway:
        for n in range(50):
            await gateway.invoke({"text": "x" * 2000, "n": n}, mode="async")
    database = tmp_path / "state" / "tangram.sqlite"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'inputs'").fetchone()
    with database.open("rb+") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xff" * 4096)
    assert quick_check(database, 60.0) != "ok"
    (tmp_path / "state" / "serving").touch()
    async with serving(bench) as gateway:
        async with asyncio.timeout(60):
            while (found := await ready(gateway))[0] == 200:
                pass
        assert "the record is damaged" in str(found[1]["status"]) and "tangram restore" in str(found[1]["status"])


def test_a_check_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "STEPS", 1)
    with closing(sqlite3.connect(tmp_path / "db.sqlite")) as connection:
        connection.executescript("CREATE TABLE t (x); INSERT INTO t VALUES (1)")
    assert quick_check(tmp_path / "db.sqlite", 60.0) == "ok"
    assert quick_check(tmp_path / "db.sqlite", -1.0) == "unfinished"


@pytest.mark.promise("A backup of a gateway that serves can be put back.")
async def test_a_backup_of_a_gateway_that_serves_is_put_back_and_served(tmp_path: Path) -> None:
    copy = tmp_path / "copy.sqlite"
    async with serving(GatewayBench(tmp_path / "old")) as gateway:
        told = (await gateway.invoke({"n": 1}, mode="async", wait="5s")).json()
        await asyncio.to_thread(backup, gateway.app.config.server.state_dir / "tangram.sqlite", copy)
        assert copy.stat().st_mode & 0o777 == 0o600
        after = (await gateway.invoke({"n": 2}, mode="async", wait="5s")).json()
        with pytest.raises(Conflict, match="exists"):
            backup(gateway.app.config.server.state_dir / "tangram.sqlite", copy)
        with pytest.raises(Conflict, match="another gateway serves"):
            restore(copy, tmp_path / "old" / "state", replace=True)
    assert restore(copy, tmp_path / "new" / "state") is None
    async with serving(GatewayBench(tmp_path / "new")) as gateway:
        assert (await gateway.http.get(f"/v1/invocations/{told['id']}")).json() == told
        assert (await gateway.http.get(f"/v1/invocations/{after['id']}")).status_code == 404
    with pytest.raises(Conflict, match="--replace"):
        restore(copy, tmp_path / "old" / "state")
    aside = restore(copy, tmp_path / "old" / "state", replace=True)
    assert aside is not None and quick_check(aside, 60.0) == "ok"
    async with serving(GatewayBench(tmp_path / "old")) as gateway:
        assert (await gateway.http.get(f"/v1/invocations/{after['id']}")).status_code == 404


def test_what_is_no_record_or_a_newer_one_is_not_put_back(tmp_path: Path) -> None:
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(b"no database" * 1000)
    with pytest.raises(StorageUnavailable, match="no sound record"):
        restore(copy, tmp_path / "state")
    copy.unlink()
    with closing(sqlite3.connect(copy)) as connection:
        connection.execute(f"PRAGMA user_version = {max(schema()) + 1}")
    with pytest.raises(StorageUnavailable, match="this gateway reads 1 to"):
        restore(copy, tmp_path / "state")
    assert not (tmp_path / "state").exists()
    with pytest.raises(StorageUnavailable, match="cannot be copied"):
        backup(tmp_path / "none.sqlite", tmp_path / "into.sqlite")
