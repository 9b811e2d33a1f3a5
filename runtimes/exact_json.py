"""JSON whose whole numbers stay what they are, however large: orjson reads those beyond 64 bits as floats."""

from __future__ import annotations

import json

import msgspec
import orjson


def loads(data: bytes | str) -> object:
    """Return a JSON value; raises orjson.JSONDecodeError, which names line and column."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value: object = orjson.loads(data)
        return value


def dumps(value: object, *, sort_keys: bool = False) -> bytes:
    """Return plain JSON values as compact JSON; raises TypeError or ValueError for what JSON cannot hold."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None)
    except TypeError as error:
        if "64-bit" not in str(error):
            raise
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)
    return text.encode("utf-8")
