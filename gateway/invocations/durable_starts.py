"""Starts: durable work begins only when the record says so on disk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial

from gateway.invocations.invocations import Invocations
from gateway.invocations.quota_record import QuotaRecord
from gateway.invocations.trajectories import TrajectoryRecovery
from gateway.store.store import Store
from manager.action import Action, Chunk, Lease, Outcome
from manager.executor import Call, Executor
from manager.function import FunctionSpec
from runtimes.kinds import kind_of


class DurableStarts:
    """An executor that lets durable work begin only when its start is on disk, so that a killed gateway can tell.

    What is done in a sandbox is put on record as begun at the last moment, when its sandbox is ready: before, it can
    be queued again whatever it is, and of a trajectory's first environment nothing is lost. An idempotent action, and
    one whose caller waits on the connection, begin at once: neither is ever run twice by mistake. While the disk
    refuses, durable work waits here in its lease: it is neither lost nor failed for that. A call that consumes a quota
    is counted on disk before it is made, whoever waits for it.
    """

    def __init__(
        self,
        executor: Executor,
        invocations: Invocations,
        store: Store,
        trajectories: TrajectoryRecovery,
        quotas: QuotaRecord,
        on_end: Callable[[str], None],
    ) -> None:
        """``on_end`` is told of each trajectory that ends, as its environment begins to go."""
        self._executor = executor
        self._invocations = invocations
        self._store = store
        self._trajectories = trajectories
        self._quotas = quotas
        self._on_end = on_end

    async def execute(self, action: Action, lease: Lease, call: Call) -> Outcome:
        inside = kind_of(call.function).works_in_sandbox
        announce = partial(self._announce, action, call.function) if inside else partial(self._outlives, action)
        call = replace(call, announce=announce)
        once = self._once(action, call.function)
        used = self._quotas.begin(lease)
        if used and call.again is not None:
            call = replace(call, again=partial(self._again, used, call.again))
        try:
            if used or (once and (not inside or self._store.failure is not None)):
                await self._store.durable()
            return await self._executor.execute(action, lease, call)
        finally:
            self._quotas.end(used)

    async def _again(self, used: Mapping[str, int], had: Callable[[], Awaitable[None]]) -> None:
        """Its quotas have room for another try, and that is on disk."""
        await had()
        self._quotas.again(used)
        await self._store.durable()

    async def _announce(self, action: Action, function: FunctionSpec) -> bool:
        """Its sandbox is ready, and nothing was done in it yet."""
        if action.trajectory is not None and self._trajectories.opened(action.trajectory, action.task, function):
            await self._store.durable()
        self._invocations.begin(action.id)
        if self._once(action, function):
            await self._store.durable()
        return self._invocations.outlives_caller(action.id)

    async def _outlives(self, action: Action) -> bool:
        """It is on record already: whether it goes on without its caller, where it can (on a node)."""
        return self._invocations.outlives_caller(action.id)

    def _once(self, action: Action, function: FunctionSpec) -> bool:
        return not function.idempotent and self._invocations.outlives_caller(action.id)

    async def resize(self, action: Action, lease: Lease) -> None:
        await self._executor.resize(action, lease)

    async def replicate(self, function: FunctionSpec, service: str, node: str, chunk: Chunk) -> bool:
        return await self._executor.replicate(function, service, node, chunk)

    async def open_trajectory(self, trajectory: str, task: str, function: FunctionSpec) -> None:
        if self._trajectories.opened(trajectory, task, function):
            await self._store.durable()
        await self._executor.open_trajectory(trajectory, task, function)

    async def end_trajectory(self, trajectory: str) -> None:
        self._on_end(trajectory)
        await self._executor.end_trajectory(trajectory)
        self._trajectories.ended(trajectory)
