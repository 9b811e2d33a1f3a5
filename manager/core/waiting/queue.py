"""The unified action queue: what waits, grouped so that a pass looks at what can start and not at all that waits."""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from manager.action import ANYWHERE, Action, Demand, NodeChoice
from manager.config import ServiceSpec, TaskSpec
from manager.core.expiries import Expiries
from manager.errors import CapacityExceeded, CodedError, QuotaExceeded
from manager.scheduler.durations import UNKNOWN_S

Place = TypeVar("Place")

#: Order of service: the fair-share stamp, the submission, and the child's own submission (0 at the top).
Key = tuple[float, int, int]


@dataclass(slots=True, eq=False)
class Waiting:
    """One accepted action until it starts, or settles without."""

    action: Action
    key: Key
    seq: int
    #: Whether it may run again after its node was lost.
    idempotent: bool = False
    #: Whether a running action invoked it: it passes the order of its trajectory and the caps of its task.
    child: bool = False
    #: The group that a pass can choose it from; None until its turn in its trajectory has come.
    group: QueueGroup | None = None
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

    def first(self, group: QueueGroup) -> Waiting:
        """Return the first one; there is one."""
        index = self._first
        while self._items[index][2].group is not group:
            index += 1
        return self._items[index][2]

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
        "pools",
        "pools_version",
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
        #: How many of them have a choice of units, by the kind of their key; under None those that have none.
        self.keyed: defaultdict[str | None, int] = defaultdict(int)
        #: Names of the pools that could serve it, as of this version of the resources.
        self.pools: tuple[str, ...] = ()
        self.pools_version = -1

    @property
    def kinds(self) -> Iterable[str]:
        """Return the kinds that it is found by: those that it needs, or the empty one."""
        return self.demand or ("",)

    @property
    def needs_memory_only(self) -> bool:
        return self.signature.memory_bytes > 0 and not self.demand

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

    @property
    def first(self) -> Waiting:
        """Return the first in order of service; something must wait."""
        return self._by_service.first(self)

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
        self._by_task: dict[str, int] = {}
        self._by_function: dict[str, int] = {}
        self._deadlines = Expiries[Waiting](lambda one, _: self._waiting.get(one.id) is not one)
        #: What was offered since the last pass, by group, and the groups of which some left what they had reserved.
        self._arrived: dict[QueueGroup, int] = {}
        self._forsaken: set[QueueGroup] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, action_id: str) -> bool:
        return action_id in self._waiting

    def __iter__(self) -> Iterator[Waiting]:
        """Iterate over every waiting action, in no order of service."""
        return iter(self._waiting.values())

    def get(self, action_id: str) -> Waiting | None:
        return self._waiting.get(action_id)

    def of_trajectory(self, trajectory: str) -> list[Waiting]:
        """Return its waiting actions, latest first: none gets its turn while they are cancelled one by one."""
        found = [one for one in self._waiting.values() if one.action.trajectory == trajectory]
        return sorted(found, key=lambda one: one.order, reverse=True)

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
        self._deadlines.add(now_s + action.queue_timeout_s, waiting.seq, waiting)

    def offer(self, waiting: Waiting, node: str = "") -> None:
        """Let a pass choose an action, on ``node`` if it is bound to one; its trajectory, if any, holds its memory."""
        action = waiting.action
        memory_bytes = action.memory_bytes if action.trajectory is None else 0
        service = self._batch_service(action) if action.batch_tokens else ""
        group = self._latest.get(node)
        if group is None or not group.takes(action, memory_bytes, service, child=waiting.child):
            group = self._latest[node] = self._group_of(
                Signature(action.task, action.demand, memory_bytes, node, service, waiting.child, action.placement)
            )
        group.add(waiting)
        self._arrived[group] = self._arrived.get(group, 0) + 1

    def leave(self, alike: Sequence[Waiting]) -> None:
        """Remove actions of one group, or one of none, that start on what they had reserved."""
        functions: dict[str, int] = {}
        for waiting in alike:
            del self._waiting[waiting.id]
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
            self._forsaken.add(waiting.group)
        self.leave([waiting])

    def take_arrived(self) -> dict[QueueGroup, int]:
        """Return how many actions were offered since the last call, by group."""
        arrived, self._arrived = self._arrived, {}
        return arrived

    def take_forsaken(self) -> set[QueueGroup]:
        """Return the groups that an action was withdrawn from since the last call."""
        forsaken, self._forsaken = self._forsaken, set()
        return forsaken

    @property
    def has_groups(self) -> bool:
        return bool(self._groups)

    def groups(self) -> list[QueueGroup]:
        return list(self._groups.values())

    def groups_of(self, kind: str) -> Collection[QueueGroup]:
        """Return the groups that need ``kind``; those that need no kind, if it is empty."""
        return self._by_kind.get(kind, ())

    def groups_at(self, kind: str, node: str) -> Iterable[QueueGroup]:
        """Return the groups that may be given ``kind`` on ``node``."""
        return chain(self._by_place.get((kind, node), ()), self._by_place.get((kind, ""), ()))

    def by_task(self, task: str) -> int:
        return self._by_task.get(task, 0)

    def next_deadline_s(self) -> float | None:
        """Return the instant at which the next waiting action's patience ends; None if nothing waits."""
        return self._deadlines.next_s()

    def expired(self, now_s: float) -> list[Waiting]:
        """Return the waiting actions whose ``queue_timeout`` has passed."""
        return self._deadlines.take(now_s, len(self._waiting))

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
        return group

    def _forget(self, group: QueueGroup) -> None:
        """Drop a group of which nothing waits any more."""
        del self._groups[group.signature]
        if self._latest.get(group.signature.node) is group:
            del self._latest[group.signature.node]
        for kind in group.kinds:
            _discard(self._by_kind, kind, group)
            _discard(self._by_place, (kind, group.signature.node), group)

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


def _decrement(counter: dict[str, int], name: str, by: int = 1) -> None:
    """Count down, and forget a name at nought: callers invent names, which must not pile up."""
    left = counter[name] - by
    if left > 0:
        counter[name] = left
    else:
        del counter[name]
