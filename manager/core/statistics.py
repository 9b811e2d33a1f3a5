"""What the core counts: the smoothed load of each pool, and what each task used."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from manager.outcome import Settlement

#: Seconds over which arrival rate and utilisation are smoothed.
SMOOTHING_S = 10.0
#: Tasks whose accounts are kept; the one that was idle longest is forgotten.
ACCOUNTS_MAX = 4096


@dataclass(slots=True)
class Rate:
    """Events per second, exponentially smoothed."""

    per_s: float = 0.0
    _at_s: float = 0.0

    def add(self, now_s: float, count: float = 1.0) -> None:
        self.at(now_s)
        self.per_s += count / SMOOTHING_S

    def at(self, now_s: float) -> float:
        """Return the rate as it has decayed until now."""
        if now_s > self._at_s:
            self.per_s *= math.exp((self._at_s - now_s) / SMOOTHING_S)
            self._at_s = now_s
        return self.per_s


@dataclass(slots=True)
class PoolLoad:
    """Arrivals and use of one pool."""

    arrivals: Rate = field(default_factory=Rate)
    _utilisation: float = 0.0
    _fraction: float = 0.0
    _at_s: float = 0.0

    def observe(self, now_s: float, fraction: float) -> None:
        """Note that ``fraction`` of the pool is in use from now on."""
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
    #: Actions that were completed, which the times below are of.
    completed: int = 0
    act_s: float = 0.0
    queue_s: float = 0.0
    overhead_s: float = 0.0
    execution_s: float = 0.0

    def add(self, settlement: Settlement) -> None:
        self.settled[settlement.outcome.state.value] += 1
        if not settlement.completed:
            return
        self.completed += 1
        self.act_s += settlement.act_s
        self.queue_s += settlement.queue_s
        self.overhead_s += settlement.overhead_s
        self.execution_s += settlement.execution_s

    def use(self, used: Mapping[str, float]) -> None:
        """Add the unit-seconds by kind (units of quotas) that one action has used."""
        for kind, amount in used.items():
            self.used[kind] = self.used.get(kind, 0.0) + amount

    def describe(self) -> dict[str, object]:
        """Return how it fared; the view of a task says what it used, in the units of the resources."""
        return {
            "settled": dict(self.settled),
            "completed": self.completed,
            "act_s": self.act_s,
            "queue_s": self.queue_s,
            "overhead_s": self.overhead_s,
            "execution_s": self.execution_s,
        }


class Accounts(OrderedDict[str, Account]):
    """Accounts by task, at most `ACCOUNTS_MAX`."""

    def of(self, task: str) -> Account:
        """Return a task's account, which is opened if there is none."""
        account = self.get(task)
        if account is None:
            account = self[task] = Account()
            if len(self) > ACCOUNTS_MAX:
                self.popitem(last=False)
        self.move_to_end(task)
        return account
