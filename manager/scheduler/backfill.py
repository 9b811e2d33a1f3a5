"""Backfill: what may start while a wide action waits for its room (EASY; docs/SCHEDULING.md 1.3).

The wide one's shadow time is when enough units are free by the expected ends of what runs. Whatever starts meanwhile
ends before that by its own estimate, or takes units that the wide one leaves free even then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from manager.action import Action
from manager.scheduler.policy import RunningView

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
