"""Starts: durable work begins only when the record says so on disk."""

from __future__ import annotations

from gateway.invocations import Invocations
from gateway.store import Store
from manager.action import Action
from manager.errors import Reason, StorageUnavailable
from manager.executor import Call, Executor
from manager.function import FunctionSpec
from manager.lease import Lease
from manager.outcome import Outcome, State


class RecordedStarts:
    """An executor that lets durable work begin only when its start is on disk, so that a killed gateway can tell.

    An idempotent action, and one whose caller waits on the connection, begin at once: neither is ever run twice
    by mistake.
    """

    def __init__(self, executor: Executor, invocations: Invocations, store: Store) -> None:
        self._executor = executor
        self._invocations = invocations
        self._store = store

    async def execute(self, action: Action, lease: Lease, call: Call) -> Outcome:
        if not call.function.idempotent and self._invocations.outlives_caller(action.id):
            try:
                await self._store.commit()
            except StorageUnavailable as error:
                return Outcome(
                    state=State.FAILED, reason=Reason.INTERNAL, message=error.message, component=error.component
                )
        return await self._executor.execute(action, lease, call)

    async def resize(self, action: Action, lease: Lease) -> None:
        await self._executor.resize(action, lease)

    async def open_trajectory(self, trajectory: str, function: FunctionSpec) -> None:
        await self._executor.open_trajectory(trajectory, function)

    async def end_trajectory(self, trajectory: str) -> None:
        await self._executor.end_trajectory(trajectory)
