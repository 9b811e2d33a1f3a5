"""The policy ``fixed``: every elastic action gets the same DoP; for ablation, and for what has no elasticity."""

from __future__ import annotations

from dataclasses import dataclass

from manager.action import Action, UnitSet
from manager.scheduler.policy import Decision, PoolView, Start


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPolicy:
    """First come first served; ``dop`` is clipped to the unit set, and without ``wait`` to what is free."""

    name: str = "fixed"
    dop: float = 1
    #: 1: an action waits until ``dop`` units are free, and those behind it wait with it.
    wait: float = 0

    def decide(self, view: PoolView) -> Decision:
        """Start candidates in order while the next one's minimum is left."""
        starts = []
        free = view.free
        for candidate in view.candidates:
            wanted = _units(candidate.action).at_most(min(int(self._wanted(candidate.action)), view.total))
            if wanted is None or (self.wait and wanted > free):
                break
            units = _units(candidate.action).at_most(min(wanted, candidate.limit, free))
            if units is None:
                break
            starts.append(Start(action_id=candidate.action.id, units=units))
            free -= units
        return Decision(starts=starts)

    def _wanted(self, action: Action) -> float:
        """The DoP for elastic actions, never below the minimum."""
        minimum = _units(action).minimum
        return minimum if action.key is None else max(minimum, self.dop)


def _units(action: Action) -> UnitSet:
    units = action.units
    assert units is not None, f"{action.id} needs no units"
    return units
