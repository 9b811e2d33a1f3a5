"""The torch backend: processes of our own, one host image for every DoP, swaps at the speed of the bus."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from manager.action import Chunk
from manager.config import ServiceSpec
from manager.errors import ActionFailed, CodedError, InvalidConfig, InvalidInput, Reason, Unsupported
from manager.function import FunctionSpec, ModelAction, ModelSpec
from runtimes.model.checkpoint.host_images import HostImages, KnownImage, ModelKey, ask_tokenizer
from runtimes.model.checkpoint.layout import Layout, shard
from runtimes.model.checkpoint.tokens import check_ids
from runtimes.model.device.devices import discover
from runtimes.model.device.messages import (
    Decode,
    Encode,
    EncodedText,
    Generated,
    ImageRef,
    Placed,
    RunBatch,
    TokenLogprobs,
    Usage,
    WorkItem,
)
from runtimes.model.device.process import ForkServer, Gone, ModelProcess, RequestRefused
from runtimes.model.engine.contract import Answers, ModelJob, ModelRequest, OnAnswered, OnFootprint
from runtimes.model.engine.early_answers import EarlyAnswers, job_usage
from runtimes.model.engine.fleet import ChunkBroken, Fleet
from runtimes.model.engine.restores import Restores, has_moved
from runtimes.model.request import ModelInput, model_of
from runtimes.model.settings import ModelSettings

_COMPONENT = "model.torch_backend"

_HEADS: Mapping[ModelAction, str] = {
    ModelAction.SCORE: "score",
    ModelAction.LOGPROBS: "lm",
    ModelAction.GENERATE: "lm",
    ModelAction.EMBED: "base",
}

#: Tries of an action whose chunk broke under it, or ran out of memory: itself and one more.
ATTEMPTS = 2


class TorchBackend:
    """Implements `contract.ModelBackend` on this node's devices."""

    def __init__(
        self,
        settings: ModelSettings,
        fork_server: ForkServer,
        on_residency: Callable[[], None],
        on_footprint: OnFootprint = lambda _: None,
    ) -> None:
        self._settings = settings
        self._rendezvous_dir = _make_rendezvous_dir(settings.state_dir)
        self.fleet = Fleet(discover(settings), fork_server, settings, self._rendezvous_dir, on_residency)
        self._tokenizer_process = ModelProcess(fork_server, "tokenizer", {}, start_s=settings.start_s)
        self.images = HostImages(settings, self._tokenizer_process, self.fleet.forget_image)
        self._restores = Restores(settings.restore_bytes_per_s)
        #: Services as the scheduler knows them, by name.
        self._told: dict[str, ServiceSpec] = {}
        self._on_footprint = on_footprint

    # -- the contract

    async def prepare(self, function: FunctionSpec) -> ServiceSpec:
        model = model_of(function)
        known = await self.images.look(_key(model))
        units = function.cost.get("gpu")
        if units is None:
            raise InvalidConfig(f"functions.{function.name}.cost: a model function needs gpu", component=_COMPONENT)
        for dop in units:
            try:
                known.layout.check_dop(dop)
            except Unsupported as error:
                raise Unsupported(
                    f"functions.{function.name}.cost.gpu: {model.path}: {error.message}", component=_COMPONENT
                ) from error
        service = self._service(function, known.layout)
        self._check_fits(function, service)
        await self.fleet.start()
        async with self.images.hold(known):
            pass
        self._told[service.name] = service
        return service

    async def admit(self, function: FunctionSpec, given: ModelInput) -> ModelRequest:
        with _failing_the_action():
            known = await self.images.look(_key(model_of(function)))
            encoded = await self._encode(function, given, known)
        return ModelRequest(function=function, input=given, admitted=encoded)

    async def restore(self, service: str, function: FunctionSpec, chunk: Chunk) -> bool:
        known = await self.images.look(_key(model_of(function)))
        async with self.images.hold(known) as image:
            return await self.fleet.restore(chunk, image, _placed(service, image))

    async def execute(self, job: ModelJob, restored: Callable[[], None], answered: OnAnswered) -> Answers:
        with _failing_the_action():
            known = await self.images.look(_key(model_of(job.requests[0].function)))
            early = EarlyAnswers(job, partial(self._request_value, known), answered)
            async with early, self.images.hold(known) as image:
                results, usages = await self._attempt(job, image, restored, early)
            self._learn(job, usages)
            return Answers(values=await self._values(job, known, results), usage=job_usage(usages, len(job.requests)))

    async def evict(self, service: str, chunk: Chunk) -> None:
        await self.fleet.evict(chunk, (service,))

    def residency(self) -> Mapping[str, tuple[Chunk, ...]]:
        return self.fleet.residency()

    async def close(self) -> None:
        await self.images.close()
        await asyncio.gather(self.fleet.close(), self._tokenizer_process.close())
        shutil.rmtree(self._rendezvous_dir, ignore_errors=True)

    # -- parts

    async def _attempt(
        self, job: ModelJob, image: ImageRef, restored: Callable[[], None], early: EarlyAnswers
    ) -> tuple[list[object], list[Usage]]:
        """Run, and once more if processes were lost or memory ran out: by then everything idle is evicted."""
        run = RunBatch(
            place=_placed(job.service, image),
            items=tuple(item for request in job.requests for item in _items(request)),
            budget_tokens=min(model_of(request.function).batch_tokens for request in job.requests),
            evict=tuple(name for name in job.evict if name != job.service),
            cores=job.cores,
        )
        for attempt in range(1, ATTEMPTS + 1):
            try:
                early.begin()
                return await self.fleet.run(job.chunk, image, run, restored, early.ended)
            except RequestRefused as refused:
                failed = refused.failed
                if failed.reason is not Reason.OUT_OF_MEMORY or attempt == ATTEMPTS:
                    raise ActionFailed(failed.reason, failed.message, component="model.worker") from refused
            except ChunkBroken as broken:
                if attempt == ATTEMPTS:
                    raise ActionFailed(
                        Reason.MODEL_ERROR, f"{broken}; tried {attempt} times", component="model.worker"
                    ) from broken
        raise AssertionError("the last attempt returns or raises")

    async def _encode(self, function: FunctionSpec, given: ModelInput, known: KnownImage) -> EncodedText:
        model = model_of(function)
        limit = _limit(model, given, known.layout)
        if given.token_ids:
            _check_vocabulary(given, known.layout)
            encoded = check_ids(given.token_ids, limit, model.cut)
            stops = known.stop_ids if model.action is ModelAction.GENERATE else ()
            return EncodedText(ids=encoded.ids, truncated=encoded.truncated, stop_ids=stops)
        order = Encode(
            path=model.path,
            fingerprint=known.fingerprint,
            texts=given.texts,
            conversations=given.conversations,
            limit=limit,
            cut=model.cut,
            continued=model.action is ModelAction.GENERATE,
        )
        answer = (await ask_tokenizer(self._tokenizer_process, order)).value
        assert isinstance(answer, EncodedText)
        empty = next((index for index, ids in enumerate(answer.ids) if not ids), None)
        if empty is not None:
            raise InvalidInput(f"sequence {empty} has no tokens", component=_COMPONENT)
        return answer

    async def _values(
        self, job: ModelJob, known: KnownImage, results: Sequence[object]
    ) -> tuple[Mapping[str, object], ...]:
        """Share the results out to the requests, as JSON values."""
        values, start = [], 0
        for request in job.requests:
            end = start + len(request.input)
            values.append(await self._request_value(known, request, results[start:end]))
            start = end
        return tuple(values)

    async def _request_value(
        self, known: KnownImage, request: ModelRequest, results: Sequence[object]
    ) -> Mapping[str, object]:
        texts: list[str] = []
        if model_of(request.function).action is ModelAction.GENERATE:
            ids = tuple(one.ids for one in results if isinstance(one, Generated))
            order = Decode(path=known.key[0], fingerprint=known.fingerprint, ids=ids)
            texts = await self._decode(order, bool(request.input.token_ids))
        return _value(request, results, texts)

    async def _decode(self, order: Decode, ids_given: bool) -> list[str]:
        """Texts of generated ids; none for a checkpoint without a tokenizer, which was sent ids."""
        try:
            texts = (await ask_tokenizer(self._tokenizer_process, order)).value
        except InvalidConfig:
            if ids_given:
                return []
            raise
        assert isinstance(texts, list)
        return texts

    def _service(self, function: FunctionSpec, layout: Layout) -> ServiceSpec:
        """Return bytes on each device and restore seconds, for every DoP that functions of this service may ask for."""
        name, told = model_of(function).service, self._told.get(model_of(function).service)
        sizes = {dop: shard(layout, 0, dop).size_bytes for dop in function.cost["gpu"]}
        if told is not None:
            sizes = {**told.bytes_by_dop, **sizes}
        return ServiceSpec(
            name=name,
            bytes_by_dop=sizes,
            restore_s_by_dop=self._restores.estimate(name, sizes),
            batch_tokens=model_of(function).batch_tokens,
        )

    def _check_fits(self, function: FunctionSpec, service: ServiceSpec) -> None:
        arena = min(device.arena_bytes for device in self.fleet.devices)
        for dop, size in service.bytes_by_dop.items():
            if size > arena:
                raise InvalidConfig(
                    f"functions.{function.name}.cost.gpu: at DoP {dop} the model takes {size} bytes of each device, "
                    f"which has {arena}; ask for more devices or raise models.device_memory",
                    component=_COMPONENT,
                )

    def _learn(self, job: ModelJob, usages: Sequence[Usage]) -> None:
        """Keep what a restore took, and tell the scheduler if its estimates have moved."""
        seconds = max((usage.restore_s for usage in usages if usage.restored), default=0.0)
        mine, dop = self._told.get(job.service), job.chunk.size
        if mine is None or dop not in mine.bytes_by_dop or seconds <= 0:
            return
        self._restores.add(job.service, dop, mine.bytes_by_dop[dop], seconds)
        for told in list(self._told.values()):
            now = self._restores.estimate(told.name, told.bytes_by_dop)
            if has_moved(told.restore_s_by_dop, now):
                self._told[told.name] = replace(told, restore_s_by_dop=now)
                self._on_footprint(self._told[told.name])


