"""The size of a call: one number of its input that its duration may hang on."""

from __future__ import annotations

import math
from typing import NamedTuple

#: A size beyond this is none: no memory holds as much.
SIZE_MAX = 1e15
#: Lists within lists that are looked into.
_DEPTH_MAX = 8
#: How far beyond the sizes seen a line is followed.
_BEYOND = 2.0


class SizeLine(NamedTuple):
    """T(x) = fixed_s + per_unit_s x, with one unit, and the sizes that it was learned from."""

    fixed_s: float
    per_unit_s: float = 0.0
    least: float = 0.0
    most: float = 0.0

    def within(self, size: float) -> float:
        """Return the size, or the nearest up to which the line is followed."""
        return min(max(size, self.least / _BEYOND), self.most * _BEYOND, SIZE_MAX)

    def at(self, size: float | None) -> float:
        """Return the seconds that a call of ``size`` is expected to take; None where none has a size."""
        return self.fixed_s if size is None else self.fixed_s + self.per_unit_s * self.within(size)


def size_at(value: object, path: str) -> float | None:
    """Return the size of what lies at a dotted ``path`` of an input; None if there is nothing that has one.

    A number is its own size, a text has its characters and a list its elements, or those of the lists that are its
    elements. Beyond a list the path goes into each element, and their sizes are added: ``messages.content``. Neither a
    negative number nor one above `SIZE_MAX` is a size.
    """
    size = _size(value, path.split("."), 0)
    return size if size is not None and 0 <= size <= SIZE_MAX else None


def _size(value: object, names: list[str], depth: int) -> float | None:
    if isinstance(value, list) and depth < _DEPTH_MAX:
        if not names and not any(isinstance(each, list) for each in value):
            return float(len(value))
        sizes = [_size(each, names, depth + 1) for each in value]
        return (
            math.fsum(size for size in sizes if size is not None) if any(size is not None for size in sizes) else None
        )
    if names:
        return _size(value[names[0]], names[1:], depth) if isinstance(value, dict) and names[0] in value else None
    if isinstance(value, str):
        return float(len(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(min(max(value, -SIZE_MAX), 2 * SIZE_MAX))  # their sum must be a number too
    return None
