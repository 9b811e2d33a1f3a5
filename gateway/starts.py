"""Starts: durable work begins only when the record says so on disk."""

from __future__ import annotations

from gateway.invocations import Invocations
from gateway.store import Store
from gateway.trajectories import INSIDE, Trajectories
from manager.action import Action
from manager.executor import Call, Executor
from manager.function import FunctionSpec
from manager.lease import Lease
from manager.outcome import Outcome


class RecordedStarts:
    """An executor that lets durable work begin only when its start is on disk, so that a killed gateway can tell.

    So it is with a trajectory's first environment. An idempotent action, and one whose caller waits on the
    connection, begin at once: neither is ever run twice by mistake. While the disk refuses, durable work waits here in
    its lease: it is neither lost nor failed for that.
    """

    def __init__(self, executor: Executor, invocations: Invocations, store: Store, trajectories: Trajectories) -> None:
        self._executor = executor
        self._invocations = invocations
        self._store = store
        self._trajectories = trajectories

    async def execute(self, action: Action, lease: Lease, call: Call) -> Outcome:
        fresh = (
            action.trajectory is not None
            and call.function.runtime in INSIDE
            and self._trajectories.opened(action.trajectory, action.task, call.function)
        )
        once = not call.function.idempotent and self._invocations.outlives_caller(action.id)
        if fresh or once:
            await self._store.durable()
        return await self._executor.execute(action, lease, call)

    async def resize(self, action: Action, lease: Lease) -> None:
        await self._executor.resize(action, lease)

    async def prefetch(
        self, function: FunctionSpec, service: str, node: str, chunk: tuple[int, int], evict: tuple[str, ...]
    ) -> bool:
        return await self._executor.prefetch(function, service, node, chunk, evict)

    async def open_trajectory(self, trajectory: str, task: str, function: FunctionSpec) -> None:
        if self._trajectories.opened(trajectory, task, function):
            await self._store.durable()
        await self._executor.open_trajectory(trajectory, task, function)

    async def end_trajectory(self, trajectory: str) -> None:
        await self._executor.end_trajectory(trajectory)
        self._trajectories.ended(trajectory)
