"""The contract of an engine, its devices, and batches of requests."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Any, Literal, Protocol

from manager.action import Chunk
from manager.config import ServiceSpec
from manager.errors import InvalidConfig, Unsupported
from manager.function import FunctionSpec
from runtimes.model.request import GIB, ModelInput, ModelSettings

#: Told the place of a request in its job, its JSON value and the measured use so far.
OnAnswered = Callable[[int, Mapping[str, object], Mapping[str, float]], None]
#: Told whenever what a service costs is known better than before.
OnFootprint = Callable[[ServiceSpec], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One action, admitted: its input checked, and what the backend made of it (token ids, a prompt)."""

    function: FunctionSpec
    input: ModelInput
    admitted: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelJob:
    """One action, or one batch of the same service, on one chunk."""

    service: str
    chunk: Chunk
    requests: tuple[ModelRequest, ...]
    #: Services that the manager chose to evict for it.
    evict: tuple[str, ...] = ()
    #: CPU cores granted; empty leaves the device's own bound.
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """A JSON value for each request, in their order, and the measured use of the whole job."""

    values: tuple[Mapping[str, object], ...]
    usage: Mapping[str, float]


class ModelBackend(Protocol):
    """Restores, executes and evicts services on chunks. Failures of an action are ActionFailed."""

    async def prepare(self, function: FunctionSpec) -> ServiceSpec:
        """Check that the function can run, warm up and return its cost; raises InvalidConfig or Unsupported."""
        ...

    async def admit(self, function: FunctionSpec, model_input: ModelInput) -> ModelRequest:
        """Check one action's input before it joins a batch; raises InvalidInput, or ActionFailed."""
        ...

    async def restore(self, service: str, function: FunctionSpec, chunk: Chunk) -> bool:
        """Make the service resident without computing; return False if it does not fit beside what is there."""
        ...

    async def execute(self, job: ModelJob, restored: Callable[[], None], answered: OnAnswered) -> Answers:
        """Restore if needed and compute; ``restored`` is called once the weights are in place.

        ``answered`` is called with a request that has ended while others go on.

        Cancelling stops the work, at the latest by killing the chunk's processes, before it returns.
        """
        ...

    async def evict(self, service: str, chunk: Chunk) -> None:
        """Give the service's device memory back; nothing is written. Must not fail."""
        ...

    def residency(self) -> Mapping[str, tuple[Chunk, ...]]:
        """Service -> chunks on which it is resident, as last reported by the devices."""
        ...

    async def close(self) -> None:
        """Release everything; idempotent."""
        ...


#: Measurements kept of each kind: the estimate follows a machine that has become slower or faster.
KEPT = 32
#: An estimate is worth telling once it has moved by this part of itself.
WORTH_TELLING = 0.1


