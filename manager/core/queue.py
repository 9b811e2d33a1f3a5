"""The queue: fairness, children, expiries."""

from __future__ import annotations

import heapq
import sys
from bisect import insort
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from manager.action import ANYWHERE, Action, Demand, NodeChoice
from manager.config import ServiceSpec, TaskSpec
from manager.errors import CapacityExceeded, CodedError, QuotaExceeded
from manager.scheduler.rank import UNKNOWN_S

# Weighted fair sharing between tasks: start-time fair queuing, one virtual clock for each resource kind.
#
# Each action is stamped once, when it is queued, with the virtual time at which its task's share of the resources it
# needs comes round; the queue is served in the order of stamps. Inside a task stamps never go back for two actions that
# share a resource, so a task is served first come first served, and every stamp is reached: nobody starves.
#
# Virtual time is the least stamp that waits, so a short action of a long backlog that a policy lets pass moves nothing:
# were it the stamp of what was started last, everybody who comes would be put behind that backlog, whatever its weight.
# Running actions do not count: one that runs for an hour would give every newcomer an hour's advance.
#
# A policy may let an action of a task pass another of the same task. The stamps are then dealt anew (`TaskTurns`): each
# start takes the task's least one, whoever starts. Were it the starter's own, those that are passed would keep theirs,
# and a task that serves its short ones first would stand before all others for ever.

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


Item = TypeVar("Item")


