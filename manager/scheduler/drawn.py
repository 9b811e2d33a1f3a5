"""A sequence that is made as far as somebody looks: most decisions read a few actions of a long queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TypeVar, overload

#: Items that are made at once by an iteration.
AHEAD = 16

Item = TypeVar("Item")


class Drawn(Sequence[Item]):
    """What ``source`` yields, each item made once, when it is first looked at."""

    __slots__ = ("_items", "_left", "_source")

    def __init__(self, source: Callable[[], Iterator[Item]]) -> None:
        self._source = source
        self._items: list[Item] = []
        self._left: Iterator[Item] | None = None

    def __bool__(self) -> bool:
        return bool(self._first(1))

    def __len__(self) -> int:
        return len(self._first(None))

    def __iter__(self) -> Iterator[Item]:
        number = 0
        while made := self._first(number + AHEAD)[number:]:
            yield from made
            number += len(made)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        end = index.stop if isinstance(index, slice) else index + 1
        return self._first(end if end is not None and end > 0 else None)[index]

    def _first(self, count: int | None) -> list[Item]:
        """Make the first ``count`` items, or all; return what is made."""
        if self._left is None:
            self._left = self._source()
        missing = None if count is None else count - len(self._items)
        if missing is None or missing > 0:
            self._items += islice(self._left, missing)
        return self._items
