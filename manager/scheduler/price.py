"""What a core or a device is worth to those who wait, and backfill."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated

from manager.action import Action, Chunk, Work, mates_of, power_at_least
from manager.function import Setting
from manager.scheduler.paper import take, warm_fit
from manager.scheduler.policy import ChunkView, Decision, Hold, PoolView, PromptPolicy, RunningView, Start
from manager.scheduler.rank import (
    UNKNOWN_S,
    Shape,
    age_bound_s,
    head_room,
    is_elastic,
    key_units,
    kind_of,
    leader,
    ranked,
    shape_of,
    shortest_first,
)

#: Another copy of a service is taken to be busy at least this often when it is needed.
LEAST_BUSY = 0.5


@dataclass(frozen=True, slots=True)
class DeviceOption:
    """One way to serve an action: what it costs, where, and after what wait."""

    cost_s: float
    units: int
    chunk: Chunk
    #: None where the chunk is free now; 0.0 is a busy chunk whose action is overdue.
    wait_s: float | None
    #: Seconds that the chunk is taken, from its start on.
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrice:
    """Each action takes the cheapest of: a warm free chunk, a cold start on a free one, a busy warm one later.

    While others wait behind it, the last is an answer to a cold start alone: who has a warm free chunk does not leave
    it idle for a wider one, on the word of an estimate. A cold start costs its restore, and those that will follow for
    what it evicts, less those that its copy will save.
    A restore is shared with those that wait for the service, as far as the copy will serve them.
    What waits for the same service joins its batch, so a start is priced with the batch's duration: beside that of one
    alone a restore would seem dear, and under load all would queue for wide warm chunks, which waste devices.
    Shorter actions of a task take the turns of its longer ones, within an ageing bound.
    """

    c: float = 16.0
    a_s: float = 0.2
    age_max_s: float = 120.0
    #: Actions considered in one decision; the others are asked about at the next event.
    window: int = 256

    def decide(self, view: PoolView) -> Decision:
        assert view.chunks is not None
        waiting = view.eligible or [candidate.action for candidate in view.candidates]
        if not waiting or not view.chunks.free:
            return Decision()
        age_s = age_bound_s(view, waiting[: self.window], self.age_max_s)
        order = shortest_first(waiting, view.now_s, age_s, view.turns)
        return _Pass(self, view, view.chunks, age_s).run(order[: self.window])


class _Pass:
    """One decision over the chunks of a pool."""

    def __init__(self, policy: DevicePrice, view: PoolView, chunks: ChunkView, age_s: float) -> None:
        self._view = view
        self._kind = kind_of(view.name)
        self._chunks = chunks
        self._free = list(chunks.free)
        self._warm = dict(chunks.resident)
        self._worth = _Worth(chunks, view.utilisation)
        #: Seconds until a device is free, promises of this decision included; absent where that is not known. An
        #: overdue action is expected to take as long again as it has, so that nobody waits for ever for one that hangs.
        self._free_s = {device: 0.0 for chunk in chunks.free for device in chunk.devices}
        for running in view.running:
            if running.chunk is not None and running.ends_in_s is not None:
                self._occupy(running.chunk, running.ends_in_s or view.now_s - running.started_s)
        #: Every device of the pool that is free or serves an action.
        self._devices = {*self._free_s, *(device for one in view.running if one.chunk for device in one.chunk.devices)}
        self._age_s = age_s
        self._scale = policy.c / view.total
        self._coming = policy.a_s * view.arrival_rate * view.utilisation**4
        self._behind = view.backlog
        waiting = view.eligible or [candidate.action for candidate in view.candidates]
        self._mates = _Mates(waiting, chunks)
        #: Actions behind the one that is looked at, by service.
        self._alike = Counter(action.service for action in waiting)
        self._limits = {candidate.action.id: candidate.limit for candidate in view.candidates}

    def run(self, waiting: Sequence[Action]) -> Decision:
        starts: list[Start] = []
        holds: list[Hold] = []
        for action in waiting:
            batch = self._mates.take(action)
            self._behind -= len(batch)
            self._alike[action.service] -= len(batch)
            option = self._cheapest(action, batch) if batch else None
            if option is None:
                if batch and self._view.now_s - action.submitted_s >= self._age_s:
                    self._reserve(action)
                continue
            wait_s = option.wait_s or 0.0
            if option.wait_s is None:
                self._start(action, option.chunk)
                starts.append(Start(action_id=action.id, units=option.units, chunk=option.chunk))
            else:
                until_s = self._view.now_s + wait_s
                waits_for = f"devices {option.chunk.start}..{option.chunk.end - 1}, warm for {action.service}"
                holds += [Hold(action_id=one.id, waits_for=waits_for, until_s=until_s) for one in batch]
            self._occupy(option.chunk, wait_s + option.busy_s)
        return Decision(starts=starts, holds=holds)

    def _reserve(self, action: Action) -> None:
        """Hold back the place that will be free first for an action that has waited too long to be passed over.

        Without it narrow actions take each device of a wide one as it comes free, for as long as there are any.
        """
        units = key_units(action, self._kind)
        assert units is not None, f"action {action.id} does not use {self._kind}"
        size = power_at_least(units.minimum)
        waits = {
            place: max(self._free_s.get(device, math.inf) for device in place.devices) for place in self._places(size)
        }
        allowed = self._chunks.allowed(action, sorted(waits))
        place = min(allowed, key=lambda place: (waits[place], place), default=None)
        if place is None:
            return
        for chunk in [chunk for chunk in self._free if chunk.meets(place)]:
            take(self._free, place if chunk.contains(place) else chunk)
        self._occupy(place, waits[place] + (action.duration_s(units.minimum) or UNKNOWN_S))

    def _places(self, size: int) -> set[Chunk]:
        """Every chunk of ``size`` devices, all of which are there."""
        starts = {device // size * size for device in self._devices}
        return {Chunk(start, size) for start in starts if self._devices.issuperset(range(start, start + size))}

    def _start(self, action: Action, chunk: Chunk) -> None:
        """Take the chunk, where the service will be warm from now on."""
        take(self._free, chunk)
        warm = self._warm.get(action.service or "", ())
        if action.service and chunk not in warm:
            self._warm[action.service] = (*warm, chunk)

    def _occupy(self, chunk: Chunk, seconds: float) -> None:
        for device in chunk.devices:
            self._free_s[device] = seconds

    def _cheapest(self, action: Action, batch: Sequence[Action]) -> DeviceOption | None:
        alone_s = [one.t_ori_s or UNKNOWN_S for one in batch]
        together = Work.of(alone_s).seconds(action.batch_marginal) / alone_s[0]
        # n members and those behind wait for the batch: n T + price units T in all, so that each bears an n-th.
        price = self._scale * (max(0, self._behind) + self._coming) / len(batch)
        limit = self._limits.get(action.id, self._view.total)
        durations, copies = self._durations(action), self._warm.get(action.service or "", ())
        free = self._chunks.allowed(action, self._free)
        warm = {units: warm_fit(free, units, copies) for units, _ in durations if units <= limit}
        may_wait = self._behind <= 0 or not any(warm.values())
        best: DeviceOption | None = None
        # Wide ones first: they are mostly the cheapest, and the others need not be looked at closely then.
        for units, lone_s in reversed(durations):
            duration_s = lone_s * together
            floor_s = duration_s * (1 + price * units)
            if best is not None and floor_s >= best.cost_s:
                continue
            now = self._now(action, len(batch), units, duration_s, price, free, warm[units]) if units <= limit else None
            later = self._later(action, units, duration_s, price) if may_wait else None
            for option in (now, later):
                if option is not None and (best is None or option.cost_s < best.cost_s):
                    best = option
        return best

    def _now(
        self,
        action: Action,
        size: int,
        units: int,
        duration_s: float,
        price: float,
        free: Sequence[Chunk],
        warm: Chunk | None,
    ) -> DeviceOption | None:
        """Run a batch of ``size`` on the free chunk of ``units`` that is ``warm``, else where a restore costs least."""
        scale = 1 + price * units
        if warm is not None:
            return DeviceOption(duration_s * scale, units, warm, None, duration_s)
        place, restore_s, cost_s = self._cold_place(free, action.service or "", units)
        if place is None:
            return None
        if cost_s > 0:
            cost_s /= 1 + self._alike[action.service] / size * units / self._view.total
        return DeviceOption((duration_s + cost_s) * scale, units, place, None, duration_s + restore_s)

    def _later(self, action: Action, units: int, duration_s: float, price: float) -> DeviceOption | None:
        """Wait for the first warm chunk of ``units`` of which something is busy."""
        alike = [chunk for chunk in self._warm.get(action.service or "", ()) if chunk.size == units]
        warm = self._chunks.allowed(action, alike)
        waits = [(max(self._free_s.get(device, math.inf) for device in chunk.devices), chunk) for chunk in warm]
        wait_s, chunk = min(waits, default=(math.inf, Chunk(0, 0)))
        if wait_s == math.inf:
            return None
        return DeviceOption(wait_s + duration_s * (1 + price * units), units, chunk, wait_s, duration_s)

    def _cold_place(self, free: Sequence[Chunk], service: str, units: int) -> tuple[Chunk | None, float, float]:
        """The free place where a restore and what it evicts cost least, in the smallest free chunk among equals.

        Return the seconds of the restore, and of both, as well.
        """
        restore_s = self._chunks.restore_at
        places = [
            (restore_s(service, place) + self._worth.of_move(service, place), chunk.size, place)
            for chunk in free
            for place in chunk.parts(units)
        ]
        if not places:
            return None, 0.0, 0.0
        cost_s, _, place = min(places)
        return place, restore_s(service, place), cost_s

    def _durations(self, action: Action) -> list[tuple[int, float]]:
        """Seconds by admissible count, ascending."""
        unit_set = key_units(action, self._kind)
        assert unit_set is not None, f"action {action.id} does not use {self._kind}"
        if not is_elastic(action, self._kind):
            return [(unit_set.minimum, action.duration_s(unit_set.minimum) or UNKNOWN_S)]
        shape = shape_of(unit_set, action.elasticity)
        return list(zip(shape.units, (shape.factors * (action.t_ori_s or UNKNOWN_S)).tolist(), strict=True))


class _Mates:
    """What waits, by service in FCFS order, until an earlier one takes it into its batch."""

    def __init__(self, waiting: Sequence[Action], chunks: ChunkView) -> None:
        self._tokens = chunks.batch_tokens
        self._alike: dict[str, dict[str, Action]] = {}
        self._taken: set[str] = set()
        for action in waiting:
            if action.service and action.batch_tokens:
                self._alike.setdefault(action.service, {})[action.id] = action

    def take(self, action: Action) -> list[Action]:
        """The action and those that would join its batch; nothing where it has joined one itself."""
        if action.id in self._taken:
            return []
        alike = self._alike.get(action.service or "", {})
        most = self._tokens(action.service) if action.service and action.batch_tokens else 0
        mates = mates_of(action, alike.values(), most) if most else []
        # Who may take other counts is asked on his own: he may fit where the others do not.
        batch = [action, *(mate for mate in mates if mate.cost == action.cost)]
        for one in batch:
            alike.pop(one.id, None)
            self._taken.add(one.id)
        return batch


class _Worth:
    """What resident copies are worth: the restores that they are likely to save.

    A copy saves one if its service is used again soon while all other copies of it are busy: with r recent uses, n
    other copies and a fraction u of the devices in use that is 1 - exp(-r u^n) likely.
    """

    def __init__(self, chunks: ChunkView, utilisation: float) -> None:
        self._chunks = chunks
        self._busy = max(LEAST_BUSY, utilisation)
        self._moves: dict[tuple[str, Chunk], float] = {}

    def of_move(self, service: str, place: Chunk) -> float:
        """Seconds of restores that having ``service`` on ``place`` will cost others, less those that it will save."""
        if not service:
            return 0.0
        worth_s = self._moves.get((service, place))
        if worth_s is None:
            resident = self._chunks.resident
            lost_s = sum(
                self._saved_s(other, size, len(resident.get(other, ())) - 1)
                for other, size in self._chunks.evicts(service, place)
            )
            worth_s = lost_s - self._saved_s(service, place.size, len(resident.get(service, ())))
            self._moves[service, place] = worth_s
        return worth_s

    def _saved_s(self, service: str, size: int, others: int) -> float:
        likely = 1.0 - math.exp(-self._chunks.recent(service) * self._busy ** max(0, others))
        return self._chunks.restore_s(service, size) * likely


# Backfill: what may start while a wide action waits for its room (EASY; docs/SCHEDULING.md 1.3).
#
# The wide one's shadow time is when enough units are free by the expected ends of what runs. Whatever starts meanwhile
# ends before that by its own estimate, or takes units that the wide one leaves free even then.

#: Actions that are looked at in vain while a wide one waits.
BACKFILL_TRIES = 64


@dataclass(slots=True)
class Backfill:
    """The room beside one waiting action."""

    #: Seconds until it can start by estimate; 0 if it is not known what would make room for it.
    shadow_s: float
    #: Units that it leaves free when it starts.
    extra: int

    @classmethod
    def behind(cls, wanted: int, free: int, releases: Iterable[tuple[float, int]]) -> Backfill:
        """The room beside an action of ``wanted`` units; ``free`` are there, ``releases`` are (seconds, units)."""
        for ends_in_s, units in sorted(releases):
            free += units
            if free >= wanted:
                return cls(ends_in_s, free - wanted)
        return cls(0.0, 0)

    def take(self, units: int, seconds: float) -> bool:
        """Count on a start of ``seconds``; return whether the one that waits is none the later for it."""
        if seconds <= self.shadow_s:
            return True
        if units > self.extra:
            return False
        self.extra -= units
        return True


def expected_s(action: Action, units: int) -> float:
    """Seconds that an action takes by estimate; infinite if nothing is known of it."""
    seconds = action.duration_s(units)
    return math.inf if seconds is None else seconds


def release_s(running: RunningView) -> float:
    """Seconds until a running action ends by estimate; one that outlives it, or has none, may end at any moment.

    So the shadow time never moves away, whatever the estimates are worth: once it has come nothing starts any more.
    """
    return running.ends_in_s or 0.0


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
    #: Where nothing is elastic: so the tail stays that of first come first served.
    overtaken: Annotated[float, Setting("part of its own time for which a rigid action is overtaken", ge=0)] = 0.1
    #: Times the square root of those running.
    head_room: Annotated[float, Setting("free units kept from elastic actions for short ones", ge=0, le=1e3)] = 1.0

    def starts_in_order(self, longest_s: float) -> bool:
        return longest_s <= self.short_s

    def decide(self, view: PoolView) -> Decision:
        """Short rigid actions first, then the others in FCFS order, each at its cheapest count."""
        if view.chunks is not None:
            return DevicePrice(c=self.c * self.device_factor, a_s=self.device_a_s, age_max_s=self.age_max_s).decide(
                view
            )
        waiting = view.eligible or [candidate.action for candidate in view.candidates]
        if not waiting:
            return Decision()
        if view.free + view.reserved == 0:
            return Decision()
        kind = kind_of(view.name)
        overtaken = math.inf if view.has_elastic else self.overtaken
        order = ranked(view, waiting, kind, self.short_s, self.age_max_s, overtaken)
        pass_ = _PricePass(view, view.running, kind, self, order.first)
        kept_back = head_room(view.running, kind, self.head_room)
        return pass_.run(order.first, order.rest, kept_back)


class _PricePass:
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
