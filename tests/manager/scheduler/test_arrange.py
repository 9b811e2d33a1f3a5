"""DPArrange against brute force, for cores and for chunks (docs/SCHEDULING.md R6, R9, R13)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.action import Amdahl, Chunk, UnitSet, power_at_least
from manager.scheduler.paper import (
    ArrangeItem,
    BasicOperator,
    ChunkOperator,
    GreedyArrangement,
    TableArrangement,
    arrange,
    best_fit,
    take,
)
from manager.scheduler.rank import shape_of


def item(unit_set: UnitSet, t_ori_s: float, serial: float) -> ArrangeItem:
    shape = shape_of(unit_set, Amdahl(serial))
    return ArrangeItem(shape.units, shape.factors * t_ori_s, convex=shape.convex)


def spans() -> st.SearchStrategy[UnitSet]:
    return st.tuples(st.integers(1, 3), st.integers(0, 4)).map(lambda pair: UnitSet.span(pair[0], pair[0] + pair[1]))


def discrete(members: tuple[int, ...]) -> st.SearchStrategy[UnitSet]:
    return st.sets(st.sampled_from(members), min_size=1).map(lambda chosen: UnitSet.of(tuple(chosen)))


def items(unit_sets: st.SearchStrategy[UnitSet], most: int) -> st.SearchStrategy[list[ArrangeItem]]:
    durations = st.floats(0.1, 100.0)
    serial = st.floats(0.0, 1.0)
    return st.lists(st.builds(item, unit_sets, durations, serial), min_size=1, max_size=most)


def tables(unit_sets: st.SearchStrategy[UnitSet], most: int) -> st.SearchStrategy[list[ArrangeItem]]:
    """Items with arbitrary durations: no monotony, no convexity."""

    def build(unit_set: UnitSet, seconds: list[float]) -> ArrangeItem:
        units = tuple(unit_set)
        return ArrangeItem(units, np.array(seconds[: len(units)]))

    seconds = st.lists(st.floats(0.1, 50.0), min_size=8, max_size=8)
    return st.lists(st.builds(build, unit_sets, seconds), min_size=1, max_size=most)


def packs(free: list[Chunk], sizes: tuple[int, ...]) -> bool:
    """Whether real buddy placement finds a chunk for every size, tried in every order of sizes."""
    left = list(free)
    for size in sorted(sizes, reverse=True):
        place = best_fit(left, power_at_least(size))
        if place is None:
            return False
        take(left, place)
    return True


def brute_force(chosen: list[ArrangeItem], fits: object) -> float:
    assert callable(fits)
    best = math.inf
    for picks in itertools.product(*(range(len(one.units)) for one in chosen)):
        if fits(tuple(one.units[pick] for one, pick in zip(chosen, picks, strict=True))):
            best = min(best, sum(float(one.seconds[pick]) for one, pick in zip(chosen, picks, strict=True)))
    return best


@pytest.mark.slow
@given(items(spans(), 4) | items(discrete((1, 2, 4, 8)), 4), st.integers(0, 18))
def test_every_prefix_is_the_best_of_all_allocations_of_cores(chosen: list[ArrangeItem], free: int) -> None:
    table = TableArrangement(chosen, BasicOperator(free))
    for kept in range(len(chosen) + 1):
        expected = brute_force(chosen[:kept], lambda units: sum(units) <= free)
        assert table.totals[kept] == pytest.approx(expected)
        if math.isfinite(expected):
            assert_makes(chosen[:kept], table.units(kept), expected)


@pytest.mark.slow
@given(items(spans(), 6), st.integers(0, 24))
def test_marginal_gains_are_exact_for_convex_durations(chosen: list[ArrangeItem], free: int) -> None:
    assert all(one.convex for one in chosen)
    greedy, table = GreedyArrangement(chosen, free), TableArrangement(chosen, BasicOperator(free))
    assert greedy.totals == pytest.approx(table.totals)
    for kept, total in enumerate(greedy.totals):
        if math.isfinite(total):
            assert_makes(chosen[:kept], greedy.units(kept), total)
            assert sum(greedy.units(kept)) <= free


FREE_CHUNKS = st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3).map(
    lambda sizes: [Chunk(8 * node, size) for node, size in enumerate(sizes)]
)


@pytest.mark.slow
@given(items(discrete((1, 2, 4, 8)), 4) | tables(discrete((1, 2, 4, 8)), 4), FREE_CHUNKS)
def test_every_prefix_is_the_best_of_all_placements_of_chunks(chosen: list[ArrangeItem], free: list[Chunk]) -> None:
    table = TableArrangement(chosen, ChunkOperator.of(free))
    for kept in range(len(chosen) + 1):
        expected = brute_force(chosen[:kept], lambda units: packs(free, units))
        assert table.totals[kept] == pytest.approx(expected)
        if math.isfinite(expected):
            units = table.units(kept)
            assert_makes(chosen[:kept], units, expected)
            assert packs(free, units)


@pytest.mark.slow
@given(tables(spans(), 4), st.integers(1, 16))
def test_durations_of_any_form_are_arranged_exactly(chosen: list[ArrangeItem], free: int) -> None:
    arrangement = arrange(chosen, BasicOperator(free))
    expected = brute_force(chosen, lambda units: sum(units) <= free)
    assert arrangement.totals[-1] == pytest.approx(expected)


@given(FREE_CHUNKS, st.lists(st.sampled_from([1, 2, 4, 8]), max_size=6))
def test_the_nested_inequalities_say_what_buddy_placement_does(free: list[Chunk], sizes: list[int]) -> None:
    operator = ChunkOperator.of(free)
    demand = [sum(axis) for axis in zip(*(operator.demand(size) for size in sizes), strict=True)] if sizes else []
    inside = all(have <= bound for have, bound in zip(demand, operator.capacity, strict=False))
    assert inside == packs(free, tuple(sizes))


def test_devices_that_are_free_apart_are_given_to_nobody_who_needs_two_together() -> None:
    """Of a request for one or two, {1, 2}, durations are convex and there is one axis, as on cores."""
    wide = item(UnitSet.of((1, 2)), 8.0, 0.0)
    assert arrange([wide], ChunkOperator.of([Chunk(2, 1), Chunk(8, 1), Chunk(11, 1)])).units(1) == (1,)


@pytest.mark.slow
@given(items(discrete((1, 2)), 4), FREE_CHUNKS)
def test_whatever_is_arranged_on_chunks_has_a_place(chosen: list[ArrangeItem], free: list[Chunk]) -> None:
    arrangement = arrange(chosen, ChunkOperator.of(free))
    for kept, total in enumerate(arrangement.totals):
        assert math.isinf(total) or packs(free, arrangement.units(kept))


def assert_makes(chosen: list[ArrangeItem], units: tuple[int, ...], total: float) -> None:
    made = sum(float(one.seconds[one.units.index(count)]) for one, count in zip(chosen, units, strict=True))
    assert made == pytest.approx(total)
