"""The end of what a session has said, byte by byte numbered, in memory that its bytes bound and not its pieces."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

STREAMS = ("stdout", "stderr")
_CODES = {name: code for code, name in enumerate(STREAMS)}
#: Bytes from which on a block is full.
BLOCK_BYTES = 16 * 2**10
#: Most that is kept beyond what is asked for, of what its reader has not had: more is under way between a command
#: that is told to wait and its reader than some are asked to keep, and sockets to other machines hold megabytes.
UNDER_WAY_BYTES = 8 * 2**20
#: Most pieces that are returned at once, however short they are.
PAGE_PIECES = 1024


class SessionPiece(NamedTuple):
    """What a session said, and where it begins."""

    offset: int
    stream: str
    data: bytes


class _Block:
    """Bytes that follow each other, and where among them the stream changes."""

    __slots__ = ("changes", "codes", "data", "offset")

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.data = bytearray()
        #: Where each run of one stream begins, and which stream that is.
        self.changes = array("I")
        self.codes = bytearray()

    @property
    def end(self) -> int:
        return self.offset + len(self.data)

    def add(self, code: int, data: bytes) -> None:
        if not self.codes or self.codes[-1] != code:
            self.changes.append(len(self.data))
            self.codes.append(code)
        self.data += data

    def pieces(self, offset: int) -> Iterator[SessionPiece]:
        """Yield what it holds from an offset on, each run of one stream as a piece."""
        ends = chain(self.changes[1:], (len(self.data),))
        for begin, end, code in zip(self.changes, ends, self.codes, strict=True):
            first = max(begin, offset - self.offset)
            if first < end:
                yield SessionPiece(self.offset + first, STREAMS[code], bytes(self.data[first:end]))


class OutputTail:
    """The last ``keep_bytes`` of an output, and a block more at most. Use from one thread."""

    def __init__(self, keep_bytes: int, start: int = 0) -> None:
        self._keep_bytes = keep_bytes
        #: Where what is kept begins and ends.
        self.start = self.end = start
        self._blocks: deque[_Block] = deque()

    def add(self, stream: str, data: bytes, unread: int | None = None) -> None:
        """Append what was said; the oldest is forgotten for it, but for what lies behind ``unread`` (see `forget`)."""
        if not data:
            return
        if not self._blocks or len(self._blocks[-1].data) >= BLOCK_BYTES or self._blocks[-1].end != self.end:
            self._blocks.append(_Block(self.end))
        self._blocks[-1].add(_CODES[stream], data)
        self.end += len(data)
        self.forget(unread)

    def forget(self, unread: int | None = None) -> None:
        """Forget what is too much; what lies behind ``unread`` is too much only beyond `UNDER_WAY_BYTES` more."""
        start = self.end - self._keep_bytes
        if unread is not None:
            start = max(min(start, unread), start - UNDER_WAY_BYTES)
        while self._blocks and self._blocks[0].end <= start:
            self._blocks.popleft()
        self.start = max(self.start, start, self._blocks[0].offset if self._blocks else 0)

    def skip(self, end: int) -> None:
        """What comes next begins later: what is between was not heard."""
        self.end = max(self.end, end)

    def pieces(self, offset: int, most_bytes: int) -> list[SessionPiece]:
        """Return about ``most_bytes`` from an offset on, at least one piece if there is any.

        The first begins later than ``offset`` if what is between is not kept.
        """
        found: list[SessionPiece] = []
        size_bytes, offset = 0, max(offset, self.start)
        for block in self._blocks:
            if block.end <= offset:
                continue
            for piece in block.pieces(offset):
                if size_bytes >= most_bytes or len(found) == PAGE_PIECES:
                    return found
                found.append(piece)
                size_bytes += len(piece.data)
        return found

    def joined(self) -> bytes:
        """Return all that is kept, of every stream; with nothing unheard between."""
        data = b"".join([block.data for block in self._blocks])
        return data[max(0, len(data) - (self.end - self.start)) :]
