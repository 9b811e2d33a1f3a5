"""The policy ``price``: units are chosen once, by what they cost the actions behind (docs/SCHEDULING.md 1.3)."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated

from manager.action import Action
from manager.scheduler.backfill import BACKFILL_TRIES, Backfill, expected_s, release_s
from manager.scheduler.device_price import DevicePrice
from manager.scheduler.durations import UNKNOWN_S, Shape, is_elastic, kind_of, shape_of
from manager.scheduler.policy import Decision, Hold, PoolView, PromptPolicy, RunningView, Start
from manager.scheduler.rank import head_room, leader, ranked
from manager.setting import Setting

#: Ends of running actions that the option to wait looks at, soonest first.
ENDS_MAX = 64
#: Running actions that the rate of elastic ones is estimated from, and the least duration that counts.
RATE_SAMPLE = 128
SHORTEST_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PricePolicy(PromptPolicy):
    """A unit-second costs ``lambda``; each action takes the cheapest count, now or when more units are free.

    lambda = (c / M) (behind + a r u^4), with M units in all, ``behind`` elastic actions waiting behind this
    one, r elastic arrivals a second, and u the fraction of the pool in use.
    """

    name: str = "price"
    c: Annotated[float, Setting("the scale of the price of a unit-second", gt=0, le=1e6)] = 4.0
    least_price: Annotated[float, Setting("the price of a unit on idle cores, of what a wait costs", ge=0, le=1)] = (
        0.005
    )
    a_s: Annotated[float, Setting("seconds of arrivals to come that count, for cores", ge=0, le=86400)] = 8.0
    device_a_s: Annotated[float, Setting("the same for devices", ge=0, le=86400)] = 0.2
    #: What is taken wide on devices stays wide: a copy is warm at one width, and the next to come find it.
    device_factor: Annotated[float, Setting("how many times dearer a unit-second is on devices", gt=0, le=1e6)] = 4.0
    short_s: Annotated[float, Setting("a rigid action at most this long goes before the others", ge=0)] = 5.0
    age_max_s: Annotated[float, Setting("an action that has waited this long is overtaken no more", ge=0)] = 120.0
    device_age: Annotated[float, Setting("on devices, the same in mean durations; the lesser holds", gt=0)] = 5.0
    #: Times the square root of those running.
    head_room: Annotated[float, Setting("free units kept from elastic actions for short ones", ge=0, le=1e3)] = 1.0

    def decide(self, view: PoolView) -> Decision:
        """Short rigid actions first, then the others in FCFS order, each at its cheapest count."""
        if view.chunks is not None:
            return DevicePrice(
                c=self.c * self.device_factor, a_s=self.device_a_s, age_max_s=self.age_max_s, age_ratio=self.device_age
            ).decide(view)
        waiting = view.eligible or [candidate.action for candidate in view.candidates]
        if not waiting:
            return Decision()
        if view.free + view.reserved == 0:
            return Decision()
        kind = kind_of(view.name)
        order = ranked(waiting, kind, view.now_s, self.short_s, self.age_max_s, view.rigid, view.turns)
        pass_ = _Pass(view, view.running, kind, self, order.first)
        kept_back = head_room(view.running, kind, self.head_room)
        return pass_.run(order.first, order.rest, kept_back)


class _Pass:
    """One decision over interchangeable units."""

    def __init__(
        self, view: PoolView, running: Sequence[RunningView], kind: str, policy: PricePolicy, first: Sequence[Action]
    ) -> None:
        self._view = view
        self._kind = kind
        self._free = view.free + view.reserved
        self._first = first
        #: Actions behind the one that is looked at; counted when an elastic one asks.
        self._behind: int | None = None
        self._scale = policy.c / view.total
        self._least_price = policy.least_price
        self._age_max_s = policy.age_max_s
        self._running = running
        self._a_s = policy.a_s
        #: The elastic ones to come; estimated when one that waits asks.
        self._coming: float | None = None
        self._limits: dict[str, int] | None = None
        self._ends: ExpectedEnds | None = None
        self._backfill: Backfill | None = None
        self._starts: list[Start] = []
        self._holds: list[Hold] = []

    def run(self, first: Sequence[Action], rest: Iterable[Action], kept_back: int) -> Decision:
        others = iter(rest)
        next_ = next(others, None)
        head = leader(first, next_, self._kind)
        if head is not None:
            self._lead(head, kept_back)
        in_order = others if next_ is None else chain((next_,), others)
        self._each(first, head, self._start_least)
        if not self._holds:  # the oldest waits on purpose, and the others behind it
            self._each(in_order, head, lambda action: self._consider(action, kept_back))
        return Decision(starts=self._starts, holds=self._holds)

    def _lead(self, head: Action, kept_back: int) -> None:
        """Start the oldest before the short ones that came later, or keep them from making it wait longer."""
        if not self._consider(head, kept_back) and not self._holds:
            ends = [(release_s(one), one.units) for one in self._running]
            self._backfill = Backfill.behind(head.cost[self._kind].minimum, self._free, ends)

    def _each(self, waiting: Iterable[Action], head: Action | None, start: Callable[[Action], bool]) -> None:
        """Start actions in order up to the first that has to wait; beside a backfill, look at some more."""
        misses = 0
        for action in waiting:
            if action is head or start(action):
                continue
            misses += 1
            if self._backfill is None or self._free == 0 or misses > BACKFILL_TRIES:
                break

    def _consider(self, action: Action, kept_back: int) -> bool:
        """Start it or hold it; False where those behind it have to wait as well."""
        unit_set = action.cost[self._kind]
        # An idle pool keeps nothing back, and an action that has waited too long waits for nothing better.
        now = self._free == self._view.total and not self._starts
        now = now or self._view.now_s - action.submitted_s >= self._age_max_s
        spare = self._free if now else self._free - kept_back
        if not is_elastic(action, self._kind):
            return self._start(action, unit_set.minimum)
        if spare < unit_set.minimum:
            return False
        self._behind = (self._view.backlog - len(self._first) if self._behind is None else self._behind) - 1
        spare = min(spare, self._limit(action.id, spare))
        shape = shape_of(unit_set, action.elasticity)
        t_ori_s = action.t_ori_s or UNKNOWN_S
        if self._coming is None:
            self._coming = self._a_s * elastic_rate(self._running, self._kind) * self._view.utilisation**4
        price = max(self._least_price, self._scale * (max(0, self._behind) + self._coming))
        units, cost_s = cheapest(shape, t_ori_s, price, spare)
        wait_s = self._better_wait(shape, t_ori_s, price, spare, cost_s)
        if wait_s is None or now:
            return self._start(action, units)
        until_s = self._view.now_s + wait_s
        self._holds.append(Hold(action_id=action.id, waits_for=f"more than {spare} units", until_s=until_s))
        return False

    def _limit(self, action_id: str, spare: int) -> int:
        """The most units that a candidate may take; only elastic actions ask."""
        if self._limits is None:
            self._limits = {candidate.action.id: candidate.limit for candidate in self._view.candidates}
        return self._limits.get(action_id, spare)

    def _better_wait(self, shape: Shape, t_ori_s: float, price: float, spare: int, now_cost_s: float) -> float | None:
        """Seconds after which, with the units that are free then, it costs less in all than a start now."""
        most = shape.units[-1]
        wanted, floor_s = cheapest(shape, t_ori_s, price, most)
        if wanted <= spare or floor_s >= now_cost_s:
            return None
        if self._ends is None:
            self._ends = ExpectedEnds(self._running)
        return self._ends.better(shape, t_ori_s, price, spare, now_cost_s, floor_s)

    def _start_least(self, action: Action) -> bool:
        return self._start(action, action.cost[self._kind].minimum)

    def _start(self, action: Action, units: int) -> bool:
        if units > self._free:
            return False
        if self._backfill is not None and not self._backfill.take(units, expected_s(action, units)):
            return False
        self._free -= units
        self._starts.append(Start(action.id, units))
        return True


class ExpectedEnds:
    """When running actions end by estimate, and how many units they give back."""

    def __init__(self, running: Sequence[RunningView]) -> None:
        ends = [(r.ends_in_s, r.units) for r in running if r.ends_in_s is not None]
        self._ends = heapq.nsmallest(ENDS_MAX, ends)

    def better(
        self, shape: Shape, t_ori_s: float, price: float, spare: int, now_cost_s: float, floor_s: float
    ) -> float | None:
        """The wait that makes an action cheapest, None where starting now is."""
        best_s, best_cost_s = None, now_cost_s
        for ends_in_s, units in self._ends:
            if ends_in_s + floor_s >= best_cost_s:
                break
            spare += units
            cost_s = ends_in_s + cheapest(shape, t_ori_s, price, spare)[1]
            if cost_s < best_cost_s:
                best_s, best_cost_s = ends_in_s, cost_s
        return best_s


def cheapest(shape: Shape, t_ori_s: float, price: float, most: int) -> tuple[int, float]:
    """The admissible count of at most ``most`` units with the least T(k) (1 + price k), and that cost in seconds."""
    costs = shape.factors + price * shape.areas
    if most < shape.units[-1]:
        costs = costs[: bisect_right(shape.units, most)]
    index = int(costs.argmin())
    return shape.units[index], t_ori_s * float(costs[index])


def elastic_rate(running: Sequence[RunningView], kind: str) -> float:
    """Elastic actions a second through the pool, by those that run (each stands for 1 / duration), from a sample."""
    sample = running[:RATE_SAMPLE]
    durations = [
        r.action.duration_s(r.units) for r in sample if r.action.key == kind and r.action.elasticity is not None
    ]
    rate = sum(1.0 / max(SHORTEST_S, duration_s) for duration_s in durations if duration_s is not None)
    return rate * len(running) / len(sample) if sample else 0.0
