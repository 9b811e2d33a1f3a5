"""Pools: cores, concurrency and quotas; and the choice of a node by an order that is kept."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.action import Demand
from manager.config import NodeSpec
from manager.resources.cores import Cores, CpuPool
from manager.resources.nodes import Node, Nodes, Resources
from manager.resources.pools import ConcurrencyPool, ConcurrencySpec, PoolRequest, QuotaPool, QuotaSpec

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


@pytest.mark.promise("Cores are exclusive while an action runs, and given back after it.")
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


def test_a_lower_concurrency_limit_takes_nothing_away() -> None:
    pool = ConcurrencyPool("p", ConcurrencySpec(limit=3))
    for holder in "abc":
        pool.acquire(holder, PoolRequest(units=1), 0.0)
    pool.reconfigure(ConcurrencySpec(limit=1))
    pool.release("a", 0.0)
    pool.release("b", 0.0)
    assert pool.free == 0
    pool.release("c", 0.0)
    assert pool.free == 1
    pool.check()


@pytest.mark.promise("A quota holds in every window, and its burst at every instant.")
@given(
    limit=st.integers(1, 5),
    burst=st.none() | st.integers(1, 5),
    gaps=st.lists(st.floats(0, 1), min_size=1, max_size=40),
)
def test_no_window_exceeds_the_limit_and_no_instant_the_burst(limit: int, burst: int | None, gaps: list[float]) -> None:
    pool = QuotaPool("q", QuotaSpec(limit=limit, period_s=1.0, burst=burst))
    starts: list[float] = []
    now_s = 0.0
    for index, gap_s in enumerate(gaps):
        now_s += gap_s
        pool.advance(now_s)
        while pool.free:
            pool.acquire(f"{index}.{len(starts)}", PoolRequest(units=1), now_s)
            pool.release(f"{index}.{len(starts)}", now_s)
            starts.append(now_s)
    for start_s in starts:
        assert sum(start_s <= other < start_s + 1.0 for other in starts) <= limit
        assert burst is None or starts.count(start_s) <= burst


@given(limit=st.integers(1, 5), burst=st.none() | st.integers(1, 5))
def test_something_is_free_at_the_instant_that_was_promised(limit: int, burst: int | None) -> None:
    pool = QuotaPool("q", QuotaSpec(limit=limit, period_s=1.0, burst=burst))
    instant_s: float | None = 0.0
    pool.advance(0.0)
    for index in range(20):
        assert instant_s is not None
        while pool.free:
            holder = f"{index}.{pool.free}"
            pool.acquire(holder, PoolRequest(units=1), instant_s)
            pool.release(holder, instant_s)
        instant_s = pool.next_return_s()
        assert instant_s is not None
        pool.advance(instant_s)
        assert pool.free > 0


def test_a_quota_unit_returns_a_period_after_its_action_has_ended() -> None:
    pool = QuotaPool("q", QuotaSpec(limit=1, period_s=2.0))
    pool.advance(1.0)
    pool.acquire("a", PoolRequest(units=1), 1.0)
    pool.advance(3.5)
    assert (pool.free, pool.next_return_s()) == (0, None), "its call may arrive at any time until it has ended"
    pool.release("a", 3.5)
    pool.check()
    assert (pool.free, pool.next_return_s()) == (0, 5.5)
    pool.advance(5.5)
    assert pool.free == 1


def test_a_quota_unit_returns_a_period_after_its_call_has_arrived_if_that_is_known() -> None:
    pool = QuotaPool("q", QuotaSpec(limit=1, period_s=2.0, arrives_within_s=0.5))
    pool.advance(1.0)
    pool.acquire("long", PoolRequest(units=1), 1.0)
    assert (pool.free, pool.next_return_s()) == (0, 3.5)
    pool.advance(3.5)
    pool.acquire("short", PoolRequest(units=1), 3.5)
    pool.check()
    pool.release("short", 3.75)
    assert (pool.free, pool.next_return_s()) == (0, 5.75), "it has ended before that"
    pool.release("long", 9.0)
    pool.advance(9.0)
    assert pool.free == 1, "how long a call takes is no matter of the rate"


@given(
    limit=st.integers(1, 4),
    within_s=st.none() | st.floats(0, 0.5),
    calls=st.lists(st.tuples(st.floats(0, 1.5), st.floats(0, 1)), min_size=1, max_size=30),
)
def test_no_window_of_arrivals_exceeds_the_limit_wherever_in_its_call_each_is(
    limit: int, within_s: float | None, calls: list[tuple[float, float]]
) -> None:
    pool = QuotaPool("q", QuotaSpec(limit=limit, period_s=1.0, arrives_within_s=within_s))
    now_s = 0.0
    arrivals: list[float] = []
    ends: list[tuple[float, str]] = []
    pool.advance(now_s)
    for index, (takes_s, share) in enumerate(calls):
        while not pool.free:
            ending, returning_s = min(ends, default=None), pool.next_return_s()
            if ending is None or (returning_s is not None and returning_s <= ending[0]):
                assert returning_s is not None
                now_s = max(now_s, returning_s)
            else:
                ends.remove(ending)
                now_s = max(now_s, ending[0])
                pool.advance(now_s)
                pool.release(ending[1], now_s)
            pool.advance(now_s)
        pool.acquire(str(index), PoolRequest(units=1), now_s)
        ends.append((now_s + takes_s, str(index)))
        pool.check()
        arrivals.append(now_s + share * (takes_s if within_s is None else min(within_s, takes_s)))
    for start_s in arrivals:
        assert sum(start_s <= other < start_s + 1.0 - 1e-9 for other in arrivals) <= limit


def test_a_window_goes_on_under_another_core_and_what_is_taken_up_counts_once() -> None:
    pool = QuotaPool("q", QuotaSpec(limit=5, period_s=10.0))
    pool.advance(100.0)
    pool.restore([(95.0, 2)], 2, 100.0)
    assert pool.free == 1
    pool.resume("old", PoolRequest(units=1), 90.0, 100.0)
    pool.check()
    assert pool.free == 1, "it was counted already"
    pool.advance(105.0)
    assert pool.free == 3
    pool.advance(110.0)
    assert pool.free == 4
    pool.release("old", 111.0)
    pool.advance(121.0)
    assert pool.free == 5


def test_a_burst_is_not_had_anew_by_a_restart() -> None:
    pool = QuotaPool("q", QuotaSpec(limit=10, period_s=10.0, burst=3))
    pool.advance(100.0)
    pool.restore([(99.0, 3)], 0, 100.0)
    assert pool.free == 1


def test_a_further_try_takes_a_unit_of_its_own_before_anybody_who_has_not_begun() -> None:
    pool = QuotaPool("q", QuotaSpec(limit=2, period_s=2.0))
    pool.advance(0.0)
    for holder in "ab":
        pool.acquire(holder, PoolRequest(units=1), 0.0)
    pool.advance(0.5)
    pool.want_again("a", 1)
    assert (pool.grant_again(), pool.free, pool.next_return_s()) == ([], 0, 2.5)
    pool.check()
    pool.release("b", 0.5)
    pool.advance(2.5)
    assert pool.free == 1, "one of the two is kept"
    assert (pool.grant_again(), pool.wants_again()) == (["a"], False)
    assert pool.free == 1
    pool.release("a", 3.0)
    pool.check()
    pool.advance(4.9)
    assert pool.free == 1
    pool.advance(5.0)
    assert pool.free == 2


def test_one_that_ends_while_it_waits_for_another_try_keeps_nothing() -> None:
    pool = QuotaPool("q", QuotaSpec(limit=1, period_s=1.0))
    pool.advance(0.0)
    pool.acquire("a", PoolRequest(units=1), 0.0)
    pool.want_again("a", 1)
    pool.release("a", 0.5)
    pool.check()
    pool.advance(1.0)
    assert (pool.free, pool.grant_again(), pool.wants_again()) == (1, [], False)


@given(
    limit=st.integers(1, 4),
    actions=st.lists(st.tuples(st.floats(0, 1), st.lists(st.floats(0, 1), min_size=1, max_size=4)), max_size=15),
)
def test_no_window_of_arrivals_exceeds_the_limit_with_tries(
    limit: int, actions: list[tuple[float, list[float]]]
) -> None:
    pool = QuotaPool("q", QuotaSpec(limit=limit, period_s=1.0))
    now_s = 0.0
    arrivals: list[float] = []

    def until(instant_s: float) -> None:
        nonlocal now_s
        now_s = instant_s
        pool.advance(now_s)
        pool.check()

    for number, (gap_s, tries) in enumerate(actions):
        until(now_s + gap_s)
        if not pool.free:
            continue
        pool.acquire(str(number), PoolRequest(units=1), now_s)
        for index, took_s in enumerate(tries):
            if index:
                pool.want_again(str(number), 1)
                while str(number) not in pool.grant_again():
                    instant_s = pool.next_return_s()
                    assert instant_s is not None
                    until(instant_s)
            arrivals.append(now_s + took_s / 2)
            until(now_s + took_s)
        pool.release(str(number), now_s)
    for first in arrivals:
        assert sum(first <= each < first + 1.0 - 1e-9 for each in arrivals) <= limit


def spec(name: str, cores: int, memory_bytes: int) -> NodeSpec:
    return NodeSpec(name=name, numa=(tuple(range(cores)),), memory_bytes=memory_bytes)


def looked_at_all(nodes: Nodes, demand: Demand, memory_bytes: int) -> Node | None:
    able = [node for node in nodes if node.spec.cores >= dict(demand)["cpu"] and node.admits(memory_bytes)]
    return min(
        able,
        key=lambda node: ((node.held_bytes + memory_bytes) / node.bound_bytes, len(node.holders)),
        default=None,
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_node_that_is_chosen_is_the_least_held_that_admits(seed: int) -> None:
    chance = random.Random(seed)
    specs = [spec(f"n{number}", chance.choice((2, 8)), chance.choice((40, 100))) for number in range(6)]
    resources = Resources(CpuPool(one) for one in specs)
    nodes = Nodes(specs, resources, reserve=0.1)
    held: list[tuple[str, str]] = []
    refusals = 0
    for number in range(200):
        demand, memory_bytes = (("cpu", chance.choice((1, 4))),), chance.choice((1, 7, 30))
        chosen = nodes.choose(demand, memory_bytes)
        assert chosen is looked_at_all(nodes, demand, memory_bytes)
        refusals += chosen is None
        if chosen is not None and chance.random() < 0.7:
            trajectory = chance.random() < 0.8
            chosen.hold(f"h{number}", memory_bytes, trajectory=trajectory)
            held.append((chosen.spec.name, f"h{number}"))
        elif held:
            name, holder = held.pop(chance.randrange(len(held)))
            nodes[name].release(holder)
        if number == 100:  # a node goes with what it holds, and comes back empty, as the last one
            held = [each for each in held if each[0] != "n0"]
            nodes.leave("n0")
            resources.leave("n0")
            resources.join(specs[0])
            nodes.join(specs[0])
        nodes.check()
    assert refusals < 200
    assert nodes.choose((("cpu", 9),), 1) is None and not nodes.ever((("cpu", 9),), 1)
