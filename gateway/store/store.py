"""The durable record: SQLite with group commit."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import MISSING, astuple, dataclass, field, fields
from enum import StrEnum
from functools import partial
from importlib import resources
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import structlog

from gateway import serialization
from gateway.invocations.record import Record
from manager.action import State
from manager.errors import NotFound, Reason, StorageUnavailable
from runtimes.sandbox.disk import REMEDY as ROOM
from tangram.types import LIST_LIMIT_MAX

# The row of an invocation, derived from the fields of its record: columns, statements, and values both ways.
#
# A field without a default is known at acceptance and never changes after it. Mappings and tuples are kept as JSON. The
# input has a table of its own, so that a change of state rewrites a short row.

#: SQLite's type of each Python type.
SQL_TYPES: Mapping[type, str] = {bool: "INTEGER", int: "INTEGER", float: "REAL", str: "TEXT", bytes: "BLOB"}


@dataclass(frozen=True, slots=True)
class Column:
    """One column: where it lies in the row, and how its value is read."""

    name: str
    sql_type: str
    nullable: bool
    #: Whether it is written once.
    fixed: bool
    #: Whether it holds JSON.
    json: bool
    #: The field's value of the column's; None if they are the same. Any: rows have no types.
    read: Callable[[Any], object] | None


def _column(name: str, hint: Any, *, fixed: bool) -> Column:
    """Return the column of one field. Any: a type hint."""
    arms = get_args(hint) if NoneType in get_args(hint) else (hint,)
    kind = next(arm for arm in arms if arm is not NoneType)
    if get_origin(kind) is Literal:
        kind = str
    json = not isinstance(kind, type)
    read: Callable[[Any], object] | None = None
    if json:
        read = msgspec.json.Decoder(hint).decode
    elif kind is bool or issubclass(kind, StrEnum):
        read = partial(msgspec.convert, type=hint, strict=False)
    sql_type = "TEXT" if json else next(SQL_TYPES[base] for base in kind.__mro__ if base in SQL_TYPES)
    return Column(name, sql_type, len(arms) > 1, fixed, json, read)


_HINTS = get_type_hints(Record)
#: In the order of the fields.
COLUMNS = tuple(
    _column(each.name, _HINTS[each.name], fixed=each.default is MISSING and each.default_factory is MISSING)
    for each in fields(Record)
    if each.name != "input"
)
_NAMES = ", ".join(column.name for column in COLUMNS)
_values = attrgetter(*(column.name for column in COLUMNS))
_JSON = tuple(index for index, column in enumerate(COLUMNS) if column.json)

#: What a query of ``invocations i`` selects for `record_of`, beside the input.
SELECTED = ", ".join(f"i.{column.name}" for column in COLUMNS)
#: The same for a listing, which leaves out what may be large.
LISTED = ", ".join("NULL" if column.name == "result" else f"i.{column.name}" for column in COLUMNS) + ", NULL AS input"
SAVE = (
    f"INSERT INTO invocations ({_NAMES}) VALUES ({', '.join('?' * len(COLUMNS))}) ON CONFLICT (seq) DO UPDATE SET "
    + ", ".join(f"{column.name} = excluded.{column.name}" for column in COLUMNS if not column.fixed)
)


def row_of(record: Record) -> list[object]:
    """Return the values of `SAVE`."""
    row: list[object] = list(_values(record))
    for index in _JSON:
        value = row[index]
        row[index] = "{}" if value == {} else "[]" if value == () else serialization.encode(value).decode()
    return row


def record_of(row: sqlite3.Row) -> Record:
    """Return the record of a row of `SELECTED` and ``input``. Any: rows have no types."""
    values: dict[str, Any] = {
        column.name: value if column.read is None else column.read(value)
        for column, value in zip(COLUMNS, row, strict=False)
    }
    return Record(**values, input=row["input"])


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
    connection.execute("PRAGMA wal_autocheckpoint = 0")  # `gateway.store.store` does, outside of any commit
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


# Listings: the newest (or oldest) records that pass a filter, a page at a time, each page in bounded time.
#
# The time of acceptance grows with the place in the order of acceptance, so a bound on it is found by halving and costs
# no index. Where the machine's clock was set back, records of the time that it went through twice may be left out.
#
# One of the filter's conditions leads, by its index; the others are looked at in the rows that it leads to. Where they
# hold for few of them, a page ends after so many rows: it may be short, even empty, and there are more behind it.

#: Rows that one page looks at, at most, where more than one condition was given (some milliseconds).
LOOKED_AT = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which invocations a listing shows: newest first, those before ``before`` in order of acceptance.

    With ``oldest`` the other way round: oldest first, those behind ``before``.
    """

    function: str | None = None
    task: str | None = None
    trajectory: str | None = None
    parent: str | None = None
    state: State | None = None
    reason: Reason | None = None
    dead: bool | None = None
    #: Wall-clock seconds of the acceptance: from, and before.
    since_s: float | None = None
    until_s: float | None = None
    oldest: bool = False
    before: int | None = None
    limit: int = 100


