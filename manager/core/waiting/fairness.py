"""Weighted fair sharing between tasks: start-time fair queuing, one virtual clock for each resource kind.

Each action is stamped once, when it is queued, with the virtual time at which its task's share of the resources it
needs comes round; the queue is served in the order of stamps. Inside a task stamps never go back for two actions
that share a resource, so a task is served first come first served, and every stamp is reached: nobody starves.

Virtual time is the least stamp that waits, so a short action of a long backlog that a policy lets pass moves nothing:
were it the stamp of what was started last, everybody who comes would be put behind that backlog, whatever its weight.
Running actions do not count: one that runs for an hour would give every newcomer an hour's advance.

A policy may let an action of a task pass another of the same task. The stamps are then dealt anew (`TaskTurns`): each
start takes the task's least one, whoever starts. Were it the starter's own, those that are passed would keep theirs,
and a task that serves its short ones first would stand before all others for ever.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from manager.action import Action

#: A task, and the kinds that its actions need together.
TaskDemand = tuple[str, tuple[str, ...]]

#: Seconds that an action is charged for while nothing is known of its duration.
UNKNOWN_DURATION_S = 1.0
#: Flows that are remembered; what a task owes is forgotten once this many others have asked since.
FLOWS_MAX = 16_384


@dataclass(slots=True)
class _Flow:
    """One task's use of one kind: the stamps that its next one must not precede, and where its share begins."""

    #: The greatest stamp of what was started.
    started: float = 0.0
    finish: float = 0.0
    #: Stamps of what waits, in order, among them some that wait no more.
    stamps: deque[tuple[float, str]] = field(default_factory=deque)

    def last_stamp(self, waiting: Mapping[str, float]) -> float:
        """Return the greatest stamp of what was started or is ``waiting``; who left without a start has none."""
        stamps = self.stamps
        while stamps and waiting.get(stamps[-1][1]) != stamps[-1][0]:
            stamps.pop()
        while stamps and waiting.get(stamps[0][1]) != stamps[0][0]:
            stamps.popleft()
        if len(stamps) > 64 + 4 * len(waiting):
            self.stamps = deque(entry for entry in stamps if waiting.get(entry[1]) == entry[0])
        return max(self.started, self.stamps[-1][0] if self.stamps else 0.0)


class TaskTurns:
    """The stamps of a task's waiting actions, taken from the front by whoever starts, and paid by its charge."""

    __slots__ = ("_ahead", "_stamps")

    def __init__(self) -> None:
        #: Stamps in order, each with what its own action is charged.
        self._stamps: deque[tuple[float, float]] = deque()
        #: What those that started were charged beyond those whose turns they took.
        self._ahead = 0.0

    def __len__(self) -> int:
        return len(self._stamps)

    def __iter__(self) -> Iterator[float]:
        return (stamp + self._ahead for stamp, _ in self._stamps)

    def add(self, stamp: float, charge: float) -> None:
        self._stamps.append((stamp, charge))

    def start(self, charge: float) -> None:
        """Take the first turn for an action that is charged so much."""
        _, own = self._stamps.popleft()
        self._ahead += charge - own

    def leave(self) -> None:
        """Give up the last turn."""
        self._stamps.pop()


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
        self._clocks = defaultdict[str, _Clock](_Clock)
        #: Stamps of the actions that wait.
        self._waiting: dict[str, float] = {}
        #: The turns that each of them has one of, and what it was charged, over the weight.
        self._charges: dict[str, tuple[TaskTurns, float]] = {}
        #: Actions that are charged what was guessed, until what they used is known: no children, no second attempts.
        self._guessed: set[str] = set()
        self._turns: dict[TaskDemand, TaskTurns] = {}
        self._flows: OrderedDict[tuple[str, str], _Flow] = OrderedDict()

    def __len__(self) -> int:
        """Flows that are remembered."""
        return len(self._flows)

    def reconfigure(self, instantaneous: frozenset[str]) -> None:
        self._instantaneous = instantaneous

    def stamp(self, action: Action, weight: float) -> float:
        """Return the virtual start time of a new action, and charge its task for it."""
        waiting, stamp, most = self._waiting, 0.0, 0.0
        shares = []
        for kind, _ in action.demand:
            flow, clock = self._flow(action.task, kind), self._clocks[kind]
            shares.append((flow, clock, self.charge(action, kind) / weight))
            stamp = max(stamp, clock.now(waiting), flow.finish, flow.last_stamp(waiting))
        waiting[action.id] = stamp
        for flow, clock, charge in shares:
            flow.stamps.append((stamp, action.id))
            flow.finish = stamp + charge
            clock.add(stamp, action.id)
            most = max(most, charge)
        self._guessed.add(action.id)
        demand = _demand_of(action)
        turns = self._turns.get(demand)
        if turns is None:
            turns = self._turns[demand] = TaskTurns()
        turns.add(stamp, most)
        self._charges[action.id] = turns, most
        return stamp

    def starts(self, alike: Sequence[Action]) -> None:
        """Note that actions of one task that need the same kinds were started; virtual time may pass their stamps.

        Each takes the first turn of its task.
        """
        stamps = []
        turns = None
        for action in alike:
            stamp = self._waiting.pop(action.id, None)
            if stamp is not None:
                stamps.append(stamp)
                turns, charge = self._charges.pop(action.id)
                turns.start(charge)
        if turns is None:
            return
        action, latest = alike[0], max(stamps)
        if not turns:
            del self._turns[_demand_of(action)]
        for kind, _ in action.demand:
            flow = self._flows.get((action.task, kind))
            if flow is not None:
                flow.started = max(flow.started, latest)
                flow.last_stamp(self._waiting)

    def leaves(self, action: Action, weight: float) -> None:
        """Note that an action ended without a start: it gives up the last turn of its task, which owes nothing for it.

        Were it charged nevertheless, a task that cancels a long backlog would wait until others had used as much.
        """
        if self._waiting.pop(action.id, None) is None:
            return
        turns, _ = self._charges.pop(action.id)
        turns.leave()
        if not turns:
            del self._turns[_demand_of(action)]
        self._guessed.discard(action.id)
        for kind, _ in action.demand:
            flow = self._flows.get((action.task, kind))
            if flow is not None:
                flow.finish -= self.charge(action, kind) / weight
                flow.last_stamp(self._waiting)

    def turns(self, demands: Iterable[TaskDemand]) -> Iterator[str]:
        """Yield the task of each turn to come, in order, of what waits with these demands."""
        stamps = (zip(self._turns.get(demand, ()), repeat(demand[0])) for demand in demands)
        return (task for _, task in heapq.merge(*stamps))

    def correct(self, action: Action, weight: float, used: Mapping[str, float]) -> None:
        """Charge what was really used, in unit-seconds by kind, instead of what was guessed, if anything was.

        Of a batch one member has used the units, and the others nothing.
        """
        guessed = action.id in self._guessed
        self._guessed.discard(action.id)
        for kind, amount in {**(dict.fromkeys(action.cost, 0.0) if guessed else {}), **used}.items():
            flow = self._flows.get((action.task, kind))
            if flow is None:
                continue
            if not guessed:
                flow.finish = max(flow.finish, self._clocks[kind].now(self._waiting)) + amount / weight
            elif kind not in self._instantaneous:
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


def _demand_of(action: Action) -> TaskDemand:
    return action.task, tuple([kind for kind, _ in action.demand])
