"""A model input is checked before anything is done with it, and the refusal names the JSON path."""

from __future__ import annotations

from pathlib import Path

import pytest

from manager.errors import InvalidInput
from manager.function import ModelAction
from runtimes.model.request import parse_input
from tests.runtimes.model.asking import function

SCORE = function(Path("m"), ModelAction.SCORE)
GENERATE = function(Path("m"), ModelAction.GENERATE, max_new_tokens=8)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({}, "$"),
        ({"texts": ["a"], "token_ids": [[1]]}, "$"),
        ({"texts": "a"}, "$.texts"),
        ({"texts": []}, "$.texts"),
        ({"texts": ["a"] * 5}, "$.texts"),
        ({"texts": ["a", 1]}, "$.texts[1]"),
        ({"token_ids": [[1], []]}, "$.token_ids[1]"),
        ({"token_ids": [[-1]]}, "$.token_ids[0]"),
        ({"token_ids": [[True]]}, "$.token_ids[0]"),
        ({"messages": [[{"role": "user"}]]}, "$.messages[0][0]"),
        ({"texts": ["a"], "temperature": 1}, "$.temperature"),
    ],
)
def test_a_wrong_input_is_refused_at_its_path(given: dict[str, object], path: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_input(SCORE, given, sequences_max=4)
    assert caught.value.detail["path"] == path


@pytest.mark.parametrize("option", [{"max_new_tokens": 9}, {"temperature": -1}, {"top_p": 0}, {"seed": "x"}])
def test_a_sampling_option_out_of_bounds_is_refused(option: dict[str, object]) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_input(GENERATE, {"texts": ["a"], **option}, sequences_max=4)
    assert caught.value.detail["path"] == f"$.{next(iter(option))}"


def test_one_conversation_may_come_without_its_list() -> None:
    message = {"role": "user", "content": "hello"}
    parsed = parse_input(SCORE, {"messages": [message]}, sequences_max=4)
    assert parsed.conversations == ((message,),)


def test_an_unseeded_draw_gets_a_seed_that_a_retry_will_share() -> None:
    assert parse_input(GENERATE, {"texts": ["a"], "seed": 7}, sequences_max=4).sampling.seed == 7
    assert parse_input(GENERATE, {"texts": ["a"]}, sequences_max=4).sampling.seed >= 0
