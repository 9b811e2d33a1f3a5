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


@dataclass(slots=True, eq=False)
class _Stamp:
    """The place of one action that waits, and what its task was charged for it, over the weight."""

    at: float
    charge: float
    waits: bool = True


@dataclass(slots=True, eq=False)
class _Flow:
    """One task's use of one kind: the stamps that its next one must not precede, and where its share begins."""

    #: The greatest stamp of what was started.
    started: float = 0.0
    finish: float = 0.0
    #: Of what waits, in order, among them some that wait no more; the last one waits.
    stamps: deque[_Stamp] = field(default_factory=deque)
    #: The stamp by which its kind's clock looks at it, which nothing of it precedes; None if it does not.
    clocked: float | None = None

    def begin(self, virtual: float) -> float:
        """Return the least stamp that its next action may have, at a virtual time.

        It precedes nothing that was started or waits; who left without a start has no stamp.
        """
        return max(virtual, self.finish, self.started, self.stamps[-1].at if self.stamps else 0.0)

    def first(self) -> float | None:
        """Return the least stamp that waits; None if nothing does."""
        stamps = self.stamps
        while stamps and not stamps[0].waits:
            stamps.popleft()
        return stamps[0].at if stamps else None

    def tidy(self, waiting: int) -> None:
        """Forget stamps that wait no more, which some have just ceased to do; ``waiting`` are left in all."""
        stamps = self.stamps
        while stamps and not stamps[-1].waits:
            stamps.pop()
        if len(stamps) > 64 + 4 * waiting:
            self.stamps = deque(stamp for stamp in stamps if stamp.waits)


class TaskTurns:
    """The stamps of a task's waiting actions, taken from the front by whoever starts, and paid by its charge."""

    __slots__ = ("_ahead", "_stamps")

    def __init__(self) -> None:
        #: In order, among them some whose action has started and left its turn to another.
        self._stamps: deque[_Stamp] = deque()
        #: What those that started were charged beyond those whose turns they took.
        self._ahead = 0.0

    def __len__(self) -> int:
        return len(self._stamps)

    def __iter__(self) -> Iterator[float]:
        return (stamp.at + self._ahead for stamp in self._stamps)

    def add(self, stamp: _Stamp) -> None:
        self._stamps.append(stamp)

    def start(self, stamps: Iterable[_Stamp]) -> None:
        """Take the first turns for the actions of these stamps."""
        for stamp in stamps:
            self._ahead += stamp.charge - self._stamps.popleft().charge

    def leave(self) -> None:
        """Give up the last turn."""
        self._stamps.pop()


class _Clock:
    """The virtual time of one kind: the least stamp that waits. It never goes back."""

    __slots__ = ("_added", "_heap", "_latest", "_virtual")

    def __init__(self) -> None:
        #: `_Flow.clocked`, a number that is never the same, and the flow; each flow once.
        self._heap: list[tuple[float, int, _Flow]] = []
        self._added = 0
        self._virtual = 0.0
        self._latest = 0.0

    def add(self, flow: _Flow, stamp: _Stamp, waiting: int) -> None:
        """Let a stamp wait, the last of its flow; then ``waiting`` do so in all."""
        flow.stamps.append(stamp)
        if flow.clocked is None or stamp.at < flow.clocked:  # those by which it was looked at have left
            if flow.clocked is not None or len(self._heap) > 64 + 4 * waiting:
                self._look_away(flow)
            flow.clocked = stamp.at
            self._added += 1
            heapq.heappush(self._heap, (stamp.at, self._added, flow))
        if stamp.at > self._latest:
            self._latest = stamp.at

    def _look_away(self, flow: _Flow) -> None:
        """Look no more at a flow, nor at those of which nothing waits."""
        kept = []
        for entry in self._heap:
            if entry[2] is flow or entry[2].first() is None:
                entry[2].clocked = None
            else:
                kept.append(entry)
        self._heap = kept
        heapq.heapify(kept)

    def now(self) -> float:
        """Return the least stamp that waits; the latest ever if none does."""
        heap = self._heap
        while heap:
            known, number, flow = heap[0]
            first = flow.first()
            if first == known:
                break
            flow.clocked = first
            if first is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (first, number, flow))
        virtual = heap[0][0] if heap else self._latest
        if virtual > self._virtual:
            self._virtual = virtual
        return self._virtual

    def check(self) -> None:
        flows = [flow for _, _, flow in self._heap]
        assert len(flows) == len(set(flows)), "a flow is looked at twice"
        for known, _, flow in self._heap:
            first = flow.first()
            assert known == flow.clocked and (first is None or known <= first), f"a clock takes {first} for {known}"