class Restores:
    """Seconds by service, DoP and bytes; the node's own rate stands in for what was never measured."""

    def __init__(self, bytes_per_s: float) -> None:
        """``bytes_per_s`` is assumed until anything is measured."""
        self._assumed = bytes_per_s
        self._seconds: dict[tuple[str, int, int], deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._rates: deque[float] = deque(maxlen=KEPT)

    def add(self, service: str, dop: int, size_bytes: int, seconds: float) -> None:
        """Note one restore of ``size_bytes`` on each device, until the slowest had all of it."""
        self._seconds[service, dop, size_bytes].append(seconds)
        if size_bytes and seconds > 0:
            self._rates.append(size_bytes / seconds)

    def estimate(self, service: str, bytes_by_dop: Mapping[int, int]) -> dict[int, float]:
        """Seconds to restore the service at each DoP."""
        rate = middle(self._rates) if self._rates else self._assumed
        estimates = {}
        for dop, size in bytes_by_dop.items():
            measured = self._seconds.get((service, dop, size))
            estimates[dop] = middle(measured) if measured else size / rate
        return estimates


def middle(values: Iterable[float]) -> float:
    """The mean of the middle third: one slow restore among many changes nothing."""
    ordered = sorted(values)
    cut = len(ordered) // 3
    return fmean(ordered[cut : len(ordered) - cut])


def has_moved(before: Mapping[int, float], now: Mapping[int, float]) -> bool:
    """Return whether an estimate differs enough from the one last reported to report it again."""
    return any(
        abs(seconds - before.get(dop, 0.0)) > WORTH_TELLING * before.get(dop, 0.0) for dop, seconds in now.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberAnswer:
    """One action's JSON value, and the measured use of the job it was part of."""

    value: Mapping[str, object]
    usage: Mapping[str, float]


@dataclass(eq=False, slots=True, kw_only=True)
class BatchMember:
    """One action of a batch; ``begin`` is called when its weights are in place."""

    request: ModelRequest
    begin: Callable[[], None]
    #: What the manager evicts for it: the leader of a batch carries that, and members come in any order.
    evict: tuple[str, ...] = ()
    answer: asyncio.Future[MemberAnswer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class BatchJob:
    """Waits shortly for the members that the lease names, then runs those that came as one job.

    Whoever makes or finds it promises to `join` or to `leave_out` its action; the wait begins with the first to join.
    """

    def __init__(
        self,
        *,
        backend: ModelBackend,
        service: str,
        members: tuple[str, ...],
        chunk: Chunk,
        cores: tuple[int, ...],
        gather_s: float,
        on_end: Callable[[], None],
    ) -> None:
        self._backend, self._service, self._chunk = backend, service, chunk
        self._cores, self._gather_s = cores, gather_s
        self._on_end = on_end
        self._expected = set(members)
        self._present: list[BatchMember] = []
        self._first = asyncio.Event()
        self._complete = asyncio.Event()
        #: Whether the job is on its way: later comers make a batch of their own.
        self.closed = False
        #: Whether it computes something that nobody waits for any more.
        self._abandoned = False
        self._task = asyncio.create_task(self._run(), name=f"batch {members[0]}")

    def join(self, action_id: str, member: BatchMember) -> None:
        self._present.append(member)
        self._first.set()
        self.leave_out(action_id)

    def leave_out(self, action_id: str) -> None:
        """Wait no longer for this action."""
        self._expected.discard(action_id)
        if not self._expected:
            self._first.set()
            self._complete.set()

    async def answer(self, member: BatchMember) -> MemberAnswer:
        """The member's answer. When the last member is cancelled the job is stopped before this returns."""
        try:
            return await member.answer
        except asyncio.CancelledError:
            self._abandoned = True
            raise
        finally:
            self._present.remove(member)
            if not self._present and self._abandoned:
                await self.cancel()

    async def cancel(self) -> None:
        """Stop the job and wait until it has stopped."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            await self._first.wait()
            if self._expected:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._gather_s):
                        await self._complete.wait()
            self.closed = True
            members = list(self._present)
            if members:
                await self._execute(members)
        finally:
            self.closed = True
            self._on_end()

    async def _execute(self, members: list[BatchMember]) -> None:
        job = ModelJob(
            service=self._service,
            chunk=self._chunk,
            requests=tuple(member.request for member in members),
            evict=tuple({name: None for member in members for name in member.evict}),
            cores=self._cores,
        )

        def answered(index: int, value: Mapping[str, object], usage: Mapping[str, float]) -> None:
            if not members[index].answer.done():
                members[index].answer.set_result(MemberAnswer(value=value, usage=usage))

        try:
            answers = await self._backend.execute(job, lambda: _begin(members), answered)
        except BaseException as error:
            for member in members:
                if not member.answer.done():
                    _settle_error(member.answer, error)
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        for member, value in zip(members, answers.values, strict=True):
            if not member.answer.done():
                member.answer.set_result(MemberAnswer(value=value, usage=answers.usage))


def _begin(members: list[BatchMember]) -> None:
    for member in members:
        member.begin()


def _settle_error(answer: asyncio.Future[MemberAnswer], error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError):
        answer.cancel()
    else:
        answer.set_exception(error)


_COMPONENT = "model.devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device that holds weights and computes."""

    #: Its place on the node: what chunks count in.
    index: int
    kind: Literal["cpu", "cuda"]
    name: str
    #: Bytes of its arena: what the manager may fill with services.
    arena_bytes: int
    #: The driver's name of a CUDA device; empty for ``cpu``.
    uuid: str = ""

    @property
    def torch_name(self) -> str:
        """As the device's own process calls it: that process sees no other CUDA device."""
        return "cpu" if self.kind == "cpu" else "cuda:0"

    @property
    def environment(self) -> Mapping[str, str] | None:
        """Return what its process needs in its environment; None if it needs nothing of its own.

        NVML counts devices by bus, CUDA in an order of its own: the UUID is the one name that both agree on.
        """
        return {"CUDA_VISIBLE_DEVICES": self.uuid} if self.kind == "cuda" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A CUDA device as the driver knows it."""

    uuid: str
    name: str
    memory_bytes: int
    #: Whether it is divided into instances (MIG), so that it can no longer be used as a whole.
    divided: bool = False


class DeviceDriver(Protocol):
    """What is asked of NVML."""

    def gpus(self) -> Sequence[Gpu]:
        """Return every GPU by bus order; none if there is no driver."""
        ...

    def used_bytes(self, uuid: str) -> int | None:
        """Return the bytes in use by all processes; None if the driver cannot tell."""
        ...


def discover(settings: ModelSettings, driver: DeviceDriver | None = None, visible: str | None = None) -> list[Device]:
    """Return the devices of this node, their number rounded down to a power of two (chunks are powers of two).

    ``visible`` stands for CUDA_VISIBLE_DEVICES, which is honoured. Raises InvalidConfig if CUDA is demanded and
    NVML finds no device, or if a device is divided by MIG.
    """
    if settings.device == "none":
        return []
    devices = [] if settings.device == "cpu" else _cuda_devices(settings, driver or nvml(), visible)
    if settings.device == "cuda" and not devices:
        raise InvalidConfig(
            "device: cuda, but NVML finds no NVIDIA device; install the driver (and nvidia-ml-py), "
            "look at CUDA_VISIBLE_DEVICES, or use device: cpu",
            component=_COMPONENT,
        )
    if not devices:
        size = settings.device_bytes or 2 * GIB
        count = settings.devices or 1
        devices = [Device(index=i, kind="cpu", name="cpu", arena_bytes=size) for i in range(count)]
    wanted = min(settings.devices or len(devices), len(devices))
    return devices[: 1 << (wanted.bit_length() - 1)]


def used_bytes(device: Device) -> int | None:
    """Bytes in use on a CUDA device as the driver counts them; None for a ``cpu`` device."""
    return None if device.kind == "cpu" else nvml().used_bytes(device.uuid)


def require_torch() -> None:
    """Raise Unsupported with the remedy if the model extra is not installed."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
    if missing:
        raise Unsupported(
            f"model functions need {', '.join(missing)}: pip install tangram-gateway[model]", component=_COMPONENT
        )


def visible_gpus(gpus: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; all of them if it is not set.

    Read as CUDA reads it: numbers (taken by bus order, as nvidia-smi prints them) or UUIDs, which may be shortened;
    the list ends at the first entry that names no GPU, and one that is named twice leaves none.
    """
    if setting is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        gpu = _named(gpus, entry)
        if gpu is None:
            break
        if gpu in chosen:
            return []
        chosen.append(gpu)
    return chosen


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    matching = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _cuda_devices(settings: ModelSettings, driver: DeviceDriver, visible: str | None) -> list[Device]:
    gpus = visible_gpus(driver.gpus(), os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible)
    divided = next((gpu for gpu in gpus if gpu.divided), None)
    if divided is not None:
        raise InvalidConfig(
            f"{divided.name} {divided.uuid} is divided by MIG, which is not supported: switch MIG off, "
            "leave the GPU out by CUDA_VISIBLE_DEVICES, or use device: cpu",
            component=_COMPONENT,
        )
    return [
        Device(
            index=index,
            kind="cuda",
            name=gpu.name,
            arena_bytes=settings.device_bytes or int(gpu.memory_bytes * settings.arena_share),
            uuid=gpu.uuid,
        )
        for index, gpu in enumerate(gpus)
    ]


@cache
def nvml() -> DeviceDriver:
    """NVML, initialised once for the life of this process (each start of it takes tens of milliseconds)."""
    return Nvml()


class Nvml:
    """Implements `DeviceDriver`; without a driver or its Python bindings there are no GPUs."""

    def __init__(self) -> None:
        self._nvml: Any = _initialised()

    def gpus(self) -> Sequence[Gpu]:
        if self._nvml is None:
            return []
        handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        return [
            Gpu(
                uuid=str(self._nvml.nvmlDeviceGetUUID(handle)),
                name=str(self._nvml.nvmlDeviceGetName(handle)),
                memory_bytes=int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total),
                divided=self._divided(handle),
            )
            for handle in handles
        ]

    def used_bytes(self, uuid: str) -> int | None:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
        except self._nvml.NVMLError:
            return None  # lost, or reset: the view goes on without the figure

    def _divided(self, handle: object) -> bool:
        try:
            current, _ = self._nvml.nvmlDeviceGetMigMode(handle)
        except self._nvml.NVMLError:
            return False  # a GPU that cannot be divided
        return bool(current)


def _initialised() -> Any:
    """Return the initialised NVML module; None if there is no binding or no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
