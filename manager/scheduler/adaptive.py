"""The adaptive policy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from manager.action import Action, Amdahl, Elasticity, UnitSet
from manager.function import Setting
from manager.scheduler.policy import (
    CrowdView,
    Decision,
    PoolView,
    PromptPolicy,
    ResizeChoice,
    RunningSet,
    RunningView,
    Start,
)
from manager.scheduler.price import BACKFILL_TRIES, Backfill, PricePolicy, cheapest, expected_s, release_s
from manager.scheduler.rank import (
    UNKNOWN_S,
    Floats,
    Ranked,
    head_room,
    is_malleable,
    kind_of,
    leader,
    ranked,
    shape_of,
)

Counts = NDArray[np.int64]

#: Taken for an action whose elasticity is not known: any one concave speed gives equal shares.
ASSUMED: Elasticity = Amdahl(0.05)


@dataclass(frozen=True, slots=True, eq=False)
class ShareMember:
    """One that shares: its least and most units, and the speed gained by each unit between them, falling."""

    least: int
    most: int
    gains: Floats


@lru_cache(maxsize=8192)
def member(unit_set: UnitSet, elasticity: Elasticity | None, most: int, least_gain: float = 0.0) -> ShareMember:
    """The claim of an elastic action that can use at most ``most`` units, each of which adds ``least_gain`` or more."""
    shape = shape_of(unit_set, elasticity or ASSUMED)
    most = max(unit_set.minimum, min(unit_set.maximum, most))
    if least_gain > 0.0 and unit_set.choices is None:
        most = min(most, unit_set.minimum + int((shape.gains >= least_gain).sum()))
    return ShareMember(unit_set.minimum, most, shape.gains[: most - unit_set.minimum])


def water_fill(members: Sequence[ShareMember], units: int, weights: Sequence[float]) -> list[int]:
    """Units for each member, at least its least; the rest goes by the largest weighted gains, earlier ones first.

    The sum is at most ``units`` wherever the least ones fit.
    """
    spare = units - sum(one.least for one in members)
    if spare <= 0 or not members:
        return [one.least for one in members]
    if spare >= sum(one.most - one.least for one in members):
        return [one.most if one.gains.size == 0 or one.gains[-1] > 0.0 else _useful(one) for one in members]
    sizes = np.array([one.most - one.least for one in members])
    gains = np.concatenate([one.gains for one in members]) * np.repeat(weights, sizes)
    ends = np.cumsum(sizes)
    level = float(np.partition(gains, gains.size - spare)[gains.size - spare])
    level = max(level, 0.0)
    shares = _counts(gains > level, ends)
    if level > 0.0:
        shares += _remainder(_counts(gains == level, ends), spare - int(shares.sum()))
    return [one.least + int(more) for one, more in zip(members, shares, strict=True)]


def _useful(one: ShareMember) -> int:
    return one.least + int((one.gains > 0.0).sum())


def _counts(mask: NDArray[np.bool_], ends: Counts) -> Counts:
    """How many of each member's gains are marked."""
    sums = np.concatenate(([0], np.cumsum(mask)))[np.concatenate(([0], ends))]
    return np.asarray(np.diff(sums), dtype=np.int64)


def _remainder(ties: Counts, left: int) -> Counts:
    """Units for gains exactly at the water level, in order, as far as they go."""
    before = np.cumsum(ties) - ties
    share: Counts = np.minimum(np.maximum(left - before, 0), ties)
    return share


# Turns: who starts now, where one task waits whose work is known (docs/DECISIONS.md).
#
# To start everybody at one core slows those that are nearly done. So an action starts once its useful width fits beside
# those that run with less work left, at theirs, and the others at their minimum. What has waited for most of the time
# in which the pool works off all that is there starts first.

#: Steps of the price, by powers of two, for which the useful width is kept: a part of the decisions is found there.
PRICE_STEPS = 4


@lru_cache(maxsize=8192)
def useful_width(unit_set: UnitSet, elasticity: Elasticity | None, most: int, step: int) -> int:
    """The count of at most ``most`` units that is cheapest at the price of a step."""
    return cheapest(shape_of(unit_set, elasticity or ASSUMED), 1.0, 2.0 ** (step / PRICE_STEPS), most)[0]


