"""Weighted fair sharing between tasks: start-time fair queuing, one virtual clock for each resource kind.

Each action is stamped once, when it is queued, with the virtual time at which its task's share of the resources it
needs comes round; the queue is served in the order of stamps. Inside a task stamps never go back for two actions
that share a resource, so a task is served first come first served, and every stamp is reached: nobody starves.

Virtual time is the least stamp that waits, so a short action of a long backlog that a policy lets pass moves nothing:
were it the stamp of what was started last, everybody who comes would be put behind that backlog, whatever its weight.
Running actions do not count: one that runs for an hour would give every newcomer an hour's advance.
"""

from __future__ import annotations

import heapq
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


class _Clock:
    """The virtual time of one kind: the least stamp that waits. It never goes back."""

    __slots__ = ("_heap", "_latest", "_virtual")

    def __init__(self) -> None:
        #: Stamps with their actions, among them some that wait no more.
        self._heap: list[tuple[float, str]] = []
        self._virtual = 0.0
        self._latest = 0.0

    def add(self, stamp: float, action_id: str) -> None:
        heapq.heappush(self._heap, (stamp, action_id))
        self._latest = max(self._latest, stamp)

    def now(self, waiting: Mapping[str, float]) -> float:
        """Return the least stamp among ``waiting``, the stamps of waiting actions; the latest ever if none waits."""
        heap = self._heap
        while heap and waiting.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        if len(heap) > 64 + 4 * len(waiting):
            heap[:] = [entry for entry in heap if waiting.get(entry[1]) == entry[0]]
            heapq.heapify(heap)
        self._virtual = max(self._virtual, heap[0][0] if heap else self._latest)
        return self._virtual


class FairShare:
    """Stamps of actions. Charges are unit-seconds (units of a quota) over the task's weight."""

    def __init__(self, instantaneous: frozenset[str]) -> None:
        #: Kinds that are consumed at the start whatever the duration: quotas.
        self._instantaneous = instantaneous
        self._clocks: dict[str, _Clock] = {}
        #: Stamps of the actions that wait.
        self._waiting: dict[str, float] = {}
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
            stamp = max(stamp, self._clock(kind).now(self._waiting), flow.finish, flow.last_stamp)
        for flow, charge in flows:
            flow.last_stamp = stamp
            flow.finish = stamp + charge / weight
        self._waiting[action.id] = stamp
        for kind, _ in action.demand:
            self._clock(kind).add(stamp, action.id)
        return stamp

    def waits_no_more(self, action: Action) -> None:
        """Note that an action was started, or ended without: virtual time may pass its stamp."""
        self._waiting.pop(action.id, None)

    def _clock(self, kind: str) -> _Clock:
        clock = self._clocks.get(kind)
        if clock is None:
            clock = self._clocks[kind] = _Clock()
        return clock

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
