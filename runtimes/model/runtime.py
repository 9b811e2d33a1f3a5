"""The `model` runtime and its kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, NotRequired, TypedDict

from msgspec import Meta

from manager.action import Chunk
from manager.config import ServiceSpec
from manager.errors import ActionFailed, CodedError, InvalidInput, Reason, Unsupported
from manager.function import FunctionSpec, ModelAction, ModelSpec, Setting
from runtimes.kind import DeclarationSite, Kind, RuntimeDeps, Schema, schema_of
from runtimes.model.checkpoint import checkpoint_problem, fingerprint
from runtimes.model.engine import BatchJob, BatchMember, ModelBackend, ModelRequest, OnFootprint, require_torch
from runtimes.model.external import ExternalBackend, engine_problems
from runtimes.model.processes import ForkServer
from runtimes.model.request import INPUTS, SEQUENCES, ModelSettings, model_of, parse_input
from runtimes.model.torch_backend import ModelStats, TorchBackend
from runtimes.runtime import Execution, Result, Runtime

_COMPONENT = "model.runtime"

#: Told whenever what is resident on this node changes: service -> chunks.
OnResidency = Callable[[Mapping[str, tuple[Chunk, ...]]], None]


class ModelRuntime(Runtime):
    """The gateway's process never imports torch and never waits for it."""

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
        if model_of(function).engine is not None:
            return self._external
        if self.settings.device == "none":
            message = "this machine serves no models: its devices are switched off (node.devices.kind, --devices)"
            raise Unsupported(message, component=_COMPONENT)
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


async def model_problems(functions: Iterable[FunctionSpec], settings: ModelSettings) -> dict[str, str]:
    """Return why in-house model functions are refused, by function: their checkpoints are looked at with torch."""
    backend = TorchBackend(replace(settings, device="cpu"), fork_server := ForkServer(), lambda: None)
    problems = {}
    try:
        for function in functions:
            try:
                await backend.inspect(function)
            except CodedError as error:
                problems[function.name] = error.message
    finally:
        await backend.close()
        await asyncio.to_thread(fork_server.close)
    return problems


def _evicted(execution: Execution) -> tuple[str, ...]:
    grant = execution.lease.grants.get("gpu")
    return () if grant is None else grant.evict


def _batch_key(execution: Execution) -> tuple[str, ...]:
    return execution.lease.batch or (execution.action.id,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKeys:
    """The keys of a model function."""

    model: Annotated[ModelSpec, Setting("the checkpoint and what is asked of it")]


class ModelResult(TypedDict):
    """What every action tells of its sequences; an external engine does not."""

    tokens: NotRequired[Annotated[list[int], Meta(description="Tokens of each sequence as it was read")]]
    truncated: NotRequired[Annotated[list[int], Meta(description="Indices of the sequences that were cut")]]


class ScoreResult(ModelResult):
    """The value of the head for each sequence."""

    scores: Annotated[
        list[float | list[float]], Meta(description="A number for each sequence; a list if the head has several labels")
    ]


class StepScoresResult(ModelResult):
    """The value of the head at the end of each step."""

    step_scores: Annotated[
        list[list[float | list[float]]],
        Meta(description="For each sequence a number for each step; a list if the head has several labels"),
    ]
    positions: Annotated[list[list[int]], Meta(description="The positions of these tokens in each sequence")]


class LogprobsResult(ModelResult):
    """The log-probability of each token under the ones before it."""

    logprobs: Annotated[list[list[float]], Meta(description="For each sequence every token's but the first")]
    sums: Annotated[list[float], Meta(description="Their sum for each sequence")]
    token_ids: NotRequired[Annotated[list[list[int]], Meta(description="The sequences' ids, if top_logprobs is given")]]
    ranks: NotRequired[
        Annotated[list[list[int]], Meta(description="Rank of each token in the vocabulary, 1 the likeliest, likewise")]
    ]
    top_logprobs: NotRequired[
        Annotated[
            list[list[list[list[int | float]]]],
            Meta(description="The likeliest tokens in its place, id and log-probability, likewise"),
        ]
    ]


class EmbedResult(ModelResult):
    """A vector for each sequence, pooled as the checkpoint declares; of length one if it declares nothing."""

    embeddings: list[list[float]]


class GenerateResult(ModelResult):
    """A continuation of each sequence."""

    texts: NotRequired[
        Annotated[list[str], Meta(description="Continuations; left out if the checkpoint has no tokenizer")]
    ]
    token_ids: NotRequired[Annotated[list[list[int]], Meta(description="Their ids; an external engine tells none")]]
    finish_reasons: Annotated[list[str], Meta(description="stop or length, for each sequence")]
    seed: Annotated[int, Meta(description="The seed that was used")]


_ONE_OF = [{"required": [kind]} for kind in SEQUENCES]
_RESULTS: Mapping[ModelAction, type] = {
    ModelAction.SCORE: ScoreResult,
    ModelAction.STEP_SCORES: StepScoresResult,
    ModelAction.LOGPROBS: LogprobsResult,
    ModelAction.EMBED: EmbedResult,
    ModelAction.GENERATE: GenerateResult,
}
_SHOWN: Mapping[str, tuple[Schema, Schema]] = {
    action: (schema_of(INPUTS[action], oneOf=_ONE_OF, additionalProperties=False), schema_of(result))
    for action, result in _RESULTS.items()
}


def _schemas(function: FunctionSpec) -> tuple[Schema, Schema]:
    assert function.model is not None, f"{function.name} has no model section"
    return _SHOWN[function.model.action]


def _spec(section: ModelKeys, place: DeclarationSite) -> Mapping[str, object]:
    spec = section.model
    if spec.engine is not None:
        for message in engine_problems(spec.engine):
            place.refuse(("model", "engine"), message)
        if spec.engine.command and place.roots is not None:
            place.refuse(
                ("model", "engine", "command"),
                "it runs on the gateway's machine: declare it in the server's own files, and apply them with tangram "
                "apply --own",
            )
    path = ((place.models_dir or place.directory) / spec.path.expanduser()).resolve()
    if spec.engine is not None:
        return {"model": replace(spec, path=path) if spec.engine.command and path.is_dir() else spec}
    if not place.may_look_at(path):
        place.refuse(
            ("model", "path"),
            f"{path} is outside of the directories that this gateway serves; "
            "put it below models.dir or beside the server's own files, or name it in these and apply them with "
            "tangram apply --own",
        )
    elif place.look and not place.models_elsewhere and (problem := checkpoint_problem(path, spec.action)) is not None:
        place.refuse(("model", "path"), problem)
    return {"model": replace(spec, path=path)}


def _make(deps: RuntimeDeps) -> Runtime:

    return ModelRuntime(deps.models)


def _source(function: FunctionSpec) -> str:
    """What names the weights that a revision was declared with; an engine of its own has its own."""
    return "" if function.model is None or function.model.engine else fingerprint(function.model.path)


MODEL = Kind(
    name="model",
    meaning="a model that is restored when it is needed and evicted when not",
    make=_make,
    section=ModelKeys,
    cost="gpu",
    spec=_spec,
    input_schema=lambda function: _schemas(function)[0],
    result_schema=lambda function: _schemas(function)[1],
    shown=_SHOWN,
    source=_source,
)