class Page(NamedTuple):
    """Records without input and result, and where the next page begins; None after the last."""

    records: list[Record]
    before: int | None


class _Condition(NamedTuple):
    """One condition, its value if it has one, and the index that leads to what passes it."""

    sql: str
    value: object
    by: str


def read_page(connection: sqlite3.Connection, chosen: Filter) -> Page:
    """Return a page; runs in a reader's thread."""
    limit = min(chosen.limit, LIST_LIMIT_MAX)
    conditions = _conditions(chosen)
    leading = next((each for each in conditions if each.by), None)
    others = [each for each in conditions if each is not leading]
    lead, way = ("", "NOT INDEXED") if leading is None else (f"{leading.sql} AND ", f"INDEXED BY {leading.by}")
    led = [] if leading is None or "?" not in leading.sql else [leading.value]
    low, high = _span(connection, chosen)
    direction = "ASC" if chosen.oldest else "DESC"
    seen = None
    if others:
        sql = (
            f"SELECT seq FROM invocations {way} WHERE {lead}seq >= ? AND seq < ? "
            f"ORDER BY seq {direction} LIMIT 1 OFFSET {LOOKED_AT}"
        )
        row = connection.execute(sql, (*led, low, high)).fetchone()
        if row is not None and chosen.oldest:
            seen = int(row[0]) - 1
            high = seen + 1
        elif row is not None:
            low = seen = int(row[0]) + 1
    rest = "".join(f" AND {each.sql}" for each in others)
    values = [each.value for each in others if "?" in each.sql]
    sql = (
        f"SELECT {LISTED} FROM invocations i {way} "
        f"WHERE {lead}seq >= ? AND seq < ?{rest} ORDER BY seq {direction} LIMIT {limit + 1}"
    )
    records = [record_of(row) for row in connection.execute(sql, (*led, low, high, *values))]
    if len(records) > limit:
        return Page(records[:limit], records[limit - 1].seq)
    return Page(records, seen)


def _conditions(chosen: Filter) -> list[_Condition]:
    """Return what was asked: the condition that few pass comes first, one without an index last."""
    wanted = [
        _Condition("trajectory = ?", chosen.trajectory, "invocations_trajectory"),
        _Condition("parent = ?", chosen.parent, "invocations_parent"),
        _Condition("dead = 1", chosen.dead or None, "invocations_dead"),
        _Condition("reason = ?", None if chosen.reason is None else chosen.reason.value, "invocations_reason"),
        _Condition("state = ?", None if chosen.state is None else chosen.state.value, "invocations_state"),
        _Condition("function = ?", chosen.function, "invocations_function"),
        _Condition("task = ?", chosen.task, "invocations_task"),
        _Condition("dead = 0", True if chosen.dead is False else None, ""),
        _Condition("accepted_s >= ?", chosen.since_s, ""),
        _Condition("accepted_s < ?", chosen.until_s, ""),
    ]
    return [each for each in wanted if each.value is not None]


