"""The wire: JSON, names, durations and instants as they cross every door."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import cast

import orjson

from manager.errors import InvalidInput

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
KEY = re.compile(r"[\x21-\x7e]{1,255}")
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
#: Levels of nesting of an input. What carries it on wraps it, and nothing of JSON writes more than 254.
DEPTH_MAX = 200
_WRAPS = 254 - DEPTH_MAX
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)(ms|s|m|h|d)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


@dataclass(frozen=True, slots=True)
class EncodedJson:
    """JSON that is already encoded, for use inside a value given to `dumps`: it is not parsed again."""

    data: bytes


def dumps(value: object) -> bytes:
    """Compact JSON. What JSON cannot hold becomes text, and text that is no Unicode is repaired, never refused.

    Raises RecursionError for what is nested a thousand levels deep.
    """
    try:
        return orjson.dumps(value, default=_fragment, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS)
    except (TypeError, ValueError):
        text = json.dumps(value, default=_plain, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


def loads(data: bytes | str) -> object:
    """A JSON value; raises InvalidInput."""
    try:
        return cast(object, orjson.loads(data))
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"the body is not JSON: {error}", detail={"path": "$"}) from None


def loads_object(data: bytes | str) -> dict[str, object]:
    """A JSON object, ``{}`` where there is no body; raises InvalidInput."""
    value = loads(data) if data else {}
    if not isinstance(value, dict):
        raise InvalidInput(f"the body must be a JSON object, not {_kind(value)}", detail={"path": "$"})
    if _too_deep(data, value):
        raise InvalidInput(f"the body is nested deeper than {DEPTH_MAX} levels", detail={"path": "$"})
    return value


def _too_deep(data: bytes | str, value: object) -> bool:
    """Whether it is nested deeper than `DEPTH_MAX`; looked at closely only where there are brackets enough."""
    brackets = data.count("{") + data.count("[") if isinstance(data, str) else data.count(b"{") + data.count(b"[")
    if brackets <= DEPTH_MAX:
        return False
    for _ in range(_WRAPS):
        value = [value]
    try:
        orjson.dumps(value)
    except TypeError:
        return True
    return False


def name(text: str, what: str) -> str:
    """A name a caller chose (trajectory, task, invocation); raises InvalidInput for odd characters."""
    if NAME.fullmatch(text) is None:
        raise InvalidInput(
            f"{what} {text[:64]!r} must be 1 to 128 letters, digits or . _ : @ - and start with a letter or digit",
            detail={"path": what},
        )
    return text


def duration_s(text: str, what: str) -> float:
    """Seconds of ``500ms 30s 2m 1h``, or of a bare number; raises InvalidInput."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidInput(f"{what} {text[:64]!r} is no duration such as 500ms, 30s or 2m", detail={"path": what})
    return float(match[1]) * _SECONDS[match[2]]


def whole(text: str, what: str, *, minimum: int = 0, maximum: int = 2**53) -> int:
    """An integer within bounds; raises InvalidInput."""
    if len(text) > 16 or not text.isascii() or not text.isdigit() or not minimum <= int(text) <= maximum:
        message = f"{what} {text[:64]!r} must be a whole number from {minimum} to {maximum}"
        raise InvalidInput(message, detail={"path": what})
    return int(text)


def flag(text: str, what: str) -> bool:
    """A boolean; raises InvalidInput."""
    if text not in ("true", "false", "1", "0"):
        raise InvalidInput(f"{what} {text[:64]!r} must be true or false", detail={"path": what})
    return text in ("true", "1")


def instant(wall_s: float | None) -> str | None:
    """RFC 3339 in UTC with milliseconds."""
    if wall_s is None:
        return None
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")


def _fragment(value: object) -> object:
    return orjson.Fragment(value.data) if isinstance(value, EncodedJson) else str(value)


def _plain(value: object) -> object:
    return orjson.loads(value.data) if isinstance(value, EncodedJson) else str(value)