class Expiries(Generic[Item]):
    """A heap from which nothing is deleted at once: what is stale goes when it comes up, or in bulk."""

    def __init__(self, is_stale: Callable[[Item, float], bool]) -> None:
        """``is_stale`` says of an item and its instant whether that instant means nothing any more."""
        self._is_stale = is_stale
        #: Instant, order, a number that is never the same (items need not compare), item.
        self._heap: list[tuple[float, int, int, Item]] = []
        self._added = 0

    def add(self, expiry_s: float, seq: int, item: Item) -> None:
        """Note that ``item`` expires at ``expiry_s``; ``seq`` orders what expires at the same instant."""
        self._added += 1
        heapq.heappush(self._heap, (expiry_s, seq, self._added, item))

    def next_s(self) -> float | None:
        """Return the instant at which the next item expires; None if there is none."""
        while self._heap and self._is_stale(self._heap[0][-1], self._heap[0][0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now_s: float, living: int) -> list[Item]:
        """Remove and return what has expired; ``living`` is about how many items are not stale."""
        due: list[Item] = []
        while self._heap and self._heap[0][0] <= now_s:
            expiry_s, _, _, item = heapq.heappop(self._heap)
            if not self._is_stale(item, expiry_s):
                due.append(item)
        if len(self._heap) > 64 + 4 * living:
            self._heap = [entry for entry in self._heap if not self._is_stale(entry[-1], entry[0])]
            heapq.heapify(self._heap)
        return due


Place = TypeVar("Place")
Counted = TypeVar("Counted")

#: Order of service: the fair-share stamp, the submission, and the child's own submission (0 at the top).
Key = tuple[float, int, int]


@dataclass(slots=True, eq=False)
class Waiting:
    """One accepted action until it starts, or settles without."""

    action: Action
    key: Key
    seq: int
    #: Whether a running action invoked it: it passes the order of its trajectory and the caps of its task.
    child: bool = False
    #: The group that a pass can choose it from; None until its turn in its trajectory has come.
    group: QueueGroup | None = None
    #: The instant from which it may start; 0 once that has come.
    not_before_s: float = 0.0
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.action.id

    @property
    def order(self) -> tuple[Key, int]:
        """Return the place in the order of service."""
        return self.key, self.seq


class Signature(NamedTuple):
    """What decides whether an action can start: members of a group are alike in it."""

    task: str
    demand: Demand
    #: Bytes newly held by the action itself.
    memory_bytes: int
    #: The node it is pinned to; empty if any will do.
    node: str
    #: The service whose batch it may join; empty if it joins none.
    batch_service: str
    child: bool
    #: Which nodes are right for it.
    placement: NodeChoice = ANYWHERE


#: What sorts waiting actions among others: one that is queued again may meet the mark of its first time.
_place = itemgetter(0, 1)
#: What stands first in an order: a `Key`, or seconds.
Rank = TypeVar("Rank", Key, float)


def _expected_s(waiting: Waiting) -> float:
    """Return the seconds that an action takes with one unit, by estimate."""
    seconds = waiting.action.t_ori_s
    return UNKNOWN_S if seconds is None else seconds


class InOrder(Generic[Rank]):
    """Waiting actions of one group in one order. Who has left is marked, by `Waiting.group`; and cleaned out in bulk.

    It does not hold its group: a circle would keep both, and what lies in them, until the collector comes.
    """

    __slots__ = ("_first", "_items")

    def __init__(self, items: Iterable[tuple[Rank, int, Waiting]] | None = None) -> None:
        self._items: list[tuple[Rank, int, Waiting]] = [] if items is None else sorted(items, key=_place)
        self._first = 0

    def add(self, rank: Rank, waiting: Waiting) -> None:
        item = (rank, waiting.seq, waiting)
        last = self._items[-1] if self._items else None
        if last is None or last[0] < rank or (last[0] == rank and last[1] < waiting.seq):
            self._items.append(item)
        else:
            insort(self._items, item, lo=self._first, key=_place)

    def clean(self, group: QueueGroup, live: int) -> bool:
        """Take in that some have left, so that ``live`` of this order are in the group; whether the list is new."""
        while self._first < len(self._items) and self._items[self._first][2].group is not group:
            self._first += 1
        if len(self._items) <= 32 + 2 * live:
            return False
        self._items = [item for item in self._items[self._first :] if item[2].group is group]
        self._first = 0
        return True

    def items(self, group: QueueGroup) -> Iterator[tuple[Rank, int, Waiting]]:
        """Yield each with what sorts it among others; the group must not change meanwhile."""
        for index in range(self._first, len(self._items)):
            item = self._items[index]
            if item[2].group is group:
                yield item


class QueueGroup:
    """Waiting actions with one signature, in order of service.

    From the first time that somebody asks they also lie in the order of their expected seconds, the earlier of equals
    first, and those that have no choice of a kind's units lie by themselves.
    """

    __slots__ = (
        "_by_length",
        "_by_service",
        "_rigid",
        "_seconds",
        "demand",
        "keyed",
        "live",
        "longest_s",
        "places",
        "signature",
    )

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.demand: Mapping[str, int] = dict(signature.demand)
        self._by_service: InOrder[Key] = InOrder()
        self._by_length: InOrder[float] | None = None
        self._seconds = 0.0
        self._rigid: dict[str, InOrder[Key]] = {}
        self.live = 0
        #: What none of them exceeds in expected seconds with one unit, as far as these are known.
        self.longest_s = 0.0
        #: How many of them have a choice of units, by the kind of their key; under None those that have none.
        self.keyed: defaultdict[str | None, int] = defaultdict(int)
        #: How many nodes could serve it, as of that version of the resources.
        self.places = 0, -1

    @property
    def kinds(self) -> Iterable[str]:
        """Return the kinds that it is found by: those that it needs, or the empty one."""
        return self.demand or ("",)

    def takes(self, action: Action, memory_bytes: int, batch_service: str, *, child: bool) -> bool:
        """Return whether an action that is offered on this group's node is alike in all else."""
        signature = self.signature
        return (
            action.task == signature.task
            and action.demand == signature.demand
            and memory_bytes == signature.memory_bytes
            and batch_service == signature.batch_service
            and child is signature.child
            and action.placement == signature.placement
        )

    def add(self, waiting: Waiting) -> None:
        waiting.group = self
        self.live += 1
        self.keyed[waiting.action.key] += 1
        self.longest_s = max(self.longest_s, waiting.action.t_ori_s or 0.0)
        self._by_service.add(waiting.key, waiting)
        if self._by_length is not None:
            seconds = _expected_s(waiting)
            self._by_length.add(seconds, waiting)
            self._seconds += seconds
        for kind, rigid in self._rigid.items():
            if waiting.action.key != kind:
                rigid.add(waiting.key, waiting)

    def remove(self, leaving: Sequence[Waiting]) -> None:
        for waiting in leaving:
            assert waiting.group is self, f"{waiting.id} is not in this group"
            waiting.group = None
            self.keyed[waiting.action.key] -= 1
        self.live -= len(leaving)
        self._by_service.clean(self, self.live)
        if self._by_length is not None:
            for waiting in leaving:
                self._seconds -= _expected_s(waiting)
            if self._by_length.clean(self, self.live):  # so that what is rounded does not pile up
                self._seconds = sum(seconds for seconds, _, _ in self._by_length.items(self))
        for kind, rigid in self._rigid.items():
            rigid.clean(self, self.live - self.keyed[kind])

    def rigid(self, kind: str) -> Iterator[tuple[Key, int, Waiting]]:
        """Yield those without a choice of ``kind``'s units as `items` does."""
        if kind not in self._rigid:
            self._rigid[kind] = InOrder(item for item in self.items() if item[2].action.key != kind)
        return self._rigid[kind].items(self)

    def shortest(self) -> Iterator[tuple[float, int, Waiting]]:
        """Yield the same actions, the shortest first, as `items` does."""
        return self._lengths().items(self)

    @property
    def seconds(self) -> float:
        """Return the sum of their expected seconds."""
        self._lengths()
        return self._seconds

    def _lengths(self) -> InOrder[float]:
        if self._by_length is None:
            self._by_length = InOrder((_expected_s(one), one.seq, one) for one in self)
            self._seconds = sum(seconds for seconds, _, _ in self._by_length.items(self))
        return self._by_length

    def check(self) -> None:
        """Assert that all orders hold the same actions, which the counts are of."""
        assert {key: count for key, count in self.keyed.items() if count} == Counter(one.action.key for one in self)
        for kind, rigid in self._rigid.items():
            assert [one for _, _, one in rigid.items(self)] == [one for one in self if one.action.key != kind]
        if self._by_length is not None:
            lengths = [(item[0], item[2]) for item in self._by_length.items(self)]
            assert {id(one) for _, one in lengths} == {id(one) for one in self} and len(lengths) == self.live
            expected_s = sum(seconds for seconds, _ in lengths)
            assert abs(self._seconds - expected_s) <= 1e-6 * max(1.0, expected_s)

    def items(self) -> Iterator[tuple[Key, int, Waiting]]:
        """Yield waiting actions in order, each with what sorts it among others; the group must not change meanwhile."""
        return self._by_service.items(self)

    def __iter__(self) -> Iterator[Waiting]:
        """Iterate over waiting actions in order; the group must not change meanwhile."""
        return (waiting for _, _, waiting in self.items())


@dataclass(slots=True, kw_only=True)
class Bounds:
    """Most waiting actions: in all, by task and by function."""

    total: int
    tasks: Mapping[str, TaskSpec]
    functions: Mapping[str, int] = field(default_factory=dict)


class Queue:
    """Everything that waits: admitted, offered to a pass when its turn has come, gone when it starts or settles."""

    def __init__(self, bounds: Bounds, services: Mapping[str, ServiceSpec]) -> None:
        self.bounds = bounds
        #: The model services whose actions may wait for a batch.
        self.services = services
        self._waiting: dict[str, Waiting] = {}
        self._groups: dict[Signature, QueueGroup] = {}
        #: By node, the one that was offered something last: most often the next one is alike.
        self._latest: dict[str, QueueGroup] = {}
        #: The same by kind that they need, and by kind and node; those that need none are under the empty kind.
        self._by_kind: dict[str, dict[QueueGroup, None]] = {}
        self._by_place: dict[tuple[str, str], dict[QueueGroup, None]] = {}
        #: By kind, how many groups need so many units of it at least.
        self._minima: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._by_task: dict[str, int] = {}
        self._by_function: dict[str, int] = {}
        self._deadlines = Expiries[Waiting](lambda one, _: self._waiting.get(one.id) is not one)
        #: Whose turn has come before the instant from which they may start, with the node that each is bound to.
        self._early: dict[Waiting, str] = {}
        self._due = Expiries[Waiting](lambda one, _: one not in self._early)
        #: Until the next pass takes them: how many were offered, by group, and the groups of which some were withdrawn
        #: from what they had reserved.
        self.arrived: dict[QueueGroup, int] = {}
        self.forsaken: set[QueueGroup] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, action_id: str) -> bool:
        return action_id in self._waiting

    def __iter__(self) -> Iterator[Waiting]:
        """Iterate over every waiting action, in no order of service."""
        return iter(self._waiting.values())

    def get(self, action_id: str) -> Waiting | None:
        return self._waiting.get(action_id)

    def refusal(self, action: Action) -> CodedError | None:
        """Return why one more such action cannot be queued now; None if it can."""
        bound = self.bounds.functions.get(action.function)
        if bound is not None and self._by_function.get(action.function, 0) >= bound:
            return _over(QuotaExceeded, f"function {action.function} has {bound} actions waiting, its bound", action)
        task = self.bounds.tasks.get(action.task)
        if task is not None and self._by_task.get(action.task, 0) >= task.max_queued:
            return _over(QuotaExceeded, f"task {action.task} has {task.max_queued} actions waiting, its bound", action)
        if len(self._waiting) >= self.bounds.total:
            return _over(CapacityExceeded, f"{self.bounds.total} actions wait, the bound of the queue", action)
        return None

    def admit(self, waiting: Waiting, now_s: float) -> None:
        """Count an action and start its waiting clock."""
        assert waiting.id not in self._waiting, f"{waiting.id} waits already"
        action = waiting.action
        self._waiting[waiting.id] = waiting
        self._by_task[action.task] = self._by_task.get(action.task, 0) + 1
        self._by_function[action.function] = self._by_function.get(action.function, 0) + 1
        self._deadlines.add(max(now_s, waiting.not_before_s) + action.queue_timeout_s, waiting.seq, waiting)

    def offer(self, waiting: Waiting, node: str = "") -> None:
        """Let a pass choose an action, on ``node`` if it is bound to one; its trajectory, if any, holds its memory.

        One that may not start yet is offered by `release`, when it may.
        """
        action = waiting.action
        if waiting.not_before_s:
            self._early[waiting] = node
            self._due.add(waiting.not_before_s, waiting.seq, waiting)
            return
        memory_bytes = action.memory_bytes if action.trajectory is None else 0
        service = self._batch_service(action) if action.batch_tokens else ""
        group = self._latest.get(node)
        if group is None or not group.takes(action, memory_bytes, service, child=waiting.child):
            group = self._latest[node] = self._group_of(
                Signature(action.task, action.demand, memory_bytes, node, service, waiting.child, action.placement)
            )
        group.add(waiting)
        self.arrived[group] = self.arrived.get(group, 0) + 1

    def release(self, now_s: float) -> None:
        """Offer what may start by now."""
        for waiting in self._due.take(now_s, len(self._early)) if self._early else ():
            waiting.not_before_s = 0.0
            self.offer(waiting, self._early.pop(waiting))

    def early(self) -> Collection[Waiting]:
        """Return those whose turn has come before the instant from which they may start."""
        return self._early.keys()

    def next_release_s(self) -> float | None:
        """Return the instant from which the next of those may start; None if there is none."""
        return self._due.next_s() if self._early else None

    def leave(self, alike: Sequence[Waiting]) -> None:
        """Remove actions of one group, or one of none, that start on what they had reserved."""
        functions: dict[str, int] = {}
        for waiting in alike:
            del self._waiting[waiting.id]
            if self._early:
                self._early.pop(waiting, None)
            functions[waiting.action.function] = functions.get(waiting.action.function, 0) + 1
        for function, count in functions.items():
            _decrement(self._by_function, function, count)
        _decrement(self._by_task, alike[0].action.task, len(alike))
        group = alike[0].group
        if group is not None:
            group.remove(alike)
            if not group.live:
                self._forget(group)

    def withdraw(self, waiting: Waiting) -> None:
        """Remove an action that leaves what it had reserved to others."""
        if waiting.group is not None:
            self.forsaken.add(waiting.group)
        self.leave([waiting])

    def groups(self) -> list[QueueGroup]:
        return list(self._groups.values())

    def groups_of(self, kind: str) -> Collection[QueueGroup]:
        """Return the groups that need ``kind``; those that need no kind, if it is empty."""
        return self._by_kind.get(kind, ())

    def groups_at(self, kind: str, node: str) -> Iterable[QueueGroup]:
        """Return the groups that may be given ``kind`` on ``node``."""
        return chain(self._by_place.get((kind, node), ()), self._by_place.get((kind, ""), ()))

    def least(self, kind: str) -> int:
        """Return the fewest units of ``kind`` with which something that waits could start; more than any if nothing."""
        return min(self._minima[kind], default=sys.maxsize)

    def by_task(self, task: str) -> int:
        return self._by_task.get(task, 0)

    def tasks(self) -> Iterable[str]:
        """Return the tasks of which actions wait."""
        return self._by_task.keys()

    def next_deadline_s(self) -> float | None:
        """Return the instant at which the next waiting action's patience ends; None if nothing waits."""
        return self._deadlines.next_s() if self._waiting else None

    def expired(self, now_s: float) -> list[Waiting]:
        """Return the waiting actions whose ``queue_timeout`` has passed."""
        return self._deadlines.take(now_s, len(self._waiting)) if self._waiting else []

    def check(self) -> None:
        """Assert that the counters and the groups agree with what waits."""
        grouped = [one for group in self._groups.values() for one in group]
        assert len(grouped) == sum(group.live for group in self._groups.values())
        indexed = {group for groups in self._by_place.values() for group in groups}
        assert indexed == set(self._groups.values()) == {group for groups in self._by_kind.values() for group in groups}
        assert all(self._waiting.get(one.id) is one for one in grouped), "a group holds what does not wait"
        for node, group in self._latest.items():
            assert self._groups.get(group.signature) is group and group.signature.node == node, f"{node}: a lost group"
        assert sum(self._by_task.values()) == sum(self._by_function.values()) == len(self._waiting)
        for group in self._groups.values():
            group.check()

    def _group_of(self, signature: Signature) -> QueueGroup:
        """Return the group of a signature, which is made if there is none."""
        group = self._groups.get(signature)
        if group is None:
            group = self._groups[signature] = QueueGroup(signature)
            for kind in group.kinds:
                self._by_kind.setdefault(kind, {})[group] = None
                self._by_place.setdefault((kind, signature.node), {})[group] = None
            for kind, units in signature.demand:
                self._minima[kind][units] += 1
        return group

    def _forget(self, group: QueueGroup) -> None:
        """Drop a group of which nothing waits any more."""
        del self._groups[group.signature]
        if self._latest.get(group.signature.node) is group:
            del self._latest[group.signature.node]
        for kind in group.kinds:
            _discard(self._by_kind, kind, group)
            _discard(self._by_place, (kind, group.signature.node), group)
        for kind, units in group.signature.demand:
            _decrement(self._minima[kind], units)

    def _batch_service(self, action: Action) -> str:
        """Return the service whose batch an action with tokens may join; empty if the service makes none."""
        name = action.service or ""
        return name if name in self.services and self.services[name].batch_tokens else ""


