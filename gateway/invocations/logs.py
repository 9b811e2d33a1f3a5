"""Logs: what an invocation said, kept, bounded, followed while it runs; and how the gateway speaks itself.

A log is a row of records numbered from 0. Writing never waits: a record goes to a short tail in memory and is
noted for the store's next transaction. Nobody is told of a record before it stands on disk, so that no kill can give
its number to another. Followers pull at their own pace, from the tail or from the store, so a slow one costs no memory
and blocks nobody.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, cast

import structlog

from gateway import serialization
from gateway.config.schema import ServerConfig
from gateway.metrics import Metrics
from gateway.store.store import LogRow, Store, Written
from manager.config import share_of
from manager.errors import CapacityExceeded
from tangram.types import LogLine

#: Characters of one record; longer writes become several.
RECORD_CHARS = 16 * 1024
#: What a record costs beside its text when the limit is counted.
RECORD_OVERHEAD_BYTES = 64
PAGE_RECORDS = 256
#: Of a running invocation's log, kept in memory for its followers.
TAIL_BYTES = 64 * 2**10
#: Control characters but tab and line feed: a terminal would obey them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
OUTPUT = ("stdout", "stderr")
STREAMS = (*OUTPUT, "log", "system")
#: The stream of the record that says that a log is full, that some records are missing, that retention removed it.
TRUNCATED, DROPPED, EXPIRED = "truncated", "dropped", "expired"


class InvocationLog:
    """The log of one living invocation: a `manager.executor.LogSink` that may be written from any thread.

    Thousands wait, and have said nothing: what it keeps of what was said is made with the first of it.
    """

    __slots__ = (
        *("_followers", "_known_bytes", "_limit_bytes", "_logs", "_missing", "_omitted_bytes", "_room_bytes", "_seq"),
        *("_tail", "_tail_chars"),
        *("closed", "end", "finished", "truncated", "written"),
    )

    def __init__(self, logs: Logs, seq: int, limit_bytes: int) -> None:
        self._logs = logs
        self._seq = seq
        self._room_bytes = limit_bytes
        self._limit_bytes = limit_bytes
        self._tail: deque[LogRow] | None = None
        self._tail_chars = 0
        self._followers: tuple[asyncio.Event, ...] = ()
        self._missing = 0
        #: Bytes that found no room.
        self._omitted_bytes = 0
        #: Bytes of each stream that will be written once more and are on record already.
        self._known_bytes: dict[str, int] | None = None
        self.end = 0
        #: How many of the records stand on disk.
        self.written = 0
        self.finished = False
        #: Whether what is left of it is to be had of the store.
        self.closed = False
        self.truncated = False

    def write(self, stream: str, data: str) -> None:
        """Append text; what is beyond the bound is dropped, and the log's last record says how much."""
        if threading.get_ident() == self._logs.thread:
            self._write(stream, data)
        elif not self._logs.loop.is_closed():
            self._logs.loop.call_soon_threadsafe(self._write, stream, data)

    def omit(self, size_bytes: int) -> None:
        """Count bytes that were said and do not come, as their sandbox kept within the bound itself."""
        if size_bytes:
            self.truncated = True
            self._omitted_bytes += size_bytes

    def restore(self, written: Sequence[Written]) -> None:
        """Go on where an earlier gateway stopped; the text of recent records will come once more and is passed over."""
        self.end = self.written = max((each.end for each in written), default=0)
        self.truncated = any(each.stream == TRUNCATED for each in written)
        self._room_bytes -= sum(each.text_bytes + each.records * RECORD_OVERHEAD_BYTES for each in written)
        self._known_bytes = {each.stream: each.recent_bytes for each in written if each.stream in OUTPUT}

    def pass_over_nothing(self) -> None:
        """What comes is new: another try begins."""
        self._known_bytes = None

    def finish(self) -> None:
        """Nothing more will come: followers read to the end and stop."""
        if self._omitted_bytes:
            text = f"the log reached its limit of {self._limit_bytes} bytes; {self._omitted_bytes} bytes are missing"
            self._append(TRUNCATED, text)
        self.closed = self.finished = True
        self._wake()

    def pause(self) -> None:
        """Take nothing more: what comes is the next gateway's."""
        self.finished = True
        self._wake()

    def _write(self, stream: str, data: str) -> None:
        stream = stream if stream in STREAMS else "log"
        if self._known_bytes and self._known_bytes.get(stream):
            data = self._new(stream, data, self._known_bytes)
        for start in range(0, len(data), RECORD_CHARS):
            if self.finished:
                return
            piece = data[start : start + RECORD_CHARS]
            text = piece.encode("utf-8", "replace")
            room_bytes = 0 if self.truncated else max(0, self._room_bytes - RECORD_OVERHEAD_BYTES)
            if len(text) > room_bytes:
                piece = text[:room_bytes].decode("utf-8", "ignore")
                self.omit(len(text) - len(piece.encode()))
            self._room_bytes -= len(text) + RECORD_OVERHEAD_BYTES
            if piece:
                self._append(stream, piece)

    def _new(self, stream: str, data: str, known: dict[str, int]) -> str:
        """The part that is not on record."""
        text = data.encode("utf-8", "replace")
        known_bytes = min(len(text), known[stream])
        known[stream] -= known_bytes
        return text[known_bytes:].decode("utf-8", "replace")

    def _append(self, stream: str, data: str) -> None:
        if self._missing and self._keep(DROPPED, f"{self._missing} records were dropped: the disk was too slow"):
            self._missing = 0
        if not self._keep(stream, data):
            self._missing += 1

    def _keep(self, stream: str, data: str) -> bool:
        text = serialization.unicode(data)
        row = LogRow(seq=self._seq, position=self.end, time_s=self._logs.wall(), stream=stream, data=text)
        if not self._logs.store.save_log(row, soon=bool(self._followers)):
            return False
        self.end += 1
        if self._tail is None:
            self._tail = deque()
        self._tail.append(row)
        self._tail_chars += len(row.data)
        while self._tail_chars > TAIL_BYTES and len(self._tail) > 1:
            self._tail_chars -= len(self._tail.popleft().data)
        self._wake()
        return True

    def _wake(self) -> None:
        for follower in self._followers:
            follower.set()

    def recent(self, position: int) -> list[LogRow] | None:
        """Records on disk from ``position`` on, if memory still holds them all; None sends the reader to the store."""
        if position >= self.written:
            return []
        if not self._tail or position < self._tail[0].position:
            return None
        return [row for row in self._tail if position <= row.position < self.written][:PAGE_RECORDS]

    def reached_disk(self, end: int) -> None:
        """The records before ``end`` stand there."""
        self.written = end
        self._wake()

    async def beyond(self, position: int) -> bool:
        """Wait until something is new of what follows ``position``; False after ``heartbeat_s`` of silence."""
        event = asyncio.Event()
        self._followers += (event,)
        try:
            if self.written > position or self.closed or (self.finished and self.end <= position):
                return True
            async with asyncio.timeout(self._logs.settings.heartbeat_s):
                await event.wait()
            return True
        except TimeoutError:
            return False
        finally:
            self._followers = tuple([one for one in self._followers if one is not event])


