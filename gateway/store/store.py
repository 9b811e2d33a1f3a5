"""The store: every record of the gateway in SQLite, written by one thread with group commit, read beside it.

A change is first noted in memory (`Store.save`) and written with everything else that changed meanwhile. Whoever
must know that it is durable awaits `Store.commit`, which starts a write at once; nobody else causes one sooner
than ``lazy_s``, so a short synchronous invocation costs one row, written once. While a write is in flight the
next batch gathers: the window is the disk's own time, never a timer's.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog

from gateway import wire
from gateway.invocations.record import Record
from gateway.store.checkpoint import Checkpoints
from gateway.store.file import REMEDY, make_ready, mended_by, queries
from gateway.store.listing import Filter, Page, read_page
from gateway.store.rows import record_of, row_of
from manager.errors import NotFound, StorageUnavailable

_T = TypeVar("_T")


class Durability(StrEnum):
    """What a committed record survives."""

    PROCESS = "process"  #: the death of the process
    POWER = "power"  #: also the loss of power: each commit waits for the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """Where the records live, and their bounds."""

    path: Path
    durability: Durability = Durability.PROCESS
    #: Longest time for which a change that nobody waits for stays in memory only.
    lazy_s: float = 0.05
    #: And how long log records that somebody follows wait to be written with others.
    soon_s: float = 0.005
    #: Bytes of log text that may wait for the disk; beyond them log records are dropped, and say so.
    log_backlog_bytes: int = 32 * 2**20
    #: Seconds between two tries to write after the disk refused.
    retry_s: float = 1.0
    #: Seconds in which commits gather in the write-ahead log before they are copied into the file.
    checkpoint_s: float = 1.0
    #: Reads at once.
    readers: int = 4


@dataclass(frozen=True, slots=True)
class OpenTrajectory:
    """What the next gateway must know of a trajectory that has an environment."""

    task: str
    memory_bytes: int
    ttl_s: float
    sandbox: str = ""  #: what it has chosen, as JSON; empty if that is its function's own
    node: str = ""  #: empty on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """One log record of one invocation; ``position`` counts from 0 without holes."""

    seq: int
    position: int
    time_s: float
    stream: str
    data: str


class Written(NamedTuple):
    """What a log holds of one stream."""

    stream: str
    records: int
    #: The position after the last one.
    end: int
    text_bytes: int
    #: Bytes of the records since the instant that was asked for.
    recent_bytes: int


@dataclass(slots=True)
class _Batch:
    """What one transaction writes, and who waits for it."""

    records: dict[int, Record] = field(default_factory=dict)
    inputs: dict[int, bytes] = field(default_factory=dict)
    keys: dict[str, tuple[str, bytes, int, float]] = field(default_factory=dict)
    logs: list[LogRow] = field(default_factory=list)
    documents: dict[str, str | None] = field(default_factory=dict)
    trajectories: dict[str, OpenTrajectory | None] = field(default_factory=dict)
    notes: list[tuple[str, tuple[object, ...]]] = field(default_factory=list)
    waiters: list[asyncio.Future[None]] = field(default_factory=list)

    def __bool__(self) -> bool:
        noted = self.records or self.keys or self.logs or self.documents or self.trajectories or self.notes
        return bool(noted or self.waiters)

    def under(self, newer: _Batch) -> _Batch:
        """Both in one, for another try: what ``newer`` holds wins."""
        return _Batch(
            self.records | newer.records,
            self.inputs | newer.inputs,
            self.keys | newer.keys,
            self.logs + newer.logs,
            self.documents | newer.documents,
            self.trajectories | newer.trajectories,
            self.notes + newer.notes,
            newer.waiters,
        )


class Store:
    """Records, inputs, idempotency keys, logs and small documents. Use from one event loop.

    Raises StorageUnavailable, with the reason, whenever the disk refuses.
    """

    def __init__(
        self, spec: StoreSpec, *, wall: Callable[[], float] = time.time, lost: Callable[[], str | None] = lambda: None
    ) -> None:
        """``lost`` says why what is written is not kept, if it is not: nothing new is accepted then."""
        self._spec = spec
        self.lost = lost
        self._wall = wall
        self._queries = queries()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-writer")
        self._readers = ThreadPoolExecutor(spec.readers, thread_name_prefix="store-reader")
        self._checkpoints = Checkpoints(spec.path, spec.checkpoint_s, self._between)
        self._local = threading.local()
        self._connection: sqlite3.Connection | None = None
        self._read_connections: list[sqlite3.Connection] = []
        self._batch = _Batch()
        self._log_bytes = 0
        self._soon = False  # whether somebody follows a log of which the batch holds records
        self._writing: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._seq = 0
        self._log = structlog.get_logger("gateway.store")
        #: Why the last write failed; None while the disk takes what it is given.
        self.failure: str | None = None
        #: Transactions and records written since the start (metrics).
        self.commits = 0
        self.rows_written = 0
        self.log_records_dropped = 0
        #: Told which log records have just become durable, before anybody who waits for that.
        self.on_logs: Callable[[Sequence[LogRow]], None] | None = None

    async def open(self) -> None:
        """Open or make the database, and bring it up to date; raises StorageUnavailable when it is corrupt or newer."""
        loop = asyncio.get_running_loop()
        try:
            self._spec.path.parent.mkdir(parents=True, exist_ok=True)
            self._seq = await loop.run_in_executor(self._writer, self._open)
        except (sqlite3.OperationalError, OSError) as error:
            raise StorageUnavailable(f"{self._spec.path}: {error}", component="store") from None
        except sqlite3.DatabaseError as error:
            told = f"{self._spec.path}: {error}; restore a copy of it, or {REMEDY}"
            raise StorageUnavailable(told, component="store") from None

    async def close(self) -> None:
        """Write what is noted, and close; idempotent."""
        if self._connection is None:
            return
        try:
            await self.commit()
        except StorageUnavailable as error:
            self._log.error("records lost at close", reason=error.message)
        self._stop_timer()
        await self._checkpoints.close()
        await asyncio.get_running_loop().run_in_executor(self._writer, self._close)
        self._readers.shutdown(wait=True)
        self._writer.shutdown(wait=True)
        for connection in self._read_connections:
            connection.close()

    # Writing

    def next_seq(self) -> int:
        """The place of the next invocation in the order of acceptance."""
        self._seq += 1
        return self._seq

    def check(self) -> None:
        """Raise StorageUnavailable while the disk refuses: nothing new is accepted then."""
        refused = self.lost() or self.failure
        if refused is not None:
            raise StorageUnavailable(refused, component="store", retry_after_s=self._spec.retry_s * 2)

    def create(self, record: Record) -> None:
        """Note a new record with its input."""
        if record.input is not None:
            self._batch.inputs[record.seq] = record.input
        self.save(record)

    def save(self, record: Record) -> None:
        """Note that the record changed; it is written as it stands when the next transaction begins."""
        self._batch.records[record.seq] = record
        self._arm()

    def save_key(self, key: str, digest: bytes, seq: int, expires_s: float) -> None:
        """Note an idempotency key with the digest of its body."""
        self._batch.keys[key] = (key, digest, seq, expires_s)
        self._arm()

    def drop_key(self, key: str, seq: int) -> None:
        """Let nobody latch on to this key any more."""
        self.save_key(key, b"", seq, 0.0)

    def save_trajectory(self, name: str, opened: OpenTrajectory | None) -> None:
        """Note that a trajectory has an environment; None: that it has none any more."""
        self._batch.trajectories[name] = opened
        self._arm()

    def note(self, statement: str, *values: object) -> None:
        """Note a named statement, to be run after what was saved before; it must be safe to run again."""
        self._batch.notes.append((statement, values))
        self._arm()

    def save_log(self, row: LogRow, *, soon: bool = False) -> bool:
        """Note a log record, ``soon`` if somebody waits for it; False if it is dropped: too much waits for the disk."""
        if self._log_bytes >= self._spec.log_backlog_bytes:
            self.log_records_dropped += 1
            return False
        self._log_bytes += len(row.data)
        self._batch.logs.append(row)
        self._soon = self._soon or soon
        self._arm()
        return True

    def save_document(self, name: str, body: str | None) -> None:
        """Note a small document (learned history); None: it goes."""
        self._batch.documents[name] = body
        self._arm()

    async def durable(self) -> None:
        """Return when all that was noted before is durable, however long the disk refuses."""
        while True:
            try:
                return await self.commit()
            except StorageUnavailable:
                await asyncio.sleep(self._spec.retry_s)

    async def commit(self) -> None:
        """Return when all that was noted before is durable; raises StorageUnavailable."""
        await self.committed()

    def committed(self) -> asyncio.Future[None]:
        """A future that is done when all that was noted before is durable, or raises StorageUnavailable."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._batch.waiters.append(waiter)
        self._write_next()
        return waiter

    def _arm(self) -> None:
        if self._writing is not None:
            return
        loop, within_s = asyncio.get_running_loop(), self._spec.soon_s if self._soon else self._spec.lazy_s
        sooner = self._timer is not None and self.failure is None and loop.time() + within_s < self._timer.when()
        if self._timer is None or sooner:
            self._stop_timer()
            self._timer = loop.call_later(within_s, self._write_next)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _write_next(self) -> None:
        """Hand the gathered batch to the writer, unless it is busy: then its end does."""
        self._stop_timer()
        if self._writing is not None or not self._batch or self._connection is None:
            return
        batch, self._batch = self._batch, _Batch()
        self._log_bytes, self._soon = 0, False
        rows = [row_of(record) for record in batch.records.values()]
        loop = asyncio.get_running_loop()
        self._writing = loop.run_in_executor(self._writer, self._write, self._connection, batch, rows)
        self._writing.add_done_callback(lambda done: self._written(batch, done))

    def _written(self, batch: _Batch, done: asyncio.Future[None]) -> None:
        self._writing = None
        error = done.exception()
        if error is None:
            self._succeeded(batch)
        else:
            self._refused(batch, error)
        if self._batch.waiters:
            self._write_next()
        elif self._batch and self.failure is None:
            self._arm()

    def _succeeded(self, batch: _Batch) -> None:
        if self.failure is not None:
            self._log.warning("the disk takes records again", after=self.failure)
        self.failure = None
        self._checkpoints.committed()
        self.commits += 1
        self.rows_written += len(batch.records)
        if batch.logs and self.on_logs is not None:
            self.on_logs(batch.logs)
        for waiter in batch.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _refused(self, batch: _Batch, error: BaseException) -> None:
        """Tell the waiters, keep the rest for another try (a refused acceptance is forgotten by its waiter)."""
        if self.failure is None:
            self._log.error("the disk refuses records", reason=str(error))
        self.failure = f"the record cannot be written: {error}{mended_by(error, self._spec.path)}"
        self._batch = batch.under(self._batch)
        self._batch.documents["probe"] = wire.instant(self._wall()).isoformat()
        self._log_bytes = sum(len(row.data) for row in self._batch.logs)
        for waiter in batch.waiters:
            if not waiter.done():
                waiter.set_exception(StorageUnavailable(self.failure, component="store", retry_after_s=1.0))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._spec.retry_s, self._write_next)

    def _write(self, connection: sqlite3.Connection, batch: _Batch, rows: Sequence[list[object]]) -> None:
        """One transaction; runs in the writer thread."""
        sql = self._queries
        try:
            connection.execute("BEGIN IMMEDIATE")
            tables: dict[str, Collection[Sequence[object]]] = {
                "save_invocation": rows,
                "save_input": batch.inputs.items(),
                "save_key": batch.keys.values(),
                "save_log": [(log.seq, log.position, log.time_s, log.stream, log.data) for log in batch.logs],
                "save_document": [each for each in batch.documents.items() if each[1] is not None],
                "remove_document": [each[:1] for each in batch.documents.items() if each[1] is None],
            }
            for statement, values in tables.items():
                if values:  # each statement takes a turn with the event loop's thread
                    connection.executemany(sql[statement], values)
            if batch.logs:
                connection.execute(sql["count_log_bytes"], (sum(len(log.data.encode()) for log in batch.logs),))
            for name, opened in batch.trajectories.items():
                if opened is None:
                    connection.execute(sql["delete_trajectory"], (name,))
                else:
                    connection.execute(sql["save_trajectory"], (name, *astuple(opened)))
            for statement, given in batch.notes:
                connection.execute(sql[statement], given)
            connection.execute("COMMIT")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    # Reading

    async def get(self, seq: int) -> Record | None:
        """The record of this place in the order, with its input; None where there is none."""
        rows = await self.read("get", (seq,))
        pending = self._batch.records.get(seq)  # what a disk that refuses has not taken yet
        if pending is not None:
            return pending
        return record_of(rows[0]) if rows else None

    async def find(self, chosen: Filter) -> Page:
        """The newest records that pass the filter, without their inputs and results."""
        return await self._reading(partial(read_page, chosen=chosen))

    async def unfinished(self) -> list[Record]:
        """Queued and running records in order of acceptance: what a restart has to decide on."""
        return [record_of(row) for row in await self.read("unfinished", ())]

    async def trajectories(self) -> dict[str, OpenTrajectory]:
        """The trajectories that have an environment, by name."""
        rows = await self.read("trajectories", ())
        return {row["name"]: OpenTrajectory(*tuple(row)[1:]) for row in rows}

    async def key(self, key: str) -> tuple[bytes, int] | None:
        """Digest and place of a living idempotency key."""
        return next(((row["digest"], row["seq"]) for row in await self.read("key", (key, self._wall()))), None)

    async def logs(self, seq: int, position: int, limit: int) -> list[LogRow]:
        """Log records from ``position`` on."""
        rows = await self.read("logs", (seq, position, limit))
        return [LogRow(seq=seq, **dict(row)) for row in rows]

    async def logs_written(self, seq: int, since_s: float) -> list[Written]:
        """What the log holds of each stream."""
        return [Written(*row) for row in await self.read("logs_written", (since_s, seq))]

    async def document(self, name: str) -> str | None:
        rows = await self.read("document", (name,))
        return str(rows[0]["body"]) if rows else None

    async def counts(self) -> Mapping[str, int]:
        """Records by state, from the database itself."""
        return {row[0]: row[1] for row in await self.read("counts", ())}

    async def read(self, query: str, values: tuple[object, ...]) -> Sequence[sqlite3.Row]:
        """The rows of a named query, which sees everything that was noted before."""
        sql = self._queries[query]
        return await self._reading(lambda connection: connection.execute(sql, values).fetchall())

    async def _reading(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """What ``work`` makes of a connection of its thread, when all that was noted before is written."""
        if self.failure is None and (self._batch or self._writing is not None):
            with suppress(StorageUnavailable):  # a disk that refuses: what is on it can be read all the same
                await self.commit()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._readers, self._read, work)
        except sqlite3.Error as error:
            raise StorageUnavailable(f"the record cannot be read: {error}", component="store") from None

    def _read(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = sqlite3.connect(self._spec.path, isolation_level=None, check_same_thread=False)
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA query_only = 1")
            self._local.connection = connection
            self._read_connections.append(connection)
        return work(connection)

    async def alter(self, work: Callable[[sqlite3.Connection, Mapping[str, str]], int]) -> int:
        """Run ``work(connection, queries)`` in the writer's thread, between two transactions (retention)."""
        connection = self._connection
        if connection is None:
            return 0
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._writer, self._alter, connection, work)
        except sqlite3.Error as error:
            raise StorageUnavailable(f"the record cannot be changed: {error}", component="store") from None

    def _between(self, work: Callable[[sqlite3.Connection], object]) -> None:
        """Run ``work`` in the writer's thread, between two transactions; nobody waits for it."""
        if self._connection is not None:
            self._writer.submit(work, self._connection)

    def _alter(
        self, connection: sqlite3.Connection, work: Callable[[sqlite3.Connection, Mapping[str, str]], int]
    ) -> int:
        try:
            return work(connection, self._queries)
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    # The connection, in the writer's thread

    def _open(self) -> int:
        """Returns the last place in the order of acceptance."""
        self._spec.path.touch(mode=0o600)
        self._spec.path.chmod(0o600)  # SQLite gives its other files the same
        connection = sqlite3.connect(self._spec.path, isolation_level=None, check_same_thread=False)
        try:
            level = "FULL" if self._spec.durability is Durability.POWER else "NORMAL"
            make_ready(connection, self._spec.path, synchronous=level)
            last = connection.execute(self._queries["last_seq"]).fetchone()
        except (sqlite3.Error, StorageUnavailable):
            connection.close()
            raise
        self._connection = connection
        return int(last[0])

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def require(record: Record | None, invocation_id: str) -> Record:
    """The record if the id is truly its own; raises NotFound."""
    if record is None or record.id != invocation_id:
        raise NotFound(f"no invocation {invocation_id!r}")
    return record
