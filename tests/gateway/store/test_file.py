"""The store's file: an older one is brought up to date in place, a newer one is left alone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gateway.store.file import schema
from gateway.store.store import OpenTrajectory, Store, StoreSpec
from manager.errors import StorageUnavailable
from manager.outcome import State
from tests.gateway.conftest import GatewayBench, serving

VERSION_1 = Path(__file__).parent / "version_1.sql"
#: Later gateways of version 1 made this table without saying so.
UNTOLD = """
CREATE TABLE trajectories (
    name TEXT PRIMARY KEY, task TEXT NOT NULL, memory_bytes INTEGER NOT NULL, ttl_s REAL NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO trajectories VALUES ('t-1', 'rl', 7, 60.0);
"""


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


@pytest.mark.parametrize("scripts", [(), (UNTOLD,)])
async def test_a_file_of_version_1_is_upgraded_in_place_and_loses_nothing(
    tmp_path: Path, scripts: tuple[str, ...]
) -> None:
    old, fresh = tmp_path / "old.sqlite", tmp_path / "fresh.sqlite"
    write(old, VERSION_1.read_text(encoding="utf-8"), *scripts)
    for path in (old, fresh):
        store = Store(StoreSpec(path=path))
        await store.open()
        if path == old:
            ended, queued = await store.get(1), await store.get(2)
            assert ended is not None
            assert queued is not None
            assert (ended.state, ended.result, ended.execution_s) == (State.SUCCEEDED, b'{"n":1}', 0.75)
            assert (queued.state, queued.input, queued.options) == (State.QUEUED, b'{"n":2}', {"timeout_s": 5.0})
            assert await store.key("echo\nk") == (b"\x00", 2)
            assert [row.data for row in await store.logs(1, 0, 10)] == ["hello"]
            expected = {"t-1": OpenTrajectory("rl", 7, 60.0)} if scripts else {}
            assert await store.trajectories() == expected
            assert store.next_seq() == 3
        await store.close()
    assert shape(old) == shape(fresh)


async def test_a_gateway_serves_from_an_old_file_and_runs_what_waited_in_it(tmp_path: Path) -> None:
    write(tmp_path / "state" / "tangram.sqlite", VERSION_1.read_text(encoding="utf-8"))
    kept = {"retention": {"records_age": "100000d", "logs_age": "100000d"}}
    async with serving(GatewayBench(tmp_path, server=kept)) as gateway:
        # Its max_age is long over: it ends typed, and is not lost.
        waited = (await gateway.http.get("/v1/invocations/00000000002-0123456789ab?wait=5s")).json()
        assert (waited["state"], waited["reason"], waited["dead"]) == ("timed_out", "queue_timeout", True)
        log = (await gateway.http.get("/v1/invocations/00000000001-0123456789ab/logs")).text
        assert '"data":"hello"' in log
        assert (await gateway.invoke({"n": 3})).status_code == 200


async def test_an_upgrade_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "db.sqlite"
    write(path, VERSION_1.read_text(encoding="utf-8"), "CREATE TABLE expired_logs (in_the_way)")
    before = shape(path)
    with pytest.raises(StorageUnavailable, match=r"expired_logs.*db\.sqlite|db\.sqlite.*expired_logs"):
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
