"""One image serves every DoP: each shard is made of contiguous ranges, and together they are the whole."""

from __future__ import annotations

import pytest

from manager.errors import Unsupported
from runtimes.model.checkpoint import Cut, Head, Layout, Piece, shard


def layout(**changes: object) -> Layout:
    rows = Piece(name="rows", source="rows", offset=0, shape=(16, 4), dtype="float32", transposed=False, cut=Cut.ROWS)
    heads = Piece(
        name="heads", source="heads", offset=256, shape=(8, 4), dtype="float32", transposed=False, cut=Cut.HEADS
    )
    norm = Piece(name="norm", source="norm", offset=512, shape=(4,), dtype="float32", transposed=False, cut=Cut.WHOLE)
    values: dict[str, object] = {
        "pieces": (rows, heads, norm),
        "tied": {},
        "equal": {},
        "size_bytes": 4096,
        "kv_heads": 2,
        "head_dim": 4,
        "refusals": {8: "12 attention heads do not divide by 8"},
        "positions_max": 0,
        "vocab_size": 0,
        "config": {},
        "head": Head.LM,
        "dtype": "float32",
        **changes,
    }
    return Layout(**values)  # type: ignore[arg-type]  # checked by the dataclass


def rows_of(rank: int, dop: int, name: str) -> tuple[int, int]:
    """First row and number of rows that a rank copies of a piece."""
    part = shard(layout(), rank, dop)
    piece = next(piece for piece in layout().pieces if piece.name == name)
    view = part.views[name]
    copy = next(c for c in part.copies if c.target <= view.offset < c.target + c.size_bytes)
    first = (copy.source + view.offset - copy.target - piece.offset) // (piece.size_bytes // piece.shape[0])
    return first, view.shape[0]


def test_the_whole_model_is_a_single_copy() -> None:
    assert len(shard(layout(), 0, 1).copies) == 1


@pytest.mark.parametrize("dop", [1, 2, 4])
def test_the_ranks_share_the_rows_without_gap_or_overlap(dop: int) -> None:
    assert [rows_of(rank, dop, "rows") for rank in range(dop)] == [(rank * 16 // dop, 16 // dop) for rank in range(dop)]


def test_few_heads_are_given_whole_to_several_ranks() -> None:
    assert [rows_of(rank, 4, "heads") for rank in range(4)] == [(0, 4), (0, 4), (4, 4), (4, 4)]


def test_what_is_not_cut_is_given_to_every_rank() -> None:
    assert {rows_of(rank, 2, "norm") for rank in range(2)} == {(0, 4)}


def test_a_dop_that_does_not_divide_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="12 attention heads do not divide by 8"):
        shard(layout(), 0, 8)