class SuiteTurns:
    """The room for one more, in a pool where some run."""

    def __init__(self, kind: str, running: Iterable[RunningView], units: int, price: float) -> None:
        """``units`` are what they and those that start have together; ``price``: of a unit, as in ``cheapest``."""
        self._kind = kind
        self._step = round(PRICE_STEPS * math.log2(price))
        #: Work left, and the units that are useful above the minimum.
        self._members: list[tuple[float, int]] = []
        self._free = units
        for one in running:
            self._put(
                left_s(one.action, one.remaining), one.action.cost[kind].minimum, self._width(one.action, one.workers)
            )

    @property
    def work_s(self) -> float:
        """Return the work that is left of all that are counted."""
        return sum(seconds for seconds, _ in self._members)

    def add(self, action: Action) -> None:
        """Count one that starts whatever room there is."""
        units = action.cost[self._kind]
        self._put(left_s(action, 1.0), units.minimum, self._width(action, units.maximum))

    def take(self, action: Action) -> bool:
        """Count one if it fits; return whether it does. They are asked about in ascending order of their work."""
        units, work_s = action.cost[self._kind], left_s(action, 1.0)
        wide = self._width(action, units.maximum)
        if self._members and wide > self._free - sum(more for seconds, more in self._members if seconds <= work_s):
            return False
        self._put(work_s, units.minimum, wide)
        return True

    def _put(self, work_s: float, least: int, wide: int) -> None:
        self._members.append((work_s, wide - least))
        self._free -= least

    def _width(self, action: Action, most: int) -> int:
        units = action.cost[self._kind]
        return useful_width(units, action.elasticity, most, self._step) if action.key == self._kind else units.minimum


def left_s(action: Action, remaining: float | None) -> float:
    """The work that is left of an action on one unit, by estimate."""
    return (action.t_ori_s or UNKNOWN_S) * (1.0 if remaining is None else remaining)


# The policy ``adaptive``: cores move between running elastic actions (docs/SCHEDULING.md 1.4).
#
# Malleable actions share what the others leave, by water-filling on marginal speed; each holds at least its minimum, is
# started with as many workers as it may usefully grow to, and is resized only where it pays. Pools whose units are not
# interchangeable, and those where nothing can be resized, are left to ``price``.


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptivePolicy(PromptPolicy):
    """Starts malleable actions in turn, and shares cores among those that run; everything else by price."""

    name: str = "adaptive"
    #: More workers than its share are started for a long action, as long as they cost at most this part of its work.
    worker_budget: Annotated[float, Setting("part of a long action's work that more workers may cost", ge=0, le=1)] = (
        0.02
    )
    #: Core-seconds that a worker costs, where the pool's configuration does not say.
    worker_cost_s: float = 0.3
    #: So an idle node does not lend what is of no use.
    least_gain: Annotated[float, Setting("speed that one more unit must add, of what the first has", ge=0, le=1)] = 0.05
    #: 0: all alike; below 0 much work left counts more, which ends a batch sooner (`manager.assembly.STEP_BIAS`).
    bias: Annotated[float, Setting("exponent by which little work left counts more in the shares", ge=-4, le=8)] = 0.2
    grow_ratio: Annotated[float, Setting("a running action grows at this multiple of what it holds", ge=1, le=1e3)] = (
        1.15
    )
    #: A joining action is given this part of its share by shrinking others; more only from free units.
    join_share: Annotated[float, Setting("part of a joining action's share that others shrink for", ge=0, le=1)] = 0.9
    short_s: Annotated[float, Setting("a rigid action at most this long goes before the others", ge=0)] = 5.0
    age_max_s: Annotated[float, Setting("an action that has waited this long is overtaken no more", ge=0)] = 120.0
    head_room: Annotated[float, Setting("free units kept from elastic actions for short ones", ge=0, le=1e3)] = 0.5
    #: Of the time in which the pool works off all that waits and runs.
    crowd_age: Annotated[float, Setting("who has waited so many times that long goes before the shortest", ge=0)] = 0.7
    crowd_price: Annotated[float, Setting("price of a unit for the turns, by elastic actions a unit", gt=0, le=1e6)] = (
        2.0
    )
    #: For devices and for pools without malleable actions.
    price: PricePolicy = field(default_factory=PricePolicy)

    def starts_in_order(self, longest_s: float) -> bool:
        return self.price.starts_in_order(longest_s)

    def decide(self, view: PoolView) -> Decision:
        """Start everything that fits at its minimum, making room by shrinking; grow into what is left."""
        kind = kind_of(view.name)
        if view.chunks is not None:
            return self.price.decide(view)
        running = RunningSet.of(view.running, kind)
        malleable = [r for r in running.malleable.values() if is_malleable(r.action, kind)]
        if not malleable and not view.has_elastic:
            return self.price.decide(view)
        waiting = view.eligible or [candidate.action for candidate in view.candidates]
        if not malleable and not any(is_malleable(action, kind) for action in waiting):
            return self.price.decide(view)
        if not waiting and view.free + view.reserved == 0:
            return Decision()
        order = ranked(view, waiting, kind, self.short_s, self.age_max_s)
        kept_back = head_room(running, kind, self.head_room)
        return _Pass(self, view, kind, malleable, kept_back).run(order)


