"""The arena: first fit, least recently used out first, and never what computes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytestmark = pytest.mark.model

from runtimes.model.weights import DoesNotFit, SlotKey, Slots

PAGE = 4096


def key(name: str) -> SlotKey:
    return (name, 1, 0)


def test_the_least_recently_used_slot_goes_first() -> None:
    slots = Slots(3 * PAGE)
    for name in "abc":
        slots.allocate(key(name), PAGE)
    slots.pin(key("a"))
    slots.unpin(key("a"))
    assert slots.allocate(key("d"), PAGE)[1] == [key("b")]


def test_what_may_not_evict_takes_a_hole_or_does_not_fit() -> None:
    slots = Slots(3 * PAGE)
    slots.allocate(key("a"), PAGE)
    assert slots.allocate(key("b"), PAGE, evict_idle=False) == (PAGE, [])
    with pytest.raises(DoesNotFit):
        slots.allocate(key("c"), 2 * PAGE, evict_idle=False)
    assert slots.keys() == [key("a"), key("b")]


def test_what_computes_is_never_evicted() -> None:
    slots = Slots(2 * PAGE)
    slots.allocate(key("a"), PAGE)
    slots.pin(key("a"))
    slots.allocate(key("b"), PAGE)
    with pytest.raises(DoesNotFit):
        slots.allocate(key("c"), 2 * PAGE)
    assert key("a") in slots


def test_a_model_larger_than_the_arena_does_not_fit() -> None:
    with pytest.raises(DoesNotFit):
        Slots(PAGE).allocate(key("a"), 2 * PAGE)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.booleans()), max_size=60))
def test_slots_never_overlap_and_stay_in_bounds(moves: list[tuple[int, int, bool]]) -> None:
    slots = Slots(8 * PAGE)
    held: dict[SlotKey, tuple[int, int]] = {}
    for number, pages, release in moves:
        name = key(str(number))
        if release or name in slots:
            slots.evict(name)
            held.pop(name, None)
            continue
        offset, evicted = slots.allocate(name, pages * PAGE)
        for other in evicted:
            del held[other]
        held[name] = (offset, offset + pages * PAGE)
        ranges = sorted(held.values())
        assert ranges[-1][1] <= 8 * PAGE
        assert all(left[1] <= right[0] for left, right in pairwise(ranges))
        assert sorted(slots.keys()) == sorted(held)
