"""The state directory: one gateway's, watched, checked after a kill, backed up while it serves, and put back."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gateway.store import maintenance
from gateway.store.maintenance import StateDirectory, backup, quick_check, restore
from gateway.store.store import schema
from manager.errors import Conflict, StorageUnavailable
from tests.gateway.conftest import GatewayBench, RunningGateway, serving


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
        assert gateway.app.machines.keep is not gone


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
