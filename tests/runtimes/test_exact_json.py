"""Whole numbers stay what they are, and what is no JSON is told with line and column."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtimes import runtime

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)


@given(VALUES, st.booleans())
def test_a_value_comes_back_as_it_was(value: object, sort_keys: bool) -> None:
    written = runtime.dumps(value, sort_keys=sort_keys)
    assert runtime.loads(written) == value
    assert json.loads(written) == value


@pytest.mark.parametrize("number", [2**53 + 1, 2**63, 2**64 - 1, 2**64, 2**70 + 1, -(2**70), 10**400])
def test_a_whole_number_is_exact_however_large(number: int) -> None:
    assert runtime.loads(f'{{"n":[{number}]}}') == {"n": [number]}
    assert json.loads(runtime.dumps({"b": number, "a": 1}, sort_keys=True)) == {"a": 1, "b": number}
    assert runtime.dumps({"b": number, "a": 1}, sort_keys=True).startswith(b'{"a":')


@pytest.mark.parametrize("text", ['{"a":', "[NaN]", "[1e400]", '"\\ud800"', b'"\xff"', "", "1" * 5000])
def test_what_is_no_json_is_told_with_its_place(text: str | bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError, match="line 1 column"):
        runtime.loads(text)


def test_what_json_cannot_hold_is_refused() -> None:
    for value in ({1, 2}, {"n": 2**70, "s": {1}}):
        with pytest.raises(TypeError):
            runtime.dumps(value)
    with pytest.raises(ValueError, match="JSON compliant"):
        runtime.dumps([2**70, float("nan")])
