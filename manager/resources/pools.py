"""The contract of a pool; pools of quotas and of concurrency."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar

from manager.action import Chunk, Grant
from manager.function import Setting


class Headroom:
    """What of a pool is neither held nor promised, during one scheduling pass.

    Candidates `take` in order; an action that cannot start reserves, so that no later one starts in its place.
    """

    __slots__ = ("awaited", "free", "kept", "rivals")

    def __init__(self, free: int) -> None:
        self.free = free
        #: What is reserved for actions that wait for more of this pool and nothing else.
        self.awaited = 0
        #: Free places that are reserved; none where units are interchangeable.
        self.kept: list[Chunk] = []
        #: Groups of waiting actions that may still take of it.
        self.rivals = 0

    def fits(self, units: int, node: str = "", among: frozenset[str] = frozenset()) -> bool:
        """Whether ``units`` can be taken together, on ``node`` if one is named, else on one ``among`` those named."""
        return units <= self.free

    def take(self, units: int, node: str = "", among: frozenset[str] = frozenset()) -> None:
        """Promise units that fit."""
        self.free -= units

    def reserve(self, units: int, node: str = "", among: frozenset[str] = frozenset()) -> None:
        """Hold back up to ``units``, whatever there is of them."""
        self.free = max(0, self.free - units)


class PoolRequest(NamedTuple):
    """What an action wants of a pool at its start; those that are alike want the same."""

    units: int
    service: str | None = None
    #: The chunk that the policy chose, in the pool's indices.
    chunk: Chunk | None = None
    #: The node it must be on, for actions that also hold something else of a node.
    node: str = ""
    #: Places that it leaves to others, unless it names its chunk.
    kept: Sequence[Chunk] = ()
    #: The nodes whose places are right for it, if it holds nothing else of one; empty for all.
    among: frozenset[str] = frozenset()


class Pool(ABC):
    """One pool. ``acquire`` and ``release`` come in pairs, by the id of the holder."""

    #: Whether a waiting parent's units may serve its children meanwhile.
    lendable = False
    #: What the account of its use counts, with its unit.
    measure: str

    def __init__(self, name: str, kind: str, node: str = "") -> None:
        self.name = name
        self.kind = kind
        #: The node whose units these are; empty where the pool belongs to none, or spans several.
        self.node = node
        #: Whether its node is closed: what is free of it cannot be acquired.
        self.closed = False
        self._held: dict[str, int] = {}
        self._changed: set[str] = set()

    def announce_to(self, changed: set[str]) -> None:
        """Add the pool's name to ``changed`` from now on whenever more of it may start than before."""
        self._changed = changed

    def _note_change(self) -> None:
        self._changed.add(self.name)

    @property
    @abstractmethod
    def total(self) -> int:
        """Units when nothing is held."""

    @property
    @abstractmethod
    def free(self) -> int:
        """Units that can be acquired now."""

    @property
    def idle(self) -> int:
        """Units that nobody holds: those that are free, and those of closed nodes."""
        return self.free

    @abstractmethod
    def acquire(self, holder: str, ask: PoolRequest, now_s: float) -> Grant:
        """Give ``ask.units`` to a new holder; they must fit."""

    def acquire_each(self, holders: Sequence[str], ask: PoolRequest, now_s: float) -> list[Grant]:
        """Give ``ask.units`` to each of some new holders, in order; they must fit together."""
        return [self.acquire(holder, ask, now_s) for holder in holders]

    def resume(self, holder: str, ask: PoolRequest, started_s: float, now_s: float) -> Grant:
        """Give ``ask.units`` to a holder that was started earlier, under another core; they must fit."""
        return self.acquire(holder, ask, now_s)

    @abstractmethod
    def release(self, holder: str, now_s: float) -> None:
        """Take back all that ``holder`` holds."""

    def headroom(self) -> Headroom:
        return Headroom(self.free)

    def accepts(self, ask: PoolRequest) -> bool:
        """Whether `acquire` would succeed now."""
        return ask.units <= self.free

    def resize(self, holder: str, units: int) -> Grant:
        """Change what a holder holds, keeping as much of it as possible."""
        raise AssertionError(f"{self.name}: units of a running action cannot change")

    def bequeath(self, holder: str, heir: str, grant: Grant) -> None:
        """End a loan whose lender ended first: the heir keeps ``grant``, the rest is released."""
        raise AssertionError(f"{self.name}: units cannot be lent")

    def admits(self, units: int) -> bool:
        """Whether ``units`` could ever be granted, were nothing else held."""
        return units <= self.total

    def chunk_of(self, holder: str) -> Chunk | None:
        """Return the place of a holder's units, in the pool's indices; None where units have no places."""
        return None

    @property
    def held(self) -> Mapping[str, int]:
        """Units by holder."""
        return self._held

    def check(self) -> None:
        """Assert what always holds."""
        held = sum(self._held.values())
        assert held == self.total - self.idle, f"{self.name}: {held} held, {self.idle} idle of {self.total}"

    def describe(self) -> dict[str, object]:
        """A JSON-able view for people."""
        return {"kind": self.kind, "node": self.node, "total": self.total, "free": self.free, "held": dict(self._held)}

    def _enter(self, holder: str, units: int) -> None:
        assert holder not in self._held, f"{self.name}: {holder} holds {self._held[holder]} units already"
        self._held[holder] = units

    def _leave(self, holder: str) -> int:
        assert holder in self._held, f"{self.name}: {holder} holds nothing"
        self._note_change()
        return self._held.pop(holder)


