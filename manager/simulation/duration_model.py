"""What the scheduler of a simulation knows of an action's duration: the truth, or what it has learned so far."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from manager.action import PRIOR_BATCH_MARGINAL, Amdahl, Elasticity
from manager.input_size import SizeLine
from manager.learning.history import History
from manager.outcome import Settlement
from manager.simulation.trace import TraceStep


class KnownDuration(NamedTuple):
    """What an action shall state of its duration."""

    t_ori_s: float | None
    elasticity: Elasticity | None
    batch_marginal: float
    #: The most units of its key that it may have: None for all of its unit set.
    units_max: int | None = None
    line: SizeLine | None = None
    #: The size of the call, where its function declares one.
    size: float | None = None
    #: Whether the line is the function's, while the key has none of its own.
    borrows: bool = False


class DurationModel(Protocol):
    """Gives estimates for actions and takes in how they ended."""

    def of(self, step: TraceStep) -> KnownDuration:
        """What is known of a step before it runs."""
        ...

    def observe(self, settlement: Settlement) -> None:
        """Learn from an action that ended."""
        ...


class Oracle:
    """Profiles that are exact."""

    def __init__(self, batch_marginal: float = PRIOR_BATCH_MARGINAL) -> None:
        self._batch_marginal = batch_marginal

    def of(self, step: TraceStep) -> KnownDuration:
        return KnownDuration(step.t_ori_s, step.elasticity, self._batch_marginal, size=step.size)

    def observe(self, settlement: Settlement) -> None:
        pass


class Learning:
    """No profile at all but what the gateway's own history learns, here and in earlier runs that share it.

    ``sized``: whether it knows the sizes of calls, as where their functions declare one.
    """

    def __init__(self, history: History | None = None, *, sized: bool = True) -> None:
        self.history = history or History()
        self._sized = sized

    def of(self, step: TraceStep) -> KnownDuration:
        size = step.size if self._sized else None
        learned = self.history.learned(step.function, step.profile_key, size)
        elasticity = Amdahl(learned.serial_fraction) if step.key is not None else None
        return KnownDuration(
            learned.t_ori_s,
            elasticity,
            learned.batch_marginal,
            learned.units_max,
            learned.line,
            size,
            learned.borrowed,
        )

    def observe(self, settlement: Settlement) -> None:
        self.history.observe(settlement)
