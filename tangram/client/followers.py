"""Follow logs and sessions over reconnections."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tangram import types
from tangram.client.requests import FailureStreak, Retries
from tangram.errors import ConflictError, TangramError, UnreadableAnswerError


class SessionFollower:
    """The state of one reader of a session, across its connections."""

    def __init__(self, id: str, retries: Retries, *, input_offset: int | None) -> None:
        #: The first byte of output not yet seen, and how many were no longer kept when they were asked for.
        self.offset = self.missing = 0
        #: Bytes of input that the session was passed; None before that is known.
        self.input_offset = input_offset
        #: How it ended, once that was seen.
        self.end: types.SessionEnd | None = None
        self._id = id
        self._failing = FailureStreak(retries)

    def feed(self, text: str) -> types.SessionOutput | None:
        """Return the output of one NDJSON record, if it has some that was not seen; raises ConflictError if taken."""
        if not text:
            return None
        try:
            record = types.read_session_record(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnreadableAnswerError(f"a record of a session is not understood ({error}): {text[:200]}") from error
        self._failing.succeeded()
        match record:
            case types.SessionEnd():
                self.end = record
            case types.SessionTaken():
                raise ConflictError(f"another caller has attached to session {self._id}")
            case types.SessionAttached():
                self.input_offset = record.input_offset if self.input_offset is None else self.input_offset
            case types.SessionOutput():
                return self._fresh(record)
            case types.SessionSilence():
                return None
        return None

    def _fresh(self, record: types.SessionOutput) -> types.SessionOutput | None:
        self.missing += max(0, record.offset - self.offset)
        fresh = record.data[max(0, self.offset - record.offset) :]
        end = record.offset + len(record.data)
        if end <= self.offset:
            return None
        self.offset = end
        return types.SessionOutput(stream=record.stream, offset=end - len(fresh), data=fresh)

    def again_s(self, error: TangramError) -> float | None:
        """The connection ended before the session did; return the seconds to wait before the next, None to give up."""
        return self._failing.again_s(error)


class OutputLines:
    """What a command says, line by line: each is told when it is whole, and the last one at the end."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._begun: dict[str, str] = {}

    def take(self, line: types.LogLine) -> None:
        """Tell the lines that a record of the log completes."""
        if line.stream in ("stdout", "stderr"):
            *whole, self._begun[line.stream] = (self._begun.get(line.stream, "") + line.data).split("\n")
            for each in whole:
                self._tell(each)

    def end(self) -> None:
        """Tell what has no line's end."""
        for rest in filter(None, self._begun.values()):
            self._tell(rest)


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

    def feed(self, text: str) -> types.LogLine | None:
        """Return the line of one NDJSON record, or None for a heartbeat, an end, or one that was seen before."""
        if not text:
            return None
        try:
            record = types.read_log_record(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnreadableAnswerError(f"a record of a log is not understood ({error}): {text[:200]}") from error
        self._failing.succeeded()
        match record:
            case types.LogEnd():
                self.ended = not self._to_its_end or record.state not in ("queued", "running")
            case types.LogLag():  # the gateway dropped this reader: it was too slow
                self.offset = record.next_offset
            case types.LogLine() if record.offset >= self.offset:
                self.offset = record.offset + 1
                return record
        return None

    def again_s(self, error: TangramError) -> float | None:
        """The connection ended before the log did; return the seconds to wait before the next, None to give up."""
        return self._failing.again_s(error)
