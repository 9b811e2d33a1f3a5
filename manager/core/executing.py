"""The executing set: leases of running actions, from the first unit acquired to the last one released."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from manager.batch import Batch, expected_s
from manager.core.queue import Entry
from manager.core.statistics import PoolLoad
from manager.lease import Grant, Lease
from manager.outcome import State
from manager.resources.nodes import Nodes
from manager.resources.pool import Pool, PoolRequest, Resources
from manager.scheduler.policy import RunningView

#: An action that outlives its estimate is taken to have this much of its work left.
_LEAST_REMAINING = 0.01


class Executing:
    """Running actions by id and by the pools whose units they hold."""

    def __init__(self, resources: Resources, nodes: Nodes) -> None:
        self._resources = resources
        self._nodes = nodes
        self._running: dict[str, Entry] = {}
        #: Pool name -> holder id -> entry. A batch has one holder, its leader.
        self._holders: dict[str, dict[str, Entry]] = {}
        #: Members still running, by the id of the leader that holds their units.
        self._batches: dict[str, set[str]] = {}
        self._leader: dict[str, str] = {}
        self._malleable: dict[str, int] = {}
        self._held_by_task: dict[tuple[str, str], int] = {}
        self.loads: dict[str, PoolLoad] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, action_id: str) -> bool:
        return action_id in self._running

    def get(self, action_id: str) -> Entry | None:
        return self._running.get(action_id)

    def all(self) -> list[Entry]:
        return list(self._running.values())

    def holders(self, pool: str) -> Mapping[str, Entry]:
        return self._holders.get(pool, {})

    def malleable(self, pool: str) -> int:
        """Running actions that hold units of the pool and can be resized."""
        return self._malleable.get(pool, 0)

    def held_by(self, task: str, kind: str) -> int:
        """Units of ``kind`` that the task's actions hold (children not counted: their parents are)."""
        return self._held_by_task.get((task, kind), 0)

    def load(self, pool: str) -> PoolLoad:
        load = self.loads.get(pool)
        if load is None:
            load = self.loads[pool] = PoolLoad()
        return load

    def asks(self, entry: Entry, node: str, units: Mapping[str, int]) -> list[tuple[Pool, PoolRequest]] | None:
        """What an action that runs already asks of each pool to run on; None where it is not to be had."""
        asks: list[tuple[Pool, PoolRequest]] = []
        for kind, count in units.items():
            pool, ask = self._resources.find(kind, node), PoolRequest(holder=entry.id, units=count, node=node)
            if pool is None or not (pool.timed or pool.accepts(ask)):
                return None
            asks.append((pool, ask))
        memory_bytes = _own_memory(entry) if node else 0
        has_room = memory_bytes == 0 or (node in self._nodes and memory_bytes <= self._nodes[node].free_bytes)
        return asks if has_room else None

    def resume(
        self, entry: Entry, node: str, asks: Sequence[tuple[Pool, PoolRequest]], started_s: float, now_s: float
    ) -> Lease:
        """Acquire everything for an action that runs since ``started_s``; what was consumed then is not any more."""
        grants: dict[str, Grant] = {}
        for pool, ask in asks:
            grants[pool.kind] = pool.resume(ask, started_s, now_s)
            self._hold(pool, entry, now_s)
        return self._settle_in(entry, node, grants, started_s)

    def start(
        self, entry: Entry, node: str, asks: Sequence[tuple[Pool, PoolRequest]], workers: int, now_s: float
    ) -> Lease:
        """Acquire everything for one action; all of it must fit. ``workers`` are for a malleable one's key resource."""
        grants: dict[str, Grant] = {}
        for pool, ask in asks:
            grant = pool.acquire(ask, now_s)
            if workers >= ask.units and entry.malleable(pool.kind):
                grant = replace(grant, workers=workers)
            grants[pool.kind] = grant
            self._hold(pool, entry, now_s)
        return self._settle_in(entry, node, grants, now_s)

    def join(self, entry: Entry, leader: Entry, now_s: float) -> Lease:
        """Let ``entry`` run on the units of ``leader``, in one batch."""
        assert leader.lease is not None
        self._batches.setdefault(leader.id, {leader.id}).add(entry.id)
        self._leader[entry.id] = leader.id
        grants = {kind: replace(grant, restore=False, evict=()) for kind, grant in leader.lease.grants.items()}
        return self._enter(entry, Lease(action_id=entry.id, node=leader.lease.node, grants=grants), now_s)

    def seal(self, leader: Entry, members: list[Entry]) -> None:
        """Write the batch into the leases of all its members, leader first, and when it is expected to end."""
        entries = (leader, *members)
        kin = Counter((entry.action.function, entry.action.profile_key) for entry in entries)
        alone_s = [_alone_s(entry) for entry in entries]
        batch, ids = Batch(kin, expected_s(alone_s, leader.action.batch_marginal)), tuple(entry.id for entry in entries)
        for entry in entries:
            assert entry.lease is not None
            entry.lease, entry.batch = replace(entry.lease, batch=ids), batch

    def can_borrow(self, entry: Entry, parent: Entry) -> bool:
        """Whether a child can run on what its waiting parent holds, with what is free of everything else."""
        return self._loan(entry, parent) is not None

    def borrow(self, entry: Entry, parent: Entry, now_s: float) -> Lease:
        """Start a child on units that its waiting parent lends; they must be enough.

        Without it parents that hold every core and wait for their children would wait for ever.
        """
        plan = self._loan(entry, parent)
        assert plan is not None and parent.lease is not None, f"{parent.id} has nothing to lend {entry.id}"
        grants: dict[str, Grant] = {}
        for kind, (pool, count, lent) in plan.items():
            if lent:
                grants[kind] = replace(
                    parent.lease.grants[kind], units=count, cores=parent.lease.grants[kind].cores[:count]
                )
            else:
                ask = PoolRequest(holder=entry.id, units=count, service=entry.action.service, node=parent.lease.node)
                grants[kind] = pool.acquire(ask, now_s)
                self._hold(pool, entry, now_s)
        entry.borrowed = frozenset(kind for kind, (_, _, lent) in plan.items() if lent)
        entry.lender, parent.borrower = parent, entry
        node, memory_bytes = parent.lease.node, _own_memory(entry)
        if memory_bytes:
            self._nodes[node].hold(entry.id, memory_bytes)
        lease = Lease(action_id=entry.id, node=node, grants=grants, memory_bytes=memory_bytes)
        return self._enter(entry, lease, now_s)

    def resize(self, entry: Entry, kind: str, units: int, now_s: float) -> Lease:
        """Change the units of a running action."""
        assert entry.lease is not None
        old = entry.lease.grants[kind]
        self._account(entry, now_s)
        entry.done = 1.0 - (self.remaining(entry, now_s) or 1.0)
        entry.since_s = now_s
        entry.resized = True
        pool = self._resources[old.pool]
        grant = replace(pool.resize(entry.id, units), workers=old.workers)
        self._count_task(entry, kind, units - old.units)
        self._observe(pool, now_s)
        entry.lease = replace(entry.lease, grants={**entry.lease.grants, kind: grant})
        return entry.lease

    def end(self, entry: Entry, now_s: float) -> None:
        """Release what the action holds."""
        lease = entry.lease
        assert lease is not None, f"{entry.id} does not run"
        self._account(entry, now_s)
        del self._running[entry.id]
        for kind, grant in lease.grants.items():
            self._count_task(entry, kind, -grant.units)
        if lease.memory_bytes:
            self._nodes[lease.node].release(entry.id)
        leader = self._leader.pop(entry.id, entry.id)
        members = self._batches.get(leader)
        if members is not None:
            members.discard(entry.id)
            if members:
                return
            del self._batches[leader]
        self._release(leader, entry, now_s)

    def remaining(self, entry: Entry, now_s: float) -> float | None:
        """Fraction of the work still to do, by estimate."""
        duration_s = _duration_s(entry)
        if duration_s is None:
            return None
        passed = max(0.0, now_s - entry.since_s) / duration_s if duration_s > 0 else 1.0
        return max(_LEAST_REMAINING, 1.0 - entry.done - passed)

    def view(self, pool: Pool, now_s: float) -> list[RunningView]:
        """The running actions of a pool, as its policy sees them."""
        return [self._running_view(pool, holder, entry, now_s) for holder, entry in self.holders(pool.name).items()]

    def check(self) -> None:
        """Assert that pools hold units for running actions and batches only."""
        for pool in self._resources:
            assert set(pool.held) == set(self.holders(pool.name)), f"{pool.name}: {pool.held} without an action"
        for entry in self._running.values():
            assert entry.state is State.RUNNING and entry.lease is not None

    def _running_view(self, pool: Pool, holder: str, entry: Entry, now_s: float) -> RunningView:
        remaining = self.remaining(entry, now_s)
        duration_s = _duration_s(entry)
        lease = entry.lease
        assert lease is not None
        ends_in_s = None
        if duration_s is not None:
            ends_in_s = max(0.0, entry.since_s + (1.0 - entry.done) * duration_s - now_s)
        return RunningView(
            action=entry.action,
            units=pool.held[holder],
            ends_in_s=ends_in_s,
            started_s=entry.started_s,
            remaining=remaining,
            chunk=pool.chunk_of(holder),
            resize_after_s=entry.resize_after_s,
            workers=max((grant.workers for grant in lease.grants.values() if grant.pool == pool.name), default=0),
        )

    def _settle_in(self, entry: Entry, node: str, grants: dict[str, Grant], started_s: float) -> Lease:
        """Hold its memory, and make its lease of what it was granted."""
        memory_bytes = _own_memory(entry) if node else 0
        if memory_bytes:
            self._nodes[node].hold(entry.id, memory_bytes)
        where = node or next((grant.pool.partition(":")[2] for grant in grants.values() if grant.chunk), "")
        return self._enter(
            entry, Lease(action_id=entry.id, node=where, grants=grants, memory_bytes=memory_bytes), started_s
        )

    def _enter(self, entry: Entry, lease: Lease, now_s: float) -> Lease:
        assert entry.id not in self._running, f"{entry.id} runs already"
        entry.lease, entry.batch = lease, None
        entry.state = State.RUNNING
        entry.started_s = entry.accounted_s = now_s
        entry.since_s = now_s if entry.action.service is None else now_s + self._restore_s(entry.action.service, lease)
        self._running[entry.id] = entry
        for kind, grant in lease.grants.items():
            self._count_task(entry, kind, grant.units)
        return lease

    def _restore_s(self, service: str, lease: Lease) -> float:
        """Seconds until the work of an action that needs the service can begin."""
        return sum(
            self._pool_of_grant(kind, lease).restore_s(service, grant.units)
            for kind, grant in lease.grants.items()
            if grant.restore
        )

    def _loan(self, entry: Entry, parent: Entry) -> dict[str, tuple[Pool, int, bool]] | None:
        """(pool, units, lent) by kind, where every unit can be had."""
        lease = parent.lease
        if lease is None or parent.borrower is not None or parent.action.malleable or parent.action.batch_tokens:
            return None
        if entry.group is None or entry.group.signature.node not in ("", lease.node):
            return None
        memory_bytes = _own_memory(entry)
        if memory_bytes and (not lease.node or self._nodes[lease.node].free_bytes < memory_bytes):
            return None
        plan: dict[str, tuple[Pool, int, bool]] = {}
        for kind, units in entry.action.cost.items():
            grant = lease.grants.get(kind)
            pool = self._resources.find(kind, lease.node)
            if pool is None:
                return None
            lent = grant is not None and grant.pool == pool.name and pool.lendable and grant.units >= units.minimum
            ask = PoolRequest(holder=entry.id, units=units.minimum, service=entry.action.service, node=lease.node)
            if not lent and not pool.accepts(ask):
                return None
            plan[kind] = (pool, units.minimum, lent)
        return plan if any(lent for _, _, lent in plan.values()) else None

    def _release(self, holder: str, entry: Entry, now_s: float) -> None:
        lease = entry.lease
        assert lease is not None
        heir = entry.borrower
        for kind in lease.grants:
            if kind in entry.borrowed:
                continue
            pool = self._pool_of_grant(kind, lease)
            if heir is not None and kind in heir.borrowed:
                assert heir.lease is not None
                pool.bequeath(holder, heir.id, heir.lease.grants[kind])
                self._holders[pool.name][heir.id] = heir
                self._malleable[pool.name] += heir.malleable(kind)
            else:
                pool.release(holder, now_s)
            held = self._holders[pool.name].pop(holder)
            self._malleable[pool.name] -= held.malleable(kind)
            self._observe(pool, now_s)
        self._pass_loan_on(entry, heir)

    def _pass_loan_on(self, entry: Entry, heir: Entry | None) -> None:
        """What the action borrowed goes back to its lender, or serves its own borrower further."""
        if heir is not None:
            heir.borrowed &= entry.borrowed
            heir.lender = entry.lender if heir.borrowed else None
        if entry.lender is not None:
            entry.lender.borrower = heir if heir is not None and heir.borrowed else None

    def _hold(self, pool: Pool, entry: Entry, now_s: float) -> None:
        holders = self._holders.get(pool.name)
        if holders is None:
            holders = self._holders[pool.name] = {}
            self._malleable[pool.name] = 0
        holders[entry.id] = entry
        if entry.malleable(pool.kind):
            self._malleable[pool.name] += 1
        self._observe(pool, now_s)

    def _observe(self, pool: Pool, now_s: float) -> None:
        total = pool.total
        self.load(pool.name).observe(now_s, (total - pool.free) / total if total else 0.0)

    def _pool(self, kind: str, node: str) -> Pool:
        pool = self._resources.find(kind, node)
        assert pool is not None, f"no pool of {kind} on {node!r}"
        return pool

    def _pool_of_grant(self, kind: str, lease: Lease) -> Pool:
        return self._pool(kind, lease.node)

    def _account(self, entry: Entry, now_s: float) -> None:
        """Add the unit-seconds since the last change (whole units for what returns with time)."""
        lease = entry.lease
        assert lease is not None
        last_s, entry.accounted_s = entry.accounted_s, now_s
        for kind, grant in lease.grants.items():
            if kind in entry.borrowed or entry.id in self._leader:
                continue
            pool = self._pool_of_grant(kind, lease)
            amount = float(grant.units) if pool.timed else grant.units * (now_s - last_s)
            entry.used[kind] = amount if pool.timed else entry.used.get(kind, 0.0) + amount

    def _count_task(self, entry: Entry, kind: str, units: int) -> None:
        if not entry.child:
            key = (entry.action.task, kind)
            held = self._held_by_task.get(key, 0) + units
            if held:
                self._held_by_task[key] = held
            else:
                self._held_by_task.pop(key, None)


def _own_memory(entry: Entry) -> int:
    """Bytes that the action holds itself: those of a trajectory are held for its whole life."""
    return entry.action.memory_bytes if entry.action.trajectory is None else 0


def _duration_s(entry: Entry) -> float | None:
    """Expected seconds of its work with the units that it has: of its batch, where it is part of one."""
    return _alone_s(entry) if entry.batch is None else entry.batch.expected_s


def _alone_s(entry: Entry) -> float | None:
    lease, key = entry.lease, entry.action.key
    assert lease is not None
    return entry.action.duration_s(lease.units(key) if key is not None else 1)
