"""Checkers: each watches events and commands with a model of its own, and knows nothing of the core's insides."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import combinations
from typing import Protocol

from manager.action import Action, Lease
from manager.config import ManagerSpec, NodeSpec
from manager.events import (
    Command,
    Event,
    Execute,
    Finished,
    NodeJoined,
    NodeLost,
    Refuse,
    ReplicaEnded,
    Replicate,
    ResidencyReported,
    Resize,
    Settle,
    Submitted,
)
from manager.resources.pools import ConcurrencySpec, QuotaSpec

#: A node, and the first device and the number of devices there.
Place = tuple[str, int, int]


class Checker(Protocol):
    def see(self, now_s: float, event: Event | None, commands: list[Command]) -> None:
        """One step of the core: what it was told (one event at a time) and what it answered."""
        ...

    def end(self) -> None:
        """Nothing more will happen."""
        ...


class Exclusive:
    """Nothing is leased twice: cores, devices, concurrency, and memory never exceed what there is."""

    def __init__(self, spec: ManagerSpec) -> None:
        self._limits = {name: one.limit for name, one in spec.resources.items() if isinstance(one, ConcurrencySpec)}
        self._nodes: dict[str, NodeSpec] = {node.name: node for node in spec.nodes}
        self._leases: dict[str, tuple[Action, Lease]] = {}

    def see(self, now_s: float, event: Event | None, commands: list[Command]) -> None:
        if isinstance(event, NodeJoined):
            self._nodes[event.node.name] = event.node
        if isinstance(event, NodeLost):
            self._leases = {key: held for key, held in self._leases.items() if held[1].node != event.node}
        for command in commands:
            if isinstance(command, Settle):
                self._leases.pop(command.settlement.action.id, None)
            elif isinstance(command, Execute | Resize):
                self._leases[command.action.id] = (command.action, command.lease)
        if any(isinstance(command, Execute | Resize) for command in commands):
            self._check()

    def end(self) -> None:
        assert not self._leases, f"still leased at the end: {sorted(self._leases)}"

    def _check(self) -> None:
        owners: dict[tuple[str, int], str] = {}
        units: Counter[str] = Counter()
        memory: Counter[str] = Counter()
        for action, lease in self._leases.values():
            memory[lease.node] += lease.memory_bytes
            for grant in lease.grants.values():
                if grant.pool in self._limits and not self._lent(action, grant.pool):
                    units[grant.pool] += grant.units
                places = grant.cores or (() if grant.chunk is None else grant.chunk.devices)
                for place in places:
                    owner = owners.setdefault((grant.pool, place), action.id)
                    assert owner == action.id or self._may_share(owner, action.id), (
                        f"{owner} and {action.id} both hold {place} of {grant.pool}"
                    )
        for pool, used in units.items():
            assert used <= self._limits[pool], f"{used} of {self._limits[pool]} {pool} held"
        for node, held in memory.items():
            assert held == 0 or held <= self._nodes[node].memory_bytes, f"{held} bytes held on {node}"

    def _lent(self, action: Action, pool: str) -> bool:
        parent = self._leases.get(action.parent or "")
        return parent is not None and any(grant.pool == pool for grant in parent[1].grants.values())

    def _may_share(self, one: str, other: str) -> bool:
        """A batch shares its chunk, and a waiting parent's units serve its child."""
        (first, first_lease), (second, second_lease) = self._leases[one], self._leases[other]
        batch = first_lease.batch or second_lease.batch
        return (one in batch and other in batch) or first.parent == other or second.parent == one


