"""Following a log: records in, lines out, and where to resume when the connection breaks; no I/O."""

from __future__ import annotations

import msgspec

from tangram.client.retries import FailureStreak, Retries
from tangram.errors import TangramError, UnreadableAnswerError
from tangram.types import LogEnd, LogLag, LogLine, read_log_record


class LogFollower:
    """The state of one reader of a log, across its connections."""

    def __init__(self, offset: int, retries: Retries, *, to_its_end: bool) -> None:
        """``to_its_end``: the log ends with its invocation, and not with a gateway that goes."""
        self._to_its_end = to_its_end
        #: The first record not yet seen.
        self.offset = offset
        #: Whether the end of the log was seen.
        self.ended = False
        self._failing = FailureStreak(retries)

    def feed(self, text: str) -> LogLine | None:
        """Return the line of one NDJSON record, or None for a heartbeat, an end, or one that was seen before."""
        if not text:
            return None
        try:
            record = read_log_record(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnreadableAnswerError(f"a record of a log is not understood ({error}): {text[:200]}") from error
        self._failing.succeeded()
        match record:
            case LogEnd():
                self.ended = not self._to_its_end or record.state not in ("queued", "running")
            case LogLag():  # the gateway dropped this reader: it was too slow
                self.offset = record.next_offset
            case LogLine() if record.offset >= self.offset:
                self.offset = record.offset + 1
                return record
        return None

    def again_s(self, error: TangramError) -> float | None:
        """The connection ended before the log did; return the seconds to wait before the next, None to give up."""
        return self._failing.again_s(error)
