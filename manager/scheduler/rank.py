"""Rank by expected duration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, islice
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from manager.action import Action, Elasticity, Kin, UnitSet
from manager.scheduler.policy import PoolView, RunningSet, RunningView

Floats = NDArray[np.float64]

#: Seconds taken for an action of which nothing is known: it only has to be positive.
UNKNOWN_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """How durations scale with units for one unit set and elasticity, relative to one unit."""

    #: Admissible counts, ascending.
    counts: Floats
    #: duration(count) / T_ori = 1 / (E(count) * count).
    factors: Floats
    #: factors * counts: the unit-seconds of one second of T_ori.
    areas: Floats
    #: Seconds of T_ori done a second, count / (count * factor).
    speeds: Floats
    #: Speed gained by each count over the one before it, made falling (a share never skips a unit).
    gains: Floats
    #: Whether each further unit saves no more than the one before it (and the counts are consecutive).
    convex: bool
    #: The counts once more, as integers to answer with.
    units: tuple[int, ...]


@lru_cache(maxsize=8192)
def shape_of(unit_set: UnitSet, elasticity: Elasticity | None) -> Shape:
    """The shape of a unit set under an elasticity (values, compared as such); rigid where there is none."""
    units = tuple(unit_set)
    counts = np.array(units, dtype=np.float64)
    if elasticity is None:
        factors = np.ones(len(units))
    else:
        factors = np.array([1.0 / (elasticity.efficiency(count) * count) for count in units])
    return Shape(
        counts=counts,
        factors=factors,
        areas=factors * counts,
        speeds=1.0 / factors,
        gains=np.minimum.accumulate(np.diff(1.0 / factors)),
        convex=_convex(units, factors),
        units=units,
    )


def key_units(action: Action, kind: str) -> UnitSet | None:
    """The units of pool kind ``kind`` that are a choice: the key's unit set; another resource counts at its minimum."""
    cost = action.cost.get(kind)
    if cost is None or action.key == kind:
        return cost
    return UnitSet.fixed(cost.minimum)


def is_elastic(action: Action, kind: str) -> bool:
    """Whether more units of ``kind`` make the action faster, as far as is known."""
    return (
        action.key == kind
        and action.elasticity is not None
        and action.t_ori_s is not None
        and action.cost[kind].elastic
    )


def is_malleable(action: Action, kind: str) -> bool:
    """Whether its units of ``kind`` can be changed one by one while it runs."""
    return action.malleable and action.key == kind and action.cost[kind].choices is None


def kind_of(pool: str) -> str:
    """The resource kind of a pool: ``cpu:node0`` is ``cpu``, ``google_search`` is itself."""
    return pool.partition(":")[0]


def _convex(units: tuple[int, ...], factors: Floats) -> bool:
    if units[-1] - units[0] + 1 != len(units):
        return False
    gains = factors[:-1] - factors[1:]
    return bool(np.all(gains[:-1] - gains[1:] >= -1e-12))


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
        while batch := self._first(number + AHEAD)[number:]:
            yield from batch
            number += len(batch)

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


#: By how many turns of others a task's short actions may be ahead of its own.
TURNS_AHEAD = 32


@dataclass(frozen=True, slots=True)
class Ranked:
    """What waits, in two queues, each in FCFS order."""

    #: Rigid and short: they start before the others.
    first: Sequence[Action]
    #: The others; drawn, because a decision rarely looks at many.
    rest: Sequence[Action]


class _Parted:
    """What waits, in two parts: each action is looked at once, and none before somebody asks for one of either part."""

    def __init__(self, waiting: Iterable[Action], is_short: Callable[[Action], bool]) -> None:
        self._left = iter(waiting)
        self._is_short = is_short
        self._short: list[Action] = []
        self._others: list[Action] = []

    def short(self) -> Iterator[Action]:
        return self._part(self._short)

    def others(self) -> Iterator[Action]:
        return self._part(self._others)

    def _part(self, part: list[Action]) -> Iterator[Action]:
        """Yield a part, reading on where it ends."""
        number = 0
        while True:
            while number < len(part):
                yield part[number]
                number += 1
            for action in self._left:
                into = self._short if self._is_short(action) else self._others
                into.append(action)
                if into is part:
                    break
            else:
                return


def ranked(
    view: PoolView, waiting: Sequence[Action], kind: str, short_s: float, age_max_s: float, overtaken: float = math.inf
) -> Ranked:
    """Split what waits; nothing overtakes once the oldest that could be overtaken has waited ``age_max_s``.

    Nor once it has waited ``overtaken`` times what it is expected to take.

    If several tasks wait, short ones of a task that has none of the next `TURNS_AHEAD` turns pass nobody.
    """
    now_s, rigid, turns = view.now_s, view.rigid, view.turns
    if turns is None and view.longest_s <= short_s:
        return Ranked(waiting, ())
    if rigid is None and turns is None:  # nothing but their length tells them apart
        parted = _Parted(waiting, partial(is_short, kind=kind, short_s=short_s))
        oldest = next(parted.others(), None)
        if oldest is not None and now_s - oldest.submitted_s >= min(age_max_s, overtaken * _expected_s(oldest)):
            return Ranked((), waiting)
        return Ranked(Drawn(parted.short), Drawn(parted.others))
    oldest = next((action for action in waiting if not is_short(action, kind, short_s)), None)
    if oldest is not None and now_s - oldest.submitted_s >= min(age_max_s, overtaken * _expected_s(oldest)):
        return Ranked((), waiting)
    soon = None if turns is None else frozenset(islice(turns(), TURNS_AHEAD))

    def passes(action: Action) -> bool:
        return is_short(action, kind, short_s) and (soon is None or action.task in soon)

    among = waiting if rigid is None else rigid
    return Ranked(
        Drawn(lambda: (action for action in among if passes(action))),
        Drawn(lambda: (action for action in waiting if not passes(action))),
    )


