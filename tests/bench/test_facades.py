"""The bench of the doors: what counts as agreement of two servers."""

from __future__ import annotations

import math

from bench.facades.teachers import first_keys, largest_difference

ROW = [7, 3, 99]


def test_a_first_key_that_is_another_token_is_as_far_off_as_can_be() -> None:
    listed = [None, {"3": {"logprob": -1.5}, "5": {"logprob": -0.5}}, {"99": {"logprob": -2.0}}]
    assert largest_difference([first_keys(listed, ROW)], [[-1.5, -2.25]]) == 0.25
    turned = [None, {"5": {"logprob": -0.5}, "3": {"logprob": -1.5}}, {"99": {"logprob": -2.0}}]
    assert largest_difference([first_keys(turned, ROW)], [[-0.5, -2.0]]) == math.inf


def test_a_number_that_is_missing_is_no_agreement() -> None:
    assert largest_difference([[-1.5]], [[-1.5, -2.0]]) == math.inf
    assert largest_difference([first_keys([None, {}, None], ROW)], [[0.0, 0.0]]) == math.inf
