"""Care of the state directory: its lock, backups, retention."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Self

import structlog

from gateway.auth import make_private
from gateway.config.schema import RetentionSection
from gateway.store.store import Store, schema
from manager.action import State
from manager.errors import Conflict, StorageUnavailable

#: Most that one deletion takes while the writer, and whoever waits to be accepted, waits for it (some milliseconds):
#: records, or bytes of log text.
PRUNE_ROWS = 200
PRUNE_LOG_BYTES = 4 * 2**20
#: Pages that one step gives back to the disk, and how many stay for new records: a tenth, or 4 MiB.
SHRINK_PAGES = 500
SPARE_SHARE, SPARE_PAGES = 10, 1024
#: Seconds between two deletions of one round, so that they never keep the writer busy.
PAUSE_S = 0.05

#: Seconds that the check of the database may take, beside the work: a record of some GiB on a slow disk.
CHECK_S = 60.0
#: Seconds between two clean-ups: what retention keeps too long for so long is little beside a day.
CLEAN_EVERY_S = 300.0

Queries = Mapping[str, str]


async def prune_for_ever(store: Store, spec: RetentionSection, wall: Callable[[], float] = time.time) -> None:
    """Delete what is too old or too much, every `CLEAN_EVERY_S`, until cancelled."""
    log = structlog.get_logger("gateway.retention")
    while True:
        try:
            deleted = await prune(store, spec, wall)
        except StorageUnavailable as error:
            log.warning("old records stay", reason=error.message)
        else:
            if any(deleted.values()):
                log.info("old records deleted", **deleted)
        await asyncio.sleep(CLEAN_EVERY_S)


async def prune(
    store: Store, spec: RetentionSection, wall: Callable[[], float], *, pause_s: float = PAUSE_S
) -> dict[str, int]:
    """One round: how many records and logs went. Raises StorageUnavailable."""
    now_s = wall()
    kinds = {
        "logs": partial(prune_logs, older_than_s=now_s - spec.logs_age_s, bytes_max=spec.logs_bytes, now_s=now_s),
        "records": partial(
            prune_records, older_than_s=now_s - spec.records_age_s, bytes_max=spec.records_bytes, now_s=now_s
        ),
    }
    deleted = dict.fromkeys(kinds, 0)
    for kind, work in kinds.items():
        while count := await store.alter(work):
            deleted[kind] += count
            await asyncio.sleep(pause_s)
    pages = 0
    while count := await store.alter(shrink):
        pages += count
        await asyncio.sleep(pause_s)
    return {**deleted, "pages": pages} if pages else deleted


def prune_records(
    connection: sqlite3.Connection, sql: Queries, *, older_than_s: float, bytes_max: int, now_s: float
) -> int:
    """Delete some of the oldest ended records with their logs; returns how many.

    Those that ended before ``older_than_s``, and any while the database is larger than ``bytes_max``. Dead letters go
    only by size. Expired idempotency keys go too.
    """
    with closing(connection.execute(sql["oldest"])) as rows:
        old = list(islice(_old_records(rows, older_than_s, _size_bytes(connection) > bytes_max), PRUNE_ROWS))
    connection.execute("BEGIN IMMEDIATE")
    _delete_logs(connection, sql, old)
    for query in ("delete_invocation", "delete_input", "delete_expired_log", "delete_delivery"):
        connection.executemany(sql[query], [(seq,) for seq in old])
    connection.execute(sql["delete_keys"], (now_s, PRUNE_ROWS))
    connection.execute("COMMIT")
    return len(old)


def prune_logs(
    connection: sqlite3.Connection, sql: Queries, *, older_than_s: float, bytes_max: int, now_s: float
) -> int:
    """Delete some of the oldest logs of ended invocations; returns how many. Their readers are told that they are gone.

    Those whose invocation ended before ``older_than_s``, and any while all together are larger than ``bytes_max``.
    """
    result = connection.execute(sql["log_bytes"]).fetchone()
    left_bytes = 0 if result is None else int(result[0])
    going_bytes = 0
    old: list[int] = []
    for seq in _logs(connection, sql):
        ended = connection.execute(sql["ended"], (seq,)).fetchone()
        if ended is not None and not State(ended[0]).terminal:
            continue
        enough = left_bytes - going_bytes <= bytes_max and ended is not None and ended[1] >= older_than_s
        if enough or going_bytes >= PRUNE_LOG_BYTES or len(old) >= PRUNE_ROWS:
            break
        old.append(seq)
        going_bytes += int(connection.execute(sql["log_bytes_of"], (seq,)).fetchone()[0])
    if old:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(sql["expire_log"], [(seq, now_s) for seq in old])
        _delete_logs(connection, sql, old)
        connection.execute("COMMIT")
    return len(old)


def shrink(connection: sqlite3.Connection, _: Queries) -> int:
    """Give some of the file's unused pages back to the disk, but for what its next records need; returns how many."""
    pages, free = _pages(connection)
    going = min(SHRINK_PAGES, free - max(SPARE_PAGES, pages // SPARE_SHARE))
    if going <= 0:
        return 0
    connection.executescript(
        f"PRAGMA incremental_vacuum({going});"
    )  # each step of it frees one page, and this takes all
    return free - _pages(connection)[1]


def _delete_logs(connection: sqlite3.Connection, sql: Queries, seqs: list[int]) -> None:
    size_bytes = sum(int(connection.execute(sql["log_bytes_of"], (seq,)).fetchone()[0]) for seq in seqs)
    connection.executemany(sql["delete_logs"], [(seq,) for seq in seqs])
    connection.execute(sql["count_log_bytes"], (-size_bytes,))


def _old_records(rows: sqlite3.Cursor, older_than_s: float, too_large: bool) -> Iterator[int]:
    """Those that may go, the oldest first; the scan ends at the first that was accepted too late to be old."""
    for seq, state, ended_s, accepted_s, dead in rows:
        if accepted_s >= older_than_s and not too_large:
            return
        if State(state).terminal and (too_large or (ended_s < older_than_s and not dead)):
            yield seq


def _logs(connection: sqlite3.Connection, sql: Queries) -> Iterator[int]:
    """Every invocation that has a log, by order of acceptance; each is found by its key, not by a scan."""
    seq = -1
    while (result := connection.execute(sql["oldest_log"], (seq,)).fetchone()[0]) is not None:
        seq = int(result)
        yield seq


def _size_bytes(connection: sqlite3.Connection) -> int:
    """Bytes of the database that are in use."""
    pages, free = _pages(connection)
    return (pages - free) * int(connection.execute("PRAGMA page_size").fetchone()[0])


def _pages(connection: sqlite3.Connection) -> tuple[int, int]:
    """Pages of the file, and how many of them are unused."""
    pages, free = (int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count"))
    return pages, free


DATABASE = "tangram.sqlite"
#: Seconds between two looks at whether the directory is still there.
LOOK_S = 15.0
#: Seconds that a lock of the record is waited for: longer than our own writing takes.
LOCK_S = 2.0
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
        #: Why nothing can be written there though it is there; None while it can.
        self.locked: str | None = None
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
            if not self.is_gone():
                await asyncio.to_thread(self.see_lock)

    def see_lock(self) -> None:
        """Look whether another process keeps the record locked. Blocks for `LOCK_S` at most."""
        try:
            name = f"{self.database.absolute().as_uri()}?mode=rw"
            with closing(sqlite3.connect(name, timeout=LOCK_S, isolation_level=None, uri=True)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
            self.locked = None
        except sqlite3.OperationalError as error:
            self.locked = f"the record cannot be written, as another process has {self.database} open: {error}"

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

    async def check(self) -> None:
        """Check the database after an unclean end, beside everything else and within `CHECK_S`."""
        if not self.unclean:
            return
        self.checked = "checking"
        self.checked = await asyncio.to_thread(quick_check, self.database, CHECK_S)
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
        result = path.stat()
    except OSError:
        return None
    return result.st_dev, result.st_ino


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
    result = quick_check(copy, CHECK_S)
    if result != "ok":
        raise StorageUnavailable(f"{copy} is no sound record: {result}", component="restore")
    with closing(sqlite3.connect(f"file:{copy}?mode=ro", uri=True)) as connection:
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if not 1 <= version <= max(schema()):
        message = f"{copy} is of schema version {version}, this gateway reads 1 to {max(schema())}"
        raise StorageUnavailable(message, component="restore")


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
