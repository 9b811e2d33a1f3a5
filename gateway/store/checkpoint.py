"""Checkpoints: what was committed goes from the write-ahead log into the file, beside the writer and not in its way.

SQLite would do so within a commit, now and then, and whoever waits for that commit would wait for two more syncs of
the disk. Here another thread does, once a while for all that was written meanwhile.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

#: A log of so many pages (64 MiB) is to begin anew: only between two commits can all of it be in the file.
FRAMES_MAX = 16384


class Checkpoints:
    """Copies within ``every_s`` of a commit; ``between`` runs a function in the writer's thread between two."""

    def __init__(
        self, path: Path, every_s: float, between: Callable[[Callable[[sqlite3.Connection], object]], object]
    ) -> None:
        self._path = path
        self._every_s = every_s
        self._between = between
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-checkpointer")
        self._connection: sqlite3.Connection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._copying: asyncio.Future[int] | None = None
        self._missed = False
        self._log = structlog.get_logger("gateway.store")

    def committed(self) -> None:
        """There is something to copy."""
        if self._copying is not None:
            self._missed = True
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._begin)

    async def close(self) -> None:
        """Stop; what is not copied yet stays in the log, where it is as safe."""
        if self._timer is not None:
            self._timer.cancel()
        if self._copying is not None:
            await asyncio.wait([self._copying])
        self._thread.shutdown(wait=True)
        if self._connection is not None:
            self._connection.close()

    def _begin(self) -> None:
        self._timer = None
        self._copying = asyncio.get_running_loop().run_in_executor(self._thread, self._copy)
        self._copying.add_done_callback(self._copied)

    def _copy(self) -> int:
        """Pages of the log that were copied or had been; runs in its own thread."""
        if self._connection is None:
            self._connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        return copy(self._connection)

    def _copied(self, done: asyncio.Future[int]) -> None:
        self._copying = None
        error = done.exception()
        if error is not None:
            self._log.warning("the log of the database grows: it cannot be copied", reason=str(error))
        elif done.result() > FRAMES_MAX:
            self._between(copy)  # little is left to copy by now, and the next commit begins the log anew
        if self._missed or error is not None:
            self._missed = False
            self.committed()


def copy(connection: sqlite3.Connection) -> int:
    """Copy what no reader and no writer is in the way of; how many pages of the log are in the file."""
    _, _, copied = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return int(copied)
