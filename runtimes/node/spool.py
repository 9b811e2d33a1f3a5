"""Spools: what each attempt said, on the node's disk until the gateway has its end on record.

A spool is a file of records (stream, text) and only ever grows; a place in it is a byte offset, the same for both
sides, so that a piece that was lost is asked for again and none is taken twice. When the daemon was killed, an adopted
command says all once more from its start: what the file holds of each stream is then passed over.
"""

from __future__ import annotations

import asyncio
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from runtimes.node.wire import ChannelError

RECORD = struct.Struct(">BI")
STREAMS = ("stdout", "stderr", "log", "system")
#: Streams that a command that is taken over says again.
AGAIN = ("stdout", "stderr")
_CODES = {name: code for code, name in enumerate(STREAMS)}
#: Bytes of one record's text; longer writes become several.
TEXT_BYTES = 256 * 2**10
#: Bytes of the youngest records that are kept in memory until they are sent.
TAIL_BYTES = 256 * 2**10


def records(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield the records (stream, text) of a piece; raises ChannelError if it holds no whole number of them."""
    place = 0
    while place < len(data):
        if len(data) - place < RECORD.size:
            raise ChannelError("a torn record in a log")
        code, size_bytes = RECORD.unpack_from(data, place)
        place += RECORD.size + size_bytes
        if place > len(data) or code >= len(STREAMS):
            raise ChannelError("a torn record in a log")
        yield STREAMS[code], data[place - size_bytes : place].decode("utf-8", "surrogatepass")


class Spool:
    """One attempt's log: a `manager.executor.LogSink` that may be written from any thread.

    ``on_more`` is called, on the loop, when there is something new.
    """

    def __init__(self, path: Path | str, limit_bytes: int, on_more: Callable[[], None], *, fresh: bool = False) -> None:
        """``fresh``: there is no file yet."""
        self._path = path
        self._limit_bytes = limit_bytes
        self._on_more = on_more
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        #: Of the file, which is made with the first record: many attempts say nothing.
        self._fd = -1
        self._has_file = self._closed = False
        #: Bytes of the file; the tail begins at an offset of it, and reaches beyond it if some is not written yet.
        self._file_bytes = 0
        self._tail = bytearray()
        self._tail_begin = 0
        self._text_bytes = 0
        #: Bytes of each stream that are here and come once more.
        self._known_bytes: dict[str, int] = {}
        #: Bytes that were said and are not kept.
        self.omitted_bytes = 0
        self.paused = False
        if not fresh:
            self._take_up()

    def _take_up(self) -> None:
        """Go on with what a daemon before left; its last record may be torn and is then said again."""
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        self._has_file = True
        held = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        place = 0
        while len(held) - place >= RECORD.size:
            code, size_bytes = RECORD.unpack_from(held, place)
            if code >= len(STREAMS) or place + RECORD.size + size_bytes > len(held):
                break
            place += RECORD.size + size_bytes
            self._text_bytes += size_bytes
            if STREAMS[code] in AGAIN:
                self._known_bytes[STREAMS[code]] = self._known_bytes.get(STREAMS[code], 0) + size_bytes
        os.ftruncate(self._fd, place)
        self._file_bytes = self._tail_begin = place

    @property
    def end(self) -> int:
        """The offset behind the last record."""
        return self._tail_begin + len(self._tail)

    def write(self, stream: str, data: str) -> None:
        """Append text; what is beyond the bound is counted and dropped."""
        if threading.get_ident() == self._thread:
            self._write(stream, data)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._write, stream, data)

    def omit(self, size_bytes: int) -> None:
        """Count bytes that were said and do not come."""
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
        code = _CODES.get(stream, _CODES["log"])
        for piece in _pieces(text):
            self._tail += RECORD.pack(code, len(piece))
            self._tail += piece
        if len(self._tail) > TAIL_BYTES:
            with suppress(OSError):  # a full disk: it stays in memory, within the log's own bound
                self.flush()
                self.sent(self.end)
        self._on_more()

    def flush(self) -> None:
        """Write what is not in the file yet; raises OSError."""
        begin = self._file_bytes - self._tail_begin
        if begin < len(self._tail) and self._fd < 0 and not self._closed:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._has_file = True
        while begin < len(self._tail):
            begin += os.pwrite(self._fd, memoryview(self._tail)[begin:].tobytes(), self._tail_begin + begin)
        self._file_bytes = self.end

    def sent(self, offset: int) -> None:
        """What lies before an offset needs no memory; it is in the file."""
        done = min(offset, self._file_bytes) - self._tail_begin
        if done > 0:
            del self._tail[:done]
            self._tail_begin += done

    def read(self, offset: int, most_bytes: int) -> bytes:
        """Return whole records from an offset on, at least one if there is any; empty at the end."""
        if offset >= self._tail_begin:
            held = bytes(self._tail[offset - self._tail_begin :][: most_bytes + TEXT_BYTES + RECORD.size])
        else:
            held = os.pread(self._fd, min(most_bytes + TEXT_BYTES + RECORD.size, self.end - offset), offset)
        place = 0
        while place < most_bytes and len(held) - place >= RECORD.size:
            size_bytes = RECORD.size + RECORD.unpack_from(held, place)[1]
            if place + size_bytes > len(held):
                break
            place += size_bytes
        return held[:place]

    def close(self) -> None:
        """Keep the file for the next daemon; idempotent."""
        self.paused = self._closed = True
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Forget it; idempotent."""
        self.close()
        if self._has_file:
            self._has_file = False
            with suppress(FileNotFoundError):
                os.unlink(self._path)  # noqa: PTH108  # a name, and no path is made of it for each attempt


def _pieces(text: bytes) -> Iterator[bytes]:
    """Yield a long text in pieces that end between two characters."""
    place = 0
    while place < len(text):
        end = min(len(text), place + TEXT_BYTES)
        while end < len(text) and text[end] & 0xC0 == 0x80:
            end -= 1
        yield text[place:end]
        place = end
