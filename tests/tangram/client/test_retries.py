"""The rule for sending a request again: what it takes of the process that it lives in."""

from __future__ import annotations

import random

from tangram.client.retries import Retries
from tangram.errors import ConnectionFailed


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
