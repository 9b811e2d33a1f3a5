"""The adaptive policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
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
from manager.scheduler.rank import Floats, Ranked, head_room, is_malleable, is_short, kind_of, leader, ranked, shape_of

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


# Turns in a crowd: who starts, and how wide, while more waits than can run (docs/DECISIONS.md).
#
# Where one task waits, the shortest goes first, by its expected work. It starts at a width that pays for the many
# behind it, on free units. What has waited as long as the pool takes to work off all that waits goes before everything
# else, at its minimum: first come first served would not have started it sooner.


class CrowdPass:
    """One decision in a crowd. Units come from the free ones, and for some from those above running ones' minima."""

    def __init__(
        self,
        view: PoolView,
        crowd: CrowdView,
        kind: str,
        running: RunningSet,
        *,
        short_s: float,
        workers: Callable[[Action, int], int],
    ) -> None:
        """``workers`` says how many to start for an action that begins with so many units and may grow later."""
        self._view = view
        self._crowd = crowd
        self._kind = kind
        self._short_s = short_s
        self._workers = workers
        self._running = running
        self._free = view.free + view.reserved
        #: Units that shrinking can still give, and what it was decided to leave each that is shrunk.
        self._slack = running.slack
        self._shrunk: dict[str, int] = {}
        self._starts: dict[str, Start] = {}
        self._limits: dict[str, int] | None = None

    def lead(self, head: Action) -> bool:
        """Start an action before all others; return whether there was room."""
        return self._start_least(head)

    def run(self, *, age: float, price: float) -> Decision:
        """Start the aged ones, then the others in turn.

        ``age``: times the seconds in which the pool works off all that waits. ``price``: of a unit, as in
        ``price.cheapest``, times the elastic actions that wait for each unit of the pool.
        """
        if self._free + self._slack > 0:
            self._start_aged(age * self._crowd.work_s() / self._view.total)
            self._take_turns(price * self._crowd.elastic / self._view.total)
        shrinks = [ResizeChoice(action_id=holder, units=units) for holder, units in self._shrunk.items()]
        return Decision(starts=list(self._starts.values()), resizes=shrinks)

    def _start_aged(self, aged_s: float) -> None:
        """Start those that have waited for so long, in order of service."""
        for action in self._view.eligible:
            if self._view.now_s - action.submitted_s < aged_s:
                return
            if not self._started(action) and not self._start_least(action):
                return

    def _take_turns(self, unit_price: float) -> None:
        """Start the shortest while there is room; nothing overtakes the first that has to wait."""
        promised = (candidate.action for candidate in self._view.candidates)  # some may wait for other things as well
        for action in chain(self._crowd.shortest(), promised):
            if self._started(action):
                continue
            if is_short(action, self._kind, self._short_s):
                done = self._start_least(action)
            else:
                done = self._start_wide(action, unit_price)
            if not done or self._free + self._slack == 0:
                return

    def _started(self, action: Action) -> bool:
        return action.id in self._starts

    def _start_least(self, action: Action) -> bool:
        """Start at the minimum, shrinking running ones if need be; return whether there was room."""
        least = action.cost[self._kind].minimum
        if least > self._free + self._slack:
            return False
        self._shrink(least - self._free)
        grows = is_malleable(action, self._kind)
        self._add(action, least, self._workers(action, least) if grows else 0)
        return True

    def _start_wide(self, action: Action, unit_price: float) -> bool:
        """Start on free units alone, as wide as pays; return whether there was room."""
        units = action.cost[self._kind]
        if units.minimum > self._free:
            return False
        wide = units.minimum
        if action.key == self._kind and action.elasticity is not None:
            wide, _ = cheapest(shape_of(units, action.elasticity), 1.0, unit_price, self._most(action))
        self._add(action, wide, wide if is_malleable(action, self._kind) else 0)
        return True

    def _most(self, action: Action) -> int:
        """Return the most units it may take now: a candidate may be kept to less by its task's cap."""
        if self._limits is None:
            self._limits = {candidate.action.id: candidate.limit for candidate in self._view.candidates}
        return min(self._free, self._limits.get(action.id, self._free))

    def _add(self, action: Action, units: int, workers: int) -> None:
        self._free -= units
        self._starts[action.id] = Start(action_id=action.id, units=units, workers=workers)

    def _shrink(self, missing: int) -> None:
        """Free ``missing`` units or more, from those that hold most above their minimum."""
        if missing <= 0:
            return
        for holder, units, unit_set in self._widest():
            # Where not every count is admissible, the minimum is.
            taken = units - unit_set.minimum if unit_set.choices else min(missing, units - unit_set.minimum)
            self._shrunk[holder] = units - taken
            self._free += taken
            self._slack -= taken
            missing -= taken
            if missing <= 0:
                return
        raise AssertionError(f"{missing} units were counted as slack that nobody holds")

    def _widest(self) -> list[tuple[str, int, UnitSet]]:
        """Return the running ones that can be shrunk with their units, those with most above the minimum first."""
        widest = []
        for one in self._running.malleable.values():
            units, unit_set = self._shrunk.get(one.action.id, one.units), one.action.cost[self._kind]
            if units > unit_set.minimum:
                widest.append((one.action.id, units, unit_set))
        widest.sort(key=lambda each: each[2].minimum - each[1])
        return widest


