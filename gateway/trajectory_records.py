"""Leases and locks of trajectories, and the catalogue of snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, TypeVar

import structlog

from gateway.cluster.cluster import Cluster
from gateway.cluster.store import NodeSnapshot
from manager.errors import Conflict
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.snapshots import SnapshotRecord, SnapshotSettings

#: Seconds between two looks for leases that have run out.
LOOK_S = 1.0
#: Seconds for which what was opened is held for a client that went away before it was told so, and may ask again.
ABANDONED_S = 10.0

#: For how many seconds nothing of a trajectory has waited or run (0 while something does); None if it does not live.
IdleTime = Callable[[str], float | None]


class TrajectoryLease(NamedTuple):
    """For how long, and until when on the clock, in seconds."""

    lease_s: float
    until_s: float


class Leases:
    """Until when each leased trajectory is held for its client. Use from one event loop.

    There is none of what was opened without one before its first renewal, and none of an earlier gateway: ``idle_ttl``
    alone bounds those. At most one is kept for each trajectory that lives or is being opened.
    """

    def __init__(self, now: Callable[[], float], idle_s: IdleTime, end: Callable[[str], Awaitable[bool]]) -> None:
        self._now = now
        self._idle_s = idle_s
        self._end = end
        self._leases: dict[str, TrajectoryLease] = {}
        self._log = structlog.get_logger("gateway.trajectory_records")

    def hold(self, trajectory: str, lease_s: float) -> TrajectoryLease:
        """Hold one that is being opened, or lives, for so long from now on."""
        lease = self._leases[trajectory] = TrajectoryLease(lease_s, self._now() + lease_s)
        return lease

    def let_go(self, trajectory: str, lease: TrajectoryLease) -> None:
        """It could not be opened; nothing is done if somebody else holds it by now."""
        if self._leases.get(trajectory) is lease:
            del self._leases[trajectory]

    def abandon(self, trajectory: str, lease: TrajectoryLease) -> None:
        """Who opened it has gone before it was told so; nothing is done if somebody else holds it by now."""
        if self._leases.get(trajectory) is lease:
            self.hold(trajectory, min(lease.lease_s, ABANDONED_S))

    def renew(self, trajectories: Iterable[str], lease_s: float) -> list[str]:
        """Hold those that live for so long from now on; returns the others, which nobody holds any more."""
        gone = []
        for trajectory in trajectories:
            if self._idle_s(trajectory) is None:
                self._leases.pop(trajectory, None)
                gone.append(trajectory)
            else:
                self._leases[trajectory] = TrajectoryLease(lease_s, self._now() + lease_s)
        return gone

    def left_s(self, trajectory: str) -> float | None:
        """Seconds for which it is held yet; None if it has no lease."""
        lease = self._leases.get(trajectory)
        return None if lease is None else max(0.0, lease.until_s - self._now())

    async def end_lapsed_for_ever(self) -> None:
        """End what nobody holds any more, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.end_lapsed()

    async def end_lapsed(self) -> None:
        """End what its client holds no more, if no action of anybody used it for as long either."""
        for trajectory in [name for name, lease in self._leases.items() if lease.until_s <= self._now()]:
            lease, idle_s = self._leases.get(trajectory), self._idle_s(trajectory)
            if lease is None or lease.until_s > self._now():  # renewed while another was ended
                continue
            if idle_s is None:
                del self._leases[trajectory]
            elif idle_s >= lease.lease_s:
                del self._leases[trajectory]
                self._log.warning("a trajectory ended: its client has fallen silent", trajectory=trajectory)
                await self._end(trajectory)


T = TypeVar("T")


class SnapshotCatalogue:
    """The snapshots of this machine and of its nodes; each is where the trajectory lived that it was taken of."""

    def __init__(self, environments: Environments, machines: Cluster) -> None:
        self._environments = environments
        self._here = environments.provider.snapshots
        self._machines = machines

    @property
    def settings(self) -> SnapshotSettings:
        """The bounds of those on this machine."""
        return self._here.settings

    def all(self) -> list[NodeSnapshot]:
        """Return every snapshot, also those that are lost, the oldest first."""
        nodes = self._machines.snapshots
        found = [*map(self._on_here, self._here.all()), *nodes.all()]
        return sorted(found, key=lambda each: each.record.made_s)

    def in_use(self) -> set[str]:
        """Return the snapshots that a living trajectory began with, or something is about to begin with."""
        nodes = self._machines.snapshots
        here = {each.id for each in self._here.all() if self._here.user(each.id)}
        return here | set(nodes.used())

    def get(self, id: str) -> NodeSnapshot:
        """Return a snapshot that a trajectory may begin with.

        Raises NotFound, Unsupported for one of another kind of sandbox than this machine's, SnapshotLost if its node is
        gone, and Conflict if that takes no new work.
        """
        nodes = self._machines.snapshots
        if nodes.find(id) is None:
            return self._on_here(self._here.get(id))
        found = nodes.get(id)
        if why := self._machines.leaving(found.node):
            told = f"snapshot {id!r} is on node {found.node}, which takes no new work: {why}"
            raise Conflict(told, component="snapshots")
        return found

    async def begin(self, id: str, work: Callable[[], Awaitable[T]]) -> T:
        """Do what begins with a snapshot, which is not removed meanwhile.

        Raises as `get`, SnapshotLost if its node is lost meanwhile, and what the work raises.
        """
        nodes = self._machines.snapshots
        if nodes.find(id) is not None:
            return await nodes.begin(id, work)
        async with self._here.held(id):
            return await work()

    async def take(self, trajectory: str) -> NodeSnapshot:
        """Take a snapshot of a trajectory where it lives; raises as `Environments.snapshot` or `NodeSnapshots.take`."""
        nodes, remote = self._machines.snapshots, self._machines.remote_of(trajectory)
        if remote is None:
            return self._on_here(await self._environments.snapshot(trajectory))
        return NodeSnapshot(remote.name, await nodes.take(remote, trajectory))

    async def remove(self, id: str) -> None:
        """Remove a snapshot; raises NotFound, Conflict for one that something needs, or StorageUnavailable."""
        nodes = self._machines.snapshots
        if nodes.find(id) is not None:
            await nodes.remove(id)
        else:
            await self._here.remove(id)

    def _on_here(self, record: SnapshotRecord) -> NodeSnapshot:
        return NodeSnapshot(self._machines.here.name, record)
