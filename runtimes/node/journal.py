"""What outlives a daemon, in one SQLite file: the attempts that began on its node, how they ended, and their logs.

An attempt is written down before it begins and when it has ended, until the gateway has that end on record: no daemon
of this state directory begins it again, and the next one reports its end if this one is killed. What a kill leaves is
in the kernel's hands, so nothing is synced. A file that a crash of the machine has damaged is begun anew, as another
life of the state directory. The file belongs to one process: SQLite then takes no lock for each write.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from runtimes.node.protocol import RECORD, STREAM_CODES, AttemptEnd, ExecuteAttempt, records

NAME = "journal"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SCHEMA = """
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
PRAGMA journal_size_limit = 4194304;
CREATE TABLE IF NOT EXISTS life (born TEXT NOT NULL, boot TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS attempts (claim TEXT PRIMARY KEY, attempt BLOB, lasting INT, ended BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS logs (claim TEXT, place INT, records BLOB, PRIMARY KEY (claim, place)) WITHOUT ROWID;
"""
#: Seconds for which a file that another process has is waited for: that of a daemon which is ending.
BUSY_S = 5.0
#: Free pages that are given back at once.
VACUUM_PAGES = 256
#: Streams that a command which is taken over repeats from its start.
REPEATED = ("stdout", "stderr")
#: Bytes of one record's text; longer writes become several.
TEXT_BYTES = 256 * 2**10
#: Bytes of records that wait in memory before they are written.
PENDING_BYTES = 64 * 2**10


class JournalEntry(NamedTuple):
    """One attempt that has begun."""

    execute: ExecuteAttempt
    lasting: bool
    end: AttemptEnd | None


class AttemptJournal:
    """The journal of a state directory, for one thread. Its methods raise OSError where the disk refuses."""

    def __init__(self, directory: Path, boot_id: Path = BOOT_ID) -> None:
        self._path = directory / NAME
        boot = boot_id.read_text(encoding="ascii").strip()
        try:
            self._database, self.epoch, self.entries = self._opened(boot)
        except sqlite3.OperationalError as error:  # a full disk, or a file that another process has
            raise OSError(f"{self._path}: {error}") from error
        except (sqlite3.DatabaseError, msgspec.MsgspecError):
            for file in directory.glob(f"{NAME}*"):
                file.unlink()
            with self._as_disk_error():
                self._database, self.epoch, self.entries = self._opened(boot)

    def _opened(self, boot: str) -> tuple[sqlite3.Connection, str, list[JournalEntry]]:
        """Return the connection, the life of the directory on this boot, and the attempts that daemons before left."""
        database = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        try:
            database.executescript(SCHEMA)
            row = database.execute("SELECT born, boot FROM life").fetchone() or (secrets.token_hex(8), "")
            if row[1] != boot:
                if row[1] and database.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                    raise sqlite3.DatabaseError("damaged by a crash of the machine")
                database.execute("DELETE FROM life")
                database.execute("INSERT INTO life VALUES (?, ?)", (row[0], boot))
            rows = database.execute("SELECT attempt, lasting, ended FROM attempts")
            entries = [
                JournalEntry(
                    msgspec.msgpack.decode(attempt, type=ExecuteAttempt),
                    bool(lasting),
                    None if ended is None else msgspec.msgpack.decode(ended, type=AttemptEnd),
                )
                for attempt, lasting, ended in rows
            ]
            database.execute("DELETE FROM logs WHERE claim NOT IN (SELECT claim FROM attempts)")
        except BaseException:
            database.close()
            raise
        return database, f"{boot}/{row[0]}", entries

    def begin(self, execute: ExecuteAttempt, *, lasting: bool) -> None:
        """Write down that an attempt is about to begin: whatever happens, it does not begin again."""
        row = (execute.claim, msgspec.msgpack.encode(execute), lasting)
        self._write("INSERT OR REPLACE INTO attempts (claim, attempt, lasting) VALUES (?, ?, ?)", [row])

    def set_lasting(self, claim: str, lasting: bool) -> None:
        """Write down whether it outlives its caller."""
        self._write("UPDATE attempts SET lasting = ? WHERE claim = ?", [(lasting, claim)])

    def end(self, ends: Iterable[AttemptEnd]) -> None:
        """Write down how attempts have ended."""
        rows = [(msgspec.msgpack.encode(end), end.claim) for end in ends]
        self._write("UPDATE attempts SET ended = ? WHERE claim = ?", rows)

    def forget(self, claims: Iterable[str]) -> None:
        """Remove attempts and their logs: their ends are on record elsewhere."""
        rows = [(claim,) for claim in claims]
        self._write("DELETE FROM attempts WHERE claim = ?", rows)
        self._write("DELETE FROM logs WHERE claim = ?", rows)
        with self._as_disk_error():
            self._database.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()

    def append_log(self, claim: str, place: int, data: bytes) -> None:
        """Write whole records of a log, which begin at a place of it."""
        self._write("INSERT INTO logs VALUES (?, ?, ?)", [(claim, place, data)])

    def read_log(self, claim: str, place: int) -> bytes:
        """Return whole records of a log from a place on; empty if there are none."""
        query = "SELECT place, records FROM logs WHERE claim = ? AND place <= ? ORDER BY place DESC LIMIT 1"
        with self._as_disk_error():
            row = self._database.execute(query, (claim, place)).fetchone()
        return b"" if row is None else row[1][place - row[0] :]

    def close(self) -> None:
        """Close the file; idempotent. Whoever writes to it afterwards meets an OSError."""
        self._database.close()

    def _write(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        """Execute a statement for each row, all in one transaction."""
        with self._as_disk_error():
            if len(rows) == 1:
                self._database.execute(statement, rows[0])
            else:
                with self._database:
                    self._database.execute("BEGIN")
                    self._database.executemany(statement, rows)

    @contextmanager
    def _as_disk_error(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise OSError(f"{self._path}: {error}") from error


class LogSpool:
    """One attempt's log: a `manager.executor.LogSink` that may be written from any thread.

    It is a sequence of records (stream, text) that only grows. A place in it is a byte offset, the same for both sides,
    so that a piece that was lost is asked for again and none is taken twice. When the daemon was killed, an adopted
    command repeats all from its start: what the journal holds of each stream is then passed over.
    """

    def __init__(
        self,
        journal: AttemptJournal,
        claim: str,
        limit_bytes: int,
        on_more: Callable[[], None],
        *,
        resumed: bool = False,
    ) -> None:
        """``on_more`` is called on the loop when there is something new; ``resumed``: a daemon before has begun it."""
        self._journal, self._claim = journal, claim
        self._limit_bytes = limit_bytes
        self._on_more = on_more
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        #: Where it ends, and the records before that which are not in the journal yet.
        self.end = 0
        self._pending = bytearray()
        self._text_bytes = 0
        #: Bytes of each stream that are here and come once more.
        self._known_bytes = dict.fromkeys(REPEATED, 0)
        #: Bytes that came and are not kept.
        self.omitted_bytes = 0
        #: Whether what comes is left to the next daemon.
        self.paused = False
        while resumed and (held := journal.read_log(claim, self.end)):
            self.end += len(held)
            for stream, text in records(held):
                size_bytes = len(text.encode("utf-8", "surrogatepass"))
                self._text_bytes += size_bytes
                if stream in REPEATED:
                    self._known_bytes[stream] += size_bytes

    def write(self, stream: str, data: str) -> None:
        """Append text; what is beyond the bound is counted and dropped."""
        if threading.get_ident() == self._thread:
            self._write(stream, data)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._write, stream, data)

    def omit(self, size_bytes: int) -> None:
        """Count bytes that came and are not kept."""
        self.omitted_bytes += size_bytes

    def _write(self, stream: str, data: str) -> None:
        if self.paused:
            return
        text = data.encode("utf-8", "surrogatepass")
        known_bytes = min(len(text), self._known_bytes.get(stream, 0))
        if known_bytes:
            self._known_bytes[stream] -= known_bytes
            text = text[known_bytes:]
        room_bytes = max(0, self._limit_bytes - self._text_bytes)
        if len(text) > room_bytes:
            kept = text[:room_bytes].decode("utf-8", "ignore").encode() if room_bytes else b""
            self.omit(len(text) - len(kept))
            text = kept
        if not text:
            return
        self._text_bytes += len(text)
        code = STREAM_CODES.get(stream, STREAM_CODES["log"])
        for piece in _pieces(text):
            self._pending += RECORD.pack(code, len(piece)) + piece
            self.end += RECORD.size + len(piece)
        if len(self._pending) > PENDING_BYTES:
            with suppress(OSError):  # a full disk: it stays in memory, within the log's own bound
                self.flush()
        self._on_more()

    def flush(self) -> None:
        """Write what is not in the journal yet; raises OSError."""
        if self._pending:
            self._journal.append_log(self._claim, self.end - len(self._pending), bytes(self._pending))
            self._pending.clear()

    def read(self, place: int, most_bytes: int) -> bytes:
        """Return whole records from a place on, at least one if there is any; empty at the end. Raises OSError.

        What is returned is in the journal: the next daemon must mean the same by the place behind it.
        """
        self.flush()
        held, end = self._journal.read_log(self._claim, place), 0
        while end < most_bytes and end < len(held):
            end += RECORD.size + RECORD.unpack_from(held, end)[1]
        return held[:end]


def _pieces(text: bytes) -> Iterator[bytes]:
    """Yield a long text in pieces that end between two characters."""
    place = 0
    while place < len(text):
        end = min(len(text), place + TEXT_BYTES)
        while end < len(text) and text[end] & 0xC0 == 0x80:
            end -= 1
        yield text[place:end]
        place = end
