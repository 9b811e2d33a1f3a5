"""Algorithm 1 of the paper with DPArrange."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
from numpy.typing import NDArray

from manager.action import Action, Chunk, UnitSet, power_at_least
from manager.function import Setting
from manager.scheduler.policy import ChunkView, Decision, Hold, PoolView, PromptPolicy, RunningView, Start, WaitingView
from manager.scheduler.rank import UNKNOWN_S, is_elastic, key_units, kind_of, shape_of


class CompletionHeap:
    """Seconds from now at which executing actions end.

    It holds times and no units, as the paper has it: an action of 32 units that ends admits one action
    (docs/SCHEDULING.md R8, a known bias of the paper's policy).
    """

    def __init__(self, ends_in_s: Iterable[float]) -> None:
        self._ends = list(ends_in_s)
        heapq.heapify(self._ends)

    def estimate(self, first_s: Sequence[float], rest_s: Sequence[float]) -> float:
        """Sum of the ACTs of the waiting actions, each started when one executing action ends, in order.

        ``first_s`` holds the first one's durations at its d-th smallest admissible counts, d = 1 .. depth
        (docs/SCHEDULING.md R5); the best d counts. ``rest_s`` holds the durations of the others at their minimum. The
        popped time is the wait; a heap that runs empty means no wait (docs/SCHEDULING.md R4).
        """
        if not first_s:
            return 0.0
        return min(self._run([duration, *rest_s]) for duration in first_s)

    def _run(self, durations_s: Sequence[float]) -> float:
        heap = self._ends.copy()
        total = 0.0
        for duration_s in durations_s:
            end_s = duration_s
            if heap:
                end_s = heap[0] + duration_s
                heapq.heapreplace(heap, end_s)
            else:
                heap.append(end_s)
            total += end_s
        return total


class Operator(Protocol):
    """A topology as a box of demand vectors.

    The paper's four primitives become three facts. START is the zero vector, END is ``capacity``; PREV(j, k)
    is ``j - demand(k)``, the same shift for every state, so a whole table moves at once; ISVALID is being
    inside the box (an infinity in the table says the rest, docs/SCHEDULING.md R7).
    """

    @property
    def capacity(self) -> tuple[int, ...]:
        """The largest demand that fits, one number an axis."""
        ...

    @property
    def interchangeable(self) -> bool:
        """Whether any of the units serve any request: then alone may units be handed out one by one."""
        ...

    def demand(self, units: int) -> tuple[int, ...]:
        """What ``units`` take, along the axes of ``capacity``; a set of requests fits iff its sum is inside."""
        ...


@dataclass(frozen=True, slots=True)
class BasicOperator:
    """Interchangeable units (cores, quota): one axis."""

    units: int

    @property
    def capacity(self) -> tuple[int, ...]:
        return (self.units,)

    @property
    def interchangeable(self) -> bool:
        return True

    def demand(self, units: int) -> tuple[int, ...]:
        return (units,)


# DPArrange: units for the first actions of a queue that minimise the sum of durations, for every prefix at once.
#
# The paper's appendix asks for exactly n units; here a prefix takes at most what is there (docs/SCHEDULING.md R6). One
# forward pass holds the optimum of every prefix, so that evicting the last action is a table read (10.13).

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


def item_of(action: Action, kind: str) -> ArrangeItem:
    """An action for DPArrange; a rigid one is a one-element unit set (docs/SCHEDULING.md R2)."""
    units = key_units(action, kind)
    assert units is not None, f"action {action.id} does not use {kind}"
    elasticity = action.elasticity
    if elasticity is None or not is_elastic(action, kind):
        rigid = shape_of(UnitSet.fixed(units.minimum), None)
        return ArrangeItem(rigid.units, rigid.factors * (action.duration_s(units.minimum) or UNKNOWN_S), convex=True)
    shape = shape_of(units, elasticity)
    return ArrangeItem(shape.units, shape.factors * (action.t_ori_s or UNKNOWN_S), convex=shape.convex)


def ends_in_s(running: Sequence[RunningView]) -> list[float]:
    """When running actions end; one whose end is unknown is taken to need as long again as it has run."""
    known = [action.ends_in_s for action in running if action.ends_in_s is not None]
    guess = sum(known) / len(known) if known else UNKNOWN_S
    return [guess if action.ends_in_s is None else max(0.0, action.ends_in_s) for action in running]


class Objective:
    """getApproximatedObjective for every number of kept candidates; the exact part is a table read."""

    def __init__(
        self,
        arrangement: Arrangement,
        items: Sequence[ArrangeItem],
        waiting: Sequence[ArrangeItem],
        running_s: Sequence[float],
        depth: int,
    ) -> None:
        self._arrangement = arrangement
        self._items = items
        #: The queue behind the candidates.
        self._waiting = waiting
        self._running_s = running_s
        self._depth = depth
        self._minimum_s = [float(item.seconds[0]) for item in (*items, *waiting)]

    def of(self, kept: int) -> float:
        """Sum of ACTs in seconds from now, over the whole queue, with the first ``kept`` candidates started."""
        exact_s = self._arrangement.totals[kept]
        heap = CompletionHeap([*self._running_s, *self._durations_s(kept)])
        return exact_s + heap.estimate(self._first_s(kept), self._minimum_s[kept + 1 :])

    def _durations_s(self, kept: int) -> list[float]:
        chosen = self._arrangement.units(kept)
        return [
            float(item.seconds[item.units.index(units)]) for item, units in zip(self._items[:kept], chosen, strict=True)
        ]

    def _first_s(self, kept: int) -> list[float]:
        """Durations of the first action left behind at its smallest counts, as deep as asked for."""
        if kept == len(self._minimum_s):
            return []
        behind = self._items[kept] if kept < len(self._items) else self._waiting[kept - len(self._items)]
        return [float(seconds) for seconds in behind.seconds[: self._depth]]


@dataclass(frozen=True, slots=True)
class ChunkOperator:
    """Free chunks as an operator.

    A set of power-of-two requests fits into buddy chunks iff for every level L the requests of at least L,
    counted in chunks of L, are no more than the free chunks of at least L, counted the same way: with nodes
    of eight devices, four nested inequalities, one axis each.
    """

    #: Sizes of the free chunks, merged as far as possible.
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, free: Iterable[Chunk]) -> ChunkOperator:
        return cls(tuple(chunk.size for chunk in free))

    @property
    def levels(self) -> tuple[int, ...]:
        """The sizes that a request can have: 1, 2, 4 ... up to the largest free chunk."""
        largest = max(self.sizes, default=1)
        return tuple(1 << level for level in range(largest.bit_length()))

    @property
    def capacity(self) -> tuple[int, ...]:
        return tuple(sum(size // level for size in self.sizes if size >= level) for level in self.levels)

    @property
    def interchangeable(self) -> bool:
        """Never: devices that are free apart do not make a chunk, and then they have one axis as cores do."""
        return False

    def demand(self, units: int) -> tuple[int, ...]:
        """A request that is no power of two takes the next one; one above every free chunk never fits."""
        size = power_at_least(units)
        levels = self.levels
        if size > levels[-1]:
            return tuple(count + 1 for count in self.capacity)
        return tuple(size // level if level <= size else 0 for level in levels)


def take(free: list[Chunk], chunk: Chunk) -> None:
    """Remove ``chunk`` from the free chunks in place, splitting the one that contains it into buddies."""
    whole = next(one for one in free if one.contains(chunk))
    free.remove(whole)
    free.extend(whole.without(chunk))


def best_fit(free: Iterable[Chunk], size: int) -> Chunk | None:
    """Return a place for ``size`` devices in the smallest free chunk that holds it, the lowest such; None if none."""
    fitting = [chunk for chunk in free if chunk.size >= size]
    if not fitting:
        return None
    return Chunk(min(fitting, key=lambda chunk: (chunk.size, chunk.start)).start, size)


def warm_fit(free: Iterable[Chunk], size: int, warm: Iterable[Chunk]) -> Chunk | None:
    """Return the place among ``warm`` chunks of exactly ``size`` that is wholly free, in the smallest free chunk."""
    chunks = list(free)
    fits = [(outer.size, place) for place in warm if place.size == size for outer in chunks if outer.contains(place)]
    return min(fits)[1] if fits else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperPolicy(PromptPolicy):
    """Starts a prefix of the candidates with the units that minimise the estimated sum of ACTs."""

    name: str = "paper"
    #: The paper sets 2.
    depth: Annotated[int, Setting("counts of the first action left behind that the estimate tries", ge=1, le=64)] = 2
    #: 1: at least one candidate starts, and what is left behind is taken to start with the units that are free now.
    greedy: Annotated[int, Setting("1: at least one action starts; 0: none may be the better choice", ge=0, le=1)] = 0
    #: Those behind add the same to every choice.
    estimate_window: Annotated[int, Setting("waiting actions that the estimate looks at", ge=0, le=65536)] = 256

    def starts_in_order(self, longest_s: float) -> bool:
        return True

    def decide(self, view: PoolView) -> Decision:
        """Keep candidates while evicting the last one does not lower the objective (docs/SCHEDULING.md R3)."""
        candidates = view.candidates
        if not candidates:
            return Decision()
        kind = kind_of(view.name)
        whole = [item_of(candidate.action, kind) for candidate in candidates]
        items = [_limited(item, candidate.limit) for item, candidate in zip(whole, candidates, strict=True)]
        if not any(is_elastic(candidate.action, kind) for candidate in candidates):
            return _decision(view, [item.units[0] for item in items])
        arrangement = arrange(items, _operator(view))
        kept = self._evict_while_better(view, arrangement, items if self.greedy else whole, kind)
        return _decision(view, arrangement.units(kept))

    def _evict_while_better(
        self, view: PoolView, arrangement: Arrangement, items: Sequence[ArrangeItem], kind: str
    ) -> int:
        """Number of candidates after the eviction loop; it stops on the first plateau (docs/SCHEDULING.md R10).

        None may be left only where something runs, so that its end asks again.
        """
        chosen = {candidate.action.id for candidate in view.candidates}
        behind = [action for action in view.queued if action.id not in chosen][: self.estimate_window]
        waiting = [item_of(action, kind) for action in behind]
        objective = Objective(arrangement, items, waiting, ends_in_s(view.running), self.depth)
        kept, best = len(items), objective.of(len(items))
        least = 1 if self.greedy or not view.running else 0
        while kept > least:
            fewer = objective.of(kept - 1)
            if fewer >= best:
                break
            kept, best = kept - 1, fewer
        return kept


def _limited(item: ArrangeItem, limit: int) -> ArrangeItem:
    """The item with the counts that the candidate may take now."""
    allowed = sum(1 for units in item.units if units <= limit)
    return (
        item if allowed == len(item.units) else ArrangeItem(item.units[:allowed], item.seconds[:allowed], item.convex)
    )


def _operator(view: PoolView) -> Operator:
    return BasicOperator(view.free) if view.chunks is None else ChunkOperator.of(view.chunks.open)


def _decision(view: PoolView, units: Sequence[int]) -> Decision:
    kept = view.candidates[: len(units)]
    starts = (
        [Start(action_id=waiting.action.id, units=count) for waiting, count in zip(kept, units, strict=True)]
        if view.chunks is None
        else placed(view.chunks, kept, units)
    )
    holds = [
        Hold(action_id=waiting.action.id, waits_for="evicted: the estimate is better if the others take its units")
        for waiting in view.candidates[len(units) :]
    ]
    return Decision(starts=starts, holds=holds)


def placed(chunks: ChunkView, candidates: Sequence[WaitingView], units: Sequence[int]) -> list[Start]:
    """Chunks for the chosen sizes: the largest first, warm places preferred, else the smallest chunk that fits."""
    free = list(chunks.open)
    starts: dict[str, Start] = {}
    order = sorted(range(len(units)), key=lambda index: (-units[index], index))
    for index in order:
        action, size = candidates[index].action, units[index]
        warm, places = chunks.resident.get(action.service or "", ()), chunks.allowed(action, free)
        place = warm_fit(places, size, warm) or best_fit(places, size)
        assert place is not None or len(places) < len(free), f"{size} devices of {free} were promised to {action.id}"
        if place is not None:  # else those of the nodes that are right for it are fewer: the core finds what is left
            take(free, place)
        starts[action.id] = Start(action_id=action.id, units=size, chunk=place)
    return [starts[candidate.action.id] for candidate in candidates[: len(units)]]
