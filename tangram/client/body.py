"""Bodies of requests as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec

from tangram.errors import InvalidInputError

COMPONENT = "client"


def json_body(value: object) -> bytes:
    """Return a value as JSON; raises InvalidInputError for what JSON cannot hold, with its place.

    That is text which is no Unicode, numbers that are none (NaN, infinity), and objects of other libraries.
    """
    try:
        body = msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        place = error.object[max(0, error.start - 20) : error.end + 20]
        told = f"the input has text that is no Unicode, a lone surrogate in {place!r}"
        raise InvalidInputError(f"{told}; send bytes as stdin_base64 or in a file", component=COMPONENT) from None
    except TypeError as error:
        told = f"the input is no JSON: {error}; of numpy and torch send .item() or .tolist()"
        raise InvalidInputError(told, component=COMPONENT) from None
    if b"null" in body:  # as which msgspec writes numbers that are none
        for path, number in _not_finite(value, "$"):
            told = f"{path} is {number}, which JSON does not have: send null or a text, as the function expects it"
            raise InvalidInputError(told, component=COMPONENT, detail={"path": path})
    return body


def _not_finite(value: object, path: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers that are none, with their places; the value could be written, so it is no circle."""
    if isinstance(value, float):
        if not math.isfinite(value):
            yield path, value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _not_finite(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _not_finite(each, f"{path}.{name}")
    elif isinstance(value, list | tuple | set | frozenset):
        for index, each in enumerate(value):
            yield from _not_finite(each, f"{path}[{index}]")
