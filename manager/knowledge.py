"""What the scheduler of a simulation knows of an action's duration: the truth, or what it has learned so far."""

from __future__ import annotations

from typing import Protocol

from manager.action import Amdahl, Elasticity
from manager.history import History
from manager.outcome import Settlement
from manager.trace import Step


class Knowledge(Protocol):
    """Gives estimates for actions and takes in how they ended."""

    def of(self, step: Step) -> tuple[float | None, Elasticity | None]:
        """(T_ori in seconds, elasticity) as the action shall state them."""
        ...

    def observe(self, settlement: Settlement) -> None:
        """Learn from an action that ended."""
        ...


class Oracle:
    """Profiles that are exact."""

    def of(self, step: Step) -> tuple[float | None, Elasticity | None]:
        return step.t_ori_s, step.elasticity

    def observe(self, settlement: Settlement) -> None:
        pass


class Learning:
    """No profile at all but what the gateway's own history learns, here and in earlier runs that share it."""

    def __init__(self, history: History | None = None) -> None:
        self.history = history or History()

    def of(self, step: Step) -> tuple[float | None, Elasticity | None]:
        learned = self.history.learned(step.function, step.profile_key)
        return learned.t_ori_s, Amdahl(learned.serial_fraction) if step.key is not None else None

    def observe(self, settlement: Settlement) -> None:
        self.history.observe(settlement)
