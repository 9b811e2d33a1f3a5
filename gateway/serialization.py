"""The wire: JSON as every server reads and writes it, and what is read from texts of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypedDict, TypeVar

import msgspec
import orjson

from manager.errors import InvalidInput
from runtimes import runtime
from tangram import types
from tangram.types import NAME_WORDS, explained

T = TypeVar("T")
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
#: What vendors add to it; W3C gives it 512 characters.
TRACESTATE = re.compile(r"[ -~]{1,512}")
#: Values of a body: reading a million of them keeps every other caller waiting for a tenth of a second.
VALUES_MAX = 2**20
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
#: Levels of nesting of an input. What carries it on wraps it, and nothing of JSON writes more than 254.
DEPTH_MAX = 200
_WRAPS = 254 - DEPTH_MAX
#: Which field a message of msgspec speaks of.
_FIELD = re.compile(r"(?:unknown|required) field `(.*)`$")
_ENCODER = msgspec.json.Encoder(enc_hook=str)


def encode(value: object) -> bytes:
    """Return a wire type, or plain values, as JSON; text that is no Unicode is repaired, never refused."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        return _ENCODER.encode(_repaired(value))


def _repaired(value: object) -> object:
    """Return the same with question marks for what is no Unicode; JSON that is already encoded stays as it is."""
    if isinstance(value, str):
        return unicode(value)
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(
            value, **{name: _repaired(getattr(value, name)) for name in value.__struct_fields__}
        )
    if isinstance(value, Mapping):
        return {_repaired(key): _repaired(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return tuple(_repaired(item) for item in value)
    return value


def unicode(text: str) -> str:
    """Return the text with question marks for lone surrogates, which no encoding takes."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def dumps(value: object) -> bytes:
    """Return any value as compact JSON. What JSON cannot hold becomes text; text that is no Unicode is repaired.

    Raises RecursionError for what is nested a thousand levels deep.
    """
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS)
    except (TypeError, ValueError):
        text = json.dumps(value, default=str, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


def loads(data: bytes | str) -> object:
    """A JSON value; raises InvalidInput."""
    try:
        return runtime.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"the body is not JSON: {error}", detail={"path": "$"}) from None


def loads_object(data: bytes | str) -> dict[str, object]:
    """A JSON object, ``{}`` where there is no body; raises InvalidInput."""
    small = len(data) <= DEPTH_MAX  # too small to be too much
    if not small and _too_many(data):
        message = f"the body holds more than {VALUES_MAX} values; send them as one text, or upload a file"
        raise InvalidInput(message, detail={"path": "$"})
    value = loads(data) if data else {}
    if not isinstance(value, dict):
        raise InvalidInput(f"the body must be a JSON object, not {_kind(value)}", detail={"path": "$"})
    if not small and _too_deep(data, value):
        raise InvalidInput(f"the body is nested deeper than {DEPTH_MAX} levels", detail={"path": "$"})
    return value


def _too_many(data: bytes | str) -> bool:
    """Whether it holds more than `VALUES_MAX` values; lists and objects, which cost more, count thrice."""
    text = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    return _separators(text) > VALUES_MAX and _separators(_TEXT.sub(b"", text)) > VALUES_MAX


def _separators(data: bytes) -> int:
    return data.count(b",") + 2 * (data.count(b"[") + data.count(b"{"))


def _too_deep(data: bytes | str, value: object) -> bool:
    """Whether it is nested deeper than `DEPTH_MAX`; looked at closely only where there are brackets enough."""
    brackets = data.count("{") + data.count("[") if isinstance(data, str) else data.count(b"{") + data.count(b"[")
    if brackets <= DEPTH_MAX:
        return False
    for _ in range(_WRAPS):
        value = [value]
    try:
        runtime.dumps(value)
    except (TypeError, RecursionError):
        return True
    return False


def read(value: object, kind: type[T], what: str = "") -> T:
    """Return JSON values or texts as a wire type; raises InvalidInput with the path of what does not fit.

    ``what`` is the path of the value itself.
    """
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        problem, place = explained(error)
        field = _FIELD.search(problem)
        path = (what + place + ("" if field is None else f".{field[1]}")).removeprefix(".")
        raise InvalidInput(f"{path}: {problem}", detail={"path": path}) from None


def name(text: str, what: str) -> str:
    """Return a name that a caller chose (trajectory, task, invocation); raises InvalidInput for odd characters."""
    if not types.is_name(text):
        raise InvalidInput(f"{what} {text[:64]!r} must be {NAME_WORDS}", detail={"path": what})
    return text


def duration_s(text: str, what: str) -> float:
    """Return the seconds of ``500ms 30s 1h30m``, or of a bare number of them; raises InvalidInput."""
    try:
        return types.wait_s(text)
    except ValueError as error:
        raise InvalidInput(f"{what}: {error}", detail={"path": what}) from None


def moment_s(text: str, what: str, now_s: float) -> float:
    """Return the wall-clock seconds of an instant, or of a duration before ``now_s``; raises InvalidInput."""
    if "T" not in text:
        return now_s - duration_s(text, what)
    day, rest = text[8:10], text[10:]
    try:
        return (datetime.fromisoformat(f"{text[:8]}01{rest}") + timedelta(days=int(day) - 1)).timestamp()
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"{what}: {error}", detail={"path": what}) from None


class TraceContext(TypedDict):
    """The W3C trace context of a call."""

    traceparent: str | None
    tracestate: str | None


def trace(parent: object, state: object) -> TraceContext:
    """Return the trace context, dropped where it is malformed, as W3C asks; a state alone means nothing."""
    if not isinstance(parent, str) or TRACEPARENT.fullmatch(parent) is None:
        return TraceContext(traceparent=None, tracestate=None)
    has_state = isinstance(state, str) and TRACESTATE.fullmatch(state) is not None
    return TraceContext(traceparent=parent, tracestate=str(state) if has_state else None)


def instant(wall_s: float) -> datetime:
    """Return wall-clock seconds as an instant in UTC."""
    return datetime.fromtimestamp(wall_s, UTC)


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
