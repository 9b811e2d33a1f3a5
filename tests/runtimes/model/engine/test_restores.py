"""Measured restores: the estimate follows them, and one that was slow by chance changes nothing."""

from __future__ import annotations

import pytest

from runtimes.model.engine import KEPT, Restores, has_moved, middle


def test_nothing_measured_is_estimated_by_the_rate_that_is_assumed() -> None:
    assert Restores(100.0).estimate("a", {1: 200, 2: 100}) == {1: 2.0, 2: 1.0}


def test_each_dop_follows_its_own_measurements_and_the_others_the_nodes_rate() -> None:
    restores = Restores(1.0)
    restores.add("a", 2, 100, 0.5)
    assert restores.estimate("a", {1: 200, 2: 100}) == {1: 1.0, 2: 0.5}
    restores.add("a", 1, 200, 4.0)
    assert restores.estimate("a", {1: 200, 2: 100}) == {1: 4.0, 2: 0.5}


def test_outliers_change_nothing() -> None:
    restores = Restores(1.0)
    for seconds in (1.0, 1.1, 0.9, 60.0, 1.0, 0.0001):
        restores.add("a", 1, 100, seconds)
    assert restores.estimate("a", {1: 100})[1] == pytest.approx(1.0)


def test_a_machine_that_became_slower_is_followed() -> None:
    restores = Restores(1.0)
    for seconds in (*[1.0] * 100, *[3.0] * KEPT):
        restores.add("a", 1, 100, seconds)
    assert restores.estimate("a", {1: 100}) == {1: 3.0}


def test_another_checkpoint_under_the_same_name_is_measured_anew() -> None:
    restores = Restores(1.0)
    restores.add("a", 1, 100, 1.0)
    assert restores.estimate("a", {1: 400}) == {1: 4.0}


def test_the_middle_is_the_value_the_mean_or_the_mean_of_the_middle_third() -> None:
    assert (middle([5.0]), middle([1.0, 2.0]), middle([1.0, 2.0, 90.0])) == (5.0, 1.5, 2.0)


def test_a_tenth_is_worth_telling() -> None:
    assert not has_moved({1: 1.0}, {1: 1.09})
    assert has_moved({1: 1.0}, {1: 1.2}) and has_moved({1: 1.0, 2: 1.0}, {1: 1.0, 2: 0.8}) and has_moved({}, {1: 0.1})
