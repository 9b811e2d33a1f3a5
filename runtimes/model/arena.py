"""The device arena: one allocation, slots by first fit and LRU, restores as few large copies with layered fences."""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from runtimes.model.layout import PAGE_BYTES, Copy, Shard, View, align

#: torch leaves these calls untyped.
_cuda: Any = torch.cuda

#: What a slot holds: (service, DoP, first device of its chunk).
SlotKey = tuple[str, int, int]


class DoesNotFit(Exception):
    """Even with every idle slot evicted there is no room."""


@dataclass(slots=True)
class Slot:
    """A range of the arena in use."""

    offset: int
    size_bytes: int
    last_used: int
    pinned: bool = False


class Slots:
    """Who lies where in an arena of ``size_bytes``; pure bookkeeping."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._slots: dict[SlotKey, Slot] = {}
        self._ticks = 0

    def __contains__(self, key: SlotKey) -> bool:
        return key in self._slots

    def keys(self) -> list[SlotKey]:
        return list(self._slots)

    @property
    def used_bytes(self) -> int:
        return sum(slot.size_bytes for slot in self._slots.values())

    def allocate(self, key: SlotKey, size_bytes: int, *, push: bool = True) -> tuple[int, list[SlotKey]]:
        """An offset for ``key``, and the least recently used idle slots that had to go; raises DoesNotFit.

        Without ``push`` nothing goes: it takes a hole, or does not fit.
        """
        assert key not in self._slots, f"{key} is resident already"
        size_bytes = align(size_bytes, PAGE_BYTES)
        evicted: list[SlotKey] = []
        while (offset := self._hole(size_bytes)) is None:
            idle = [(slot.last_used, other) for other, slot in self._slots.items() if not slot.pinned]
            if not push or not idle or size_bytes > self.size_bytes:
                raise DoesNotFit(f"{size_bytes} bytes do not fit an arena of {self.size_bytes}")
            victim = min(idle)[1]
            self.release(victim)
            evicted.append(victim)
        self._ticks += 1
        self._slots[key] = Slot(offset, size_bytes, self._ticks)
        return offset, evicted

    def release(self, key: SlotKey) -> None:
        """Evict: the range is free, nothing is written back. Idempotent."""
        self._slots.pop(key, None)

    def pin(self, key: SlotKey) -> None:
        """Keep from eviction while it computes or is about to."""
        self._ticks += 1
        slot = self._slots[key]
        slot.pinned, slot.last_used = True, self._ticks

    def unpin(self, key: SlotKey) -> None:
        if key in self._slots:
            self._slots[key].pinned = False

    def idle(self) -> list[SlotKey]:
        """Slots that may be evicted, least recently used first."""
        found = [(slot.last_used, key) for key, slot in self._slots.items() if not slot.pinned]
        return [key for _, key in sorted(found)]

    def _hole(self, size_bytes: int) -> int | None:
        start = 0
        for slot in sorted(self._slots.values(), key=lambda slot: slot.offset):
            if slot.offset - start >= size_bytes:
                return start
            start = slot.offset + slot.size_bytes
        return start if self.size_bytes - start >= size_bytes else None


class Transfer(Protocol):
    """A restore under way."""

    def wait(self, end: int) -> None:
        """Let the computation go on only when the slot's first ``end`` bytes have arrived."""
        ...

    def finish(self) -> None:
        """Block until every byte has arrived; raises what the copy raised."""
        ...


