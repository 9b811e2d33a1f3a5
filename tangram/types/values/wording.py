"""Patterns of texts in words: what a value that does not fit should have been."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from msgspec import Meta, ValidationError

#: By pattern, as it was declared.
_WORDS: dict[str, str] = {}
_MISMATCH = re.compile(r"Expected `str` matching regex (?P<pattern>'.*'|\".*\")")


def declare(pattern: str, words: str) -> None:
    """Say what fits a pattern, in words that go on after "must be"."""
    _WORDS[pattern] = words


def mismatch(pattern: str) -> str:
    """Return what a text that does not fit a pattern is told."""
    words = _WORDS.get(pattern)
    return f"must match {pattern}" if words is None else f"must be {words}"


def worded(pattern: str, words: str, *, examples: Sequence[str] = (), description: str | None = None) -> Meta:
    """Return the constraint of a text of the wire, whose errors say ``words`` (`explained`)."""
    declare(pattern, words)
    return Meta(pattern=pattern, description=description, examples=list(examples) or None)


def explained(error: ValidationError) -> tuple[str, str]:
    """Return what an error says, a pattern in its words, and the path of what it is about (``.a[0]``)."""
    said, _, place = str(error).partition(" - at `")
    found = _MISMATCH.fullmatch(said)
    return said if found is None else mismatch(ast.literal_eval(found["pattern"])), place.removesuffix(
        "`"
    ).removeprefix("$")