class Logs:
    """The logs of all invocations, living or ended."""

    def __init__(self, store: Store, settings: ServerConfig, *, wall: Callable[[], float] = time.time) -> None:
        self.store = store
        self.settings = settings
        self.wall = wall
        #: Those that its logs belong to; whoever writes from elsewhere hands over.
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self._living: dict[int, InvocationLog] = {}
        store.on_logs = self._reached_disk
        self._following: Counter[str] = Counter()
        self.followers_dropped = 0

    def measured_by(self, metrics: Metrics) -> None:
        """Count who follows."""
        metrics.watch("tangram_log_followers", "Log streams open", lambda: self.followers)
        slow = "Followers dropped because they did not read"
        metrics.watch("tangram_log_followers_dropped", slow, lambda: self.followers_dropped, counter=True)

    def open(self, seq: int, limit_bytes: int) -> InvocationLog:
        """The sink of a new invocation."""
        log = self._living[seq] = InvocationLog(self, seq, limit_bytes)
        return log

    async def resume(self, seq: int, limit_bytes: int, since_s: float) -> InvocationLog:
        """The sink of an invocation that outlived the gateway: its records go on where they stopped.

        What was said since ``since_s`` is taken to be said once more, by a command that is taken over.
        """
        log = self.open(seq, limit_bytes)
        log.restore(await self.store.logs_written(seq, since_s))
        return log

    def leave(self, seq: int) -> None:
        """It goes on without this gateway: nothing more is taken down here."""
        log = self._living.get(seq)
        if log is not None:
            log.pause()

    def close(self, seq: int) -> None:
        """The invocation ended. Its records are in the store, or on their way there before any later read."""
        log = self._living.pop(seq, None)
        if log is not None:
            log.finish()

    async def read(self, seq: int, position: int, limit: int = PAGE_RECORDS) -> list[LogRow]:
        """A page of records from ``position`` on; empty at the end."""
        log = self._living.get(seq)
        page = None if log is None else log.recent(position)
        if page is None or (log is not None and log.written < log.end and len(page) < limit):
            page = await self.store.logs(seq, position, min(limit, PAGE_RECORDS))
        return page[:limit]

    def _reached_disk(self, rows: Sequence[LogRow]) -> None:
        """These were written, and all before them."""
        for seq, end in {row.seq: row.position + 1 for row in rows}.items():
            log = self._living.get(seq)
            if log is not None:
                log.reached_disk(end)

    def follow(self, seq: int, position: int, task: str = "") -> AsyncGenerator[list[LogRow], None]:
        """Pages of records as they come, until the invocation has ended; an empty page is a heartbeat.

        Raises CapacityExceeded when too many follow already, or too many logs of its task.
        """
        own, limit = self._following[task], self.settings.followers_max
        if self.followers >= limit or own >= share_of(limit):
            raise CapacityExceeded(
                f"{self.followers} logs are followed already, {own} of task {task!r}, as many as may be",
                component="logs",
                retry_after_s=1.0,
            )
        return self._follow(seq, position, task)

    @property
    def followers(self) -> int:
        """How many follow a log now."""
        return self._following.total()

    async def _follow(self, seq: int, position: int, task: str) -> AsyncGenerator[list[LogRow], None]:
        self._following[task] += 1
        try:
            log, page = self._living.get(seq), await self.read(seq, position)
            while True:
                if page:
                    position = page[-1].position + 1
                    yield page
                elif log is None or (log.finished and log.end <= position):
                    return
                elif not await log.beyond(position):
                    yield []
                log = self._living.get(seq)
                result = None if log is None else log.recent(position)
                page = await self.store.logs(seq, position, PAGE_RECORDS) if result is None else result
        finally:
            self._following[task] -= 1
            if not self._following[task]:
                del self._following[task]


