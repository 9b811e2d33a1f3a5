"""Interactive sessions on the wire: their opening, the records of their output, and what they are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from tangram.types.values.scalars import AnyReason, AnyState, Count, Name

Side = Annotated[int, Meta(ge=1, le=1000)]
SignalName = Literal["HUP", "INT", "QUIT", "KILL", "USR1", "USR2", "TERM", "CONT", "TSTP"]


class SessionTerminal(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size of a terminal."""

    rows: Side = 24
    columns: Side = 80


class SessionOpening(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command that somebody types to."""

    argv: Annotated[tuple[str, ...], Meta(min_length=1, description="Program and arguments, run without a shell")]
    function: Annotated[Name, Meta(description="The exec function whose sandbox and cores it has")] = "shell"
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    user: str | None = None
    terminal: Annotated[
        SessionTerminal | None, Meta(description="A terminal of its own, so large; without, it has three pipes")
    ] = None


class SessionSteering(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a session is told beside its input."""

    terminal: Annotated[SessionTerminal | None, Meta(description="Its terminal is so large from now on")] = None
    signal: Annotated[SignalName | None, Meta(description="What runs in its foreground gets this signal")] = None


class SessionFed(Struct, frozen=True, kw_only=True):
    """How much input a session has been passed."""

    input_offset: Annotated[Count, Meta(description="Bytes passed on since its beginning; send on from there")]
    reads: Annotated[bool, Meta(description="Whether its command still reads; if not, more input is dropped")]


class SessionAttached(Struct, frozen=True, kw_only=True):
    """The first record of an attachment, once the command runs or has ended."""

    stream: Literal["attached"]
    offset: Annotated[Count, Meta(description="First byte of its output that is still kept")]
    input_offset: Annotated[Count, Meta(description="Bytes of input that it was passed so far")]


class SessionOutput(Struct, frozen=True, kw_only=True):
    """A piece of what a session said. Bytes before ``offset`` that were not sent are no longer kept."""

    stream: Annotated[str, Meta(extra_json_schema={"enum": ["stdout", "stderr"]})]
    offset: Annotated[Count, Meta(description="Its first byte, counted over both streams")]
    data: Annotated[bytes, Meta(description="The bytes, in base64")]


class SessionSilence(Struct, frozen=True, kw_only=True):
    """Nothing was said for a while; the session goes on."""

    stream: Literal["heartbeat"]


class SessionTaken(Struct, frozen=True, kw_only=True):
    """The last record for who was attached when another caller attached."""

    stream: Literal["detached"]


class SessionEnd(Struct, frozen=True, kw_only=True):
    """The last record of a session."""

    stream: Literal["eof"]
    offset: Annotated[Count, Meta(description="Bytes that it said, as far as they are known")]
    state: AnyState
    reason: AnyReason | None
    message: str
    exit_code: Annotated[int | None, Meta(description="Exit status of the command; null if it has none")]
    signal: Annotated[int | None, Meta(description="The signal that ended it, else null")]


SessionRecord = SessionAttached | SessionOutput | SessionSilence | SessionTaken | SessionEnd


class _SessionKind(Struct):
    """What tells the records apart."""

    stream: str


_KIND = msgspec.json.Decoder(_SessionKind)
_OUTPUT = msgspec.json.Decoder(SessionOutput)
_MARKS: dict[str, msgspec.json.Decoder[SessionAttached | SessionSilence | SessionTaken | SessionEnd]] = {
    "attached": msgspec.json.Decoder(SessionAttached),
    "heartbeat": msgspec.json.Decoder(SessionSilence),
    "detached": msgspec.json.Decoder(SessionTaken),
    "eof": msgspec.json.Decoder(SessionEnd),
}


def read_session_record(text: bytes | str) -> SessionRecord:
    """Return one record of NDJSON; raises `msgspec.DecodeError` for what is none."""
    mark = _MARKS.get(_KIND.decode(text).stream)
    return _OUTPUT.decode(text) if mark is None else mark.decode(text)