class TimedPool(Pool):
    """Units return with time, not with the end of their action."""

    @abstractmethod
    def advance(self, now_s: float) -> None:
        """Let what returns with time return."""

    @abstractmethod
    def next_return_s(self) -> float | None:
        """Return the instant at which the next unit returns by itself; None if none is due."""

    @abstractmethod
    def restore(self, ended: Sequence[tuple[float, int]], running: int, now_s: float) -> None:
        """Go on where the pool of another core was: (instant, units) of ended actions, and units of running ones."""

    @abstractmethod
    def want_again(self, holder: str, units: int) -> None:
        """Note that a holder wants as many units once more: before anybody who has not begun."""

    @abstractmethod
    def grant_again(self) -> list[str]:
        """Give what was wanted again, in order, as far as there are units; return the holders that have theirs."""

    @abstractmethod
    def wants_again(self, holder: str = "") -> bool:
        """Return whether a holder (anybody by default) still waits for units that it wants again."""


# Declared resources: what the configuration declares by a spec of some kind, and the spec makes its own pool.
#
# A new kind is a module with its spec and its pool, and a row in `manager.resources.pools`.


class ResourceSpec(ABC):
    """One declared resource; the kinds are frozen dataclasses."""

    __slots__ = ()

    #: As the configuration's ``kind`` names it, and what that means.
    kind: ClassVar[str]
    meaning: ClassVar[str]
    #: What the account of its use counts, with its unit.
    measure: ClassVar[str] = "slot_s"

    #: Units when nothing is held.
    limit: int

    @property
    @abstractmethod
    def most(self) -> int:
        """Units that can be granted at once."""

    @abstractmethod
    def make_pool(self, name: str) -> DeclaredPool[Any]:
        """Return the pool of a resource of this name."""


SpecT = TypeVar("SpecT", bound=ResourceSpec)


class DeclaredPool(Pool, Generic[SpecT]):
    """A resource without a place, by its spec."""

    def __init__(self, name: str, spec: SpecT) -> None:
        super().__init__(name, name)
        self.spec = spec
        self.measure = spec.measure

    @property
    def total(self) -> int:
        return self.spec.limit

    def admits(self, units: int) -> bool:
        return units <= self.spec.most

    def reconfigure(self, spec: SpecT) -> None:
        """Take new bounds; nothing that is held is taken away."""
        self.spec = spec
        self._note_change()


#: Rounding of seconds times rate that must not cost a token.
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaSpec(ResourceSpec):
    """A rate: at most ``limit`` units in any window of ``period``."""

    kind: ClassVar[str] = "quota"
    meaning: ClassVar[str] = "a rate"
    measure: ClassVar[str] = "quota_units"

    limit: Annotated[int, Setting("units in any window of period", ge=1)]
    period_s: Annotated[float, Setting("length of the window", gt=0)]
    burst: Annotated[int | None, Setting("most units at one instant", ge=1)] = None
    #: None: by its end, as where a program makes the call at some moment of its run.
    arrives_within_s: Annotated[
        float | None, Setting("seconds from a call's start within which the service has counted it", ge=0)
    ] = None

    @property
    def most(self) -> int:
        return self.limit if self.burst is None else min(self.burst, self.limit)

    def make_pool(self, name: str) -> QuotaPool:
        return QuotaPool(name, self)


