"""Execute leased actions: put on record that their work begins, and hand them to this machine or to a node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from gateway.invocations.invocations import Invocations
from gateway.invocations.restart import QuotaRecord, TrajectoryRecovery
from gateway.store.store import Store
from manager.action import Action, Chunk, Lease, Outcome
from manager.errors import ActionFailed, StorageUnavailable
from manager.executor import Call, CallHooks, Executor
from manager.function import FunctionSpec
from runtimes.kinds import kind_of
from runtimes.node.protocol import failed

#: Invocation, action and the caller's ``traceparent`` -> that of the action (`gateway.tracing.TraceExporter`).
PassTrace = Callable[[str, str, str | None], str | None]


class GatewayDispatcher:
    """The `manager.executor.Executor` of a gateway, over that of its machines.

    Durable work begins only when its start is on disk, so that a killed gateway can tell. What is done in a sandbox is
    put on record as begun at the last moment, when its sandbox is ready: before, it can be queued again whatever it is,
    and of a trajectory's first environment nothing is lost. An idempotent action, and one whose caller waits on the
    connection, begin at once: neither is ever run twice by mistake. While the disk refuses, durable work waits here in
    its lease: it is neither lost nor failed for that. A call that consumes a quota is counted on disk before it is
    made, whoever waits for it.
    """

    def __init__(
        self,
        machines: Executor,
        *,
        invocations: Invocations,
        store: Store,
        trajectories: TrajectoryRecovery,
        quotas: QuotaRecord,
        on_end: Callable[[str], None],
        pass_trace: PassTrace | None = None,
    ) -> None:
        """``machines`` execute what they are given: this one, or all of a fleet.

        ``on_end`` is told of each trajectory that ends, as its environment begins to go.
        """
        self._machines = machines
        self._invocations = invocations
        self._store = store
        self._trajectories = trajectories
        self._quotas = quotas
        self._on_end = on_end
        self._pass_trace = pass_trace

    async def execute(self, action: Action, lease: Lease, call: Call) -> Outcome:
        """Run the action to its end where its lease says."""
        function = call.function
        if self._pass_trace is not None:
            call.traceparent = self._pass_trace(call.invocation_id, action.id, call.traceparent)
        inside = kind_of(function).works_in_sandbox
        if inside and not call.resumed and (loss := self._trajectories.take_loss(action.trajectory)) is not None:
            return failed(loss)
        used = self._quotas.begin(lease)
        hooks = call.hooks = _Hooks(
            self._invocations,
            self._store,
            self._trajectories,
            self._quotas,
            action,
            function,
            inside,
            used,
            call.resumed,
        )
        try:
            if used or ((not inside or self._store.failure is not None) and hooks.begins_once()):
                await (self._store.durable() if call.resumed else self._invocations.begin_written(action.id))
        except ActionFailed as left:
            return failed(left)
        else:
            return await self._machines.execute(action, lease, call)
        finally:
            if used:
                self._quotas.end(used)

    async def resize(self, action: Action, lease: Lease) -> None:
        """Give a running action other cores, where it runs."""
        await self._machines.resize(action, lease)

    async def replicate(self, function: FunctionSpec, service: str, node: str, chunk: Chunk) -> bool:
        """Copy a service on the node's devices; return False where it cannot be."""
        return await self._machines.replicate(function, service, node, chunk)

    async def open_trajectory(self, trajectory: str, task: str, function: FunctionSpec) -> None:
        """Make the trajectory's environment, once it is on record; raises CodedError, also if the last one is lost."""
        if (loss := self._trajectories.take_loss(trajectory)) is not None:
            raise loss
        if self._trajectories.opened(trajectory, task, function):
            await self._store.durable()
        await self._machines.open_trajectory(trajectory, task, function)

    async def end_trajectory(self, trajectory: str) -> None:
        """Remove the trajectory's environment, then its record."""
        self._on_end(trajectory)
        await self._machines.end_trajectory(trajectory)
        self._trajectories.ended(trajectory)
        with suppress(StorageUnavailable):  # it has ended all the same
            await self._store.commit()  # it is told by then: no later gateway finds it alive, or lost


@dataclass(slots=True, eq=False)
class _Hooks(CallHooks):
    """Puts on record what becomes of one call."""

    invocations: Invocations
    store: Store
    trajectories: TrajectoryRecovery
    quotas: QuotaRecord
    action: Action
    function: FunctionSpec
    #: Whether it is done in a sandbox; what is not is on record as begun from its lease on.
    inside: bool
    #: The quota units that it consumes.
    used: Mapping[str, int]
    #: Whether an earlier gateway began it, and put that on record.
    resumed: bool

    def begins_once(self) -> bool:
        """Whether it must not be run a second time by a later gateway."""
        return not self.function.idempotent and self.invocations.outlives_caller(self.action.id)

    async def commit_begin(self) -> bool:
        """Put on record that its work begins now; its sandbox is ready, and nothing was done in it yet."""
        action = self.action
        if self.inside:
            name = action.trajectory
            if name is not None and self.trajectories.opened(name, action.task, self.function):
                await self.store.durable()
            self.invocations.begin(action.id)
        lasting = self.invocations.outlives_caller(action.id)
        if lasting and self.inside and not self.function.idempotent:
            await self.invocations.begin_written(self.action.id)
        return lasting

    async def again(self) -> None:
        """Its quotas have room for another try, and that is on disk."""
        await self.invocations.engine.try_again(self.action)
        if self.used:
            self.quotas.again(self.used)
            await self.store.durable()

    def begun(self) -> None:
        if not self.inside and not self.resumed:
            self.invocations.work_began(self.action.id)
