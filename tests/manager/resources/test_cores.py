"""Exclusive cores, NUMA-first, and the CPU pool over them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from manager.config import NodeSpec
from manager.resources.cores import Cores, CpuPool
from manager.resources.pools import PoolRequest

NUMA = (tuple(range(8)), tuple(range(8, 12)), tuple(range(12, 20)))


def test_the_tightest_numa_node_that_fits_is_taken() -> None:
    assert Cores(NUMA).allocate(3) == (8, 9, 10)


def test_a_set_that_fits_no_numa_node_takes_the_fewest() -> None:
    assert Cores(NUMA).allocate(16) == (*range(8), *range(12, 20))


def test_a_growing_set_stays_beside_its_cores() -> None:
    cores = Cores(NUMA)
    mine = cores.allocate(5)
    more = cores.allocate(2, beside=mine)
    assert set(mine + more) <= set(range(8))


@given(st.lists(st.integers(1, 9), max_size=4), st.integers(1, 9), st.integers(0, 20))
def test_sets_that_are_given_together_are_those_that_are_given_one_by_one(
    before: list[int], count: int, sets: int
) -> None:
    together, alone = Cores(NUMA), Cores(NUMA)
    for taken in before:
        if taken <= alone.free:
            assert together.allocate(taken) == alone.allocate(taken)
    sets = min(sets, alone.free // count)
    assert together.allocate_each(count, sets) == [alone.allocate(count) for _ in range(sets)]
    together.check()
    assert together.free == alone.free


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9)), max_size=60))
def test_no_core_is_ever_held_twice(moves: list[tuple[str, int]]) -> None:
    pool = CpuPool(NodeSpec(name="n", numa=NUMA, memory_bytes=1))
    for holder, units in moves:
        held = pool.held.get(holder, 0)
        if held and not units:
            pool.release(holder, 0.0)
        elif held and units - held <= pool.free:
            before = set(pool.resize(holder, held).cores)
            after = set(pool.resize(holder, units).cores)
            assert len(before & after) == min(held, units), "a resize keeps as many cores as it can"
        elif not held and 0 < units <= pool.free:
            assert len(pool.acquire(holder, PoolRequest(units=units), 0.0).cores) == units
        pool.check()
