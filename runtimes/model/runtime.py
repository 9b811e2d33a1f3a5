"""The model runtime: score, logprobs, embed and generate, on the chunk that the lease grants (paper, EOE)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from manager.action import Action, Chunk, Lease
from manager.config import ServiceSpec
from manager.errors import ActionFailed, InvalidInput, Reason, Unsupported
from manager.function import FunctionSpec
from runtimes.model.device.devices import require_torch
from runtimes.model.device.process import ForkServer
from runtimes.model.engine.batch import BatchJob, BatchMember
from runtimes.model.engine.contract import ModelBackend, ModelRequest, OnFootprint
from runtimes.model.engine.external import ExternalBackend
from runtimes.model.engine.stats import ModelStats
from runtimes.model.engine.torch_backend import TorchBackend
from runtimes.model.request import model_of, parse_input
from runtimes.model.settings import ModelSettings
from runtimes.runtime import Execution, Result

_COMPONENT = "model.runtime"

#: Told whenever what is resident on this node changes: service -> chunks.
OnResidency = Callable[[Mapping[str, tuple[Chunk, ...]]], None]


class ModelRuntime:
    """Implements `runtimes.runtime.Runtime`. The gateway's process never imports torch and never waits for it."""

    def __init__(
        self,
        settings: ModelSettings | None = None,
        *,
        on_residency: OnResidency | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        self.settings = settings or ModelSettings()
        self.on_residency = on_residency
        #: Told whenever a service's footprint is known better than before.
        self.on_footprint: OnFootprint | None = None
        self.stats = ModelStats()
        self._own_fork_server = fork_server is None
        self._fork_server = fork_server or ForkServer()
        self._torch: TorchBackend | None = None
        self._external = ExternalBackend(self.settings, self._report, self._learn)
        #: Functions that are ready, and what each service costs: functions may share one.
        self._ready: set[str] = set()
        self._footprints: dict[str, ServiceSpec] = {}
        self._batches: dict[tuple[str, ...], BatchJob] = {}

    # -- Runtime

    async def prepare(self, function: FunctionSpec) -> None:
        """Check the checkpoint, read it into host memory and start the devices' processes."""
        service = await self._backend(function).prepare(function)
        self._footprints[service.name] = service
        self._ready.add(function.name)

    async def execute(self, execution: Execution) -> Result:
        """Run one action on its chunk, together with the other members of its batch if the lease names any."""
        function = execution.call.function
        backend = self._backend(function)
        batch = self._batch(execution, backend)
        try:
            request = await self._admit(execution, backend)
            await self._evict_elsewhere(execution, backend)
        except BaseException:
            batch.leave_out(execution.action.id)
            raise
        member = BatchMember(request=request, begin=execution.begin, evict=_evicted(execution))
        batch = self._batch(execution, backend)  # another one if the first left without us
        batch.join(execution.action.id, member)
        try:
            answer = await batch.answer(member)
        finally:
            execution.end()
        self.stats.count(answer.usage)
        return Result(value=answer.value, usage=answer.usage)

    async def resize(self, action: Action, lease: Lease) -> None:
        """A model action keeps its chunk to its end."""

    async def end_trajectory(self, trajectory: str) -> None:
        """Models keep nothing for a trajectory."""

    async def close(self) -> None:
        """End every process and free every image."""
        for batch in list(self._batches.values()):
            await batch.cancel()
        if self._torch is not None:
            await self._torch.close()
            self._torch = None
        await self._external.close()
        if self._own_fork_server:
            await asyncio.to_thread(self._fork_server.close)

    # -- beyond the protocol

    async def footprint(self, function: FunctionSpec) -> ServiceSpec:
        """Bytes on each device by DoP, and restore seconds by DoP as far as they were measured, for the manager."""
        if function.name not in self._ready:
            await self.prepare(function)
        return self._footprints[model_of(function).service]

    async def replicate(self, function: FunctionSpec, service: str, chunk: Chunk) -> bool:
        """Restore a service where there is room, beside what computes now; return False if there was none."""
        return await self._backend(function).restore(service, function, chunk)

    def residency(self) -> Mapping[str, tuple[Chunk, ...]]:
        """Service -> chunks on which it is really resident."""
        ours = {} if self._torch is None else self._torch.residency()
        return {**ours, **self._external.residency()}

    def resources(self) -> dict[str, object]:
        """Devices, host memory and swap counts, JSON-able."""
        return self.stats.view(self._torch)

    # -- parts

    def _backend(self, function: FunctionSpec) -> ModelBackend:
        if model_of(function).engine_url:
            return self._external
        if self.settings.device == "none":
            told = "this machine serves no models: its devices are switched off (node.devices.kind, --devices)"
            raise Unsupported(told, component=_COMPONENT)
        if self._torch is None:
            require_torch()
            self._torch = TorchBackend(self.settings, self._fork_server, self._report, self._learn)
        return self._torch

    async def _admit(self, execution: Execution, backend: ModelBackend) -> ModelRequest:
        function = execution.call.function
        try:
            return await backend.admit(
                function, parse_input(function, execution.call.input, self.settings.sequences_max)
            )
        except InvalidInput as error:
            raise ActionFailed(
                Reason.INVALID_INPUT, error.message, component=error.component, detail=error.detail
            ) from error

    def _batch(self, execution: Execution, backend: ModelBackend) -> BatchJob:
        """The batch that the lease names, or one of this action alone."""
        key = _batch_key(execution)
        batch = self._batches.get(key)
        if batch is None or batch.closed:
            grant = execution.lease.grants.get("gpu")
            if grant is None or grant.chunk is None:
                raise ActionFailed(
                    Reason.INTERNAL, "the lease of a model action grants no chunk of devices", component=_COMPONENT
                )
            batch = BatchJob(
                backend=backend,
                service=execution.action.service or model_of(execution.call.function).service,
                members=key,
                chunk=grant.chunk,
                cores=execution.lease.cores,
                gather_s=self.settings.gather_s,
                on_end=lambda: self._forget(key, batch),
            )
            self._batches[key] = batch
        return batch

    async def _evict_elsewhere(self, execution: Execution, backend: ModelBackend) -> None:
        """Evict what the manager evicts for this action but the other backend holds."""
        for other in (self._torch, self._external):
            if other is None or other is backend:
                continue
            resident = other.residency()
            for service in _evicted(execution):
                for chunk in resident.get(service, ()):
                    await other.evict(service, chunk)

    def _forget(self, key: tuple[str, ...], batch: BatchJob | None) -> None:
        if self._batches.get(key) is batch:
            del self._batches[key]

    def _learn(self, service: ServiceSpec) -> None:
        self._footprints[service.name] = service
        if self.on_footprint is not None:
            self.on_footprint(service)

    def _report(self) -> None:
        if self.on_residency is not None:
            self.on_residency(self.residency())


def _evicted(execution: Execution) -> tuple[str, ...]:
    grant = execution.lease.grants.get("gpu")
    return () if grant is None else grant.evict


def _batch_key(execution: Execution) -> tuple[str, ...]:
    return execution.lease.batch or (execution.action.id,)
