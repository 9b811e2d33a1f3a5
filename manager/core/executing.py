"""What executes, and the statistics of what ended."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from manager.action import Action, Batch, Chunk, Grant, Kin, Lease, Settlement, expected_s
from manager.core.queue import Waiting
from manager.resources.cores import PlacedPool
from manager.resources.nodes import Nodes, Resources
from manager.resources.pools import Pool, PoolRequest, TimedPool
from manager.scheduler.policy import RunningSet, RunningView

#: Seconds over which arrival rate and utilisation are smoothed.
SMOOTHING_S = 10.0
#: Tasks whose accounts are kept; the one that was idle longest is forgotten.
ACCOUNTS_MAX = 4096


@dataclass(slots=True)
class Rate:
    """Events per second, exponentially smoothed."""

    per_s: float = 0.0
    _at_s: float = 0.0

    def add(self, now_s: float, count: float = 1.0) -> None:
        self.at(now_s)
        self.per_s += count / SMOOTHING_S

    def at(self, now_s: float) -> float:
        """Return the rate as it has decayed until now."""
        if now_s > self._at_s:
            self.per_s *= math.exp((self._at_s - now_s) / SMOOTHING_S)
            self._at_s = now_s
        return self.per_s


@dataclass(slots=True)
class PoolLoad:
    """Arrivals and use of one pool."""

    arrivals: Rate = field(default_factory=Rate)
    _utilisation: float = 0.0
    _fraction: float = 0.0
    _at_s: float = 0.0

    def observe(self, now_s: float, fraction: float) -> None:
        """Note that ``fraction`` of the pool is in use from now on."""
        self.utilisation(now_s)
        self._fraction = fraction

    def utilisation(self, now_s: float) -> float:
        if now_s > self._at_s:
            decay = math.exp((self._at_s - now_s) / SMOOTHING_S)
            self._utilisation = self._utilisation * decay + self._fraction * (1 - decay)
            self._at_s = now_s
        return self._utilisation


@dataclass(slots=True)
class Account:
    """What one task has been given and how it fared."""

    settled: Counter[str] = field(default_factory=Counter)
    #: Unit-seconds by resource kind; units for quotas.
    used: dict[str, float] = field(default_factory=dict)
    #: Actions that were completed, which the times below are of.
    completed: int = 0
    act_s: float = 0.0
    queue_s: float = 0.0
    overhead_s: float = 0.0
    execution_s: float = 0.0

    def add(self, settlement: Settlement, used: Mapping[str, float]) -> None:
        """Add an end, and the unit-seconds by kind (units of quotas) that the action has used."""
        self.settled[settlement.outcome.state.value] += 1
        for kind, amount in used.items():
            self.used[kind] = self.used.get(kind, 0.0) + amount
        if not settlement.completed:
            return
        self.completed += 1
        self.act_s += settlement.act_s
        self.queue_s += settlement.queue_s
        self.overhead_s += settlement.overhead_s
        self.execution_s += settlement.execution_s

    def describe(self) -> dict[str, object]:
        """Return how it fared; the view of a task says what it used, in the units of the resources."""
        return {
            "settled": dict(self.settled),
            "completed": self.completed,
            "act_s": self.act_s,
            "queue_s": self.queue_s,
            "overhead_s": self.overhead_s,
            "execution_s": self.execution_s,
        }


class Accounts(OrderedDict[str, Account]):
    """Accounts by task, at most `ACCOUNTS_MAX`."""

    def of(self, task: str) -> Account:
        """Return a task's account, which is opened if there is none."""
        account = self.get(task)
        if account is None:
            account = self[task] = Account()
            if len(self) > ACCOUNTS_MAX:
                self.popitem(last=False)
        self.move_to_end(task)
        return account


#: An action that outlives its estimate is taken to have this much of its work left.
_LEAST_REMAINING = 0.01