class _Pass:
    """One decision: who joins, what each one's share is, and which moves are worth making."""

    def __init__(
        self, policy: AdaptivePolicy, view: PoolView, kind: str, malleable: Sequence[RunningView], kept_back: int
    ) -> None:
        self._policy = policy
        self._view = view
        self._free = view.free + view.reserved
        self._kind = kind
        self._malleable = malleable
        self._kept_back = kept_back

    def run(self, order: Ranked) -> Decision:
        held = sum(r.units for r in self._malleable)
        # What can be had at most: the free units, and what running ones hold above their minimum.
        reach = self._free + held - sum(self._least(r.action) for r in self._malleable)
        first, rest, reach = self._joining(order, reach)
        joiners = [action for action in rest if is_malleable(action, self._kind)]
        rigid = first + [action for action in rest if not is_malleable(action, self._kind)]
        rigid_units = sum(self._least(action) for action in rigid)
        shares = self._shares(joiners, self._free + held - rigid_units - self._kept_back, reach)
        starts = [Start(action_id=action.id, units=self._least(action)) for action in rigid]
        joined, shrinks, spare = self._join(joiners, shares, self._free - rigid_units)
        growths, wake_s = self._grow(shares, spare - self._kept_back)
        return Decision(starts=starts + joined, resizes=shrinks + growths, wake_s=wake_s)

    def _least(self, action: Action) -> int:
        return action.cost[self._kind].minimum

    def _joining(self, order: Ranked, reach: int) -> tuple[list[Action], list[Action], int]:
        """The short ones and the others that start now at their minimum, and what can be had beside them.

        The first wide one goes before everything else; while it has to wait, what starts makes it wait no longer.
        """
        if reach == 0:
            return [], [], 0
        head = self._lead(order)
        heads: list[Action] = []
        backfill = None
        if head is not None and self._least(head) <= reach:
            heads, reach = [head], reach - self._least(head)
        elif head is not None:
            backfill = Backfill.behind(self._least(head), reach, [self._release(one) for one in self._view.running])
            reach = self._free  # to shrink others would make them end later than expected
        first, reach = self._fitting(order.first, reach, head, backfill)
        in_order: Iterable[Action] = order.rest
        if reach and self._view.crowd is not None and self._policy.bias >= 0.0:
            in_order = self._in_turn(in_order, self._view.crowd, [*heads, *first])
        rest, reach = self._fitting(in_order, reach, head, backfill)
        return first, heads + rest, reach

    def _lead(self, order: Ranked) -> Action | None:
        """Return the first wide one of the others, until the oldest of them has waited too long: then it, if wide."""
        ahead = order.rest[:BACKFILL_TRIES]
        if ahead and self._view.now_s - ahead[0].submitted_s < self._policy.age_max_s:
            wide = next((action for action in ahead if self._least(action) > 1), None)
            return wide or leader(order.first, None, self._kind)
        return leader(order.first, next(iter(ahead), None), self._kind)

    def _in_turn(self, in_order: Iterable[Action], crowd: CrowdView, starting: Sequence[Action]) -> Iterator[Action]:
        """Yield those that have their turn now, beside what is ``starting``: the aged in order, then the shortest."""
        policy, view, running = self._policy, self._view, self._malleable
        price = policy.crowd_price * max(1, len(running) + crowd.elastic) / view.total
        units = self._free + sum(one.units for one in running) - self._kept_back
        turns = SuiteTurns(self._kind, running, units, price)
        work_s = crowd.work_s() + turns.work_s
        for action in starting:
            turns.add(action)
        told = {action.id for action in starting}
        aged_s = view.now_s - policy.crowd_age * work_s / view.total
        for action in takewhile(lambda action: action.submitted_s <= aged_s, in_order):
            if action.id not in told:
                told.add(action.id)
                turns.add(action)
                yield action
        for action in crowd.shortest():
            if action.id not in told:
                if not turns.take(action):
                    return
                yield action

    def _release(self, running: RunningView) -> tuple[float, int]:
        """Seconds until an action ends, and what it gives back then: at any time it can be shrunk to its minimum."""
        shrinks = running.action.malleable and is_malleable(running.action, self._kind)
        return release_s(running), self._least(running.action) if shrinks else running.units

    def _fitting(
        self, waiting: Iterable[Action], reach: int, head: Action | None, backfill: Backfill | None
    ) -> tuple[list[Action], int]:
        """The actions that fit together at their minimum, up to the first that does not; ``head`` is left out."""
        fitting: list[Action] = []
        misses = 0
        for action in waiting:
            least = self._least(action)
            if action is head:
                continue
            if least <= reach and (backfill is None or backfill.take(least, expected_s(action, least))):
                reach -= least
                fitting.append(action)
                continue
            misses += 1
            if backfill is None or reach == 0 or misses > BACKFILL_TRIES:
                break
        return fitting, reach

    def _shares(self, joiners: Sequence[Action], units: int, reach: int) -> list[int]:
        """The share of each running malleable action, then of each joiner."""
        if reach == 0:  # minima take all that there is
            return [self._least(action) for action in (*(r.action for r in self._malleable), *joiners)]
        kind, gain = self._kind, self._policy.least_gain
        members = [member(r.action.cost[kind], r.action.elasticity, r.workers, gain) for r in self._malleable]
        members += [self._member(action) for action in joiners]
        weights = [self._weight(r.action, r.remaining) for r in self._malleable]
        weights += [self._weight(action, 1.0) for action in joiners]
        return water_fill(members, units, weights)

    def _member(self, action: Action) -> ShareMember:
        units = action.cost[self._kind]
        return member(units, action.elasticity, units.maximum, self._policy.least_gain)

    def _weight(self, action: Action, remaining: float | None) -> float:
        """How much a gain of speed counts: more for an action with little work left, where that is known."""
        if self._policy.bias == 0.0 or action.t_ori_s is None:
            return 1.0
        return float(max(1.0, action.t_ori_s * (remaining or 1.0)) ** -self._policy.bias)

    def _join(
        self, joiners: Sequence[Action], shares: Sequence[int], free: int
    ) -> tuple[list[Start], list[ResizeChoice], int]:
        """Start the joiners, each with part of its share at least; what is missing is shrunk from running ones."""
        wanted = list(shares[len(self._malleable) :])
        entitled = [
            max(self._least(action), math.ceil(self._policy.join_share * share))
            for action, share in zip(joiners, wanted, strict=True)
        ]
        shrinks, freed = self._shrink(shares, sum(entitled) - free)
        spare = free + freed - sum(entitled)
        starts: list[Start] = []
        for action, share, units in zip(joiners, wanted, entitled, strict=True):
            more = max(0, min(share - units, spare - self._kept_back))
            spare -= more
            starts.append(Start(action_id=action.id, units=units + more, workers=self._workers(action, share)))
        return starts, shrinks, spare

    def _workers(self, action: Action, share: int) -> int:
        """Workers to start: what it may usefully grow to when others end, as far as its work is known to be worth it.

        The runtime starts as many and no more, so this is also the most that it is ever given.
        """
        cost_s = self._view.worker_cost_s or self._policy.worker_cost_s
        affordable = int(self._policy.worker_budget * (action.t_ori_s or 0.0) / cost_s)
        return max(share, min(self._member(action).most, affordable))

    def _shrink(self, shares: Sequence[int], missing: int) -> tuple[list[ResizeChoice], int]:
        """Take ``missing`` units back from those that hold most above their share."""
        if missing <= 0:
            return [], 0
        above = [(r.units - share, r) for r, share in zip(self._malleable, shares, strict=False) if r.units > share]
        above.sort(key=lambda pair: -pair[0])
        shrinks: list[ResizeChoice] = []
        freed = 0
        for excess, running in above:
            if freed >= missing:
                break
            shrinks.append(ResizeChoice(action_id=running.action.id, units=running.units - excess))
            freed += excess
        assert freed >= missing, f"{missing} units were promised, {freed} can be shrunk"
        return shrinks, freed

    def _grow(self, shares: Sequence[int], spare: int) -> tuple[list[ResizeChoice], float | None]:
        """Give free units to those furthest below their share, where it is worth a resize."""
        if spare <= 0:
            return [], None
        ratio, now_s = self._policy.grow_ratio, self._view.now_s
        below = [
            (share / r.units, share, r)
            for r, share in zip(self._malleable, shares, strict=False)
            if share >= ratio * r.units
        ]
        below.sort(key=lambda triple: -triple[0])
        growths: list[ResizeChoice] = []
        damped_s = [r.resize_after_s for _, _, r in below if r.resize_after_s > now_s]
        for _, share, running in below:
            more = min(spare, share - running.units)
            if running.resize_after_s > now_s or running.units + more < ratio * running.units:
                continue
            spare -= more
            growths.append(ResizeChoice(action_id=running.action.id, units=running.units + more))
        return growths, min(damped_s, default=None)
