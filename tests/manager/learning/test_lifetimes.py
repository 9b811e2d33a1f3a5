"""The end of a batch is told from lifetimes that were seen, and from none that were not."""

from __future__ import annotations

import random

import pytest

from manager.learning import BatchState, Lifetimes


def ends_in_s(seen_s: list[float], ages_s: list[float], *, needed: int, at_once: int = 0) -> float | None:
    """The estimate for a batch when lifetimes of the same weight were seen."""
    lifetimes = Lifetimes([(each, 1.0) for each in seen_s], ages_s)
    return lifetimes.ends_in_s(BatchState(ages_s=ages_s, needed=needed, at_once=at_once or len(ages_s)))


def test_what_takes_as_long_as_all_before_ends_when_they_did() -> None:
    assert ends_in_s([10.0] * 20, [4.0] * 8, needed=8) == pytest.approx(6.0, abs=0.01)
    assert ends_in_s([10.0] * 20, [4.0] * 7 + [1.0], needed=8) == pytest.approx(9.0, abs=0.01)


def test_without_an_end_nothing_is_told() -> None:
    assert ends_in_s([], [1.0, 2.0], needed=2) is None
    assert ends_in_s([], [], needed=2) is None
    assert ends_in_s([10.0] * 4, [], needed=2) is None, "nobody knows how many will live at once"


def test_of_what_outlived_all_that_ended_nothing_is_told() -> None:
    assert ends_in_s([10.0] * 20, [11.0], needed=1) is None
    assert ends_in_s([10.0] * 20, [11.0, 2.0], needed=1) == pytest.approx(8.0, abs=0.1), "the other one is enough"


def test_the_short_ones_of_a_batch_do_not_speak_for_its_long_ones() -> None:
    assert ends_in_s([1.0] * 8, [2.0] * 8, needed=8) is None
    told = ends_in_s([1.0] * 50 + [10.0] * 50, [2.0] * 8, needed=8)
    assert told == pytest.approx(8.0, abs=0.1)


def test_what_has_not_begun_waits_for_a_place() -> None:
    assert ends_in_s([10.0] * 20, [0.0] * 10, needed=100) == pytest.approx(100.0, abs=1.0)
    assert ends_in_s([10.0] * 20, [], needed=30, at_once=10) == pytest.approx(30.0, abs=1.0)
    assert ends_in_s([10.0] * 20, [9.0] * 2, needed=10, at_once=10) == pytest.approx(10.0, abs=0.1)


def test_more_than_are_needed_end_it_sooner() -> None:
    seen_s = [float(each) for each in range(1, 101)]
    all_of_them, half = ends_in_s(seen_s, [0.0] * 20, needed=20), ends_in_s(seen_s, [0.0] * 20, needed=10)
    assert all_of_them is not None
    assert half == pytest.approx(50.0, abs=8.0)
    assert all_of_them > 90.0
    assert ends_in_s(seen_s, [0.0], needed=0) == 0.0


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_the_estimate_is_near_the_end_whatever_has_ended_of_a_batch(share: float) -> None:
    chance = random.Random(7)
    told, true = [], []
    for _ in range(60):
        seen_s = [chance.lognormvariate(3.0, 0.6) for _ in range(512)]
        batch_s = sorted(chance.lognormvariate(3.0, 0.6) for _ in range(128))
        now_s = batch_s[int(share * 128)]
        left_s = [each for each in batch_s if each > now_s]
        estimate = ends_in_s(
            [*seen_s, *(each for each in batch_s if each <= now_s)], [now_s] * len(left_s), needed=len(left_s)
        )
        if estimate is not None:
            told.append(estimate)
            true.append(batch_s[-1] - now_s)
    assert len(told) >= 50
    assert sum(told) / len(told) == pytest.approx(sum(true) / len(true), rel=0.15)