@dataclass(slots=True, eq=False)
class Running:
    """One started action until it settles."""

    #: As it waited: its place in the order of service.
    waited: Waiting
    lease: Lease
    started_s: float
    #: When it got its present units (or its service was there), and the fraction of its work done before.
    since_s: float
    done: float = 0.0
    #: What it was started with; None if alone.
    batch: Batch | None = None
    #: Unit-seconds used until ``accounted_s``, by kind.
    used: dict[str, float] = field(default_factory=dict)
    accounted_s: float = field(init=False)
    resize_after_s: float = 0.0
    #: Whether its units have changed while it ran.
    resized: bool = False
    #: Why it is being killed; empty if it is not.
    aborting: str = ""
    #: Kinds whose units are lent, by whom, and the child that uses this one's units.
    borrowed: frozenset[str] = frozenset()
    lender: Running | None = None
    borrower: Running | None = None
    action: Action = field(init=False)
    id: str = field(init=False)
    child: bool = field(init=False)

    def __post_init__(self) -> None:
        self.action, self.id, self.child = self.waited.action, self.waited.id, self.waited.child
        self.accounted_s = self.started_s


class HeldView(RunningView):
    """A running action as a policy sees it: what changes is looked up when somebody asks."""

    __slots__ = ("_executing", "_pool", "_running")

    _executing: Executing
    _pool: Pool
    _running: Running

    def __init__(self, executing: Executing, running: Running, pool: Pool) -> None:
        put = object.__setattr__  # what policies see is frozen
        put(self, "_executing", executing)
        put(self, "_pool", pool)
        put(self, "_running", running)
        put(self, "action", running.action)
        put(self, "workers", running.lease.grants[pool.kind].most)

    @property
    def started_s(self) -> float:
        return self._running.started_s

    @property
    def chunk(self) -> Chunk | None:
        return self._pool.chunk_of(self._running.id)

    @property
    def units(self) -> int:
        return self._pool.held[self._running.id]

    @property
    def ends_in_s(self) -> float | None:
        return self._executing.ends_in_s(self._running, self._executing.viewed_s)

    @property
    def remaining(self) -> float | None:
        return self._executing.remaining(self._running, self._executing.viewed_s)

    @property
    def resize_after_s(self) -> float:
        return self._running.resize_after_s


