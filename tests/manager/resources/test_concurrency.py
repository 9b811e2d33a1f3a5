"""Concurrency: units return with their action, and a lower limit takes nothing away."""

from __future__ import annotations

from manager.resources.pools import ConcurrencyPool, ConcurrencySpec, PoolRequest


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
