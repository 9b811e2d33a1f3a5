"""The policy ``fixed``: every elastic action gets the same DoP; for ablation, and for what has no elasticity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from manager.action import Action, UnitSet
from manager.function import Setting
from manager.scheduler.policy import Decision, PoolView, PromptPolicy, Start


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPolicy(PromptPolicy):
    """First come first served; ``dop`` is clipped to the unit set and, once waited for, to what is free.

    It is waited for as long as something runs that may give it back: what is free and not shown is kept for a wide
    action behind, which waits for this very one.
    """

    name: str = "fixed"
    dop: Annotated[int, Setting("units of every elastic action", ge=1)] = 1
    #: Rigid actions pass one that waits meanwhile, elastic ones do not.
    wait_s: Annotated[float, Setting("seconds that an elastic action waits for all of dop", ge=0)] = 0.0

    def starts_in_order(self, longest_s: float) -> bool:
        return True

    def decide(self, view: PoolView) -> Decision:
        """Start candidates in order while the next one's units are left."""
        starts: list[Start] = []
        free = view.free
        wake_s: float | None = None
        for candidate in view.candidates:
            action, units = candidate.action, _units(candidate.action)
            if action.key is not None and wake_s is not None:
                continue
            wanted = units.at_most(min(self._wanted(action), view.total))
            assert wanted is not None, f"{action.id} never fits"
            busy = len(starts) > 0 or len(view.running) > 0
            if action.key is not None and wanted > free and busy and view.now_s < action.submitted_s + self.wait_s:
                wake_s = action.submitted_s + self.wait_s
                continue
            granted = units.at_most(min(wanted, candidate.limit, free))
            if granted is None:
                break
            starts.append(Start(action_id=action.id, units=granted))
            free -= granted
        return Decision(starts=starts, wake_s=wake_s)

    def _wanted(self, action: Action) -> int:
        """The DoP for elastic actions, never below the minimum."""
        minimum = _units(action).minimum
        return minimum if action.key is None else max(minimum, self.dop)


def _units(action: Action) -> UnitSet:
    units = action.units
    assert units is not None, f"{action.id} needs no units"
    return units
