"""Every snapshot that a trajectory can begin with: those of this machine, and those that nodes keep."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.cluster.machines import OneMachine
from gateway.cluster.snapshots import NodeSnapshot
from manager.errors import Conflict
from runtimes.sandbox.environments import Environments
from runtimes.sandbox.snapshots import SnapshotRecord, SnapshotSettings

_T = TypeVar("_T")


class SnapshotCatalogue:
    """The snapshots of this machine and of its nodes; each is where the trajectory lived that it was taken of."""

    def __init__(self, environments: Environments, machines: OneMachine) -> None:
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
        found = [*map(self._on_here, self._here.all()), *(() if nodes is None else nodes.all())]
        return sorted(found, key=lambda each: each.record.made_s)

    def in_use(self) -> set[str]:
        """Return the snapshots that a living trajectory began with, or something is about to begin with."""
        nodes = self._machines.snapshots
        here = {each.id for each in self._here.all() if self._here.user(each.id)}
        return here | (set() if nodes is None else set(nodes.used()))

    def get(self, id: str) -> NodeSnapshot:
        """Return a snapshot that a trajectory may begin with.

        Raises NotFound, Unsupported for one of another kind of sandbox than this machine's, SnapshotLost if its node is
        gone, and Conflict if that takes no new work.
        """
        nodes = self._machines.snapshots
        if nodes is None or nodes.find(id) is None:
            return self._on_here(self._here.get(id))
        found = nodes.get(id)
        if why := self._machines.leaving(found.node):
            told = f"snapshot {id!r} is on node {found.node}, which takes no new work: {why}"
            raise Conflict(told, component="snapshots")
        return found

    async def begin(self, id: str, work: Callable[[], Awaitable[_T]]) -> _T:
        """Do what begins with a snapshot, which is not removed meanwhile.

        Raises as `get`, SnapshotLost if its node is lost meanwhile, and what the work raises.
        """
        nodes = self._machines.snapshots
        if nodes is not None and nodes.find(id) is not None:
            return await nodes.begin(id, work)
        async with self._here.held(id):
            return await work()

    async def take(self, trajectory: str) -> NodeSnapshot:
        """Take a snapshot of a trajectory where it lives; raises as `Environments.snapshot` or `NodeSnapshots.take`."""
        nodes, remote = self._machines.snapshots, self._machines.remote_of(trajectory)
        if nodes is None or remote is None:
            return self._on_here(await self._environments.snapshot(trajectory))
        return NodeSnapshot(remote.name, await nodes.take(remote, trajectory))

    async def remove(self, id: str) -> None:
        """Remove a snapshot; raises NotFound, Conflict for one that something needs, or StorageUnavailable."""
        nodes = self._machines.snapshots
        if nodes is not None and nodes.find(id) is not None:
            await nodes.remove(id)
        else:
            await self._here.remove(id)

    def _on_here(self, record: SnapshotRecord) -> NodeSnapshot:
        return NodeSnapshot(self._machines.here.name, record)
