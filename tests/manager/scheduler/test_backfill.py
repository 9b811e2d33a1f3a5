"""Backfill: what starts beside a waiting action makes it wait no longer."""

from __future__ import annotations

import random

from manager.scheduler.price import Backfill


def test_what_ends_before_the_shadow_time_passes_and_the_rest_takes_extra_units() -> None:
    beside = Backfill.behind(6, 1, [(5.0, 2), (9.0, 4), (20.0, 1)])
    assert (beside.shadow_s, beside.extra) == (9.0, 1)
    assert beside.take(3, 9.0)
    assert not beside.take(2, 9.1)
    assert beside.take(1, 1000.0)
    assert not beside.take(1, 1000.0), "the extra unit was given twice"


def test_nothing_passes_where_nobody_knows_what_makes_room() -> None:
    beside = Backfill.behind(6, 1, [(5.0, 2)])
    assert not beside.take(1, 0.1)


def test_whatever_passes_the_shadow_time_stays() -> None:
    chance = random.Random(1)
    for _ in range(500):
        running = [(chance.uniform(0, 10), chance.randint(1, 4)) for _ in range(chance.randint(1, 12))]
        free = chance.randint(0, 6)
        wanted = chance.randint(1, free + sum(units for _, units in running))
        beside = Backfill.behind(wanted, free, running)
        left = free
        for _ in range(10):
            units, seconds = chance.randint(1, 3), chance.uniform(0, 12)
            if units <= left and beside.take(units, seconds):
                left -= units
                running.append((seconds, units))
        assert (
            left + sum(units for ends_s, units in running if ends_s <= beside.shadow_s)
            >= min(wanted, free + sum(units for _, units in running))
            or left >= wanted
        )
