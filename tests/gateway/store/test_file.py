"""The store's file: an older one is brought up to date in place, a newer one is left alone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gateway.store import store
from gateway.store.store import LogRow, OpenTrajectory, Store, StoreSpec, schema
from manager.action import State
from manager.errors import StorageUnavailable
from tests.gateway.records import accepted


def write(path: Path, *scripts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        for script in scripts:
            connection.executescript(script)


def shape(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Columns of every table and index, and the version."""
    with closing(sqlite3.connect(path)) as connection:
        kinds = connection.execute("SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'").fetchall()
        found = {
            name: connection.execute(f"PRAGMA {'table' if kind == 'table' else 'index'}_xinfo({name})").fetchall()
            for kind, name in kinds
        }
        return found | {"version": connection.execute("PRAGMA user_version").fetchall()}


def add_step(monkeypatch: pytest.MonkeyPatch) -> int:
    """Give the schema one step more; return its version."""
    later = max(schema()) + 1
    more = {
        **schema(),
        later: "CREATE TABLE more (x INTEGER) STRICT; ALTER TABLE nodes ADD COLUMN rack TEXT NOT NULL DEFAULT '';",
    }
    monkeypatch.setattr(store, "schema", lambda: more)
    return later


async def fill(path: Path) -> None:
    """Write a record, a key, a log and a trajectory."""
    store = Store(StoreSpec(path=path))
    await store.open()
    record = accepted(store, function="echo")
    store.save_key("echo\nk", b"\x00", record.seq, 2e9)
    store.save_log(LogRow(seq=record.seq, position=0, time_s=1.0, stream="stdout", data="hello"))
    store.save_trajectory("t-1", OpenTrajectory("rl", 7, 60.0))
    await store.close()


async def test_a_file_of_an_older_version_gets_the_steps_that_it_lacks_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, fresh = tmp_path / "old.sqlite", tmp_path / "fresh.sqlite"
    await fill(old)
    version = add_step(monkeypatch)
    for path in (old, fresh):
        store = Store(StoreSpec(path=path))
        await store.open()
        if path == old:
            record = await store.get(1)
            assert record is not None
            assert (record.state, record.function) == (State.QUEUED, "echo")
            assert await store.key("echo\nk") == (b"\x00", 1)
            assert [row.data for row in await store.logs(1, 0, 10)] == ["hello"]
            assert await store.trajectories() == {"t-1": OpenTrajectory("rl", 7, 60.0)}
            assert store.next_seq() == 2
        await store.close()
    assert shape(old) == shape(fresh)
    assert shape(old)["version"] == [(version,)]


async def test_a_step_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "db.sqlite"
    await fill(path)
    write(path, "ALTER TABLE nodes ADD COLUMN rack TEXT")
    before = shape(path)
    add_step(monkeypatch)
    with pytest.raises(StorageUnavailable, match=r"rack.*db\.sqlite|db\.sqlite.*rack"):
        await Store(StoreSpec(path=path)).open()
    assert shape(path) == before


async def test_a_newer_file_is_refused_with_what_to_do_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "db.sqlite"
    newer = max(schema()) + 1
    write(path, f"CREATE TABLE unheard_of (x); PRAGMA user_version = {newer}")
    with pytest.raises(StorageUnavailable, match=f"newer gateway wrote it .schema version {newer}") as refused:
        await Store(StoreSpec(path=path)).open()
    assert str(path) in refused.value.message and "start that one again" in refused.value.message
    assert list(shape(path)) == ["unheard_of", "version"]