def line_of(row: LogRow) -> LogLine:
    """Return a record as a follower sees it."""
    return LogLine(offset=row.position, time=serialization.instant(row.time_s), stream=row.stream, data=row.data)


class OwnLines:
    """Standard error for the gateway's own lines: one that nobody takes (a closed pipe, a full disk) is lost.

    Were it an error, it would break whatever was just being told of.
    """

    def write(self, line: bytes) -> int:
        with suppress(OSError, ValueError):
            sys.stderr.buffer.write(line)
        return len(line)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.buffer.flush()


def configure(level: str = "info", *, for_people: bool = False) -> None:
    """structlog for the gateway's own lines on standard error: one JSON object each, or lines for people."""
    render: structlog.typing.Processor = structlog.processors.JSONRenderer(
        serializer=lambda line, **_: serialization.dumps(line)
    )
    if for_people:
        render = _line_for_people(structlog.dev.ConsoleRenderer(colors=not os.environ.get("NO_COLOR")))
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if for_people else "iso", utc=not for_people),
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.BytesLoggerFactory(file=cast(BinaryIO, OwnLines())),
        cache_logger_on_first_use=True,
    )


def _line_for_people(render: structlog.dev.ConsoleRenderer) -> structlog.typing.Processor:
    """Return a processor that ends in the bytes of one line; what others wrote obeys no terminal."""

    def processor(logger: Any, name: str, event: structlog.typing.EventDict) -> bytes:
        shown = {key: _CONTROL.sub("?", each) if isinstance(each, str) else each for key, each in event.items()}
        shown |= {key: event[key] for key in ("exception",) if key in event}
        return str(render(logger, name, shown)).encode("utf-8", "replace")

    return processor
