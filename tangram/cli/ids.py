"""Ids of invocations as people write them: whole, the number before the dash, or the beginning of either."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tangram import Client, InvalidInputError, InvocationResult, NotFoundError
from tangram.cli.printing.brief import short_id

#: Digits of the number that an id begins with, and candidates that are told.
DIGITS, CANDIDATES = 11, 5
_WHOLE = re.compile(r"[0-9a-f]{11}-[0-9a-f]{12}")
_PART = re.compile(r"[0-9a-f]{1,11}|[0-9a-f]{11}-[0-9a-f]{0,11}")


def whole_id(client: Client, text: str) -> str:
    """Return the id that ``text`` stands for.

    Zeros before the number may be left out, as ``tangram ps`` does on a narrow terminal; a number that is an
    invocation's own stands for it, also where others begin alike. What looks like no id is left to the gateway.
    Raises NotFoundError, and InvalidInputError with the candidates where there are several.
    """
    given = text.lower()
    if _WHOLE.fullmatch(given) or not _PART.fullmatch(given):
        return text
    number, dash, _ = given.partition("-")
    if dash or len(number) == DIGITS:
        found = _in_range(client, int(number, 16), int(number, 16) + 1)
        matching = [each for each in found if each.id.startswith(given)]
    else:
        matching = _beginning(client, number)
    if not matching:
        raise NotFoundError(f"no invocation's id begins with {text}", component="client")
    if len(matching) > 1:
        told = ", ".join(f"{short_id(each.id)} ({each.function}, {each.state})" for each in matching[:CANDIDATES])
        more = ", ..." if len(matching) > CANDIDATES else ""
        raise InvalidInputError(f"{text} begins several ids: {told}{more}; write more of it", component="client")
    return matching[0].id


def whole_ids(client: Client, texts: Iterable[str]) -> list[str]:
    """Return each id in full, before anything is done with one of them."""
    return [whole_id(client, text) for text in texts]


def _beginning(client: Client, digits: str) -> list[InvocationResult]:
    """Return invocations whose number, without zeros before it, is ``digits``; else those that it begins."""
    number = int(digits, 16)
    if digits.startswith("0"):
        rest = 4 * (DIGITS - len(digits))
        return _in_range(client, number << rest, (number + 1) << rest)
    if exact := _in_range(client, number, number + 1):
        return exact
    found: list[InvocationResult] = []
    for more in range(1, DIGITS - len(digits) + 1):
        wider = number << (4 * more)
        found += _in_range(client, wider, wider + (1 << (4 * more)))
        if len(found) > CANDIDATES:
            break
    return found


def _in_range(client: Client, low: int, high: int) -> list[InvocationResult]:
    """Return the newest few invocations with a number from ``low`` to before ``high``."""
    cursor = f"{high:011x}-{0:012x}" if high < 16**DIGITS else None
    listed = client.list(before=cursor, limit=CANDIDATES + 1)
    return [each for each in listed if low <= int(each.id.partition("-")[0], 16) < high]
