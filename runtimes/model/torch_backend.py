"""Models on devices of this machine: restored, evicted and served."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from manager.action import Chunk
from manager.config import ServiceSpec
from manager.errors import ActionFailed, CodedError, InvalidConfig, InvalidInput, Reason, Unsupported
from manager.function import FunctionSpec, ModelAction, ModelSpec
from runtimes.model.checkpoint import HEADS, Layout, Pooling, shard
from runtimes.model.engine import (
    Answers,
    Device,
    ModelJob,
    ModelRequest,
    OnAnswered,
    OnFootprint,
    Restores,
    discover,
    has_moved,
    used_bytes,
)
from runtimes.model.host_images import HostImages, KnownImage, ModelKey, ask_tokenizer, check_ids
from runtimes.model.processes import (
    Attach,
    Decode,
    Detach,
    Done,
    Encode,
    EncodedText,
    Ended,
    Evict,
    ForkServer,
    Generated,
    Gone,
    ImageRef,
    ModelProcess,
    Placed,
    RequestRefused,
    Resident,
    Restore,
    RunBatch,
    TokenLogprobs,
    Usage,
    WorkItem,
)
from runtimes.model.request import ModelInput, ModelSettings, model_of

_COMPONENT = "model.fleet"


class ChunkBroken(Exception):
    """A rank died, was stuck, or left its peers alone: the chunk's processes have been replaced."""


@dataclass(slots=True)
class SwapCounts:
    """What one device did since the start, and does now."""

    executions: int = 0
    #: Executions that had to restore their service first.
    swaps: int = 0
    #: The service that computes, and its chunk.
    running: tuple[str, Chunk] | None = None


