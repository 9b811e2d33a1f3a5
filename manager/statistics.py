"""What the core counts: the smoothed load of each pool, and what each task used."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from manager.outcome import Settlement

#: Seconds over which arrival rate and utilisation are smoothed.
SMOOTHING_S = 10.0


@dataclass(slots=True)
class Rate:
    """Events per second, exponentially smoothed."""

    per_s: float = 0.0
    _at_s: float = 0.0

    def add(self, now_s: float, count: float = 1.0) -> None:
        self.at(now_s)
        self.per_s += count / SMOOTHING_S

    def at(self, now_s: float) -> float:
        """The rate as it has decayed until now."""
        if now_s > self._at_s:
            self.per_s *= math.exp((self._at_s - now_s) / SMOOTHING_S)
            self._at_s = now_s
        return self.per_s


@dataclass(slots=True)
class Load:
    """Arrivals and use of one pool."""

    arrivals: Rate = field(default_factory=Rate)
    _utilisation: float = 0.0
    _fraction: float = 0.0
    _at_s: float = 0.0

    def observe(self, now_s: float, fraction: float) -> None:
        """From now on ``fraction`` of the pool is in use."""
        self.utilisation(now_s)
        self._fraction = fraction

    def utilisation(self, now_s: float) -> float:
        if now_s > self._at_s:
            decay = math.exp((self._at_s - now_s) / SMOOTHING_S)
            self._utilisation = self._utilisation * decay + self._fraction * (1 - decay)
            self._at_s = now_s
        return self._utilisation


@dataclass(slots=True)
class Account:
    """What one task has been given and how it fared."""

    settled: Counter[str] = field(default_factory=Counter)
    #: Unit-seconds by resource kind; units for quotas.
    used: dict[str, float] = field(default_factory=dict)
    act_s: float = 0.0
    queue_s: float = 0.0
    overhead_s: float = 0.0
    execution_s: float = 0.0

    def add(self, settlement: Settlement) -> None:
        self.settled[settlement.outcome.state.value] += 1
        self.act_s += settlement.act_s
        self.queue_s += settlement.queue_s
        self.overhead_s += settlement.overhead_s
        self.execution_s += settlement.execution_s

    def describe(self) -> dict[str, object]:
        return {
            "settled": dict(self.settled),
            "used": dict(self.used),
            "act_s": self.act_s,
            "queue_s": self.queue_s,
            "overhead_s": self.overhead_s,
            "execution_s": self.execution_s,
        }
