"""Devices: CUDA ones found by NVML, ``cpu`` ones of a declared memory everywhere else. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from manager.errors import InvalidConfig, Unsupported
from runtimes.model.settings import GIB, ModelSettings

_COMPONENT = "model.devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device that holds weights and computes."""

    index: int
    kind: Literal["cpu", "cuda"]
    name: str
    #: Bytes of its arena: what the manager may fill with services.
    arena_bytes: int

    @property
    def torch_name(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"


def discover(settings: ModelSettings) -> list[Device]:
    """The devices of this node, their number rounded down to a power of two (chunks are powers of two).

    Raises InvalidConfig where CUDA is demanded and NVML finds no device.
    """
    found = [] if settings.device == "cpu" else _cuda_devices(settings)
    if settings.device == "cuda" and not found:
        raise InvalidConfig(
            "device: cuda, but NVML finds no NVIDIA device; install the driver or use device: cpu",
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
    if device.kind == "cpu":
        return None
    import pynvml

    with _nvml() as running:
        if not running:
            return None
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(device.index)).used)


def require_torch() -> None:
    """Raise Unsupported with the remedy where the model extra is not installed."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
    if missing:
        raise Unsupported(
            f"model functions need {', '.join(missing)}: pip install tangram-gateway[model]", component=_COMPONENT
        )


def _cuda_devices(settings: ModelSettings) -> list[Device]:
    try:
        import pynvml
    except ImportError:
        return []
    with _nvml() as running:
        if not running:
            return []
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            size = settings.device_bytes or int(total * settings.arena_share)
            name = str(pynvml.nvmlDeviceGetName(handle))
            found.append(Device(index=index, kind="cuda", name=name, arena_bytes=size))
        return found


@contextmanager
def _nvml() -> Iterator[bool]:
    """NVML for the length of a block; False where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()
