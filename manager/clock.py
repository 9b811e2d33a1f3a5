"""Time. The only module of the thinking that touches a real clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go back."""

    def now(self) -> float:
        """Seconds since an arbitrary origin, monotonic."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to: simulation and tests."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, instant_s: float) -> None:
        """Move to ``instant_s``; going back is an error of the caller."""
        assert instant_s >= self._now_s, f"the clock stands at {self._now_s}, cannot go back to {instant_s}"
        self._now_s = instant_s
