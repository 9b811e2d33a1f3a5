"""The nouns of one copy: what was copied, and what was left out and why."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

#: Files, directories and links of one copy: an agent may have made any number of them.
ENTRIES_MAX = 200_000
#: Permissions that a copy keeps: to run with the rights of its owner is nothing that a copy gives.
PERMISSIONS = 0o777


class CopiedFile(NamedTuple):
    """One file or link that was copied: its path here, and its path in the sandbox."""

    here: Path
    there: str


class LeftOut(NamedTuple):
    """What was not copied: its path on the side it comes from, and why."""

    path: str
    why: str


def text_of(path: Path | str) -> str:
    """Return a path as text that can be printed and sent: a byte that is no UTF-8 is written out as ``\\xff``."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def is_sendable(path: str) -> bool:
    """Return whether a path can stand in a request, which is UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