class EndsChecker:
    """Every accepted action settles exactly once, and its three times make up its life."""

    def __init__(self) -> None:
        self._accepted: dict[str, float] = {}
        self._settled: set[str] = set()
        self._refused: set[str] = set()

    def see(self, now_s: float, event: Event | None, commands: list[Command]) -> None:
        if isinstance(event, Submitted):
            self._accepted[event.action.id] = event.action.submitted_s
        for command in commands:
            if isinstance(command, Refuse):
                self._refused.add(command.action_id)
                self._accepted.pop(command.action_id)
            elif isinstance(command, Settle):
                settlement = command.settlement
                action_id = settlement.action.id
                assert action_id not in self._settled, f"{action_id} settled twice"
                assert action_id in self._accepted, f"{action_id} was never accepted"
                self._settled.add(action_id)
                times = (settlement.queue_s, settlement.overhead_s, settlement.execution_s)
                assert min(times) >= 0, f"{action_id}: {times}"
                life_s = now_s - self._accepted[action_id]
                assert abs(sum(times) - life_s) < 1e-6, f"{action_id}: {times} make {sum(times)}, it lived {life_s}"

    def end(self) -> None:
        missing = set(self._accepted) - self._settled
        assert not missing, f"accepted, but never settled: {sorted(missing)}"


class Quotas:
    """No window of a quota's period holds more than its limit, and no instant more than its burst."""

    def __init__(self, spec: ManagerSpec) -> None:
        self._quotas = {name: one for name, one in spec.resources.items() if isinstance(one, QuotaSpec)}
        self._starts: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def see(self, now_s: float, event: Event | None, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Execute):
                for kind, grant in command.lease.grants.items():
                    if kind in self._quotas:
                        self._add(kind, now_s, grant.units)

    def end(self) -> None:
        """All was checked as it happened."""

    def _add(self, kind: str, now_s: float, units: int) -> None:
        quota = self._quotas[kind]
        starts = self._starts[kind]
        starts.append((now_s, units))
        window = sum(count for start_s, count in starts if start_s + quota.period_s > now_s)
        assert window <= quota.limit, f"{kind}: {window} units in the window that ends at {now_s}"
        instant = sum(count for start_s, count in starts if start_s == now_s)
        assert quota.burst is None or instant <= quota.burst, f"{kind}: {instant} units at {now_s}"


class FirstComeFirstServed:
    """For policies that start in order: inside a task no action passes an earlier one on the one resource both need.

    Actions of a trajectory, children, and members of a batch keep other orders and are left out. So are cores of
    several nodes: the policy of one node may give an action's promised cores to an earlier, wider one, while the
    policy of another node starts a later action.
    """

    def __init__(self, spec: ManagerSpec) -> None:
        self._spread = {"cpu"} if len(spec.nodes) > 1 else set()
        self._waiting: dict[str, tuple[int, Action]] = {}
        self._count = 0

    def see(self, now_s: float, event: Event | None, commands: list[Command]) -> None:
        if isinstance(event, Submitted) and event.action.trajectory is None and event.action.parent is None:
            self._count += 1
            self._waiting[event.action.id] = (self._count, event.action)
        started = [command for command in commands if isinstance(command, Execute)]
        for command in commands:
            if isinstance(command, Refuse):
                self._waiting.pop(command.action_id, None)
            elif isinstance(command, Settle):
                self._waiting.pop(command.settlement.action.id, None)
        seqs = {command.action.id: self._waiting.pop(command.action.id, None) for command in started}
        for command in started:
            mine = seqs[command.action.id]
            if mine is None or command.lease.batch:
                continue
            for seq, other in self._waiting.values():
                same = other.task == command.action.task and list(other.cost) == list(command.action.cost)
                alike = same and other.memory_bytes == command.action.memory_bytes == 0
                alike = alike and other.placement == command.action.placement
                single = len(other.cost) == 1 and self._spread.isdisjoint(other.cost)
                if alike and single and seq < mine[0]:
                    kind = next(iter(other.cost))
                    smaller = other.cost[kind].minimum <= command.action.cost[kind].minimum
                    assert not smaller, f"{command.action.id} passed {other.id} on {kind} at {now_s}"

    def end(self) -> None:
        """All was checked as it happened."""


