"""Records of a log stream: what an invocation said, and how the stream goes on and ends."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from tangram.types.invocations import Invocation
from tangram.types.values.scalars import AnyReason, AnyState, Count, Instant, Milliseconds

Offset = Annotated[Count, Meta(description="Number of the record from 0; offset + 1 is where to go on reading")]


class LogLine(Struct, frozen=True, kw_only=True):
    """One record of a log: output, or what of it is missing (``truncated``, ``dropped``, ``expired``)."""

    offset: Offset
    time: Instant
    stream: Annotated[
        str,
        Meta(
            description="stdout and stderr, log (structured), system (the gateway's own), or what is missing",
            extra_json_schema={
                "enum": ["stdout", "stderr", "log", "system", "truncated", "dropped", "expired"],
            },
        ),
    ]
    data: str

    @property
    def text(self) -> str:
        """What was said."""
        return self.data


class LogHeartbeat(Struct, frozen=True, kw_only=True):
    """Nothing was said for a while; the stream goes on."""

    stream: Literal["heartbeat"]


class LogEnd(Struct, frozen=True, kw_only=True):
    """The last record of a log; ``offset`` is how many there were."""

    stream: Literal["eof"]
    offset: Count
    state: AnyState
    reason: AnyReason | None
    queue_ms: Milliseconds | None = None
    overhead_ms: Milliseconds | None = None
    execution_ms: Milliseconds | None = None


class LogLag(Struct, frozen=True, kw_only=True):
    """The last record for a follower that was too slow; ``next_offset`` is where to go on reading."""

    stream: Literal["dropped"]
    next_offset: Count
    data: str


class LogAccepted(Struct, frozen=True, kw_only=True):
    """The first record of an invocation in mode ``stream``; input and result are left out."""

    stream: Literal["accepted"]
    invocation: Invocation


class LogResult(Struct, frozen=True, kw_only=True):
    """The last record of an invocation in mode ``stream``; ``offset`` is how many log records there were."""

    stream: Literal["result"]
    offset: Count
    invocation: Invocation


LogRecord = LogLine | LogHeartbeat | LogEnd | LogLag | LogAccepted | LogResult


class _Kind(Struct):
    """What tells the records apart."""

    stream: str
    next_offset: int | None = None


_MARKS: dict[str, msgspec.json.Decoder[LogHeartbeat | LogEnd | LogAccepted | LogResult]] = {
    "heartbeat": msgspec.json.Decoder(LogHeartbeat),
    "eof": msgspec.json.Decoder(LogEnd),
    "accepted": msgspec.json.Decoder(LogAccepted),
    "result": msgspec.json.Decoder(LogResult),
}
_KIND, _LAG, _LINE = (msgspec.json.Decoder(_Kind), msgspec.json.Decoder(LogLag), msgspec.json.Decoder(LogLine))


def read_log_record(text: bytes | str) -> LogRecord:
    """Return one record of NDJSON; raises `msgspec.DecodeError` for what is none."""
    kind = _KIND.decode(text)
    if kind.next_offset is not None:
        return _LAG.decode(text)
    mark = _MARKS.get(kind.stream)
    return _LINE.decode(text) if mark is None else mark.decode(text)
