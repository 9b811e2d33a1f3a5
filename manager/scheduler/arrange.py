"""DPArrange: units for the first actions of a queue that minimise the sum of durations, for every prefix at once.

The paper's appendix asks for exactly n units; here a prefix takes at most what is there (docs/SCHEDULING.md R6). One
forward pass holds the optimum of every prefix, so that evicting the last action is a table read (10.13).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from manager.scheduler.operator import Operator

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ArrangeItem:
    """An action as DPArrange sees it: seconds at each admissible count."""

    units: tuple[int, ...]
    seconds: Floats
    #: Consecutive counts and shrinking gains: the greedy path is exact for it.
    convex: bool = False


class Arrangement(Protocol):
    """The optimum of every prefix of the items."""

    @property
    def totals(self) -> Sequence[float]:
        """``totals[t]``: least sum of seconds of the first t items; infinite where they do not fit together."""
        ...

    def units(self, kept: int) -> tuple[int, ...]:
        """Counts of the first ``kept`` items in that optimum."""
        ...


def arrange(items: Sequence[ArrangeItem], operator: Operator) -> Arrangement:
    """The arrangement by the cheapest exact way: greedy for interchangeable units and convex durations, else the DP."""
    if operator.interchangeable and all(item.convex for item in items):
        return GreedyArrangement(items, operator.capacity[0])
    return TableArrangement(items, operator)


class TableArrangement:
    """The dynamic program: one row a prefix, one cell a demand; O(n m |S|) as array shifts."""

    def __init__(self, items: Sequence[ArrangeItem], operator: Operator) -> None:
        self._items = items
        self._demands = [[operator.demand(units) for units in item.units] for item in items]
        box = tuple(bound + 1 for bound in operator.capacity)
        self._rows = [np.zeros(box)]
        for item, demands in zip(items, self._demands, strict=True):
            self._rows.append(_advance(self._rows[-1], item, demands))
        self.totals: list[float] = [float(row.flat[-1]) for row in self._rows]

    def units(self, kept: int) -> tuple[int, ...]:
        """Walk back from the full capacity; each step finds the choice that made the cell."""
        assert np.isfinite(self.totals[kept]), f"the first {kept} items do not fit together"
        cell = tuple(bound - 1 for bound in self._rows[0].shape)
        chosen: list[int] = []
        for index in range(kept, 0, -1):
            choice, cell = self._back(index, cell)
            chosen.append(self._items[index - 1].units[choice])
        return tuple(reversed(chosen))

    def _back(self, index: int, cell: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        before, item = self._rows[index - 1], self._items[index - 1]
        best, best_choice, best_cell = np.inf, -1, cell
        for choice, demand in enumerate(self._demands[index - 1]):
            previous = tuple(have - take for have, take in zip(cell, demand, strict=True))
            if min(previous) < 0:
                continue
            total = float(before[previous]) + float(item.seconds[choice])
            if total < best:
                best, best_choice, best_cell = total, choice, previous
        return best_choice, best_cell


class GreedyArrangement:
    """Marginal gains: the largest savings first; exact where every item is convex (docs/SCHEDULING.md R13)."""

    def __init__(self, items: Sequence[ArrangeItem], capacity: int) -> None:
        self._items = items
        self._capacity = capacity
        self.totals: list[float] = [0.0]
        gains: list[float] = []
        at_minimum_s, saved_s, spare = 0.0, 0.0, capacity
        for item in items:
            at_minimum_s += float(item.seconds[0])
            spare -= item.units[0]
            for gain in _gains(item):
                heapq.heappush(gains, gain)
                saved_s += gain
            while len(gains) > max(0, spare):
                saved_s -= heapq.heappop(gains)
            self.totals.append(at_minimum_s - saved_s if spare >= 0 else np.inf)

    def units(self, kept: int) -> tuple[int, ...]:
        items = self._items[:kept]
        chosen = [item.units[0] for item in items]
        spare = self._capacity - sum(chosen)
        assert spare >= 0, f"the first {kept} items do not fit together"
        gains = [(-gain, index) for index, item in enumerate(items) for gain in _gains(item)]
        for _, index in heapq.nsmallest(spare, gains):
            chosen[index] += 1
        return tuple(chosen)


def _gains(item: ArrangeItem) -> list[float]:
    """Seconds saved by each further unit, until one saves nothing."""
    saved = (item.seconds[:-1] - item.seconds[1:]).tolist()
    return [gain for gain in saved if gain > 0.0]


def _advance(before: Floats, item: ArrangeItem, demands: Sequence[tuple[int, ...]]) -> Floats:
    """The next prefix's row: every choice is the same shift of the whole table."""
    after = np.full(before.shape, np.inf)
    for seconds, demand in zip(item.seconds, demands, strict=True):
        if any(take >= bound for take, bound in zip(demand, before.shape, strict=True)):
            continue
        target = tuple(slice(take, None) for take in demand)
        source = tuple(slice(None, bound - take) for take, bound in zip(demand, before.shape, strict=True))
        np.minimum(after[target], before[source] + seconds, out=after[target])
    return after
