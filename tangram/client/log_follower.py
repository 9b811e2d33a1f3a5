"""Following a log: records in, lines out, and where to resume when the connection breaks; no I/O."""

from __future__ import annotations

import msgspec

from tangram.errors import UnreadableAnswerError
from tangram.types import LogEnd, LogLag, LogLine, read_log_record


class LogFollower:
    """The state of one reader of a log, across its connections."""

    def __init__(self, offset: int, attempts_max: int) -> None:
        #: The first record not yet seen.
        self.offset = offset
        #: Whether the end of the log was seen.
        self.ended = False
        self._attempts_max = attempts_max
        self._fruitless = 0

    def feed(self, text: str) -> LogLine | None:
        """Return the line of one NDJSON record, or None for a heartbeat, an end, or one that was seen before."""
        if not text:
            return None
        try:
            record = read_log_record(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnreadableAnswerError(f"a record of a log is not understood ({error}): {text[:200]}") from error
        self._fruitless = 0
        match record:
            case LogEnd():
                self.ended = True
            case LogLag():  # the gateway dropped this reader: it was too slow
                self.offset = record.next_offset
            case LogLine() if record.offset >= self.offset:
                self.offset = record.offset + 1
                return record
        return None

    def lost(self) -> bool:
        """The connection ended before the log did; return whether to connect again."""
        self._fruitless += 1
        return self._fruitless < self._attempts_max
