"""Packing keeps the token budget, loses no sequence, and wastes little on padding."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtimes.model.compute import pack

lengths = st.lists(st.integers(1, 300), max_size=60)


@given(lengths, st.integers(1, 2000))
def test_every_sequence_is_in_exactly_one_batch(sizes: list[int], budget: int) -> None:
    assert sorted(index for batch in pack(sizes, budget) for index in batch) == list(range(len(sizes)))


@given(lengths, st.integers(1, 2000))
def test_no_batch_exceeds_the_budget_padding_included(sizes: list[int], budget: int) -> None:
    for batch in pack(sizes, budget):
        cost = len(batch) * max(sizes[index] for index in batch)
        assert cost <= budget or len(batch) == 1


def test_sequences_of_like_length_share_a_batch() -> None:
    sizes = [100, 10, 100, 10]
    assert pack(sizes, 200) == [[1, 3], [0, 2]]
