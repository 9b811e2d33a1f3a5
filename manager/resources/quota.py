"""Quota: at most so many units in any window of time (paper, Basic Resource Manager)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from manager.lease import Grant
from manager.resources.declared import DeclaredPool, ResourceSpec
from manager.resources.pool import PoolRequest, TimedPool
from manager.setting import Setting

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

    @property
    def most(self) -> int:
        return self.limit if self.burst is None else min(self.burst, self.limit)

    def make_pool(self, name: str) -> QuotaPool:
        return QuotaPool(name, self)


class QuotaPool(DeclaredPool[QuotaSpec], TimedPool):
    """At most ``limit`` units in any window of ``period_s``, and ``burst`` at one instant.

    A unit is consumed when its action starts and returns ``period_s`` after its end, or after the end of the try for
    which it was, if the action makes its call again: that consumes another. So whenever a call arrives where it is
    counted, no window there holds more than the limit. With a ``burst`` the units are also paced by a bucket of
    that depth, refilled at limit / period.
    """

    def __init__(self, name: str, spec: QuotaSpec) -> None:
        super().__init__(name, spec)
        self._now_s = -math.inf
        #: (instant, units) of the actions that have ended within the window, oldest first.
        self._window: deque[tuple[float, int]] = deque()
        #: Of the newest of them, those of actions that another core began, and that may yet be taken up.
        self._orphaned = 0
        self._in_window = 0
        self._tokens = float(self.spec.most)
        #: Units that running actions want for another try, in order; those of the try before are in the window.
        self._wanted: dict[str, int] = {}

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
        while self._window and self._window[0][0] + self.spec.period_s <= now_s:
            self._in_window -= self._window.popleft()[1]
        if self.free > free:
            self._note_change()

    def next_return_s(self) -> float | None:
        """When the next unit can be had: both the window and the bucket must have room for it."""
        window_s = self._window[0][0] + self.spec.period_s if self._window else None
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
        self._in_window += ask.units
        self._tokens -= ask.units
        return Grant(pool=self.name, units=ask.units)

    def resume(self, holder: str, ask: PoolRequest, started_s: float, now_s: float) -> Grant:
        """What it consumed at its start is not consumed again."""
        self._enter(holder, ask.units)
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
            self._window.append((self._now_s, units))
            self._wanted[holder] = units

    def grant_again(self) -> list[str]:
        granted = []
        for holder, units in list(self._wanted.items()):
            if units > self._room:
                break
            del self._wanted[holder]
            self._in_window += units
            self._tokens -= units
            granted.append(holder)
        return granted

    def wants_again(self, holder: str = "") -> bool:
        return holder in self._wanted if holder else bool(self._wanted)

    def release(self, holder: str, now_s: float) -> None:
        units = self._leave(holder)
        if self._wanted.pop(holder, None) is None:  # else what it had is in the window
            self._window.append((now_s, units))
        self._orphaned = 0

    def _counted(self) -> int:
        waiting = sum(self._wanted.values())
        return sum(units for _, units in self._window) + sum(self._held.values()) - waiting

    def check(self) -> None:
        assert self._counted() == self._in_window, f"{self.name}: {self._window}, {self._held}, {self._wanted}"

    def describe(self) -> dict[str, object]:
        next_s = self.next_return_s()
        due_s = None if next_s is None else max(0.0, next_s - self._now_s)
        return {**super().describe(), "period_s": self.spec.period_s, "next_return_s": due_s}
