"""Expiries: soonest first, and what became stale is never seen again."""

from __future__ import annotations

import random

from manager.core.queue import Expiries


def test_what_expires_comes_in_order_and_what_is_stale_does_not_come() -> None:
    stale = {"gone"}
    expiries = Expiries[str](lambda item, _: item in stale)
    for seq, (item, expiry_s) in enumerate([("late", 9.0), ("gone", 1.0), ("second", 3.0), ("first", 2.0)]):
        expiries.add(expiry_s, seq, item)
    assert expiries.next_s() == 2.0
    assert expiries.take(3.0, 3) == ["first", "second"]
    assert expiries.next_s() == 9.0
    stale.add("late")
    assert expiries.next_s() is None and expiries.take(10.0, 0) == []


def test_an_item_may_expire_later_than_it_was_said_first() -> None:
    expiry_of = {"a": 5.0}
    expiries = Expiries[str](lambda item, expiry_s: expiry_of[item] != expiry_s)
    expiries.add(2.0, 1, "a")
    expiries.add(5.0, 1, "a")
    assert expiries.take(3.0, 1) == []
    assert expiries.next_s() == 5.0 and expiries.take(5.0, 1) == ["a"]


def test_cleaning_in_bulk_forgets_nothing_that_is_not_stale() -> None:
    chance, living = random.Random(3), set[int]()
    expiries = Expiries[int](lambda item, _: item not in living)
    for item in range(5000):
        living.add(item)
        expiries.add(chance.uniform(1.0, 100.0), item, item)
        if item % 50:
            living.discard(item)
        assert expiries.take(0.0, len(living)) == []
    assert sorted(expiries.take(100.0, len(living))) == sorted(living)
