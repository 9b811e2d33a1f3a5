"""Headers of requests: what of them is given, and whether a header can carry it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tangram.errors import InvalidInputError

_CARRIED = re.compile(r"[ -~]*", re.ASCII)


def given_headers(values: Mapping[str, str | None]) -> dict[str, str]:
    """Return the headers that have a value; raises InvalidInputError where one has more than visible ASCII."""
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if _CARRIED.fullmatch(value) is None:
            raise InvalidInputError(
                f"{name}: {value[:64]!r} has characters that no header carries; write it in ASCII",
                component="client",
                detail={"path": name},
            )
    return given
