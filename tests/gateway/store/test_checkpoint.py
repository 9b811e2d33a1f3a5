"""Checkpoints: committed records reach the file beside the commits, and the log that they wait in has a bound."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from gateway.store import store as checkpoint
from gateway.store.store import Checkpoints, Store, StoreSpec
from tests.gateway.conftest import until
from tests.gateway.records import accepted

NEVER_S = 1e6


async def opened(directory: Path, checkpoint_s: float) -> Store:
    store = Store(StoreSpec(path=directory / "db.sqlite", checkpoint_s=checkpoint_s))
    await store.open()
    return store


def in_the_file(directory: Path) -> int:
    """Records in the file alone, without its log."""
    alone = directory / "alone.sqlite"
    alone.write_bytes((directory / "db.sqlite").read_bytes())
    with closing(sqlite3.connect(alone)) as connection:
        try:
            return int(connection.execute("SELECT count(*) FROM invocations").fetchone()[0])
        except sqlite3.DatabaseError:
            return 0  # not even the schema, or it is being copied to just now
        finally:
            alone.unlink()


def is_copied(directory: Path) -> bool:
    """Whether nobody copies and nothing is left to copy: what is in the file is so a little before."""
    with closing(sqlite3.connect(directory / "db.sqlite")) as connection:
        busy, pages, copied = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return bool(not busy and pages == copied)


async def test_no_commit_waits_for_the_file(tmp_path: Path) -> None:
    store = await opened(tmp_path, NEVER_S)
    for _ in range(4):
        accepted(store, input=b"x" * 4 * 2**20)  # each more than SQLite's own 1000 pages
        await store.commit()
    assert in_the_file(tmp_path) == 0
    await store.close()
    assert in_the_file(tmp_path) == 4


async def test_what_was_committed_is_in_the_file_soon_also_what_came_while_it_was_copied(tmp_path: Path) -> None:
    store = await opened(tmp_path, 0.001)
    for count in range(1, 20):
        accepted(store)
        await store.commit()
        if count % 6 == 0:
            await until(lambda count=count: in_the_file(tmp_path) == count)  # type: ignore[misc]
    await until(lambda: in_the_file(tmp_path) == 19)
    await store.close()


async def test_a_large_log_is_copied_to_its_end_between_two_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FRAMES_MAX", 3)
    store = await opened(tmp_path, NEVER_S)
    asked: list[Callable[[sqlite3.Connection], object]] = []
    checkpoints = Checkpoints(tmp_path / "db.sqlite", 0.001, asked.append)
    accepted(store)
    await store.commit()
    checkpoints.committed()
    await until(lambda: bool(asked))
    assert asked == [checkpoint.copy]
    await checkpoints.close()
    await store.close()


async def test_the_log_begins_anew_when_all_of_it_is_in_the_file(tmp_path: Path) -> None:
    store = await opened(tmp_path, 0.001)
    log, largest = tmp_path / "db.sqlite-wal", 0
    for count in range(1, 41):
        accepted(store, input=b"x" * 2**18)
        await store.commit()
        largest = max(largest, log.stat().st_size)
        if count % 5 == 0:
            await until(lambda count=count: in_the_file(tmp_path) == count)  # type: ignore[misc]
            await until(lambda: is_copied(tmp_path))
    assert largest < 5 * 2**20, "40 records of 256 KiB went through it"
    await store.close()


async def test_a_file_that_cannot_be_copied_to_does_not_disturb_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = 0

    def copy(connection: sqlite3.Connection) -> int:
        nonlocal tried
        tried += 1
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(checkpoint, "copy", copy)
    store = await opened(tmp_path, 0.001)
    made = accepted(store)
    await store.commit()
    await until(lambda: tried >= 3)
    assert store.failure is None
    monkeypatch.undo()
    assert await store.get(made.seq) == made
    await until(lambda: in_the_file(tmp_path) == 1)
    await store.close()