def _span(connection: sqlite3.Connection, chosen: Filter) -> tuple[int, int]:
    """Return the first place that may be shown, and that behind the last."""
    low, high = (0, 2**63 - 1) if chosen.before is None else (0, chosen.before)
    if chosen.oldest and chosen.before is not None:
        low, high = chosen.before + 1, 2**63 - 1
    if chosen.since_s is not None:
        low = max(low, _place_at(connection, chosen.since_s))
    if chosen.until_s is not None:
        high = min(high, _place_at(connection, chosen.until_s))
    return low, high


def _place_at(connection: sqlite3.Connection, time_s: float) -> int:
    """Return the first place whose record was accepted at ``time_s`` or later, or that behind the last."""
    # Two questions: for both at once SQLite would look at every record.
    ends = "SELECT (SELECT min(seq) FROM invocations), (SELECT max(seq) FROM invocations)"
    first, last = connection.execute(ends).fetchone()
    if first is None:
        return 0
    low, high = int(first), int(last) + 1
    while low < high:
        middle = (low + high) // 2
        sql = "SELECT seq, accepted_s FROM invocations WHERE seq >= ? ORDER BY seq LIMIT 1"
        seq, accepted_s = connection.execute(sql, (middle,)).fetchone()
        if accepted_s < time_s:
            low = int(seq) + 1
        else:
            high = middle
    return low


# Checkpoints: what was committed goes from the write-ahead log into the file, beside the writer and not in its way.
#
# SQLite would do so within a commit, now and then, and whoever waits for that commit would wait for two more syncs of
# the disk. Here another thread does, once a while for all that was written meanwhile.

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


# The store: every record of the gateway in SQLite, written by one thread with group commit, read beside it.
#
# A change is first noted in memory (`Store.save`) and written with everything else that changed meanwhile. Whoever must
# know that it is durable awaits `Store.commit`, which starts a write at once; nobody else causes one sooner than
# ``lazy_s``, so a short synchronous invocation costs one row, written once. While a write is in flight the next batch
# gathers: the window is the disk's own time, never a timer's.

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
    holds: str = ""  #: which clients hold it, and for how long (s), as JSON; empty for nobody


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


#: The name of a statement, and the rows that it writes.
_Statement = tuple[str, Collection[Sequence[object]]]


class _Unwritable(NamedTuple):
    """A row that cannot be written."""

    statement: str
    key: object
    why: str


def _statements(batch: _Batch, rows: Sequence[list[object]]) -> list[_Statement]:
    """Return what writes a batch, in order."""
    texts = sum(len(log.data.encode(errors="replace")) for log in batch.logs)
    statements: list[_Statement] = [
        ("save_invocation", rows),
        ("save_input", batch.inputs.items()),
        ("save_key", batch.keys.values()),
        ("save_log", [(log.seq, log.position, log.time_s, log.stream, log.data) for log in batch.logs]),
        ("save_document", [each for each in batch.documents.items() if each[1] is not None]),
        ("remove_document", [each[:1] for each in batch.documents.items() if each[1] is None]),
        ("count_log_bytes", [(texts,)] if batch.logs else ()),
        ("delete_trajectory", [(name,) for name, opened in batch.trajectories.items() if opened is None]),
        (
            "save_trajectory",
            [(name, *astuple(opened)) for name, opened in batch.trajectories.items() if opened is not None],
        ),
        *[(statement, (values,)) for statement, values in batch.notes],
    ]
    return [(statement, values) for statement, values in statements if values]


