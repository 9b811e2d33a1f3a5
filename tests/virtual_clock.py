"""A clock for tests."""

from __future__ import annotations


class VirtualClock:
    """A `manager.clock.Clock`, and a time of day to be called, that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s

    def now(self) -> float:
        return self.now_s

    __call__ = now

    def advance_to(self, instant_s: float) -> None:
        """Move to ``instant_s``; going back is an error of the caller."""
        assert instant_s >= self.now_s, f"the clock stands at {self.now_s}, cannot go back to {instant_s}"
        self.now_s = instant_s
