"""The store's file: its schema, brought up to date in place, and the statements by name."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from gateway.store.rows import SAVE, SELECTED
from manager.errors import StorageUnavailable
from runtimes.sandbox.disk import REMEDY as ROOM

REMEDY = "move it away together with its -wal and -shm files to begin without its records"


def schema() -> Mapping[int, str]:
    """The steps of schema.sql: version -> what makes it of the version before."""
    return {int(version): sql for version, sql in _parts("schema.sql", "-- version: ").items()}


def queries() -> Mapping[str, str]:
    """The statements of queries.sql by name."""
    read = {name: sql.strip().rstrip(";") for name, sql in _parts("queries.sql", "-- name: ").items()}
    return {name: sql.replace("{record}", SELECTED) for name, sql in read.items()} | {"save_invocation": SAVE}


def make_ready(connection: sqlite3.Connection, path: Path, *, synchronous: str) -> None:
    """Set the file up, and run the steps that it has not seen: all or none; a new one sees them all.

    Raises StorageUnavailable for a file that a newer gateway wrote: it may hold what this one would break.
    """
    steps = schema()
    newest = max(steps)
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > newest:
        raise StorageUnavailable(
            f"{path}: a newer gateway wrote it (schema version {version}, this one reads 1 to {newest}); "
            f"start that one again, or {REMEDY}",
            component="store",
        )
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("PRAGMA journal_size_limit = 67108864")
    connection.execute("PRAGMA wal_autocheckpoint = 0")  # `gateway.store.checkpoint` does, outside of any commit
    if version < newest:
        missing = "".join(steps[step] for step in range(version + 1, newest + 1))
        connection.executescript(f"BEGIN IMMEDIATE; {missing} PRAGMA user_version = {newest}; COMMIT;")


def _parts(file: str, mark: str) -> dict[str, str]:
    """The parts of an SQL file, each begun by a line of ``mark`` and its name."""
    text = resources.files("gateway.store").joinpath(file).read_text(encoding="utf-8")
    parts = [part.partition("\n") for part in text.split(mark)[1:]]
    return {name.strip(): sql for name, _, sql in parts}


def mended_by(error: BaseException, path: Path) -> str:
    """Return what mends a disk that refuses the file as it is full; empty for another error."""
    full = "full" in str(error) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    return f" ({path.parent}): {ROOM}" if full else ""
