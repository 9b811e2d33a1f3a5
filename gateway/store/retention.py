"""Retention: old records and logs are deleted in the background, a bounded amount at a time."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import islice

import structlog

from gateway.config.sections import RetentionSection
from gateway.store.store import Store
from manager.action import State
from manager.errors import StorageUnavailable

#: Most that one deletion takes while the writer, and whoever waits to be accepted, waits for it (some milliseconds):
#: records, or bytes of log text.
PRUNE_ROWS = 200
PRUNE_LOG_BYTES = 4 * 2**20
#: Pages that one step gives back to the disk, and how many stay for new records: a tenth, or 4 MiB.
SHRINK_PAGES = 500
SPARE_SHARE, SPARE_PAGES = 10, 1024
#: Seconds between two deletions of one round, so that they never keep the writer busy.
PAUSE_S = 0.05

Queries = Mapping[str, str]


async def prune_for_ever(store: Store, spec: RetentionSection, wall: Callable[[], float] = time.time) -> None:
    """Delete what is too old or too much, every ``interval_s``, until cancelled."""
    log = structlog.get_logger("gateway.retention")
    while True:
        try:
            deleted = await prune(store, spec, wall)
        except StorageUnavailable as error:
            log.warning("old records stay", reason=error.message)
        else:
            if any(deleted.values()):
                log.info("old records deleted", **deleted)
        await asyncio.sleep(spec.interval_s)


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
    found = connection.execute(sql["log_bytes"]).fetchone()
    left_bytes = 0 if found is None else int(found[0])
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
    while (found := connection.execute(sql["oldest_log"], (seq,)).fetchone()[0]) is not None:
        seq = int(found)
        yield seq


def _size_bytes(connection: sqlite3.Connection) -> int:
    """Bytes of the database that are in use."""
    pages, free = _pages(connection)
    return (pages - free) * int(connection.execute("PRAGMA page_size").fetchone()[0])


def _pages(connection: sqlite3.Connection) -> tuple[int, int]:
    """Pages of the file, and how many of them are unused."""
    pages, free = (int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count"))
    return pages, free
