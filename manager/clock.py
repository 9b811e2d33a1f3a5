"""Time. The only module of the thinking that touches a real clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go back."""

    def now(self) -> float:
        """Return the seconds since an arbitrary origin, monotonic."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.monotonic)


class WallClock:
    """The time of day for people and for expiries: it never jumps and never goes back.

    When the machine's clock is set, this one follows it slowly, so that nothing expires all at once and no order
    is turned round. Calling it gives seconds since 1970.
    """

    #: Seconds by which it may go wrong or right in each second.
    slew = 0.05

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._seen_s = monotonic()
        self._now_s = wall()

    def __call__(self) -> float:
        seen_s = self._monotonic()
        passed_s, self._seen_s = seen_s - self._seen_s, seen_s
        self._now_s += passed_s
        reach_s = self.slew * passed_s
        self._now_s += max(-reach_s, min(reach_s, self._wall() - self._now_s))
        return self._now_s

    @property
    def ahead_s(self) -> float:
        """Seconds by which it is ahead of the monotonic clock, which goes on while no process of ours runs."""
        return self() - self._seen_s

    def resume(self, ahead_s: float) -> None:
        """Go on as the clock of a process before, on this boot of the machine, which was ahead by so much."""
        self._seen_s = self._monotonic()
        self._now_s = self._seen_s + ahead_s