@contextmanager
def _failing_the_action() -> Iterator[None]:
    """Turn what a checkpoint or a process raises into ActionFailed(model_error); refused inputs pass as they are."""
    try:
        yield
    except (ActionFailed, InvalidInput):
        raise
    except CodedError as error:
        raise ActionFailed(Reason.MODEL_ERROR, error.message, component=error.component) from error
    except Gone as error:
        raise ActionFailed(Reason.MODEL_ERROR, str(error), component=_COMPONENT) from error


def _make_rendezvous_dir(state_dir: Path) -> Path:
    """A directory of our own for rendezvous files; those of processes that were killed are removed."""
    state_dir.mkdir(parents=True, exist_ok=True)
    for left in state_dir.glob("groups-*-*"):
        if not Path("/proc", left.name.split("-")[1]).exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"groups-{os.getpid()}-", dir=state_dir))


def _key(model: ModelSpec) -> ModelKey:
    return model.path, _HEADS[model.action], model.dtype


def _placed(service: str, image: ImageRef) -> Placed:
    """The place before it is completed for each rank."""
    return Placed(service=service, image_id=image.id, dop=1, rank=0, start=0)


def _limit(model: ModelSpec, given: ModelInput, layout: Layout) -> int:
    """Most tokens of one input: the function's bound, and the model's positions less what is to be generated."""
    positions = layout.positions_max or model.max_tokens
    limit = min(model.max_tokens, positions - given.sampling.max_new_tokens)
    if limit < 1:
        raise InvalidInput(
            f"max_new_tokens {given.sampling.max_new_tokens} leaves no room among {positions} positions",
            component=_COMPONENT,
            detail={"path": "$.max_new_tokens"},
        )
    return limit


