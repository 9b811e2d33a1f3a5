"""The rule for sending a request again: what it takes of the process that it lives in, and what it tells."""

from __future__ import annotations

import random

import pytest

from tangram.client.retries import FailureStreak, Retries
from tangram.errors import ConnectionFailed, FunctionUnavailableError


def test_a_trainer_that_is_seeded_draws_the_same_numbers_whatever_is_tried_again() -> None:
    random.seed(7)
    expected = [random.random() for _ in range(3)]
    random.seed(7)
    drawn = []
    for attempt in range(3):
        lost = ConnectionFailed("gone", detail={"sent": False})
        assert Retries().wait_s(lost, attempt, 0.0, repeatable=True)
        drawn.append(random.random())
    assert drawn == expected


def test_why_a_function_is_unavailable_is_told_once_while_it_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    unavailable = FunctionUnavailableError("function f is unavailable: no image", retry_after_s=7.0)
    streak = FailureStreak(Retries())
    assert [streak.again_s(unavailable) for _ in range(6)] == [7.0, 7.0, 7.0, 7.0, None, None]
    assert [record.message for record in caplog.records] == [f"{unavailable}; asking again in 7 s"]
