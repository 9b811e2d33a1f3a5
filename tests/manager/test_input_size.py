"""The size of a call is one number of its input, whatever the input is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.action import SIZE_MAX, size_at

INPUT = {
    "max_tokens": 64,
    "ratio": 0.5,
    "text": "héllo",
    "tests": ["a", "b", "c"],
    "token_ids": [[1, 2, 3], [4], []],
    "messages": [{"role": "user", "content": "four"}, {"role": "assistant"}, {"role": "user", "content": "sixsix"}],
    "options": {"steps": 7},
    "none": [],
    "on": True,
    "least": -1,
    "most": 10**400,
    "odd": float("nan"),
}


@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("max_tokens", 64.0),
        ("ratio", 0.5),
        ("text", 5.0),
        ("tests", 3.0),
        ("token_ids", 4.0),
        ("messages", 3.0),
        ("messages.content", 10.0),
        ("options.steps", 7.0),
        ("none", 0.0),
    ],
)
def test_numbers_texts_and_lists_have_a_size(path: str, size: float) -> None:
    assert size_at(INPUT, path) == size


@pytest.mark.parametrize(
    "path", ["gone", "options", "options.gone", "max_tokens.x", "none.x", "messages.gone", "on", "least", "most", "odd"]
)
def test_what_has_no_size_is_no_mistake(path: str) -> None:
    assert size_at(INPUT, path) is None


def test_lists_within_lists_are_not_followed_for_ever() -> None:
    deep: object = [1]
    for _ in range(5000):
        deep = [deep]
    assert size_at({"deep": deep}, "deep") is None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(("a", "b")), inner),
)


@given(values, st.sampled_from(("a", "b", "a.b", "a.a.b")))
def test_any_input_has_a_size_within_bounds_or_none(value: object, path: str) -> None:
    size = size_at(value, path)
    assert size is None or 0 <= size <= SIZE_MAX


@pytest.mark.parametrize("numbers", [[-1e308, -1e308], [1e308, 1e308], [float("inf"), float("-inf")], [-(10**400)] * 3])
def test_a_sum_of_absurd_numbers_is_no_size_and_no_fault(numbers: list[float]) -> None:
    size = size_at({"items": [{"n": each} for each in numbers]}, "items.n")
    assert size is None or 0 <= size <= SIZE_MAX
