"""Resources without a place (paper, Basic Resource Manager): concurrency, and quota in a sliding window."""

from __future__ import annotations

import math
from collections import deque

from manager.config import ConcurrencySpec, QuotaSpec
from manager.lease import Grant
from manager.resources.pool import Pool, PoolRequest

#: Rounding of seconds times rate that must not cost a token.
_EPSILON = 1e-6


class ConcurrencyPool(Pool):
    """At most ``limit`` units at the same time."""

    lendable = True

    def __init__(self, name: str, spec: ConcurrencySpec) -> None:
        super().__init__(name, name)
        self._limit = spec.limit
        self._used = 0

    @property
    def total(self) -> int:
        return self._limit

    @property
    def free(self) -> int:
        return max(0, self._limit - self._used)

    def reconfigure(self, spec: ConcurrencySpec) -> None:
        """A lower limit takes nothing away: it holds as soon as enough has been released."""
        self._limit = spec.limit
        self._note_change()

    def acquire(self, ask: PoolRequest, now_s: float) -> Grant:
        assert ask.units <= self.free, f"{self.name}: {ask.units} units wanted, {self.free} free"
        self._enter(ask.holder, ask.units)
        self._used += ask.units
        return Grant(pool=self.name, units=ask.units)

    def release(self, holder: str, now_s: float) -> None:
        self._used -= self._leave(holder)

    def bequeath(self, holder: str, heir: str, grant: Grant) -> None:
        self._used -= self._leave(holder) - grant.units
        self._enter(heir, grant.units)

    def check(self) -> None:
        assert sum(self._held.values()) == self._used, f"{self.name}: {self._held} held, {self._used} counted"


class QuotaPool(Pool):
    """At most ``limit`` units in any window of ``period_s``, and ``burst`` at one instant.

    A unit is consumed when its action starts and returns ``period_s`` later, whenever the action ends. With a
    ``burst`` the units are also paced by a bucket of that depth, refilled at limit / period.
    """

    timed = True
    measure = "quota_units"

    def __init__(self, name: str, spec: QuotaSpec) -> None:
        super().__init__(name, name)
        self._spec = spec
        self._now_s = -math.inf
        #: (instant, units) of the consumption within the window, oldest first.
        self._window: deque[tuple[float, int]] = deque()
        self._in_window = 0
        self._tokens = float(self._burst)

    @property
    def _burst(self) -> int:
        return self._spec.limit if self._spec.burst is None else min(self._spec.burst, self._spec.limit)

    @property
    def _rate(self) -> float:
        return self._spec.limit / self._spec.period_s

    @property
    def total(self) -> int:
        return self._spec.limit

    @property
    def free(self) -> int:
        free = max(0, self._spec.limit - self._in_window)
        return free if self._spec.burst is None else min(free, int(self._tokens + _EPSILON))

    def admits(self, units: int) -> bool:
        return units <= self._burst

    def reconfigure(self, spec: QuotaSpec) -> None:
        self._spec = spec
        self._tokens = min(self._tokens, float(self._burst))
        self._note_change()

    def advance(self, now_s: float) -> None:
        if now_s <= self._now_s:
            return
        free = self.free
        if self._now_s > -math.inf:
            self._tokens = min(float(self._burst), self._tokens + (now_s - self._now_s) * self._rate)
        self._now_s = now_s
        while self._window and self._window[0][0] + self._spec.period_s <= now_s:
            self._in_window -= self._window.popleft()[1]
        if self.free > free:
            self._note_change()

    def next_return_s(self) -> float | None:
        """When the next unit can be had: both the window and the bucket must have room for it."""
        window_s = self._window[0][0] + self._spec.period_s if self._window else None
        if self._spec.burst is None or self._tokens >= self._burst:
            return window_s
        wanted = math.floor(self._tokens + _EPSILON) + 1
        paced_s = self._now_s + (wanted - self._tokens) / self._rate
        if window_s is None:
            return paced_s
        return max(paced_s, window_s) if self._in_window >= self._spec.limit else paced_s

    def acquire(self, ask: PoolRequest, now_s: float) -> Grant:
        assert ask.units <= self.free, f"{self.name}: {ask.units} units wanted, {self.free} free"
        self._enter(ask.holder, ask.units)
        self._window.append((now_s, ask.units))
        self._in_window += ask.units
        self._tokens -= ask.units
        return Grant(pool=self.name, units=ask.units)

    def resume(self, ask: PoolRequest, started_s: float, now_s: float) -> Grant:
        """What it consumed at its start is not consumed again: it counts in the window of that instant."""
        self._enter(ask.holder, ask.units)
        if started_s + self._spec.period_s > now_s:
            self._window = deque(sorted([*self._window, (started_s, ask.units)]))
            self._in_window += ask.units
        self._tokens -= max(0.0, ask.units - max(0.0, now_s - started_s) * self._rate)
        return Grant(pool=self.name, units=ask.units)

    def release(self, holder: str, now_s: float) -> None:
        self._leave(holder)

    def check(self) -> None:
        assert sum(units for _, units in self._window) == self._in_window, f"{self.name}: {self._window}"

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "period_s": self._spec.period_s, "next_return_s": self.next_return_s()}