def leader(first: Sequence[Action], next_: Action | None, kind: str) -> Action | None:
    """Return the oldest action that waits if its minimum is more than one unit: it starts first, or others backfill.

    ``next_`` is the first of the others. Single units need no such care: the next one that comes free is theirs.
    """
    if next_ is not None and first and first[0].submitted_s < next_.submitted_s:
        next_ = None
    oldest = next_ or (first[0] if first else None)
    return oldest if oldest is not None and oldest.cost[kind].minimum > 1 else None


def shortest_first(
    waiting: Sequence[Action], now_s: float, age_max_s: float, turns: Callable[[], Iterator[str]] | None = None
) -> list[Action]:
    """Within a task the shortest first, by what is known of them, in the ``turns`` of the tasks.

    Without ``turns`` they are those of ``waiting``.

    Of kin whose durations are learned the one that came first goes first: that an estimate was lower when one of them
    was submitted says nothing of it. Keys of which nothing was learned are kin, by their function. What has waited for
    ``age_max_s`` goes before everything else, in FCFS order.
    """
    aged = [action for action in waiting if now_s - action.submitted_s >= age_max_s]
    young = [action for action in waiting if now_s - action.submitted_s < age_max_s] if aged else waiting
    by_task: dict[str, list[Action]] = {}
    for action in young:
        by_task.setdefault(action.task, []).append(action)
    seconds = _seconds_by_now(young)
    shortest = {task: iter(sorted(actions, key=seconds)) for task, actions in by_task.items()}
    order = (action.task for action in young)
    if turns is None or len(by_task) < 2:
        return [*aged, *(next(shortest[task]) for task in order)]
    # Some turns are of actions that wait for something else, and some may be beyond what is shown.
    mine = chain(_while_several(turns(), {task: len(actions) for task, actions in by_task.items()}), order)
    nexts = (next(shortest[task], None) for task in mine)
    return [*aged, *islice((action for action in nexts if action is not None), len(young))]


def _while_several(turns: Iterator[str], left: dict[str, int]) -> Iterator[str]:
    """Yield the turns of tasks that have actions ``left``, until one task alone has: a long backlog is not read on."""
    for task in turns:
        if task in left:
            yield task
            left[task] -= 1
            if not left[task]:
                del left[task]
                if len(left) < 2:
                    return


def age_bound_s(view: PoolView, waiting: Sequence[Action], age_max_s: float) -> float:
    """Return the seconds after which nothing overtakes an action; ``age_max_s`` at most.

    They are those in which the pool works off all that waits: first come first served would start it no later. An
    action that has waited for less than one takes, in the mean of what runs and waits, is not old in a short queue.
    """
    waiting_s = [_expected_s(action) for action in waiting]
    known = [*waiting_s, *(_expected_s(one.action) for one in view.running)]
    if not known:
        return age_max_s
    work_s = sum(waiting_s) / len(waiting_s) * max(view.backlog, len(waiting_s)) if waiting_s else 0.0
    return min(age_max_s, max(sum(known) / len(known), work_s / view.total))


def _seconds_by_now(waiting: Sequence[Action]) -> Callable[[Action], float]:
    """Return what to expect of each: of learned kin by what was known when the last of them was submitted."""
    newest: dict[Kin, Action] = {}
    for action in waiting:
        if action.line is not None:
            kin = _kin(action, "" if action.borrows else action.profile_key)
            before = newest.setdefault(kin, action)
            if before.submitted_s < action.submitted_s:
                newest[kin] = action

    def seconds(action: Action) -> float:
        if action.line is None and action.t_ori_s is not None:
            return action.t_ori_s
        # One that borrowed when it was submitted, or of which nothing was known, may have kin of its own key by now.
        kin = newest.get(_kin(action, action.profile_key)) or newest.get(_kin(action, ""))
        return _expected_s(action) if kin is None or kin.line is None else kin.line.at(action.size)

    return seconds


def _kin(action: Action, key: str) -> Kin:
    """Return whose durations tell of its own, of those with ``key``: those of any size, where it has one."""
    return Kin(action.function, key, None if action.size is None else 0.0)


def _expected_s(action: Action) -> float:
    return UNKNOWN_S if action.t_ori_s is None else action.t_ori_s


def is_short(action: Action, kind: str, short_s: float) -> bool:
    """Whether it has no choice of units and is short; one of unknown duration is taken to be short."""
    return action.key != kind and (action.t_ori_s is None or action.t_ori_s <= short_s)


def head_room(running: Sequence[RunningView], kind: str, scale: float) -> int:
    """Units kept from elastic actions for the short ones that arrive before the next end.

    Arrivals of rigid actions scatter around what runs of them by its square root.
    """
    rigid = RunningSet.of(running, kind).rigid
    return math.ceil(scale * math.sqrt(rigid)) if rigid else 0
