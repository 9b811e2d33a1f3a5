"""The other way to pin: a store process that pins an image once and copies into arenas that other processes own (IPC).

Our workers register the shared image themselves. This measures what the alternative would give, on the same bytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

from runtimes.model.processes import ImageRef
from runtimes.model.weights import DeviceBackend, Image

GIB = 2**30
ANSWER_S = 120


def store_copies(image: ImageRef, backend: DeviceBackend, rounds: int) -> Mapping[str, float]:
    """Seconds to start the owner of an arena, rate of copying into it, and whether it saw the bytes (1 or 0)."""
    import torch.multiprocessing

    context: Any = torch.multiprocessing.get_context("spawn")
    to_owner, from_owner = context.Queue(), context.Queue()
    size, device = image.layout.size_bytes, backend.name
    began = time.perf_counter()
    owner = context.Process(target=own_arena, args=(to_owner, from_owner, size, device), daemon=True)
    owner.start()
    arena = from_owner.get(timeout=ANSWER_S)
    started_s = time.perf_counter() - began
    source = Image(image.path, image.layout, backend)
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        arena.copy_(source.bytes, non_blocking=True)
        _settle(device)
        taken.append(time.perf_counter() - began)
    to_owner.put("sum")
    seen = from_owner.get(timeout=ANSWER_S) == _sample(source.bytes)
    del arena
    to_owner.put("end")
    owner.join(ANSWER_S)
    source.close()
    return {
        "owner_start_s": started_s,
        "copy_gib_per_s": size / statistics.median(taken) / GIB,
        "owner_saw_the_bytes": float(seen),
    }


def own_arena(orders: Any, answers: Any, size: int, device: str) -> None:
    """The other process: holds the arena, and says what it finds in it."""
    arena: Any = torch.zeros(size, dtype=torch.uint8, device=device)
    if device == "cpu":
        arena.share_memory_()
    answers.put(arena)
    orders.get()
    _settle(device)
    answers.put(_sample(arena))
    orders.get()


def _sample(data: torch.Tensor) -> int:
    return int(data[::4096].long().sum().item())


def _settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