# The policy ``adaptive``: every elastic action runs, and cores move between running ones (docs/SCHEDULING.md 1.4).
#
# Malleable actions share what the others leave, by water-filling on marginal speed; each holds at least its minimum, is
# started with as many workers as it may usefully grow to, and is resized only where it pays. Pools whose units are not
# interchangeable, and those where nothing can be resized, are left to ``price``.


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptivePolicy(PromptPolicy):
    """Shares cores among running malleable actions; everything else by price."""

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
    crowd: Annotated[int, Setting("elastic actions that wait from which on the shortest go first", ge=1, le=10**9)] = 14
    #: Of the time in which the pool works off all that waits.
    crowd_age: Annotated[float, Setting("in a crowd, who has waited so many times that long goes first", ge=0)] = 1.5
    crowd_price: Annotated[float, Setting("price of a unit in a crowd, for each that waits a unit", ge=0)] = 1.5
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
        pass_ = _Pass(self, view, kind, malleable, kept_back)
        if view.crowd is not None and view.crowd.elastic >= self.crowd:
            decision = pass_.run_crowd(order, running, view.crowd)
            if decision is not None:
                return decision
        return pass_.run(order)


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

    def run_crowd(self, order: Ranked, running: RunningSet, crowd: CrowdView) -> Decision | None:
        """The decision in a crowd; None while the oldest is wide and waits for its room."""
        turns = CrowdPass(self._view, crowd, self._kind, running, short_s=self._policy.short_s, workers=self._workers)
        head = leader(order.first, next(iter(order.rest), None), self._kind)
        if head is not None and not turns.lead(head):
            return None
        return turns.run(age=self._policy.crowd_age, price=self._policy.crowd_price)

    def _least(self, action: Action) -> int:
        return action.cost[self._kind].minimum

    def _joining(self, order: Ranked, reach: int) -> tuple[list[Action], list[Action], int]:
        """The short ones and the others that start now at their minimum, and what can be had beside them.

        The oldest goes before everything else if it is wide; while it has to wait, what starts makes it wait no longer.
        """
        others = iter(order.rest)
        next_ = next(others, None)
        head = leader(order.first, next_, self._kind)
        heads: list[Action] = []
        backfill = None
        if head is not None and self._least(head) <= reach:
            heads, reach = [head], reach - self._least(head)
        elif head is not None:
            backfill = Backfill.behind(self._least(head), reach, [self._release(one) for one in self._view.running])
            reach = self._free  # to shrink others would make them end later than expected
        first, reach = self._fitting(order.first, reach, head, backfill)
        in_order = others if next_ is None else chain((next_,), others)
        rest, reach = self._fitting(in_order, reach, head, backfill)
        return first, heads + rest, reach

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