def _over(error: type[CodedError], message: str, action: Action) -> CodedError:
    return error(message, component="queue", invocation_id=action.id)


def _discard(index: dict[Place, dict[QueueGroup, None]], place: Place, group: QueueGroup) -> None:
    """Remove a group from where it was found, and the place with the last one: nodes come and go."""
    groups = index[place]
    del groups[group]
    if not groups:
        del index[place]


def _decrement(counter: dict[Counted, int], name: Counted, by: int = 1) -> None:
    """Count down, and forget a name at nought: callers invent names, which must not pile up."""
    left = counter[name] - by
    if left > 0:
        counter[name] = left
    else:
        del counter[name]


@dataclass(slots=True, eq=False)
class TrajectoryState:
    """One rollout's environment as the core sees it."""

    name: str
    task: str
    memory_bytes: int
    ttl_s: float
    opened_seq: int
    #: What its actions need at least, as far as it is known.
    demand: Demand = ()
    #: Which nodes are right for it.
    placement: NodeChoice = ANYWHERE
    #: Where it is pinned; empty before.
    node: str = ""
    #: Whether it waits for a node's memory.
    waiting: bool = False
    #: The action whose turn it is (eligible or running), and those behind it.
    active: Waiting | None = None
    behind: list[Waiting] = field(default_factory=list)
    #: Actions whose turn it is, but which need the place that it waits for.
    unplaced: tuple[Waiting, ...] = ()
    #: Actions invoked by the active one, queued or running.
    children: list[Waiting] = field(default_factory=list)
    idle_since_s: float = 0.0
    #: Opened by the caller, who wants to know its place and keeps it without an action.
    explicit: bool = False
    ending: bool = False

    @property
    def at_rest(self) -> bool:
        """Return whether none of its actions is queued or running."""
        return self.active is None and not self.behind and not self.children


