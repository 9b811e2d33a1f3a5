"""The layout of a host image, and what each rank of each DoP takes from it. Plain values, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from manager.errors import Unsupported

#: Every tensor starts at a multiple of this, in the image and in the arena: no copy or kernel sees a ragged start.
ALIGN_BYTES = 256
#: Images and slots are whole pages.
PAGE_BYTES = 4096

#: Bytes of one element by torch's name of its dtype.
DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class Cut(StrEnum):
    """How a stored tensor is shared among the ranks, always along its first stored dimension."""

    WHOLE = "whole"  #: every rank has all of it
    ROWS = "rows"  #: equal contiguous parts
    HEADS = "heads"  #: key and value projections: whole heads, each given to several ranks where heads are few


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor of the image. ``shape`` is the shape as stored; a transposed one is stored as (in, out)."""

    name: str
    source: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    transposed: bool
    cut: Cut

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A whole image: pieces in layer order. One image serves every DoP that `refusals` does not name."""

    pieces: tuple[Piece, ...]
    #: Tied parameter name -> the name of the piece it shares.
    tied: Mapping[str, str]
    size_bytes: int
    #: Heads of keys and values, and their width; both 0 where the model has no sharding plan.
    kv_heads: int
    head_dim: int
    #: DoP -> why the model cannot be sharded so; absent means it can.
    refusals: Mapping[int, str]
    #: Longest input in tokens that the model's positions allow; 0 where it has no bound.
    positions_max: int
    vocab_size: int
    #: What a skeleton is built from: config.json as it was, the head, and the dtype of the weights.
    config: Mapping[str, object]
    head: str
    dtype: str

    def check_dop(self, dop: int) -> None:
        """Raise Unsupported with the name of what does not divide."""
        if dop in self.refusals:
            raise Unsupported(f"DoP {dop}: {self.refusals[dop]}", component="model.sharding")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRange:
    """One contiguous range to copy: from the image, into the slot."""

    source: int
    target: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Where a parameter lies in its slot. ``shape`` is as stored, before a transposed view is turned."""

    offset: int
    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    transposed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank holds: the copies that bring it, in layer order, and the views to bind."""

    rank: int
    dop: int
    size_bytes: int
    copies: tuple[CopyRange, ...]
    views: Mapping[str, View]


def shard(layout: Layout, rank: int, dop: int) -> Shard:
    """Return the part of ``rank`` among ``dop``; raises Unsupported if the layout does not allow the DoP."""
    layout.check_dop(dop)
    copies: list[CopyRange] = []
    views: dict[str, View] = {}
    end = 0
    for piece in layout.pieces:
        first, last = _rows(layout, piece, rank, dop)
        row_bytes = piece.size_bytes // (piece.shape[0] if piece.shape else 1)
        size = (last - first) * row_bytes
        shape = (last - first, *piece.shape[1:]) if piece.shape else ()
        views[piece.name] = View(
            offset=end, size_bytes=size, shape=shape, dtype=piece.dtype, transposed=piece.transposed
        )
        _append(copies, CopyRange(source=piece.offset + first * row_bytes, target=end, size_bytes=size))
        end += align(size, ALIGN_BYTES)
    return Shard(rank=rank, dop=dop, size_bytes=align(end, PAGE_BYTES), copies=tuple(copies), views=views)


def align(size: int, step: int) -> int:
    """Return ``size`` rounded up to a multiple of ``step``."""
    return (size + step - 1) // step * step


def _rows(layout: Layout, piece: Piece, rank: int, dop: int) -> tuple[int, int]:
    """Return the first and last row (exclusive) of ``piece`` for one rank."""
    rows = piece.shape[0] if piece.shape else 1
    if dop == 1 or piece.cut is Cut.WHOLE:
        return 0, rows
    if piece.cut is Cut.HEADS and dop > layout.kv_heads:
        head = rank * layout.kv_heads // dop
        return head * layout.head_dim, (head + 1) * layout.head_dim
    return rank * rows // dop, (rank + 1) * rows // dop


def _append(copies: list[CopyRange], copy: CopyRange) -> None:
    """Add a range, joined to its neighbour if only alignment lies between them."""
    if copies:
        last = copies[-1]
        gap = copy.source - last.source - last.size_bytes
        if copy.source - last.source == copy.target - last.target and 0 <= gap < ALIGN_BYTES:
            joined = copy.source + copy.size_bytes - last.source
            copies[-1] = CopyRange(source=last.source, target=last.target, size_bytes=joined)
            return
    copies.append(copy)
