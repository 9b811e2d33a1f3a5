"""Bodies of requests as JSON."""

from __future__ import annotations

import msgspec

from tangram.errors import InvalidInputError


def json_body(value: object) -> bytes:
    """Return a value as JSON; raises InvalidInputError for text that is no Unicode, which no encoding takes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        place = error.object[max(0, error.start - 20) : error.end + 20]
        told = f"the input has text that is no Unicode, a lone surrogate in {place!r}"
        raise InvalidInputError(f"{told}; send bytes as stdin_base64 or in a file", component="client") from None