class _CpuTransfer:
    """Fences set by the thread that copies."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends
        self._fences = [threading.Event() for _ in ends]
        self._error: BaseException | None = None
        self._done = False

    def run(self, copies: Sequence[Callable[[], object]]) -> None:
        try:
            for copy, fence in zip(copies, self._fences, strict=True):
                copy()
                fence.set()
        except BaseException as error:  # noqa: BLE001  # handed to whoever waits
            self._error = error
        finally:
            self._done = self._error is None
            for fence in self._fences:
                fence.set()

    def wait(self, end: int) -> None:
        if not self._done:
            self._fences[min(bisect_left(self._ends, end), len(self._fences) - 1)].wait()
            if self._error is not None:
                raise self._error

    def finish(self) -> None:
        self.wait(self._ends[-1])


class _CudaTransfer:
    """Events recorded on the copy stream; a wait orders the compute stream behind them without blocking the host."""

    def __init__(self, ends: Sequence[int], events: Sequence[torch.cuda.Event]) -> None:
        self._ends, self._events = ends, events
        self._done = False

    def wait(self, end: int) -> None:
        if not self._done:
            event = self._events[min(bisect_left(self._ends, end), len(self._events) - 1)]
            torch.cuda.current_stream().wait_event(event)

    def finish(self) -> None:
        self._events[-1].synchronize()
        self._done = True


class Arena:
    """One device's memory for weights."""

    def __init__(self, size_bytes: int, device: str, copy_bytes: int) -> None:
        self.slots = Slots(size_bytes)
        self.device = device
        self._copy_bytes = copy_bytes
        self._bytes = _host_bytes(size_bytes) if device == "cpu" else _device_bytes(size_bytes, device)
        self._stream = _cuda.Stream(device) if device != "cpu" else None
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="copier") if self._stream is None else None

    def restore(self, image: torch.Tensor, shard: Shard, offset: int) -> Transfer:
        """Begin copying ``shard`` of the host image to ``offset``, in layer order; returns at once."""
        parts = [part for copy in shard.copies for part in _parts(copy, self._copy_bytes)]
        ends = [part.target + part.size_bytes for part in parts]
        if self._stream is not None:
            return self._restore_cuda(image, parts, ends, offset)
        assert self._copier is not None
        transfer = _CpuTransfer(ends)
        self._copier.submit(transfer.run, [self._copy(image, part, offset) for part in parts])
        return transfer

    def view(self, offset: int, view: View) -> torch.Tensor:
        """A parameter's tensor in the slot at ``offset``."""
        dtype: torch.dtype = getattr(torch, view.dtype)
        start = offset + view.offset
        tensor = self._bytes[start : start + view.size_bytes].view(dtype).view(view.shape)
        return tensor.t() if view.transposed else tensor

    def close(self) -> None:
        if self._copier is not None:
            self._copier.shutdown()

    def _restore_cuda(self, image: torch.Tensor, parts: Sequence[Copy], ends: Sequence[int], offset: int) -> Transfer:
        events = []
        with torch.cuda.stream(self._stream):
            for part in parts:
                self._copy(image, part, offset)()
                event = _cuda.Event()
                event.record(self._stream)
                events.append(event)
        return _CudaTransfer(ends, events)

    def _copy(self, image: torch.Tensor, part: Copy, offset: int) -> Callable[[], object]:
        source = image[part.source : part.source + part.size_bytes]
        target = self._bytes[offset + part.target : offset + part.target + part.size_bytes]
        return lambda: target.copy_(source, non_blocking=True)


def bind(model: nn.Module, arena: Arena, shard: Shard, offset: int, tied: Mapping[str, str]) -> None:
    """Point every parameter of ``model`` at its view in the slot; tied names share one Parameter."""
    parameters = {
        name: nn.Parameter(arena.view(offset, view), requires_grad=False) for name, view in shard.views.items()
    }
    modules = dict(model.named_modules())
    for name in (*parameters, *tied):
        module_name, _, leaf = name.rpartition(".")
        module = modules[module_name]
        value = parameters[tied.get(name, name)]
        if leaf in module._parameters:
            module._parameters[leaf] = value
        else:
            module._buffers[leaf] = value.data


class Fences:
    """Holds each module of a model back until its own weights have arrived (compute overlaps the restore).

    On the way past, each module gives a sign of life: a long batch is no stuck one.
    """

    def __init__(self, model: nn.Module, shard: Shard, tied: Mapping[str, str]) -> None:
        self.transfer: Transfer | None = None
        self.beat: Callable[[], None] = _silence
        ends = {name: view.offset + view.size_bytes for name, view in shard.views.items()}
        ends |= {name: ends[source] for name, source in tied.items()}
        last: dict[str, int] = {}
        for name, end in ends.items():
            module = name.rpartition(".")[0]
            last[module] = max(end, last.get(module, 0))
        for module, end in last.items():
            model.get_submodule(module).register_forward_pre_hook(self._hook(end))

    def _hook(self, end: int) -> Callable[[nn.Module, object], None]:
        def wait(module: nn.Module, args: object) -> None:
            self.beat()
            if self.transfer is not None:
                self.transfer.wait(end)

        return wait


def _device_bytes(size_bytes: int, device: str) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def _host_bytes(size_bytes: int) -> torch.Tensor:
    """Anonymous memory in huge pages where the kernel gives them: a restore touches every page of its slot."""
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _silence() -> None:
    """Nobody listens."""


def _parts(copy: Copy, size_bytes: int) -> list[Copy]:
    """A range in parts of at most ``size_bytes``."""
    return [
        Copy(
            source=copy.source + start, target=copy.target + start, size_bytes=min(size_bytes, copy.size_bytes - start)
        )
        for start in range(0, copy.size_bytes, size_bytes)
    ]
