"""An action of a simulation between its lease and its end."""

from __future__ import annotations

from dataclasses import dataclass

from manager.action import Action
from manager.lease import Lease
from manager.simulation.trace import TraceStep


@dataclass(slots=True, eq=False)
class PlayedAction:
    """A leased action as it really goes."""

    action: Action
    step: TraceStep
    lease: Lease
    #: Worker processes that were started.
    workers: int
    #: Seconds of restore and of resizes so far: overhead.
    lost_s: float
    #: Instant from which the work goes on at the present units, and the fraction done before.
    since_s: float
    started_s: float
    #: When its service was in place.
    ready_s: float
    done: float = 0.0
    #: Unit-seconds held until the last resize.
    area: float = 0.0
    resized_s: float = 0.0
    version: int = 0

    @property
    def units(self) -> int:
        """Units of the key resource, or of the first of a rigid action."""
        kind = self.step.key or next(iter(self.step.cost), "")
        return self.lease.units(kind)


def work_s(step: TraceStep, lease: Lease) -> float:
    """Seconds of a step alone on the units of a lease."""
    if step.key is None or step.elasticity is None:
        return step.t_ori_s
    units = lease.units(step.key)
    return step.t_ori_s / (step.elasticity.efficiency(units) * units)
