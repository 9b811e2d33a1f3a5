"""Quota: no window holds more than its limit, and units return with time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from manager.resources.pool import PoolRequest
from manager.resources.quota import QuotaPool, QuotaSpec


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
            pool.acquire(PoolRequest(holder=f"{index}.{len(starts)}", units=1), now_s)
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
            pool.acquire(PoolRequest(holder=f"{index}.{pool.free}", units=1), instant_s)
        instant_s = pool.next_return_s()
        assert instant_s is not None
        pool.advance(instant_s)
        assert pool.free > 0


def test_a_quota_unit_returns_a_period_after_its_start_whenever_the_action_ends() -> None:
    pool = QuotaPool("q", QuotaSpec(limit=1, period_s=2.0))
    pool.advance(1.0)
    pool.acquire(PoolRequest(holder="a", units=1), 1.0)
    pool.release("a", 1.5)
    pool.advance(2.9)
    assert (pool.free, pool.next_return_s()) == (0, 3.0)
    pool.advance(3.0)
    assert pool.free == 1