class Fleet:
    """One process for each device. A chunk is used by one job at a time."""

    def __init__(
        self,
        devices: Sequence[Device],
        fork_server: ForkServer,
        settings: ModelSettings,
        rendezvous_dir: Path,
        on_residency: Callable[[], None],
    ) -> None:
        self.devices = devices
        self._settings = settings
        self._rendezvous_dir = rendezvous_dir
        self._on_residency = on_residency
        self.workers = [self._worker(device, fork_server) for device in devices]
        self._turns = [asyncio.Lock() for _ in devices]
        self._resident: list[tuple[Resident, ...]] = [() for _ in devices]
        self.counts = [SwapCounts() for _ in devices]

    # -- work

    async def run(
        self,
        chunk: Chunk,
        image: ImageRef,
        run: RunBatch,
        restored: Callable[[], None],
        ended: Callable[[Ended], None] | None = None,
    ) -> tuple[list[object], list[Usage]]:
        """Run on every rank; the first rank's results, and each rank's usage. ``ended`` is told what ends before.

        Raises RequestRefused (the model refused, every rank lives), or ChunkBroken after replacing the processes.
        ``run.place`` is completed for each rank. Cancelling waits ``kill_grace_s``, then kills.
        """
        self._check(chunk)
        async with AsyncExitStack() as turns:
            for index in chunk.devices:
                await turns.enter_async_context(self._turns[index])
                turns.enter_context(self._running(index, run.place.service, chunk))
            await self._attach(chunk, image)
            counted = _Countdown(chunk.size, restored)
            group = self._group(chunk)
            ranks = [
                asyncio.create_task(
                    self._ask(
                        index,
                        replace(run, place=_placed(run.place, rank, chunk), group=group),
                        counted.one,
                        ended=ended,
                    )
                )
                for rank, index in enumerate(chunk.devices)
            ]
            try:
                done = await self._together(chunk, ranks)
            except asyncio.CancelledError:
                await self._stop(chunk, ranks)
                raise
        for index, rank in zip(chunk.devices, done, strict=True):
            self.counts[index].executions += 1
            self.counts[index].swaps += rank.usage.restored
        results = done[0].value
        assert isinstance(results, list)
        return results, [rank.usage for rank in done]

    async def restore(self, chunk: Chunk, image: ImageRef, place: Placed) -> bool:
        """Restore without computing; return False if it does not fit or a process was lost.

        A slow rank is waited for, not killed: it computes for another action.
        """
        self._check(chunk)
        await self._attach(chunk, image)
        requests = (
            self._ask(index, Restore(place=_placed(place, rank, chunk)), None, patient=True)
            for rank, index in enumerate(chunk.devices)
        )
        answers = await asyncio.gather(*requests, return_exceptions=True)
        placed = [isinstance(answer, Done) and answer.value is True for answer in answers]
        if any(placed) and not all(placed):
            await self.evict(chunk, (place.service,))  # part of a model is of no use
        return all(placed)

    async def evict(self, chunk: Chunk, services: tuple[str, ...]) -> None:
        """Release the services' slots on the chunk's live devices."""
        alive = [index for index in chunk.devices if self.workers[index].alive]
        requests = (self._ask(index, Evict(services=services), None) for index in alive)
        await asyncio.gather(*requests, return_exceptions=True)

    async def abort(self, chunk: Chunk) -> None:
        """Replace the chunk's processes: kill them now, start them when they are needed."""
        for index in chunk.devices:
            self.workers[index].kill()
        await asyncio.gather(*(self.workers[i].gone(self._settings.start_s) for i in chunk.devices))
        for index in chunk.devices:
            self._resident[index] = ()
        self._on_residency()

    async def start(self) -> None:
        """Start every device's process."""
        await asyncio.gather(*(worker.start() for worker in self.workers))

    def forget_image(self, image_id: str) -> None:
        """Let every process unmap a dropped image."""
        for worker in self.workers:
            if image_id in worker.attached:
                worker.attached.discard(image_id)
                worker.tell(Detach(image_id=image_id))

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self.workers))

    # -- views

    def residency(self) -> Mapping[str, tuple[Chunk, ...]]:
        """Service -> chunks on which every rank holds it."""
        held = {
            (slot.service, slot.dop, slot.start, index) for index, slots in enumerate(self._resident) for slot in slots
        }
        matches: dict[str, list[Chunk]] = {}
        for service, dop, start, index in sorted(held):
            if index == start and all((service, dop, start, peer) in held for peer in range(start, start + dop)):
                matches.setdefault(service, []).append(Chunk(start, dop))
        return {service: tuple(chunks) for service, chunks in matches.items()}

    def slots(self, index: int) -> tuple[Resident, ...]:
        """What device ``index`` last reported."""
        return self._resident[index]

    # -- parts

    async def _ask(
        self,
        index: int,
        message: object,
        on_progress: Callable[[str], None] | None,
        *,
        patient: bool = False,
        ended: Callable[[Ended], None] | None = None,
    ) -> Done:
        """Ask one device, keep what it reports as resident. With ``patient`` a silent one is not taken for stuck."""
        worker = self.workers[index]
        stuck_s = None if patient else self._settings.stuck_s
        try:
            done = await worker.ask(message, stuck_s=stuck_s, on_progress=on_progress, on_ended=ended)
        except RequestRefused as refused:
            self._report(index, refused.failed.resident)
            raise
        except Gone:
            self._report(index, ())
            raise
        self._report(index, done.resident)
        return done

    @contextmanager
    def _running(self, index: int, service: str, chunk: Chunk) -> Iterator[None]:
        self.counts[index].running = service, chunk
        try:
            yield
        finally:
            self.counts[index].running = None

    def _report(self, index: int, resident: tuple[Resident, ...] | None) -> None:
        if resident is not None and resident != self._resident[index]:
            self._resident[index] = resident
            self._on_residency()

    async def _attach(self, chunk: Chunk, image: ImageRef) -> None:
        """Announce the image to every process of the chunk that has not heard of it; pinning goes on meanwhile."""
        await asyncio.gather(*(self.workers[index].start() for index in chunk.devices))
        for index in chunk.devices:
            worker = self.workers[index]
            if image.id not in worker.attached:
                worker.attached.add(image.id)
                worker.tell(Attach(image=image))

    async def _together(self, chunk: Chunk, ranks: Sequence[asyncio.Task[Done]]) -> list[Done]:
        """Every rank's answer. One that fails leaves its peers waiting in a collective: they are given
        ``kill_grace_s``, then the whole chunk is replaced."""
        await asyncio.wait(ranks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error for rank in ranks if rank.done() and (error := rank.exception()) is not None]
        if not errors:
            return [rank.result() for rank in ranks]
        if len(ranks) > 1:
            await self._stop(chunk, ranks)
        first = next((error for error in errors if isinstance(error, RequestRefused)), errors[0])
        broken = first.failed.broken if isinstance(first, RequestRefused) else isinstance(first, Gone)
        if len(ranks) == 1 and broken:
            await self.abort(chunk)  # one that was stuck is still dying: the next try must not be given to it
        sound = len(ranks) == 1 and not broken
        if isinstance(first, RequestRefused) and (sound or first.failed.reason is Reason.OUT_OF_MEMORY):
            raise first
        if isinstance(first, Gone | RequestRefused):
            raise ChunkBroken(str(first)) from first
        raise first

    async def _stop(self, chunk: Chunk, ranks: Sequence[asyncio.Task[Done]]) -> None:
        """Let the ranks end by themselves for a moment, then replace the chunk's processes."""
        _, late = await asyncio.wait(ranks, timeout=self._settings.kill_grace_s)
        failed = any(rank.done() and not rank.cancelled() and rank.exception() is not None for rank in ranks)
        if late or failed:
            await self.abort(chunk)
        await asyncio.gather(*ranks, return_exceptions=True)

    def _group(self, chunk: Chunk) -> str:
        """The rendezvous file of this very set of processes: a new process means a new file."""
        incarnations = "-".join(str(self.workers[index].incarnation) for index in chunk.devices)
        return str(self._rendezvous_dir / f"{chunk.start}-{chunk.size}-{incarnations}")

    def _check(self, chunk: Chunk) -> None:
        if chunk.start < 0 or chunk.size < 1 or chunk.end > len(self.devices) or chunk.start % chunk.size:
            raise ActionFailed(
                Reason.INTERNAL, f"no such chunk {chunk} among {len(self.devices)} devices", component=_COMPONENT
            )

    def _worker(self, device: Device, fork_server: ForkServer) -> ModelProcess:
        options: dict[str, object] = {
            "device": device.torch_name,
            "arena_bytes": device.arena_bytes,
            "copy_bytes": self._settings.copy_bytes,
            "threads": self._settings.device_threads,
            "collective_s": self._settings.collective_s,
        }
        return ModelProcess(
            fork_server, "worker", options, environment=device.environment, start_s=self._settings.start_s
        )