class TrajectoriesChecker:
    """The actions of a trajectory run one at a time and in order; children run inside their parents."""

    def __init__(self) -> None:
        self._order: dict[str, list[str]] = defaultdict(list)
        self._running: dict[str, str] = {}

    def see(self, now_s: float, event: Event | None, commands: list[Command]) -> None:
        if isinstance(event, Submitted) and event.action.trajectory is not None and event.action.parent is None:
            self._order[event.action.trajectory].append(event.action.id)
        for command in commands:
            if isinstance(command, Refuse):
                self._forget(command.action_id)
            elif isinstance(command, Settle):
                self._forget(command.settlement.action.id)
            elif isinstance(command, Execute) and command.action.trajectory is not None:
                order = self._order[command.action.trajectory]
                if command.action.id in order:
                    assert order[0] == command.action.id, f"{command.action.id} passed {order[0]}"

    def end(self) -> None:
        assert not any(self._order.values()), "trajectories hold actions at the end"

    def _forget(self, action_id: str) -> None:
        for order in self._order.values():
            if action_id in order:
                order.remove(action_id)


class Workers:
    """Nothing grows beyond the workers that it was started with: there would be nobody to use the units."""

    def __init__(self) -> None:
        self._most: dict[str, int] = {}

    def see(self, now_s: float, event: Event | None, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Execute | Resize) and command.action.key is not None:
                grant = command.lease.grants.get(command.action.key)
                if grant is None or not command.action.malleable:
                    continue
                if isinstance(command, Execute):
                    self._most[command.action.id] = grant.workers
                workers = self._most[command.action.id]
                assert not workers or grant.units <= workers, (
                    f"{command.action.id}: {grant.units} for {workers} workers"
                )

    def end(self) -> None:
        """All was checked as it happened."""


class Late:
    """Nothing is started on a node that is lost."""

    def see(self, now_s: float, event: Event | None, commands: list[Command]) -> None:
        if isinstance(event, NodeLost):
            for command in commands:
                if isinstance(command, Execute):
                    assert command.lease.node != event.node, f"{command.action.id} was started on a lost node"

    def end(self) -> None:
        """All was checked as it happened."""


class Residents:
    """A service is found in place only where it was brought; copies travel one at a time, to idle devices only.

    What the core believes may be less than what is there, never more: it is told of every failure and every report.
    What failed to arrive is not asked for again before an action has restored it there.
    """

    def __init__(self) -> None:
        #: (node, first device, size) -> services that may be there, and those that failed to come.
        self._there: dict[Place, set[str]] = defaultdict(set)
        self._failed: dict[Place, set[str]] = defaultdict(set)
        self._under_way: dict[int, Replicate] = {}
        #: Those of them that are there whether they arrive or not: an action restores it, or the node says so.
        self._begun: set[int] = set()
        self._busy: dict[str, tuple[str, Place]] = {}

    def see(self, now_s: float, event: Event | None, commands: list[Command]) -> None:
        match event:
            case NodeLost():
                self._lose(event.node)
            case ReplicaEnded():
                self._end(event)
            case ResidencyReported():
                for service, chunks in event.resident.items():
                    for chunk in chunks:
                        self._there[event.node, *chunk].add(service)
                        self._begun |= self._coming(service, (event.node, *chunk))
            case _:
                pass
        for command in commands:
            match command:
                case Settle():
                    self._busy.pop(command.settlement.action.id, None)
                case Execute():
                    self._execute(command.action, command.lease)
                case Replicate():
                    self._replicate(command)
                case _:
                    pass

    def end(self) -> None:
        """All was checked as it happened."""

    def _lose(self, node: str) -> None:
        for places in (self._there, self._failed):
            for place in [place for place in places if place[0] == node]:
                del places[place]
        self._under_way = {number: one for number, one in self._under_way.items() if one.node != node}
        self._busy = {key: held for key, held in self._busy.items() if held[1][0] != node}

    def _end(self, event: ReplicaEnded) -> None:
        replica = self._under_way.pop(event.number, None)
        if replica is None:
            return
        place = (replica.node, *replica.chunk)
        if event.done:
            self._there[place].add(replica.service)
            return
        self._failed[place].add(replica.service)
        if event.number not in self._begun:
            self._there[place].discard(replica.service)

    def _execute(self, action: Action, lease: Lease) -> None:
        grant = lease.grants.get("gpu")
        if grant is None or grant.chunk is None or action.service is None:
            return
        place = (lease.node, *grant.chunk)
        self._busy[action.id] = action.service, place
        if lease.batch and lease.batch[0] != action.id:
            return
        if grant.restore:
            self._failed[place].discard(action.service)
        else:
            assert action.service in self._there[place], f"{action.id} expects {action.service} at {place}"
        self._evict(place, grant.evict)
        self._there[place].add(action.service)
        self._begun |= self._coming(action.service, place)

    def _coming(self, service: str, place: Place) -> set[int]:
        return {
            number
            for number, one in self._under_way.items()
            if (one.service, one.node, *one.chunk) == (service, *place)
        }

    def _replicate(self, command: Replicate) -> None:
        place = (command.node, *command.chunk)
        for other in self._under_way.values():
            assert not _meet(place, (other.node, *other.chunk)), f"{command} beside {other}"
        assert not any(_meet(place, where) for _, where in self._busy.values()), f"{command}: its devices are not idle"
        assert command.service not in self._failed[place], f"{command} failed there before"
        self._under_way[command.number] = command
        self._there[place].add(command.service)

    def _evict(self, place: Place, services: tuple[str, ...]) -> None:
        """Every idle copy of these services on these devices goes."""
        for where, held in self._there.items():
            in_use = {service for service, other in self._busy.values() if other == where}
            if _meet(where, place):
                held.difference_update(set(services) - in_use)


