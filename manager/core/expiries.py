"""Expiries: the instants at which something is over unless something else happens before, soonest first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Expiries(Generic[Item]):
    """A heap from which nothing is deleted at once: what is stale goes when it comes up, or in bulk."""

    def __init__(self, is_stale: Callable[[Item, float], bool]) -> None:
        """``is_stale`` says of an item and its instant whether that instant means nothing any more."""
        self._is_stale = is_stale
        #: Instant, order, a number that is never the same (items need not compare), item.
        self._heap: list[tuple[float, int, int, Item]] = []
        self._added = 0

    def add(self, expiry_s: float, seq: int, item: Item) -> None:
        """Note that ``item`` expires at ``expiry_s``; ``seq`` orders what expires at the same instant."""
        self._added += 1
        heapq.heappush(self._heap, (expiry_s, seq, self._added, item))

    def next_s(self) -> float | None:
        """Return the instant at which the next item expires; None if there is none."""
        while self._heap and self._is_stale(self._heap[0][-1], self._heap[0][0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now_s: float, living: int) -> list[Item]:
        """Remove and return what has expired; ``living`` is about how many items are not stale."""
        due: list[Item] = []
        while self._heap and self._heap[0][0] <= now_s:
            expiry_s, _, _, item = heapq.heappop(self._heap)
            if not self._is_stale(item, expiry_s):
                due.append(item)
        if len(self._heap) > 64 + 4 * living:
            self._heap = [entry for entry in self._heap if not self._is_stale(entry[-1], entry[0])]
            heapq.heapify(self._heap)
        return due