class _Countdown:
    """Calls back once every rank has its weights."""

    def __init__(self, ranks: int, reached: Callable[[], None]) -> None:
        self._left, self._reached = ranks, reached

    def one(self, what: str) -> None:
        if what == "restored":
            self._left -= 1
            if self._left == 0:
                self._reached()


def _placed(place: Placed, rank: int, chunk: Chunk) -> Placed:
    start, dop = chunk
    return replace(place, dop=dop, rank=rank, start=start)


class EarlyAnswers:
    """Collects the sequences of a job as they end. Leaving it waits for the answers that are on their way."""

    def __init__(
        self,
        job: ModelJob,
        value_of: Callable[[ModelRequest, Sequence[object]], Awaitable[Mapping[str, object]]],
        answered: OnAnswered,
    ) -> None:
        self._job, self._value_of, self._answered = job, value_of, answered
        #: Of each sequence, by its position in the job: its request, and its position there.
        self._owners = [
            (index, place) for index, request in enumerate(job.requests) for place in range(len(request.input))
        ]
        self._parts: list[dict[int, object]] = []
        self._answers: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*self._answers)

    def begin(self) -> None:
        """Nothing has ended yet: another attempt begins."""
        self._parts = [{} for _ in self._job.requests]

    def ended(self, one: Ended) -> None:
        """Take a sequence; answer its request if that was the last of it, and others go on."""
        index, place = self._owners[one.position]
        part, request = self._parts[index], self._job.requests[index]
        part[place] = one.value
        others_go_on = any(
            len(each) < len(requested.input) for each, requested in zip(self._parts, self._job.requests, strict=True)
        )
        if len(part) == len(request.input) and others_go_on:
            answer = asyncio.ensure_future(self._answer(index, [part[place] for place in sorted(part)], one.usage))
            self._answers.add(answer)
            answer.add_done_callback(self._answers.discard)

    async def _answer(self, index: int, results: Sequence[object], usage: Usage) -> None:
        """Answer one; what cannot be said of it now is said with all the others."""
        try:
            value = await self._value_of(self._job.requests[index], results)
        except (CodedError, Gone):
            return
        used = job_usage([usage], len(self._job.requests))
        self._answered(index, value, {**used, "devices": float(self._job.chunk.size), "early": 1.0})


