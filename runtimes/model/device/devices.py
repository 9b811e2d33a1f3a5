"""Devices: CUDA ones found by NVML, ``cpu`` ones of a declared memory everywhere else. No torch here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol

from manager.errors import InvalidConfig, Unsupported
from runtimes.model.settings import GIB, ModelSettings

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
    found = [] if settings.device == "cpu" else _cuda_devices(settings, driver or nvml(), visible)
    if settings.device == "cuda" and not found:
        raise InvalidConfig(
            "device: cuda, but NVML finds no NVIDIA device; install the driver (and nvidia-ml-py), "
            "look at CUDA_VISIBLE_DEVICES, or use device: cpu",
            component=_COMPONENT,
        )
    if not found:
        size = settings.device_bytes or 2 * GIB
        count = settings.devices or 1
        found = [Device(index=i, kind="cpu", name="cpu", arena_bytes=size) for i in range(count)]
    wanted = min(settings.devices or len(found), len(found))
    return found[: 1 << (wanted.bit_length() - 1)]


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
