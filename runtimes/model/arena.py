"""The arena: one device's memory for weights, its slots, and models that are bound to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from runtimes.model.checkpoint import PAGE_BYTES, Shard, View, align
from runtimes.model.weights import DeviceBackend, Transfer

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
    """Which service has which range of an arena of ``size_bytes``; pure bookkeeping."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._slots: dict[SlotKey, Slot] = {}
        self._ticks = 0

    def __contains__(self, key: SlotKey) -> bool:
        return key in self._slots

    def keys(self) -> list[SlotKey]:
        return list(self._slots)

    def allocate(self, key: SlotKey, size_bytes: int, *, evict_idle: bool = True) -> tuple[int, list[SlotKey]]:
        """Return an offset for ``key`` and the least recently used idle slots evicted for it; raises DoesNotFit.

        Without ``evict_idle`` nothing is evicted: it takes a hole, or does not fit.
        """
        assert key not in self._slots, f"{key} is resident already"
        size_bytes = align(size_bytes, PAGE_BYTES)
        evicted: list[SlotKey] = []
        while (offset := self._hole(size_bytes)) is None:
            idle = self.idle()
            if not evict_idle or not idle or size_bytes > self.size_bytes:
                raise DoesNotFit(f"{size_bytes} bytes do not fit an arena of {self.size_bytes}")
            self.evict(idle[0])
            evicted.append(idle[0])
        self._ticks += 1
        self._slots[key] = Slot(offset, size_bytes, self._ticks)
        return offset, evicted

    def evict(self, key: SlotKey) -> None:
        """Free its range; nothing is written back. Idempotent."""
        self._slots.pop(key, None)

    def pin(self, key: SlotKey) -> None:
        """Keep from eviction while it computes or is about to."""
        self._ticks += 1
        slot = self._slots[key]
        slot.pinned, slot.last_used = True, self._ticks

    def unpin(self, key: SlotKey) -> None:
        if key in self._slots:
            self._slots[key].pinned = False

    def is_pinned(self, key: SlotKey) -> bool:
        return key in self._slots and self._slots[key].pinned

    def idle(self) -> list[SlotKey]:
        """Slots that may be evicted, least recently used first."""
        matches = [(slot.last_used, key) for key, slot in self._slots.items() if not slot.pinned]
        return [key for _, key in sorted(matches)]

    def _hole(self, size_bytes: int) -> int | None:
        start = 0
        for slot in sorted(self._slots.values(), key=lambda slot: slot.offset):
            if slot.offset - start >= size_bytes:
                return start
            start = slot.offset + slot.size_bytes
        return start if self.size_bytes - start >= size_bytes else None


class Arena:
    """One device's memory for weights."""

    def __init__(self, size_bytes: int, backend: DeviceBackend) -> None:
        self.slots = Slots(size_bytes)
        self._backend = backend
        self._bytes = backend.allocate(size_bytes)

    def restore(self, image: torch.Tensor, shard: Shard, offset: int, *, gentle: bool) -> Transfer:
        """Begin copying ``shard`` of the host image to ``offset``, in layer order; returns at once."""
        slot = self._bytes[offset : offset + shard.size_bytes]
        return self._backend.copy(image, slot, shard.copies, gentle=gentle)

    def view(self, offset: int, view: View) -> torch.Tensor:
        """A parameter's tensor in the slot at ``offset``."""
        dtype: torch.dtype = getattr(torch, view.dtype)
        start = offset + view.offset
        tensor = self._bytes[start : start + view.size_bytes].view(dtype).view(view.shape)
        return tensor.t() if view.transposed else tensor


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


def _silence() -> None:
    """Ignore the sign of life."""