def job_usage(usages: Sequence[Usage], batch: int) -> Mapping[str, float]:
    """The chunk's use: the slowest rank's times, everybody's bytes."""
    return {
        "restored": float(any(usage.restored for usage in usages)),
        "restore_s": max(usage.restore_s for usage in usages),
        "restore_bytes": float(sum(usage.restore_bytes for usage in usages)),
        "compute_s": max(usage.compute_s for usage in usages),
        "evict_s": max(usage.evict_s for usage in usages),
        "evicted": float(max(len(usage.evicted) for usage in usages)),
        "tokens": float(usages[0].tokens),
        "devices": float(len(usages)),
        "batch": float(batch),
    }


_TORCH_BACKEND_COMPONENT = "model.torch_backend"

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
        known = await self.inspect(function)
        service = self._service(function, known.layout)
        self._check_fits(function, service)
        await self.fleet.start()
        async with self.images.hold(known):
            pass
        self._told[service.name] = service
        return service

    async def inspect(self, function: FunctionSpec) -> KnownImage:
        """Check that a function can be served, without a weight being read; raises InvalidConfig or Unsupported."""
        model = model_of(function)
        known = await self.images.look(_key(model))
        units = function.cost.get("gpu")
        if units is None:
            raise InvalidConfig(
                f"functions.{function.name}.cost: a model function needs gpu", component=_TORCH_BACKEND_COMPONENT
            )
        for dop in units:
            try:
                known.layout.check_dop(dop)
            except Unsupported as error:
                raise Unsupported(
                    f"functions.{function.name}.cost.gpu: {model.path}: {error.message}",
                    component=_TORCH_BACKEND_COMPONENT,
                ) from error
        return known

    async def admit(self, function: FunctionSpec, model_input: ModelInput) -> ModelRequest:
        with _failing_the_action():
            known = await self.images.look(_key(model_of(function)))
            encoded = await self._encode(function, model_input, known)
        return ModelRequest(function=function, input=model_input, admitted=encoded)

    async def restore(self, service: str, function: FunctionSpec, chunk: Chunk) -> bool:
        known = await self.images.look(_key(model_of(function)))
        async with self.images.hold(known) as image:
            return await self.fleet.restore(chunk, image, _unplaced(service, image))

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
            place=_unplaced(job.service, image),
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

    async def _encode(self, function: FunctionSpec, inputs: ModelInput, known: KnownImage) -> EncodedText:
        model = model_of(function)
        limit = _limit(model, inputs, known.layout)
        if inputs.token_ids:
            _check_vocabulary(inputs, known.layout)
            begin = known.layout.config.get("bos_token_id")
            cut = "" if inputs.positions is not None else model.cut  # positions are of the whole sequence
            encoded = check_ids(inputs.token_ids, limit, cut, begin if isinstance(begin, int) else None)
            stops = known.stop_ids if model.action is ModelAction.GENERATE else ()
            return EncodedText(ids=encoded.ids, truncated=encoded.truncated, stop_ids=stops)
        order = Encode(
            path=model.path,
            fingerprint=known.fingerprint,
            texts=_with_prompt(inputs, known.layout.pooling),
            conversations=inputs.conversations,
            limit=limit,
            cut=model.cut,
            continued=model.action is ModelAction.GENERATE,
        )
        answer = (await ask_tokenizer(self._tokenizer_process, order)).value
        assert isinstance(answer, EncodedText)
        empty = next((index for index, ids in enumerate(answer.ids) if not ids), None)
        if empty is not None:
            raise InvalidInput(f"sequence {empty} has no tokens", component=_TORCH_BACKEND_COMPONENT)
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
        except (InvalidConfig, InvalidInput):
            if ids_given:
                return []
            raise
        assert isinstance(texts, list)
        return texts

    def _service(self, function: FunctionSpec, layout: Layout) -> ServiceSpec:
        """Return bytes on each device and restore seconds, for every DoP that functions of this service may ask for."""
        name, description = model_of(function).service, self._told.get(model_of(function).service)
        sizes = {dop: shard(layout, 0, dop).size_bytes for dop in function.cost["gpu"]}
        if description is not None:
            sizes = {**description.bytes_by_dop, **sizes}
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
                    component=_TORCH_BACKEND_COMPONENT,
                )

    def _learn(self, job: ModelJob, usages: Sequence[Usage]) -> None:
        """Keep what a restore took, and tell the scheduler if its estimates have moved."""
        seconds = max((usage.restore_s for usage in usages if usage.restored), default=0.0)
        mine, dop = self._told.get(job.service), job.chunk.size
        if mine is None or dop not in mine.bytes_by_dop or seconds <= 0:
            return
        self._restores.add(job.service, dop, mine.bytes_by_dop[dop], seconds)
        for description in list(self._told.values()):
            now = self._restores.estimate(description.name, description.bytes_by_dop)
            if has_moved(description.restore_s_by_dop, now):
                self._told[description.name] = replace(description, restore_s_by_dop=now)
                self._on_footprint(self._told[description.name])


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
        raise ActionFailed(Reason.MODEL_ERROR, str(error), component=_TORCH_BACKEND_COMPONENT) from error


