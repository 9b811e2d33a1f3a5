"""The host image: one shared-memory copy of a checkpoint in layer order, which serves every DoP and every process."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import nn

from manager.errors import InvalidConfig, Unsupported
from runtimes.model.checkpoint.checkpoint import TORCH_DTYPES, Checkpoint, Tensor
from runtimes.model.checkpoint.layout import ALIGN_BYTES, PAGE_BYTES, Layout, Piece, align
from runtimes.model.checkpoint.sharding import ShardingPlan, plan_of
from runtimes.model.checkpoint.skeleton import FAMILIES, Head, build_skeleton, weight_dtype
from runtimes.model.device.backend import DeviceBackend

_COMPONENT = "model.image"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def build_layout(checkpoint: Checkpoint, head: Head, dtype: str = "") -> Layout:
    """Lay out the parameters in the model's own (layer) order; raises InvalidConfig naming what is missing."""
    dtype = weight_dtype(checkpoint, dtype)
    model = build_skeleton(checkpoint.config, head, dtype, checkpoint.path)
    _check_layers(checkpoint)
    plan = plan_of(model)
    first_name: dict[int, str] = {}
    tied: dict[str, str] = {}
    pieces: list[Piece] = []
    end = 0
    for name, value in _stored(model):
        if id(value) in first_name:
            tied[name] = first_name[id(value)]
            continue
        first_name[id(value)] = name
        piece = _piece(checkpoint, model, plan, name, value, end)
        pieces.append(piece)
        end += align(piece.size_bytes, ALIGN_BYTES)
    config = model.config
    assert config is not None
    return Layout(
        pieces=tuple(pieces),
        tied=tied,
        size_bytes=align(end, PAGE_BYTES),
        kv_heads=plan.kv_heads,
        head_dim=plan.head_dim,
        refusals=plan.refusals,
        positions_max=int(getattr(config, "max_position_embeddings", 0) or 0),
        vocab_size=int(getattr(config, "vocab_size", 0) or 0),
        config=checkpoint.config,
        head=head,
        dtype=dtype,
    )


def fill(checkpoint: Checkpoint, layout: Layout, path: str, threads: int) -> None:
    """Read every weight straight into its place in the image at ``path``; raises InvalidConfig on a short file."""
    with map_image(path, layout.size_bytes) as view, ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda piece: _read(checkpoint.tensors[piece.source], piece, view), layout.pieces))


class Image:
    """An image mapped into this process, and pinned for its device."""

    def __init__(self, path: str, layout: Layout, backend: DeviceBackend) -> None:
        self.layout = layout
        self.bytes = torch.frombuffer(map_image(path, layout.size_bytes), dtype=torch.uint8)
        self._backend = backend
        backend.pin(self.bytes)

    def close(self) -> None:
        """Unpin and forget: the mapping goes with the last tensor that lies in it. Idempotent."""
        if self.bytes.nbytes:
            held, self.bytes = self.bytes, torch.empty(0, dtype=torch.uint8)
            self._backend.unpin(held)


def map_image(path: str, size_bytes: int) -> mmap.mmap:
    """Return a shared, writable mapping of an image file, in huge pages if the kernel gives them to shared memory."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        mapped = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED)
    finally:
        os.close(descriptor)
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _stored(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters (tied ones under each of their names) and the buffers that a checkpoint holds."""
    yield from model.named_parameters(remove_duplicate=False)
    kept = model.state_dict()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def _piece(
    checkpoint: Checkpoint, model: nn.Module, plan: ShardingPlan, name: str, value: torch.Tensor, offset: int
) -> Piece:
    source = next((alias for alias in _aliases(model, name) if alias in checkpoint.tensors), None)
    if source is None:
        raise InvalidConfig(
            f"{checkpoint.path}: the weight {name} that {type(model).__name__} needs is missing; "
            "is this the checkpoint for this action?",
            component=_COMPONENT,
        )
    found, kind = checkpoint.tensors[source].shape, checkpoint.tensors[source].dtype
    if value.is_floating_point() != ("float" in TORCH_DTYPES[kind]):
        raise Unsupported(
            f"{checkpoint.path}: {source} is {kind} where the model computes with {value.dtype}: a quantised weight, "
            "which means nothing without its scales; use the unquantised checkpoint",
            component=_COMPONENT,
        )
    if found != tuple(value.shape):
        raise InvalidConfig(
            f"{checkpoint.path}: {source} has the shape {found} where config.json asks for {tuple(value.shape)}",
            component=_COMPONENT,
        )
    placement = plan.placement(name)
    return Piece(
        name=name,
        source=source,
        offset=offset,
        shape=found[::-1] if placement.transposed else found,
        dtype=str(value.dtype).removeprefix("torch."),
        transposed=placement.transposed,
        cut=placement.cut,
    )


def _check_layers(checkpoint: Checkpoint) -> None:
    """Every layer of a known decoder is used: a model cut short computes something else without a word."""
    config = checkpoint.config
    if config.get("model_type") not in FAMILIES:
        return
    held = 1 + max((int(found[1]) for name in checkpoint.tensors if (found := _LAYER.search(name))), default=-1)
    if held > int(str(config.get("num_hidden_layers", held))):
        raise InvalidConfig(
            f"{checkpoint.path}: there are weights of {held} layers where config.json asks for "
            f"{config['num_hidden_layers']}; config.json and the weights belong to different models",
            component=_COMPONENT,
        )


def _aliases(model: nn.Module, name: str) -> Iterator[str]:
    """The names under which a checkpoint may hold a weight: with and without the base model's prefix."""
    prefix = f"{model.base_model_prefix}."
    yield name
    yield name.removeprefix(prefix) if name.startswith(prefix) else prefix + name


def _read(tensor: Tensor, piece: Piece, image: mmap.mmap) -> None:
    """Bring one tensor into the image, converted and transposed if the layout says so."""
    straight = TORCH_DTYPES[tensor.dtype] == piece.dtype and not piece.transposed
    whole = memoryview(image)
    target = whole[piece.offset : piece.offset + piece.size_bytes]
    buffer = target if straight else memoryview(bytearray(tensor.size_bytes))
    try:
        _read_into(tensor, buffer)
        if not straight and tensor.size_bytes:
            loaded = torch.frombuffer(buffer, dtype=getattr(torch, TORCH_DTYPES[tensor.dtype])).view(tensor.shape)
            placed = torch.frombuffer(target, dtype=getattr(torch, piece.dtype)).view(piece.shape)
            placed.copy_(loaded.t() if piece.transposed else loaded)
            del loaded, placed
    finally:
        target.release()
        whole.release()


def _read_into(tensor: Tensor, buffer: memoryview) -> None:
    with tensor.file.open("rb", buffering=0) as stream:
        stream.seek(tensor.offset)
        done = 0
        while done < tensor.size_bytes:
            count = stream.readinto(buffer[done:])
            if not count:
                raise InvalidConfig(
                    f"{tensor.file} ended after {tensor.offset + done} bytes; it was replaced or truncated",
                    component=_COMPONENT,
                )
            done += count
