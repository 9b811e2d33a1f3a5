"""The unified action queue: what waits, grouped so that a pass looks at what can start and not at all that waits."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from manager.action import Action, Demand
from manager.batch import Batch
from manager.config import ServiceSpec, TaskSpec
from manager.core.expiries import Expiries
from manager.errors import CapacityExceeded, CodedError, QuotaExceeded
from manager.lease import Lease
from manager.outcome import State

#: Order of service: the fair-share stamp, the submission, and the child's own submission (0 at the top).
Key = tuple[float, int, int]


@dataclass(slots=True, eq=False)
class Entry:
    """One accepted action until it settles."""

    action: Action
    key: Key
    seq: int
    idempotent: bool = False
    state: State = State.QUEUED
    #: The group it can be chosen from; None while it runs or waits for its trajectory.
    group: QueueGroup | None = None
    #: Earlier action of its trajectory must settle first, unless it was invoked by a running one.
    child: bool = False
    lease: Lease | None = None
    #: What it was started with; None where alone.
    batch: Batch | None = None
    started_s: float = 0.0
    #: Work done before ``since_s``, as a fraction, and when the units changed last.
    done: float = 0.0
    since_s: float = 0.0
    #: Until when `used` counts.
    accounted_s: float = 0.0
    #: Unit-seconds used so far, by kind.
    used: dict[str, float] = field(default_factory=dict)
    resize_after_s: float = 0.0
    #: Whether its units have changed while it ran.
    resized: bool = False
    aborting: bool = False
    #: Kinds whose units are lent, by whom, and the child that uses this one's units.
    borrowed: frozenset[str] = frozenset()
    lender: Entry | None = None
    borrower: Entry | None = None
    #: Its action's.
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.action.id

    def malleable(self, kind: str) -> bool:
        """Whether its units of ``kind`` may change while it runs."""
        return self.action.malleable and self.action.key == kind

    @property
    def order(self) -> tuple[Key, int]:
        """Sorts entries in order of service."""
        return self.key, self.seq


class Signature(NamedTuple):
    """What decides whether an action can start: members of a group are alike in it."""

    task: str
    demand: Demand
    #: Bytes newly held by the action itself.
    memory_bytes: int
    #: The node it is pinned to; empty where any will do.
    node: str
    #: The service whose batch it may join; empty where it joins none.
    batch_service: str
    child: bool


class QueueGroup:
    """Waiting actions with one signature, in order of service. Removal is a mark; the list is cleaned in bulk."""

    __slots__ = ("_first", "_items", "demand", "live", "pools", "pools_version", "signature")

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.demand: Mapping[str, int] = dict(signature.demand)
        self._items: list[tuple[Key, int, Entry]] = []
        self._first = 0
        self.live = 0
        #: Names of the pools that could serve it, as of this version of the resources.
        self.pools: tuple[str, ...] = ()
        self.pools_version = -1

    @property
    def needs_memory_only(self) -> bool:
        return self.signature.memory_bytes > 0 and not self.demand

    def add(self, entry: Entry) -> None:
        item = (entry.key, entry.seq, entry)
        if not self._items or item > self._items[-1]:
            self._items.append(item)
        else:
            insort(self._items, item, lo=self._first)
        entry.group = self
        self.live += 1

    def remove(self, entry: Entry) -> None:
        assert entry.group is self, f"{entry.id} is not in this group"
        entry.group = None
        self.live -= 1
        while self._first < len(self._items) and self._items[self._first][2].group is not self:
            self._first += 1
        if len(self._items) > 32 + 2 * self.live:
            self._items = [item for item in self._items[self._first :] if item[2].group is self]
            self._first = 0

    def first(self, count: int) -> list[tuple[Key, int, Entry]]:
        """Up to ``count`` waiting actions in order, each with what sorts it among those of other groups."""
        items = self._items
        found = [item for item in items[self._first : self._first + count] if item[2].group is self]
        index = self._first + count
        while len(found) < count and index < len(items):
            more = items[index : index + count]
            found += [item for item in more if item[2].group is self]
            index += count
        return found[:count]

    def __iter__(self) -> Iterator[Entry]:
        """Waiting actions in order; the group must not change meanwhile."""
        for index in range(self._first, len(self._items)):
            entry = self._items[index][2]
            if entry.group is self:
                yield entry


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
        self._waiting: dict[str, Entry] = {}
        self._groups: dict[Signature, QueueGroup] = {}
        self._by_task: Counter[str] = Counter()
        self._by_function: Counter[str] = Counter()
        self._deadlines = Expiries[Entry](lambda entry, _: self._waiting.get(entry.id) is not entry)
        #: What was offered since the last pass, by group, and the groups of which some left what they had reserved.
        self._arrived: dict[QueueGroup, int] = {}
        self._forsaken: set[QueueGroup] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, action_id: str) -> bool:
        return action_id in self._waiting

    def __iter__(self) -> Iterator[Entry]:
        """Every waiting action, in no order of service."""
        return iter(self._waiting.values())

    def get(self, action_id: str) -> Entry | None:
        return self._waiting.get(action_id)

    def of_trajectory(self, trajectory: str) -> list[Entry]:
        """Its waiting actions, latest first: none of them gets its turn while they are cancelled one by one."""
        found = [entry for entry in self._waiting.values() if entry.action.trajectory == trajectory]
        return sorted(found, key=lambda entry: entry.order, reverse=True)

    def refusal(self, action: Action) -> CodedError | None:
        """Why one more such action cannot be queued now; None where it can."""
        bound = self.bounds.functions.get(action.function)
        if bound is not None and self._by_function[action.function] >= bound:
            return _over(QuotaExceeded, f"function {action.function} has {bound} actions waiting, its bound", action)
        task = self.bounds.tasks.get(action.task)
        if task is not None and self._by_task[action.task] >= task.max_queued:
            return _over(QuotaExceeded, f"task {action.task} has {task.max_queued} actions waiting, its bound", action)
        if len(self._waiting) >= self.bounds.total:
            return _over(CapacityExceeded, f"{self.bounds.total} actions wait, the bound of the queue", action)
        return None

    def admit(self, entry: Entry, now_s: float) -> None:
        """Count it and start its waiting clock."""
        assert entry.id not in self._waiting, f"{entry.id} waits already"
        action = entry.action
        self._waiting[entry.id] = entry
        self._by_task[action.task] += 1
        self._by_function[action.function] += 1
        self._deadlines.add(now_s + action.queue_timeout_s, entry.seq, entry)

    def offer(self, entry: Entry, node: str = "") -> None:
        """Let a pass choose an action, on ``node`` if it is bound to one; its trajectory, if any, holds its memory."""
        action = entry.action
        memory_bytes = action.memory_bytes if action.trajectory is None else 0
        signature = Signature(action.task, action.demand, memory_bytes, node, self._batch_service(action), entry.child)
        group = self._groups.get(signature)
        if group is None:
            group = self._groups[signature] = QueueGroup(signature)
        group.add(entry)
        self._arrived[group] = self._arrived.get(group, 0) + 1

    def leave(self, entry: Entry) -> None:
        """Remove an action that starts on what it had reserved."""
        del self._waiting[entry.id]
        _decrement(self._by_task, entry.action.task)
        _decrement(self._by_function, entry.action.function)
        group = entry.group
        if group is not None:
            group.remove(entry)
            if not group.live:
                del self._groups[group.signature]

    def withdraw(self, entry: Entry) -> None:
        """Remove an action that leaves what it had reserved to others."""
        if entry.group is not None:
            self._forsaken.add(entry.group)
        self.leave(entry)

    def take_arrived(self) -> dict[QueueGroup, int]:
        """Return how many actions were offered since the last call, by group."""
        arrived, self._arrived = self._arrived, {}
        return arrived

    def take_forsaken(self) -> set[QueueGroup]:
        """Return the groups that an action was withdrawn from since the last call."""
        forsaken, self._forsaken = self._forsaken, set()
        return forsaken

    def groups(self) -> list[QueueGroup]:
        return list(self._groups.values())

    def by_task(self, task: str) -> int:
        return self._by_task[task]

    def next_deadline_s(self) -> float | None:
        """The instant at which the next waiting action's patience ends."""
        return self._deadlines.next_s()

    def expired(self, now_s: float) -> list[Entry]:
        """Waiting actions whose ``queue_timeout`` has passed."""
        return self._deadlines.take(now_s, len(self._waiting))

    def check(self) -> None:
        """Assert that the counters and the groups agree with what waits."""
        grouped = [entry for group in self._groups.values() for entry in group]
        assert len(grouped) == sum(group.live for group in self._groups.values())
        assert all(self._waiting.get(entry.id) is entry for entry in grouped), "a group holds what does not wait"
        assert sum(self._by_task.values()) == sum(self._by_function.values()) == len(self._waiting)

    def _batch_service(self, action: Action) -> str:
        """Return the service whose batch an action may join; empty if it joins none."""
        service = self.services.get(action.service or "") if action.batch_tokens else None
        return service.name if service is not None and service.batch_tokens else ""


def _over(error: type[CodedError], message: str, action: Action) -> CodedError:
    return error(message, component="queue", invocation_id=action.id)


def _decrement(counter: Counter[str], name: str) -> None:
    """Count down; names that callers invent must not pile up."""
    left = counter[name] - 1
    if left > 0:
        counter[name] = left
    else:
        del counter[name]