class FairShare:
    """Stamps of actions. Charges are unit-seconds (units of a quota) over the task's weight."""

    def __init__(self, instantaneous: frozenset[str]) -> None:
        #: Kinds that are consumed at the start whatever the duration: quotas.
        self._instantaneous = instantaneous
        self._clocks = defaultdict[str, _Clock](_Clock)
        #: Of the actions that wait.
        self._waiting: dict[str, _Stamp] = {}
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
        at = most = 0.0
        shares = []
        demand = _demand_of(action)
        for kind in demand[1]:
            flow, clock, charge = self._flow(action.task, kind), self._clocks[kind], self.charge(action, kind) / weight
            shares.append((flow, clock, charge))
            begin = flow.begin(clock.now())
            if begin > at:
                at = begin
            if charge > most:
                most = charge
        waiting = self._waiting
        stamp = waiting[action.id] = _Stamp(at, most)
        for flow, clock, charge in shares:
            flow.finish = at + charge
            clock.add(flow, stamp, len(waiting))
        self._guessed.add(action.id)
        turns = self._turns.get(demand)
        if turns is None:
            turns = self._turns[demand] = TaskTurns()
        turns.add(stamp)
        return at

    def starts(self, alike: Sequence[Action]) -> None:
        """Note that actions of one task that need the same kinds were started; virtual time may pass their stamps.

        Each takes the first turn of its task.
        """
        stamps = [stamp for action in alike if (stamp := self._waiting.pop(action.id, None)) is not None]
        if not stamps:
            return
        latest = 0.0
        for stamp in stamps:
            stamp.waits = False
            if stamp.at > latest:
                latest = stamp.at
        task, kinds = demand = _demand_of(alike[0])
        turns = self._turns[demand]
        turns.start(stamps)
        if not turns:
            del self._turns[demand]
        for kind in kinds:
            flow = self._flows.get((task, kind))
            if flow is not None:
                if latest > flow.started:
                    flow.started = latest
                flow.tidy(len(self._waiting))

    def leaves(self, action: Action, weight: float) -> None:
        """Note that an action ended without a start: it gives up the last turn of its task, which owes nothing for it.

        Were it charged nevertheless, a task that cancels a long backlog would wait until others had used as much.
        """
        stamp = self._waiting.pop(action.id, None)
        if stamp is None:
            return
        stamp.waits = False
        demand = _demand_of(action)
        turns = self._turns[demand]
        turns.leave()
        if not turns:
            del self._turns[demand]
        self._guessed.discard(action.id)
        for kind, _ in action.demand:
            flow = self._flows.get((action.task, kind))
            if flow is not None:
                flow.finish -= self.charge(action, kind) / weight
                flow.tidy(len(self._waiting))

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
                flow.finish = max(flow.finish, self._clocks[kind].now()) + amount / weight
            elif kind not in self._instantaneous:
                flow.finish += (amount - self.charge(action, kind)) / weight

    def check(self) -> None:
        """Assert that every stamp that waits has a turn, and is seen by its flow and the clock."""
        assert sum(len(turns) for turns in self._turns.values()) == len(self._waiting)
        for clock in self._clocks.values():
            clock.check()
        for name, flow in self._flows.items():
            assert not flow.stamps or flow.stamps[-1].waits, f"{name} ends in a stamp that waits no more"
            assert flow.clocked is not None or flow.first() is None, f"no clock looks at {name}"

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
    return action.task, tuple(action.cost)