def _is_of_the_disk(error: Exception) -> bool:
    """Return whether the database refuses, and not only one row that cannot be written."""
    of_a_row = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
    return isinstance(error, sqlite3.Error | OSError) and not isinstance(error, of_a_row)


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK")


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
        self._writing: asyncio.Future[list[_Unwritable]] | None = None
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
            message = f"{self._spec.path}: {error}; restore a copy of it, or {REMEDY}"
            raise StorageUnavailable(message, component="store") from None

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
        if self._timer is None:
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
            if self._timer is not None:
                self._timer.cancel()
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
        rows, unwritable = [], []
        for record in batch.records.values():
            try:
                rows.append(row_of(record))
            except Exception as error:  # noqa: BLE001  # whatever is wrong with one record, the others are written
                unwritable.append(_Unwritable("save_invocation", record.seq, repr(error)))
        loop = asyncio.get_running_loop()
        self._writing = loop.run_in_executor(self._writer, self._write, self._connection, batch, rows)
        self._writing.add_done_callback(lambda done: self._written(batch, unwritable, done))

    def _written(self, batch: _Batch, unwritable: list[_Unwritable], done: asyncio.Future[list[_Unwritable]]) -> None:
        self._writing = None
        error = done.exception()
        if error is None:
            self._succeeded(batch, [*unwritable, *done.result()])
        else:
            self._refused(batch, error)
        if self._batch.waiters:
            self._write_next()
        elif self._batch and self.failure is None:
            self._arm()

    def _succeeded(self, batch: _Batch, unwritable: Sequence[_Unwritable]) -> None:
        """Tell the waiters; all of them that not all was written, if a row could not be: it is not tried again."""
        if self.failure is not None:
            self._log.warning("the disk takes records again", after=self.failure)
        self.failure = None
        self._checkpoints.committed()
        self.commits += 1
        self.rows_written += len(batch.records)
        if batch.logs and self.on_logs is not None:
            self.on_logs(batch.logs)
        for row in unwritable:
            self._log.error("a row cannot be written and is left out", **row._asdict())
        for waiter in batch.waiters:
            if waiter.done():
                continue
            if unwritable:
                message = f"not all of it can be written: {unwritable[0].why}"
                waiter.set_exception(StorageUnavailable(message, component="store", retry_after_s=1.0))
            else:
                waiter.set_result(None)

    def _refused(self, batch: _Batch, error: BaseException) -> None:
        """Tell the waiters, keep the rest for another try (a refused acceptance is forgotten by its waiter)."""
        if self.failure is None:
            self._log.error("the disk refuses records", reason=str(error))
        self.failure = f"the record cannot be written: {error}{mended_by(error, self._spec.path)}"
        self._batch = batch.under(self._batch)
        self._batch.documents["probe"] = serialization.instant(self._wall()).isoformat()
        self._log_bytes = sum(len(row.data) for row in self._batch.logs)
        for waiter in batch.waiters:
            if not waiter.done():
                waiter.set_exception(StorageUnavailable(self.failure, component="store", retry_after_s=1.0))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._spec.retry_s, self._write_next)

    def _write(self, connection: sqlite3.Connection, batch: _Batch, rows: Sequence[list[object]]) -> list[_Unwritable]:
        """Write one transaction, and return the rows that cannot be written, which are left out of it.

        Runs in the writer thread.
        """
        statements = _statements(batch, rows)
        try:
            self._transact(connection, lambda: self._execute_all(connection, statements))
            return []
        except Exception as error:
            if _is_of_the_disk(error):
                raise
        unwritable: list[_Unwritable] = []
        self._transact(connection, lambda: unwritable.extend(self._execute_each(connection, statements)))
        return unwritable

    def _transact(self, connection: sqlite3.Connection, work: Callable[[], object]) -> None:
        """Do all of it in one transaction, or nothing, whatever is raised: no later one may begin within it."""
        try:
            connection.execute("BEGIN IMMEDIATE")
            work()
            connection.execute("COMMIT")
        except BaseException:
            _roll_back(connection)
            raise

    def _execute_all(self, connection: sqlite3.Connection, statements: Iterable[_Statement]) -> None:
        """Execute each for all its rows at once, which takes one turn with the event loop's thread."""
        for statement, values in statements:
            connection.executemany(self._queries[statement], values)

    def _execute_each(self, connection: sqlite3.Connection, statements: Iterable[_Statement]) -> Iterator[_Unwritable]:
        """Execute them row by row, and yield those that cannot be written."""
        for statement, values in statements:
            for row in values:
                try:
                    connection.execute(self._queries[statement], row)
                except Exception as error:
                    if _is_of_the_disk(error):
                        raise
                    yield _Unwritable(statement, row[0] if row else None, repr(error))

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
        except BaseException:
            _roll_back(connection)
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
