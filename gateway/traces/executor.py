"""An executor that tells what runs which span it is part of."""

from __future__ import annotations

from dataclasses import replace

from gateway.traces.exporter import TraceExporter
from manager.action import Action
from manager.chunk import Chunk
from manager.executor import Call, Executor
from manager.function import FunctionSpec
from manager.lease import Lease
from manager.outcome import Outcome


class TracedExecutor:
    """Another executor, whose calls carry the trace context of their own execution."""

    def __init__(self, executor: Executor, traces: TraceExporter) -> None:
        self._executor = executor
        self._traces = traces

    async def execute(self, action: Action, lease: Lease, call: Call) -> Outcome:
        traceparent = self._traces.passed_on(call.context["invocation_id"], action.id, call.traceparent)
        return await self._executor.execute(action, lease, replace(call, traceparent=traceparent))

    async def resize(self, action: Action, lease: Lease) -> None:
        await self._executor.resize(action, lease)

    async def replicate(self, function: FunctionSpec, service: str, node: str, chunk: Chunk) -> bool:
        return await self._executor.replicate(function, service, node, chunk)

    async def open_trajectory(self, trajectory: str, task: str, function: FunctionSpec) -> None:
        await self._executor.open_trajectory(trajectory, task, function)

    async def end_trajectory(self, trajectory: str) -> None:
        await self._executor.end_trajectory(trajectory)