def _make_rendezvous_dir(state_dir: Path) -> Path:
    """A directory of our own for rendezvous files; those of processes that were killed are removed."""
    state_dir.mkdir(parents=True, exist_ok=True)
    for left in state_dir.glob("groups-*-*"):
        if not Path("/proc", left.name.split("-")[1]).exists():
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"groups-{os.getpid()}-", dir=state_dir))


def _key(model: ModelSpec) -> ModelKey:
    return model.path, HEADS[model.action], model.dtype, model.ignore_weights


def _unplaced(service: str, image: ImageRef) -> Placed:
    """The place before it is completed for each rank."""
    return Placed(service=service, image_id=image.id, dop=1, rank=0, start=0)


def _limit(model: ModelSpec, inputs: ModelInput, layout: Layout) -> int:
    """Most tokens of one input: the function's bound, and the model's positions less what is to be generated."""
    positions = layout.positions_max or model.max_tokens
    limit = min(model.max_tokens, positions - inputs.sampling.max_new_tokens)
    if limit < 1:
        raise InvalidInput(
            f"max_new_tokens {inputs.sampling.max_new_tokens} leaves no room among {positions} positions",
            component=_TORCH_BACKEND_COMPONENT,
            detail={"path": "$.max_new_tokens"},
        )
    return limit


def _with_prompt(inputs: ModelInput, pooling: Pooling) -> tuple[str, ...]:
    """Return the texts behind the checkpoint's prompt that the input names, or its default one."""
    name = pooling.default_prompt if inputs.prompt_name is None else inputs.prompt_name
    if name and name not in pooling.prompts:
        known = ", ".join(pooling.prompts) or "none"
        raise InvalidInput(
            f"$.prompt_name: the checkpoint declares no prompt {name[:64]!r}; known: {known}",
            component=_TORCH_BACKEND_COMPONENT,
            detail={"path": "$.prompt_name"},
        )
    return tuple(pooling.prompts.get(name, "") + text for text in inputs.texts)


def _check_vocabulary(inputs: ModelInput, layout: Layout) -> None:
    """An id beyond the vocabulary would be a wild read on the device."""
    for index, row in enumerate(inputs.token_ids):
        if max(row) >= layout.vocab_size:
            raise InvalidInput(
                f"token id {max(row)} is beyond the vocabulary of {layout.vocab_size}",
                component=_TORCH_BACKEND_COMPONENT,
                detail={"path": f"$.token_ids[{index}]"},
            )


def _items(request: ModelRequest) -> list[WorkItem]:
    encoded = request.admitted
    assert isinstance(encoded, EncodedText)
    action = model_of(request.function).action
    if action is ModelAction.STEP_SCORES:
        places = _positions(request.input, encoded)
        return [
            WorkItem(ids=ids, action=action, positions=where) for ids, where in zip(encoded.ids, places, strict=True)
        ]
    if action is not ModelAction.GENERATE:
        return [WorkItem(ids=ids, action=action, top=request.input.top_logprobs) for ids in encoded.ids]
    wanted = replace(request.input.sampling, stop_ids=encoded.stop_ids)
    return [
        WorkItem(ids=ids, action=action, sampling=replace(wanted, seed=wanted.seed + index))
        for index, ids in enumerate(encoded.ids)
    ]


def _positions(inputs: ModelInput, encoded: EncodedText) -> list[tuple[int, ...]]:
    """Return where the steps of each sequence end."""
    if inputs.positions is not None:
        return list(inputs.positions)
    token = inputs.step_token_id
    return [tuple(place for place, each in enumerate(ids) if token in (None, each)) for ids in encoded.ids]


