"""What cannot be sent as JSON is refused where it is, and never becomes something else on the way."""

from __future__ import annotations

from typing import Any

import pytest

from tangram.client.requests import json_body
from tangram.errors import InvalidInputError
from tangram.types import BatchItem

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"v": NAN}, "$.v is nan"),
        ({"a": [1, {"b": (None, -INFINITY)}]}, "$.a[1].b[1] is -inf"),
        ([BatchItem(function="f", input={"score": INFINITY})], "$[0].input.score is inf"),
    ],
)
def test_a_number_that_is_none_is_refused_with_its_place(value: object, place: str) -> None:
    with pytest.raises(InvalidInputError, match="JSON does not have") as refused:
        json_body(value)
    assert place in str(refused.value)


def test_null_and_its_word_are_sent_as_they_are() -> None:
    assert json_body({"a": None, "null": "null", "n": 1e308}) == b'{"a":null,"null":"null","n":1e308}'


def test_an_object_of_another_library_is_refused_with_the_remedy() -> None:
    numpy: Any = pytest.importorskip("numpy")
    for value in (numpy.float32(0.5), numpy.zeros(2)):
        with pytest.raises(InvalidInputError, match=r"\.item\(\) or \.tolist\(\)"):
            json_body({"v": value})
