"""The state directory: held by one gateway at a time, and watched while it is."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import socket
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Self

import structlog

from gateway.access.tokens import make_private
from manager.errors import Conflict, StorageUnavailable

DATABASE = "tangram.sqlite"
#: Seconds between two looks at whether the directory is still there.
LOOK_S = 15.0
#: Steps of SQLite between two looks at the clock, in a check.
STEPS = 100_000


class StateDirectory:
    """Holds the directory from its making to `close`; raises Conflict where another gateway does.

    It is held twice: by a lock in it, which goes with the directory where it is moved, and by a name that the kernel
    keeps for its path, which stays where the directory is removed or replaced under a gateway that still runs.
    """

    def __init__(self, path: Path, *, entered: bool = False) -> None:
        """``entered``: see `make_private`."""
        self.path = path
        #: Why what is written there is not kept; None while it is.
        self.lost: str | None = None
        #: What tells the database from another; None before it is watched.
        self._known: tuple[int, int] | None = None
        #: What became of the check of the database: empty where there was none.
        self.checked = ""
        self._log = structlog.get_logger("gateway.store")
        self._name = socket.socket(socket.AF_UNIX)
        try:
            self._lock = _locked(path, entered)
            self._take_name()
        except BaseException:
            self._name.close()
            raise
        marker = path / "serving"
        #: Whether the gateway before this one was killed, or lost its machine.
        self.unclean = marker.exists()
        self._marker = marker
        marker.touch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.lost is None:
            with suppress(OSError):
                self._marker.unlink()
        self._lock.close()
        self._name.close()

    @property
    def database(self) -> Path:
        return self.path / DATABASE

    async def watch_for_ever(self) -> None:
        """Notice that the directory or its database was removed or replaced, until cancelled."""
        self._known = _identity(self.database)
        while self.lost is None:
            await asyncio.sleep(LOOK_S)
            self.is_gone()

    def is_gone(self) -> bool:
        """Look whether the lock and the database are those that are held; return whether they are not (any more)."""
        if self.lost is None:
            self._look()
        return self.lost is not None

    def _look(self) -> None:
        here = _identity(self.path / "lock")
        held = os.fstat(self._lock.fileno())
        replaced = self._known is not None and _identity(self.database) != self._known
        if replaced or here != (held.st_dev, held.st_ino):
            self.lost = (
                f"server.state_dir {self.path} was removed or replaced under the gateway: what it writes is not kept; "
                "end it, put the directory back (tangram restore), and start it again"
            )
            self._log.error("the state directory is gone", path=str(self.path))

    async def check(self, limit_s: float) -> None:
        """Check the database after an unclean end, beside everything else and within ``limit_s``."""
        if not self.unclean or limit_s <= 0:
            return
        self.checked = "checking"
        self.checked = await asyncio.to_thread(quick_check, self.database, limit_s)
        level = self._log.info if self.checked in ("ok", "unfinished") else self._log.error
        level("the database was checked after an unclean end", found=self.checked)

    @property
    def damage(self) -> str | None:
        """What is wrong with the database; None as far as is known."""
        if self.checked in ("", "checking", "ok", "unfinished"):
            return None
        return f"the record is damaged: {self.checked}; end the gateway and restore a backup (tangram restore)"

    def _take_name(self) -> None:
        """Bind the path's name; the kernel lets go of it with the process."""
        name = hashlib.sha256(bytes(self.path.resolve())).hexdigest()
        try:
            self._name.bind(f"\0tangram/{os.getuid()}/{name}")
        except OSError:
            self._lock.close()
            raise Conflict(
                f"another gateway serves from {self.path}, whose directory was replaced under it: end it first",
                component="store",
            ) from None


def quick_check(database: Path, limit_s: float) -> str:
    """Return ``ok``, ``unfinished`` after ``limit_s``, or what is wrong with the database; it may be in use."""
    until_s = time.monotonic() + limit_s
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            connection.set_progress_handler(lambda: time.monotonic() > until_s, STEPS)
            return "; ".join(str(row[0]) for row in connection.execute("PRAGMA quick_check(5)"))
    except sqlite3.OperationalError as error:
        return "unfinished" if "interrupted" in str(error) else str(error)
    except sqlite3.DatabaseError as error:
        return str(error)


def _locked(path: Path, entered: bool) -> IO[str]:
    try:
        make_private(path, entered=entered)
        held = (path / "lock").open("w")
    except OSError as error:
        raise StorageUnavailable(f"server.state_dir {path}: {error}", component="store") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        held.close()
        raise Conflict(f"another gateway serves from {path}", component="store") from None
    return held


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from another of its name; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