class Executing:
    """Running actions by id and by the pools whose units they hold."""

    def __init__(self, resources: Resources, nodes: Nodes) -> None:
        self._resources = resources
        self._nodes = nodes
        self._running: dict[str, Running] = {}
        #: Pool name -> holder id -> running action. A batch has one holder, its leader.
        self._holders: defaultdict[str, dict[str, Running]] = defaultdict(dict)
        #: Members still running, by the id of the leader that holds their units.
        self._batches: dict[str, set[str]] = {}
        self._leader: dict[str, str] = {}
        #: By leader: the member that accounts for the units since those before it have ended.
        self._payer: dict[str, str] = {}
        #: The same as policies see them, as of this instant.
        self._views: dict[str, RunningSet] = {}
        self.viewed_s = 0.0
        #: By kind, the pools in which a running action can be resized.
        self._resizable: defaultdict[str, dict[str, Pool]] = defaultdict(dict)
        self._held_by_task: dict[tuple[str, str], int] = {}
        self._loads: defaultdict[str, PoolLoad] = defaultdict(PoolLoad)

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, action_id: str) -> bool:
        return action_id in self._running

    def get(self, action_id: str) -> Running | None:
        return self._running.get(action_id)

    def all(self) -> list[Running]:
        return list(self._running.values())

    def holders(self, pool: str) -> Mapping[str, Running]:
        return self._holders.get(pool, {})

    def can_resize(self, pool: str) -> bool:
        """Return whether a running action that holds units of the pool can be resized."""
        return pool in self._views and bool(self._views[pool].malleable)

    @property
    def any_resizable(self) -> bool:
        """Return whether a running action can be resized, wherever."""
        return any(self._resizable.values())

    def can_shrink(self, pool: str) -> bool:
        """Return whether one of these holds more than its minimum."""
        return pool in self._views and self._views[pool].slack > 0

    def resizable(self, kind: str) -> dict[str, Pool]:
        """Return by name the pools of a kind in which a running action can be resized."""
        return self._resizable[kind]

    def held_by(self, task: str, kind: str) -> int:
        """Return the units of ``kind`` that the task's actions hold (children not counted: their parents are)."""
        return self._held_by_task.get((task, kind), 0)

    def load(self, name: str) -> PoolLoad:
        """Return the use of a pool, and the arrivals of a kind, by its name."""
        return self._loads[name]

    def requests(self, action: Action, node: str, units: Mapping[str, int]) -> list[tuple[Pool, PoolRequest]] | None:
        """Return what an action that runs already needs of each pool to run on; None if it cannot be had."""
        requests: list[tuple[Pool, PoolRequest]] = []
        for kind, count in units.items():
            pool, request = self._resources.find(kind, node), PoolRequest(units=count, node=node)
            if pool is None or not (isinstance(pool, TimedPool) or pool.accepts(request)):
                return None
            requests.append((pool, request))
        memory_bytes = _own_memory(action) if node else 0
        has_room = memory_bytes == 0 or (node in self._nodes and memory_bytes <= self._nodes[node].free_bytes)
        return requests if has_room else None

    def resume(
        self,
        waiting: Waiting,
        node: str,
        requests: Sequence[tuple[Pool, PoolRequest]],
        started_s: float,
        now_s: float,
    ) -> Running:
        """Acquire everything for an action that runs since ``started_s``; what it consumed then is not any more."""
        grants = {pool.kind: pool.resume(waiting.id, request, started_s, now_s) for pool, request in requests}
        running = self._lease(waiting, node, grants, started_s)
        self._note([running], [pool for pool, _ in requests], now_s)
        return running

    def start(
        self,
        alike: Sequence[Waiting],
        node: str,
        requests: Sequence[tuple[Pool, PoolRequest]],
        workers: int,
        now_s: float,
    ) -> list[Running]:
        """Acquire everything for actions of one group that request the same; all of it must fit.

        ``workers`` are for a malleable one's key resource.
        """
        if len(alike) == 1:
            granted = [{pool.kind: pool.acquire(alike[0].id, request, now_s) for pool, request in requests}]
        else:
            granted = _acquire_each([waiting.id for waiting in alike], requests, now_s)
        if workers:
            for waiting, grants in zip(alike, granted, strict=True):
                _staff(waiting.action, grants, workers)
        started = [self._lease(waiting, node, grants, now_s) for waiting, grants in zip(alike, granted, strict=True)]
        self._note(started, [pool for pool, _ in requests], now_s)
        return started

    def join(self, waiting: Waiting, leader: Running, now_s: float) -> Running:
        """Start an action on the units of ``leader``, in one batch."""
        self._batches.setdefault(leader.id, {leader.id}).add(waiting.id)
        self._leader[waiting.id] = leader.id
        grants = {kind: replace(grant, restore=False, evict=()) for kind, grant in leader.lease.grants.items()}
        running = self._enter(waiting, Lease(action_id=waiting.id, node=leader.lease.node, grants=grants), now_s)
        self._note([running], (), now_s)
        return running

    def seal(self, members: Sequence[Running]) -> None:
        """Write the batch into the leases of its members, leader first, and when it is expected to end."""
        kin = Counter(Kin.of(member.action) for member in members)
        alone_s = [_alone_s(member) for member in members]
        batch = Batch(kin, expected_s(alone_s, members[0].action.batch_marginal))
        ids = tuple(member.id for member in members)
        for member in members:
            member.lease, member.batch = replace(member.lease, batch=ids), batch

    def can_borrow(self, child: Waiting, parent: Running) -> bool:
        """Return whether a child can run on what its waiting parent holds, with what is free of everything else."""
        return self._loan(child, parent) is not None

    def borrow(self, child: Waiting, parent: Running, now_s: float) -> Running:
        """Start a child on units that its waiting parent lends; they must be enough.

        Without it parents that hold every core and wait for their children would wait for ever.
        """
        plan = self._loan(child, parent)
        assert plan is not None, f"{parent.id} has nothing to lend {child.id}"
        node = parent.lease.node
        grants: dict[str, Grant] = {}
        acquired: list[Pool] = []
        for kind, (pool, count, lent) in plan.items():
            if lent:
                grant = parent.lease.grants[kind]
                grants[kind] = replace(grant, units=count, cores=grant.cores[:count])
            else:
                grants[kind] = pool.acquire(child.id, PoolRequest(count, child.action.service, node=node), now_s)
                acquired.append(pool)
        running = self._lease(child, node, grants, now_s)
        self._note([running], acquired, now_s)
        running.borrowed = frozenset(kind for kind, (_, _, lent) in plan.items() if lent)
        running.lender, parent.borrower = parent, running
        return running

    def resize(self, running: Running, kind: str, units: int, now_s: float) -> Lease:
        """Change the units of a running action."""
        old = running.lease.grants[kind]
        self._account(running, now_s)
        running.done = 1.0 - (self.remaining(running, now_s) or 1.0)
        running.since_s = now_s
        running.resized = True
        pool = self._resources[old.pool]
        grant = replace(pool.resize(running.id, units), workers=old.most)
        self._views[pool.name].note_units(running.id, units)
        self._count_task(running, kind, units - old.units)
        self._observe(pool, now_s)
        running.lease = replace(running.lease, grants={**running.lease.grants, kind: grant})
        return running.lease

    def end(self, running: Running, now_s: float) -> None:
        """Release what the action holds."""
        lease = running.lease
        self._account(running, now_s)
        del self._running[running.id]
        for kind, grant in lease.grants.items():
            self._count_task(running, kind, -grant.units)
        if lease.memory_bytes:
            self._nodes[lease.node].release(running.id)
        leader = self._leader.pop(running.id, running.id)
        members = self._batches.get(leader)
        if members is not None:
            members.discard(running.id)
            if members:
                self._pass_account_on(leader, running, members, now_s)
                return
            del self._batches[leader]
            self._payer.pop(leader, None)
        self._release(leader, running, now_s)

    def remaining(self, running: Running, now_s: float) -> float | None:
        """Return the fraction of the work still to do, by estimate; None if nothing is known of the duration."""
        duration_s = _duration_s(running)
        if duration_s is None:
            return None
        passed = max(0.0, now_s - running.since_s) / duration_s if duration_s > 0 else 1.0
        return max(_LEAST_REMAINING, 1.0 - running.done - passed)

    def ends_in_s(self, running: Running, now_s: float) -> float | None:
        """Return the seconds until its expected end; None if nothing is known of the duration."""
        takes_s = self.takes_s(running)
        return None if takes_s is None else max(0.0, running.started_s + takes_s - now_s)

    def takes_s(self, running: Running) -> float | None:
        """Return the seconds from its start to its expected end; None if nothing is known of the duration."""
        duration_s = _duration_s(running)
        if duration_s is None:
            return None
        return running.since_s - running.started_s + (1.0 - running.done) * duration_s

    def view(self, pool: Pool, now_s: float) -> RunningSet:
        """Return the running actions of a pool, as its policy sees them until the next call."""
        self.viewed_s = now_s
        return self._view_of(pool)

    def check(self) -> None:
        """Assert that pools hold units for running actions and batches only."""
        for pool in self._resources:
            assert set(pool.held) == set(self.holders(pool.name)), f"{pool.name}: {pool.held} without an action"
            assert self.can_resize(pool.name) == (pool.name in self._resizable[pool.kind]), f"{pool.name} is mistaken"
            views = self.view(pool, self.viewed_s)
            above = sum(one.units - one.action.cost[pool.kind].minimum for one in views.malleable.values())
            assert len(views) == len(pool.held) and views.slack == above, f"{pool.name}: {above} above the minima"

    def _lease(self, waiting: Waiting, node: str, grants: dict[str, Grant], started_s: float) -> Running:
        """Make a lease of what an action was granted, and hold its memory."""
        memory_bytes = _own_memory(waiting.action) if node else 0
        if memory_bytes:
            self._nodes[node].hold(waiting.id, memory_bytes)
        where = node or next((grant.pool.partition(":")[2] for grant in grants.values() if grant.chunk), "")
        lease = Lease(action_id=waiting.id, node=where, grants=grants, memory_bytes=memory_bytes)
        return self._enter(waiting, lease, started_s)

    def _note(self, alike: Sequence[Running], pools: Iterable[Pool], now_s: float) -> None:
        """Count what actions of one task with equal grants hold from now on, of ``pools`` each by itself."""
        first = alike[0]
        for kind, grant in first.lease.grants.items():
            self._count_task(first, kind, grant.units * len(alike))
        for pool in pools:
            self._hold(pool, alike)
            self._observe(pool, now_s)

    def _hold(self, pool: Pool, new: Iterable[Running]) -> None:
        """Note who holds units of a pool from now on."""
        holders, views = self._holders[pool.name], self._view_of(pool)
        for running in new:
            holders[running.id] = running
            views.enter(running.id, running.action)

    def _look(self, pool: str, holder: str) -> HeldView:
        return HeldView(self, self._holders[pool][holder], self._resources[pool])

    def _view_of(self, pool: Pool) -> RunningSet:
        views = self._views.get(pool.name)
        if views is None:
            views = self._views[pool.name] = RunningSet(pool.kind, partial(self._look, pool.name))
        return views

    def _enter(self, waiting: Waiting, lease: Lease, started_s: float) -> Running:
        assert waiting.id not in self._running, f"{waiting.id} runs already"
        service = waiting.action.service
        since_s = started_s if service is None else started_s + self._restore_s(service, lease)
        running = self._running[waiting.id] = Running(waiting, lease, started_s, since_s)
        return running

    def _restore_s(self, service: str, lease: Lease) -> float:
        """Return the seconds until the work of an action that needs the service can begin."""
        cold = [(self._pool(kind, lease.node), grant.units) for kind, grant in lease.grants.items() if grant.restore]
        placed = [(pool, units) for pool, units in cold if isinstance(pool, PlacedPool)]
        return sum(pool.restore_s(service, units, lease.node) for pool, units in placed)

    def _loan(self, child: Waiting, parent: Running) -> dict[str, tuple[Pool, int, bool]] | None:
        """Return (pool, units, whether they are lent) by kind; None if some unit cannot be had."""
        lease, action = parent.lease, child.action
        if parent.borrower is not None or parent.action.malleable or parent.action.batch_tokens:
            return None
        if lease.node in self._nodes and not self._nodes[lease.node].keeps(action.placement):
            return None
        if child.group is None or child.group.signature.node not in ("", lease.node):
            return None
        memory_bytes = _own_memory(action)
        if memory_bytes and (not lease.node or self._nodes[lease.node].free_bytes < memory_bytes):
            return None
        plan: dict[str, tuple[Pool, int, bool]] = {}
        for kind, units in action.cost.items():
            grant = lease.grants.get(kind)
            pool = self._resources.find(kind, lease.node)
            if pool is None:
                return None
            lent = grant is not None and grant.pool == pool.name and pool.lendable and grant.units >= units.minimum
            request = PoolRequest(units=units.minimum, service=action.service, node=lease.node)
            if not lent and not pool.accepts(request):
                return None
            plan[kind] = (pool, units.minimum, lent)
        return plan if any(lent for _, _, lent in plan.values()) else None

    def _release(self, holder: str, running: Running, now_s: float) -> None:
        heir = running.borrower
        for kind in running.lease.grants:
            if kind in running.borrowed:
                continue
            pool = self._pool(kind, running.lease.node)
            if heir is not None and kind in heir.borrowed:
                pool.bequeath(holder, heir.id, heir.lease.grants[kind])
                self._hold(pool, [heir])
            else:
                pool.release(holder, now_s)
            del self._holders[pool.name][holder]
            self._views[pool.name].remove(holder)
            self._observe(pool, now_s)
        self._pass_loan_on(running, heir)

    def _pass_loan_on(self, running: Running, heir: Running | None) -> None:
        """Give what the action borrowed back to its lender, or let its own borrower keep it."""
        if heir is not None:
            heir.borrowed &= running.borrowed
            heir.lender = running.lender if heir.borrowed else None
        if running.lender is not None:
            running.lender.borrower = heir if heir is not None and heir.borrowed else None

    def _observe(self, pool: Pool, now_s: float) -> None:
        total = pool.total
        self._loads[pool.name].observe(now_s, (total - pool.idle) / total if total else 0.0)
        if self.can_resize(pool.name):
            self._resizable[pool.kind][pool.name] = pool
        else:
            self._resizable[pool.kind].pop(pool.name, None)

    def _pool(self, kind: str, node: str) -> Pool:
        pool = self._resources.find(kind, node)
        assert pool is not None, f"no pool of {kind} on {node!r}"
        return pool

    def _pass_account_on(self, leader: str, ended: Running, members: set[str], now_s: float) -> None:
        """Let another member of a batch account for its units, if the one that did has ended before it."""
        if self._payer.get(leader, leader) == ended.id:
            heir = self._running[min(members)]
            self._payer[leader], heir.accounted_s = heir.id, now_s

    def _account(self, running: Running, now_s: float) -> None:
        """Add the unit-seconds since the last change (whole units for what returns with time, once a batch)."""
        last_s, running.accounted_s = running.accounted_s, now_s
        leader = self._leader.get(running.id, running.id)
        if self._payer.get(leader, leader) != running.id:
            return
        for kind, grant in running.lease.grants.items():
            if kind in running.borrowed:
                continue
            timed = isinstance(self._pool(kind, running.lease.node), TimedPool)
            if timed and leader != running.id:
                continue
            amount = float(grant.units) if timed else grant.units * (now_s - last_s)
            running.used[kind] = amount if timed else running.used.get(kind, 0.0) + amount

    def _count_task(self, running: Running, kind: str, units: int) -> None:
        if not running.child:
            key = (running.action.task, kind)
            held = self._held_by_task.get(key, 0) + units
            if held:
                self._held_by_task[key] = held
            else:
                self._held_by_task.pop(key, None)


