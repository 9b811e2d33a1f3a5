"""Weighted fair sharing between tasks: start-time fair queuing, one virtual clock for each resource kind.

Each action is stamped once, when it is queued, with the virtual time at which its task's share of the resources it
needs comes round; the queue is served in the order of stamps. Inside a task stamps never go back for two actions
that share a resource, so a task is served first come first served, and every stamp is reached: nobody starves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from manager.action import Action

#: Seconds that an action is charged for while nothing is known of its duration.
UNKNOWN_DURATION_S = 1.0
#: Flows that are remembered; what a task owes is forgotten once this many others have asked since.
FLOWS_MAX = 16_384


@dataclass(slots=True)
class _Flow:
    """One task's use of one kind: the stamp of its last action, and where the next one's share begins."""

    last_stamp: float = 0.0
    finish: float = 0.0


class FairShare:
    """Stamps of actions. Charges are unit-seconds (units of a quota) over the task's weight."""

    def __init__(self, instantaneous: frozenset[str]) -> None:
        #: Kinds that are consumed at the start whatever the duration: quotas.
        self._instantaneous = instantaneous
        self._virtual: dict[str, float] = {}
        self._flows: OrderedDict[tuple[str, str], _Flow] = OrderedDict()

    def __len__(self) -> int:
        """Flows that are remembered."""
        return len(self._flows)

    def reconfigure(self, instantaneous: frozenset[str]) -> None:
        self._instantaneous = instantaneous

    def stamp(self, action: Action, weight: float) -> float:
        """Return the virtual start time of a new action, and charge its task for it."""
        stamp = 0.0
        flows = []
        for kind, _ in action.demand:
            flow = self._flow(action.task, kind)
            flows.append((flow, self.charge(action, kind)))
            stamp = max(stamp, self._virtual.get(kind, 0.0), flow.finish, flow.last_stamp)
        for flow, charge in flows:
            flow.last_stamp = stamp
            flow.finish = stamp + charge / weight
        return stamp

    def started(self, action: Action, stamp: float) -> None:
        """Move virtual time on to what is served."""
        for kind, _ in action.demand:
            if stamp > self._virtual.get(kind, 0.0):
                self._virtual[kind] = stamp

    def correct(self, action: Action, weight: float, used: Mapping[str, float]) -> None:
        """Charge what was really used, in unit-seconds by kind, instead of what was guessed."""
        for kind, amount in used.items():
            flow = self._flows.get((action.task, kind))
            if flow is not None and kind not in self._instantaneous:
                flow.finish += (amount - self.charge(action, kind)) / weight

    def charge(self, action: Action, kind: str) -> float:
        """Return the expected unit-seconds of ``kind``."""
        units = action.cost[kind].minimum
        if kind in self._instantaneous:
            return float(units)
        duration_s = action.duration_s(1 if action.key is None else action.cost[action.key].minimum)
        return units * (UNKNOWN_DURATION_S if duration_s is None else duration_s)

    def _flow(self, task: str, kind: str) -> _Flow:
        key = (task, kind)
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow()
            if len(self._flows) > FLOWS_MAX:
                self._flows.popitem(last=False)
        else:
            self._flows.move_to_end(key)
        return flow
