"""Backup and restore of the record: one SQLite file, written beside a gateway that serves, put back where none does."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from gateway.store.file import schema
from gateway.store.state_dir import StateDirectory, quick_check
from manager.errors import Conflict, StorageUnavailable

#: Longest check of a copy, in seconds.
CHECK_S = 3600.0


def backup(database: Path, into: Path) -> int:
    """Write a consistent copy of the database to ``into``, which must not exist; return its bytes.

    A gateway may serve from it meanwhile: the copy is of one instant. Raises Conflict or StorageUnavailable.
    """
    if into.exists():
        raise Conflict(f"{into} exists: name a file that does not", component="backup")
    part = into.with_name(f"{into.name}.part")
    try:
        part.unlink(missing_ok=True)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # it holds what the 0700 directory guards
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, isolation_level=None)) as connection:
            connection.execute("VACUUM INTO ?", (str(part),))
        _synced(part)
        part.rename(into)
    except (sqlite3.Error, OSError) as error:
        part.unlink(missing_ok=True)
        raise StorageUnavailable(f"{database} cannot be copied to {into}: {error}", component="backup") from None
    return into.stat().st_size


def restore(copy: Path, state_dir: Path, *, replace: bool = False) -> Path | None:
    """Put a copy in the place of the record; return where the present one was moved to, None if there was none.

    Raises Conflict where a gateway serves from the directory, or holds a record and ``replace`` is not given, and
    StorageUnavailable for a file that is no sound record of this version or an older one.
    """
    _check(copy)
    with StateDirectory(state_dir) as held:
        aside = None
        present = [path for path in _files(held.database) if path.exists()]
        if present:
            if not replace:
                raise Conflict(f"{present[0]} exists: give --replace to move it aside", component="restore")
            aside = _moved_aside(held.database)
        part = held.database.with_name("restored.part")
        try:
            shutil.copyfile(copy, part)
            _synced(part)
            part.rename(held.database)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise StorageUnavailable(f"{copy} cannot be put into {state_dir}: {error}", component="restore") from None
    return aside


def _check(copy: Path) -> None:
    found = quick_check(copy, CHECK_S)
    if found != "ok":
        raise StorageUnavailable(f"{copy} is no sound record: {found}", component="restore")
    with closing(sqlite3.connect(f"file:{copy}?mode=ro", uri=True)) as connection:
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if not 1 <= version <= max(schema()):
        told = f"{copy} is of schema version {version}, this gateway reads 1 to {max(schema())}"
        raise StorageUnavailable(told, component="restore")


def _files(database: Path) -> list[Path]:
    """The database with what belongs to it: its log may hold what the file does not."""
    return [database.with_name(database.name + suffix) for suffix in ("", "-wal", "-shm")]


def _moved_aside(database: Path) -> Path:
    number = next(n for n in range(1, 1_000_000) if not database.with_name(f"{database.name}.replaced-{n}").exists())
    aside = database.with_name(f"{database.name}.replaced-{number}")
    for old, new in zip(_files(database), _files(aside), strict=True):
        if old.exists():
            old.rename(new)
    return aside


def _synced(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