def _value(request: ModelRequest, results: Sequence[object], texts: Sequence[str]) -> Mapping[str, object]:
    """The JSON value of one action; raises ActionFailed(model_error) rather than return a number that is none."""
    encoded = request.admitted
    assert isinstance(encoded, EncodedText)
    common: dict[str, object] = {"tokens": [len(ids) for ids in encoded.ids]}
    if encoded.truncated:
        common["truncated"] = list(encoded.truncated)
    action = model_of(request.function).action
    if action is ModelAction.GENERATE:
        created = [one for one in results if isinstance(one, Generated)]
        written = {"texts": list(texts)} if texts else {}
        ids, reasons = [list(one.ids) for one in created], [one.reason for one in created]
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
    if action is ModelAction.STEP_SCORES:
        places = _positions(request.input, encoded)
        return {"step_scores": list(results), "positions": [list(where) for where in places], **common}
    if action is ModelAction.EMBED:
        return {"embeddings": list(results), **common}
    sums = [math.fsum(row) for row in results if isinstance(row, list)]
    return {"logprobs": list(results), "sums": sums, **common}


def _finite(result: object) -> bool:
    if isinstance(result, list):
        return all(map(_finite, result))
    return isinstance(result, float) and math.isfinite(result)


def hit_rate(executions: float, swaps: float) -> float:
    """Return the share of the executions that found their model in place; 0 if there were none."""
    return round(1 - swaps / executions, 4) if executions else 0.0


@dataclass(slots=True)
class ModelStats:
    """Counters since the start."""

    actions: int = 0
    #: Executions, restores before them, and evictions: the members of a batch share theirs.
    executions: float = 0.0
    swaps: float = 0.0
    evictions: float = 0.0
    restore_s: float = 0.0
    restored_bytes: float = 0.0

    def count(self, usage: Mapping[str, float]) -> None:
        """Add one answered action."""
        share = 1 / max(usage["batch"], 1.0)
        self.actions += 1
        self.executions += share
        if usage["restored"]:
            self.swaps += share
            self.restore_s += usage["restore_s"] * share
            self.restored_bytes += usage["restore_bytes"] * share
        self.evictions += usage.get("evicted", 0.0) * share

    def view(self, backend: TorchBackend | None) -> dict[str, object]:
        """JSON-able, for ``GET /resources`` and ``tangram top``."""
        view: dict[str, object] = {
            "actions": self.actions,
            "executions": round(self.executions),
            "swaps": round(self.swaps),
            "hit_rate": hit_rate(self.executions, self.swaps),
            "evictions": round(self.evictions),
            "restore_s": round(self.restore_s, 6),
            "restored_bytes": round(self.restored_bytes),
        }
        if backend is None:
            return {**view, "devices": [], "services": {}, "host_images": {}}
        images = backend.images
        host = {"bytes": images.held_bytes, "bound_bytes": images.bound_bytes, "count": len(images.ids())}
        services = {name: [list(chunk) for chunk in chunks] for name, chunks in backend.residency().items()}
        return {
            **view,
            "devices": _devices(backend),
            "services": services,
            "host_images": {**host, "reads": images.reads},
        }


def _devices(backend: TorchBackend) -> list[dict[str, object]]:
    fleet = backend.fleet
    return [
        {
            "index": device.index,
            "kind": device.kind,
            "name": device.name,
            "alive": worker.alive,
            "pid": worker.pid,
            "restarts": worker.restarts,
            "running": None
            if counted.running is None
            else {"service": counted.running[0], "chunk": [*counted.running[1]]},
            "executions": counted.executions,
            "swaps": counted.swaps,
            "hit_rate": hit_rate(counted.executions, counted.swaps),
            "arena_bytes": device.arena_bytes,
            "resident_bytes": sum(slot.size_bytes for slot in fleet.slots(device.index)),
            "used_bytes": used_bytes(device),
            "resident": [
                {"service": slot.service, "chunk": [slot.start, slot.dop], "bytes": slot.size_bytes}
                for slot in fleet.slots(device.index)
            ],
        }
        for device, worker, counted in zip(fleet.devices, fleet.workers, fleet.counts, strict=True)
    ]