class QuotaPool(DeclaredPool[QuotaSpec], TimedPool):
    """At most ``limit`` units in any window of ``period_s``, and ``burst`` at one instant.

    A unit is consumed when its action starts and returns ``period_s`` after its end, or after the end of the try for
    which it was, if the action makes its call again: that consumes another. So whenever a call arrives where it is
    counted, no window there holds more than the limit. Where a call is known to arrive ``arrives_within_s`` of its
    start, it returns ``period_s`` after that, if this is sooner. With a ``burst`` the units are also paced by a bucket
    of that depth, refilled at limit / period.
    """

    def __init__(self, name: str, spec: QuotaSpec) -> None:
        super().__init__(name, spec)
        self._now_s = -math.inf
        #: (instant, units) of the calls that have arrived at the latest within the window, oldest first.
        self._window: deque[tuple[float, int]] = deque()
        #: Of the newest of them, those of actions that another core began, and that may yet be taken up.
        self._orphaned = 0
        self._in_window = 0
        self._tokens = float(self.spec.most)
        #: Units that running actions want for another try, in order; those of the try before are in the window.
        self._wanted: dict[str, int] = {}
        #: Holder -> instant by which its call has arrived, of calls that may still be under way, soonest first.
        self._travelling: dict[str, float] = {}

    @property
    def _rate(self) -> float:
        return self.spec.limit / self.spec.period_s

    @property
    def _room(self) -> int:
        room = max(0, self.spec.limit - self._in_window)
        return room if self.spec.burst is None else min(room, int(self._tokens + _EPSILON))

    @property
    def free(self) -> int:
        return max(0, self._room - sum(self._wanted.values()))

    def reconfigure(self, spec: QuotaSpec) -> None:
        super().reconfigure(spec)
        self._tokens = min(self._tokens, float(spec.most))

    def advance(self, now_s: float) -> None:
        if now_s <= self._now_s:
            return
        free = self.free
        if self._now_s > -math.inf:
            self._tokens = min(float(self.spec.most), self._tokens + (now_s - self._now_s) * self._rate)
        self._now_s = now_s
        while self._travelling:
            holder, by_s = next(iter(self._travelling.items()))
            if by_s > now_s:
                break
            self._arrive(holder, by_s)
        while self._window and self._window[0][0] + self.spec.period_s <= now_s:
            self._in_window -= self._window.popleft()[1]
        if self.free > free:
            self._note_change()

    def next_return_s(self) -> float | None:
        """When the next unit can be had: both the window and the bucket must have room for it."""
        arrived_s = self._window[0][0] if self._window else min(self._travelling.values(), default=math.inf)
        window_s = arrived_s + self.spec.period_s if arrived_s < math.inf else None
        if self.spec.burst is None or self._tokens >= self.spec.most:
            return window_s
        wanted = math.floor(self._tokens + _EPSILON) + 1
        paced_s = self._now_s + (wanted - self._tokens) / self._rate
        if window_s is None:
            return paced_s
        return max(paced_s, window_s) if self._in_window >= self.spec.limit else paced_s

    def acquire(self, holder: str, ask: PoolRequest, now_s: float) -> Grant:
        assert ask.units <= self.free, f"{self.name}: {ask.units} units wanted, {self.free} free"
        self._enter(holder, ask.units)
        self._depart(holder, now_s)
        self._in_window += ask.units
        self._tokens -= ask.units
        return Grant(pool=self.name, units=ask.units)

    def resume(self, holder: str, ask: PoolRequest, started_s: float, now_s: float) -> Grant:
        """What it consumed at its start is not consumed again."""
        self._enter(holder, ask.units)
        self._depart(holder, now_s)  # the core that began it may have counted it until now
        taken_up = min(ask.units, self._orphaned)
        if taken_up:
            self._orphaned -= taken_up
            at_s, units = self._window.pop()
            self._window.append((at_s, units - taken_up))
        else:
            self._tokens -= max(0.0, ask.units - max(0.0, now_s - started_s) * self._rate)
        self._in_window += ask.units - taken_up
        return Grant(pool=self.name, units=ask.units)

    def restore(self, ended: Sequence[tuple[float, int]], running: int, now_s: float) -> None:
        """Go on in the window of another core; its actions that were ``running`` count as ended now."""
        self._window = deque([*sorted(ended), (now_s, running)])
        self._orphaned = running
        self._in_window = self._counted()
        past_s = self._window[0][0]
        for at_s, units in self._window:
            self._tokens = min(float(self.spec.most), self._tokens + (at_s - past_s) * self._rate) - units
            past_s = at_s
        self._tokens = max(0.0, self._tokens)

    def want_again(self, holder: str, units: int) -> None:
        if holder not in self._wanted:
            if holder in self._travelling:
                self._arrive(holder, self._now_s)
            self._wanted[holder] = units

    def grant_again(self) -> list[str]:
        granted = []
        for holder, units in list(self._wanted.items()):
            if units > self._room:
                break
            del self._wanted[holder]
            self._in_window += units
            self._tokens -= units
            self._depart(holder, self._now_s)
            granted.append(holder)
        return granted

    def wants_again(self, holder: str = "") -> bool:
        return holder in self._wanted if holder else bool(self._wanted)

    def release(self, holder: str, now_s: float) -> None:
        if holder in self._travelling:
            self._arrive(holder, now_s)
        self._wanted.pop(holder, None)
        self._leave(holder)
        self._orphaned = 0

    def _depart(self, holder: str, now_s: float) -> None:
        """Note that a call is under way from now on."""
        within_s = self.spec.arrives_within_s
        self._travelling[holder] = math.inf if within_s is None else now_s + within_s

    def _arrive(self, holder: str, at_s: float) -> None:
        """Count a call in the window; what was restored there may be newer."""
        del self._travelling[holder]
        self._window.append((at_s, self._held[holder]))
        if len(self._window) > 1 and self._window[-2][0] > at_s:
            self._window = deque(sorted(self._window))

    def _counted(self) -> int:
        return sum(units for _, units in self._window) + sum(self._held[holder] for holder in self._travelling)

    def check(self) -> None:
        assert self._counted() == self._in_window, f"{self.name}: {self._window}, {self._held}, {self._wanted}"

    def describe(self) -> dict[str, object]:
        next_s = self.next_return_s()
        due_s = None if next_s is None else max(0.0, next_s - self._now_s)
        return {**super().describe(), "period_s": self.spec.period_s, "next_return_s": due_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencySpec(ResourceSpec):
    """A bound: at most ``limit`` units at the same time."""

    kind: ClassVar[str] = "concurrency"
    meaning: ClassVar[str] = "a bound"

    limit: Annotated[int, Setting("units held at the same time", ge=1)]

    @property
    def most(self) -> int:
        return self.limit

    def make_pool(self, name: str) -> ConcurrencyPool:
        return ConcurrencyPool(name, self)


class ConcurrencyPool(DeclaredPool[ConcurrencySpec]):
    """Units return with their action. A lower limit holds as soon as enough has been released."""

    lendable = True

    def __init__(self, name: str, spec: ConcurrencySpec) -> None:
        super().__init__(name, spec)
        self._used = 0

    @property
    def free(self) -> int:
        return max(0, self.spec.limit - self._used)

    def acquire(self, holder: str, ask: PoolRequest, now_s: float) -> Grant:
        assert ask.units <= self.free, f"{self.name}: {ask.units} units wanted, {self.free} free"
        self._enter(holder, ask.units)
        self._used += ask.units
        return Grant(pool=self.name, units=ask.units)

    def release(self, holder: str, now_s: float) -> None:
        self._used -= self._leave(holder)

    def bequeath(self, holder: str, heir: str, grant: Grant) -> None:
        self._used -= self._leave(holder) - grant.units
        self._enter(heir, grant.units)

    def check(self) -> None:
        assert sum(self._held.values()) == self._used, f"{self.name}: {self._held} held, {self._used} counted"


KINDS: tuple[type[ResourceSpec], ...] = (QuotaSpec, ConcurrencySpec)