def _check_vocabulary(given: ModelInput, layout: Layout) -> None:
    """An id beyond the vocabulary would be a wild read on the device."""
    for index, row in enumerate(given.token_ids):
        if max(row) >= layout.vocab_size:
            raise InvalidInput(
                f"token id {max(row)} is beyond the vocabulary of {layout.vocab_size}",
                component=_COMPONENT,
                detail={"path": f"$.token_ids[{index}]"},
            )


def _items(request: ModelRequest) -> list[WorkItem]:
    encoded = request.admitted
    assert isinstance(encoded, EncodedText)
    action = model_of(request.function).action
    if action is not ModelAction.GENERATE:
        return [WorkItem(ids=ids, action=action, top=request.input.top_logprobs) for ids in encoded.ids]
    asked = replace(request.input.sampling, stop_ids=encoded.stop_ids)
    return [
        WorkItem(ids=ids, action=action, sampling=replace(asked, seed=asked.seed + index))
        for index, ids in enumerate(encoded.ids)
    ]


def _value(request: ModelRequest, results: Sequence[object], texts: Sequence[str]) -> Mapping[str, object]:
    """The JSON value of one action; raises ActionFailed(model_error) rather than return a number that is none."""
    encoded = request.admitted
    assert isinstance(encoded, EncodedText)
    common: dict[str, object] = {"tokens": [len(ids) for ids in encoded.ids]}
    if encoded.truncated:
        common["truncated"] = list(encoded.truncated)
    action = model_of(request.function).action
    if action is ModelAction.GENERATE:
        made = [one for one in results if isinstance(one, Generated)]
        written = {"texts": list(texts)} if texts else {}
        ids, reasons = [list(one.ids) for one in made], [one.reason for one in made]
        return {**written, "token_ids": ids, "finish_reasons": reasons, "seed": request.input.sampling.seed, **common}
    detailed = [one for one in results if isinstance(one, TokenLogprobs)]
    if detailed:
        results = [one.logprobs for one in detailed]
        common["token_ids"] = [list(ids) for ids in encoded.ids]
        common["ranks"] = [one.ranks for one in detailed]
        common["top_logprobs"] = [one.top for one in detailed]
    if not all(_finite(result) for result in results):
        raise ActionFailed(
            Reason.MODEL_ERROR, "the model computed a value that is not finite", component="model.worker"
        )
    if action is ModelAction.SCORE:
        return {"scores": list(results), **common}
    if action is ModelAction.EMBED:
        return {"embeddings": list(results), **common}
    sums = [math.fsum(row) for row in results if isinstance(row, list)]
    return {"logprobs": list(results), "sums": sums, **common}


def _finite(result: object) -> bool:
    row = result if isinstance(result, list) else [result]
    return all(isinstance(number, float) and math.isfinite(number) for number in row)
