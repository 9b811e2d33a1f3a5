"""Backoff: doubled with each try, bounded, for any number of tries."""

from __future__ import annotations

from tangram.types import backoff_s


def test_the_wait_doubles_with_each_try_up_to_its_bound() -> None:
    assert [backoff_s(attempt, 0.5, 3.0) for attempt in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_part_of_the_wait_spreads_those_who_failed_together() -> None:
    assert [backoff_s(9, 0.5, 3.0, chance) for chance in (0.0, 0.5)] == [0.0, 1.5]


def test_no_number_of_tries_is_too_large() -> None:
    assert backoff_s(100_000, 1.0, 60.0) == 60.0
