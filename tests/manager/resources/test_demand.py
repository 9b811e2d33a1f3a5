"""How often services are used."""

from __future__ import annotations

import pytest

from manager.resources.cores import REUSE_S, Demand


def test_uses_add_up_and_fade() -> None:
    demand = Demand()
    assert demand.recent("s", 9.0) == 0.0
    demand.use("s", 10.0)
    demand.use("s", 10.0)
    assert demand.recent("s", 10.0) == pytest.approx(2.0)
    assert demand.recent("s", 10.0 + REUSE_S) == pytest.approx(2.0 / 2.718281828)
    assert demand.recent("other", 10.0) == 0.0


def test_an_even_rate_counts_what_fell_in_the_last_seconds() -> None:
    demand = Demand()
    for index in range(2000):
        demand.use("s", index * 0.05)
    assert demand.recent("s", 100.0) == pytest.approx(REUSE_S / 0.05, rel=0.05)