class Trajectories:
    """The living ones, those that wait for memory in order of arrival, and the instants at which idle ones end."""

    def __init__(self) -> None:
        self._living: dict[str, TrajectoryState] = {}
        self._by_task: Counter[str] = Counter()
        #: In order of arrival, among them some that wait no more.
        self._waiting: deque[TrajectoryState] = deque()
        #: How many wait for memory, by task.
        self.waiting_tasks = Counter[str]()
        self._expiries = Expiries(self._is_stale)

    def __iter__(self) -> Iterator[TrajectoryState]:
        return iter(self._living.values())

    def __len__(self) -> int:
        return len(self._living)

    def get(self, name: str) -> TrajectoryState | None:
        return self._living.get(name)

    def add(self, trajectory: TrajectoryState) -> None:
        assert trajectory.name not in self._living, f"trajectory {trajectory.name} is open already"
        self._living[trajectory.name] = trajectory
        self._by_task[trajectory.task] += 1

    def of_task(self, task: str) -> int:
        """Return how many live of a task."""
        return self._by_task[task]

    def remove(self, trajectory: TrajectoryState) -> None:
        del self._living[trajectory.name]
        self._by_task[trajectory.task] -= 1
        if not self._by_task[trajectory.task]:
            del self._by_task[trajectory.task]
        self.wait_no_more(trajectory)

    def wait_for_memory(self, trajectory: TrajectoryState) -> None:
        if not trajectory.waiting:
            trajectory.waiting = True
            self.waiting_tasks[trajectory.task] += 1
            self._waiting.append(trajectory)

    def wait_no_more(self, trajectory: TrajectoryState) -> None:
        """Note that a trajectory has its place, or needs none any more."""
        if trajectory.waiting:
            trajectory.waiting = False
            _decrement(self.waiting_tasks, trajectory.task)

    def waiting(self) -> Iterator[TrajectoryState]:
        """Return those that wait for memory, the longest first; they may cease to wait meanwhile."""
        if len(self._waiting) > 64 + 2 * self.waiting_tasks.total():
            self._waiting = deque(dict.fromkeys(trajectory for trajectory in self._waiting if trajectory.waiting))
        while self._waiting and not self._waiting[0].waiting:
            self._waiting.popleft()
        return (trajectory for trajectory in self._waiting if trajectory.waiting)

    def rest(self, trajectory: TrajectoryState, now_s: float) -> None:
        """Start the idle clock of a trajectory of which nothing runs or waits."""
        trajectory.idle_since_s = now_s
        self._expiries.add(now_s + trajectory.ttl_s, trajectory.opened_seq, trajectory)

    def next_expiry_s(self) -> float | None:
        """Return the instant at which the next idle trajectory ends; None if there is none."""
        return self._expiries.next_s()

    def expired(self, now_s: float) -> list[TrajectoryState]:
        """Return the trajectories that were idle for their whole ``ttl_s``."""
        return self._expiries.take(now_s, len(self._living))

    def _is_stale(self, trajectory: TrajectoryState, expiry_s: float) -> bool:
        return (
            self._living.get(trajectory.name) is not trajectory
            or not trajectory.at_rest
            or trajectory.idle_since_s + trajectory.ttl_s != expiry_s
        )
