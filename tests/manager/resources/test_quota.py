"""Quota: no window holds more than its limit, and units return with time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from manager.resources.pools import PoolRequest, QuotaPool, QuotaSpec


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


@given(
    limit=st.integers(1, 4),
    calls=st.lists(st.tuples(st.floats(0, 1.5), st.floats(0, 1)), min_size=1, max_size=30),
)
def test_no_window_of_arrivals_exceeds_the_limit_wherever_in_its_call_each_is(
    limit: int, calls: list[tuple[float, float]]
) -> None:
    pool = QuotaPool("q", QuotaSpec(limit=limit, period_s=1.0))
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
        arrivals.append(now_s + share * takes_s)
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
