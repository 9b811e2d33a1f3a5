"""The rule for sending a request again: what it takes of the process that it lives in, and what it tells."""

from __future__ import annotations

import logging
import random

import pytest

from tangram.client.requests import TOLD_MAX, FailureStreak, Retries, Teller
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


def test_an_outage_that_fails_many_calls_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    gone = ConnectionFailed("cannot reach http://many.example: refused", detail={"sent": False})
    for _ in range(50):
        assert FailureStreak(Retries()).again_s(gone) is not None
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "cannot reach http://many.example: refused; trying again for 60 s"
    ]


def test_what_was_told_long_ago_is_told_again_and_what_is_kept_is_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("tangram.client.requests.time.monotonic", lambda: now[0])
    teller = Teller()
    for now[0] in (0.0, 9.0, 11.0, 19.0, 22.0):
        teller.warn("gone", "trying again")
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 3  # at 0, 11 and 22
    for number in range(TOLD_MAX):
        teller.warn(f"other {number}", "trying again")
    caplog.clear()
    teller.warn("gone", "trying again")  # it had to make room
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