def _acquire_each(
    holders: Sequence[str], requests: Sequence[tuple[Pool, PoolRequest]], now_s: float
) -> list[dict[str, Grant]]:
    """Acquire for several what each requests of each pool; return what each was granted, by kind."""
    granted: list[dict[str, Grant]] = [{} for _ in holders]
    for pool, request in requests:
        for grants, grant in zip(granted, pool.acquire_each(holders, request, now_s), strict=True):
            grants[pool.kind] = grant
    return granted


def _staff(action: Action, grants: dict[str, Grant], workers: int) -> None:
    """Enter ``workers`` for a malleable action, if it can use as many as it has units."""
    for kind, grant in grants.items():
        if workers >= grant.units and action.malleable_in(kind):
            grants[kind] = replace(grant, workers=workers)


def _own_memory(action: Action) -> int:
    """Return the bytes that an action holds itself: those of a trajectory are held for its whole life."""
    return action.memory_bytes if action.trajectory is None else 0


def _duration_s(running: Running) -> float | None:
    """Return the expected seconds of its work with the units that it has: of its batch, if it is part of one."""
    return _alone_s(running) if running.batch is None else running.batch.expected_s


def _alone_s(running: Running) -> float | None:
    key = running.action.key
    return running.action.duration_s(running.lease.units(key) if key is not None else 1)