def _meet(one: Place, other: Place) -> bool:
    return one[0] == other[0] and one[1] < other[1] + other[2] and other[1] < one[1] + one[2]


class FairShares:
    """While two tasks both wait for one kind, what each was given of it, over its weight, differs by a bound.

    The bound of start-time fair queuing: an action of each, over its weight. It holds for units that any action can
    take (one node), in order, with durations that are known.
    """

    def __init__(self, kind: str, weights: Mapping[str, float]) -> None:
        self._kind = kind
        self._weights = weights
        self._waiting: Counter[str] = Counter()
        self._largest: dict[str, float] = dict.fromkeys(weights, 0.0)
        #: For two tasks that both wait: how much more the first was given, now, at least and at most since then.
        self._leads: dict[tuple[str, str], tuple[float, float, float]] = {}
        #: The largest difference that was seen, as a part of its bound.
        self.worst = 0.0

    def see(self, now_s: float, event: Event | None, commands: list[Command]) -> None:
        if isinstance(event, Submitted):
            self._waiting[event.action.task] += 1
            self._largest[event.action.task] = max(self._largest[event.action.task], self._share(event.action))
        for command in commands:
            if isinstance(command, Refuse):
                raise AssertionError(f"{command.action_id} was refused")
            if isinstance(command, Execute):
                self._start(command.action)

    def end(self) -> None:
        """All was checked as it happened."""

    def _share(self, action: Action) -> float:
        duration_s = action.t_ori_s
        assert duration_s is not None
        return action.cost[self._kind].minimum * duration_s / self._weights[action.task]

    def _start(self, action: Action) -> None:
        self._waiting[action.task] -= 1
        for pair in combinations(sorted(self._weights), 2):
            if not all(self._waiting[task] for task in pair):
                self._leads.pop(pair, None)
            elif action.task in pair:
                self._give(pair, self._share(action) if action.task == pair[0] else -self._share(action))

    def _give(self, pair: tuple[str, str], share: float) -> None:
        lead, least, most = self._leads.get(pair, (0.0, 0.0, 0.0))
        lead += share
        least, most = min(least, lead), max(most, lead)
        self._leads[pair] = lead, least, most
        bound = self._largest[pair[0]] + self._largest[pair[1]]
        self.worst = max(self.worst, (most - least) / bound)
        assert most - least <= bound * 1.000001, f"{pair}: {most - least:g} apart, {bound:g} is the bound"


def story(event: Event | None) -> str:
    """A line for the journal."""
    match event:
        case Submitted():
            return f"submitted {event.action.id}"
        case Finished():
            return f"finished {event.action_id} {event.outcome.state.value}"
        case None:
            return "pass"
        case _:
            return repr(event)
