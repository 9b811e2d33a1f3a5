"""The kinds say what the runtimes take and return, and whole numbers stay what they are."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from manager.function import DurationSpec, FunctionSpec, ModelAction, ModelSpec, RequestSpec
from runtimes import runtime
from runtimes.kind import Kind
from runtimes.kinds import KINDS, input_schema, result_schema

MODEL = ModelSpec(path=Path("reward"), action=ModelAction.SCORE)

SUITE = FunctionSpec(name="suite", runtime="pytest", duration=DurationSpec(key="repo"))

SEARCH = FunctionSpec(
    name="search", runtime="api", request=RequestSpec(method="GET", url="https://api.test/{lang}?q={query}")
)


@pytest.mark.parametrize(
    ("function", "good", "bad"),
    [
        (FunctionSpec(name="sh", runtime="exec"), {"command": "ls", "cwd": "a"}, {"command": 7}),
        (FunctionSpec(name="sh", runtime="exec"), {"argv": ["ls"]}, {"argv": ["ls"], "command": "ls"}),
        (SUITE, {"repo": "x/y", "fail_to_pass": ["t.py::a"]}, {"fail_to_pas": ["t.py::a"]}),
        (FunctionSpec(name="rm", runtime="model", model=MODEL), {"texts": ["a"]}, {"texts": []}),
        (FunctionSpec(name="rm", runtime="model", model=MODEL), {"token_ids": [[1]]}, {"seed": 1}),
        (SEARCH, {"query": "x", "lang": "en"}, {"query": "x"}),
        (SEARCH, {"query": 1, "lang": "en"}, {"query": "x", "lang": "en", "host": "evil"}),
    ],
)
def test_a_built_in_schema_takes_what_the_runtime_takes(
    function: FunctionSpec, good: dict[str, object], bad: dict[str, object]
) -> None:
    schema = input_schema(function)
    assert schema is not None
    Draft202012Validator.check_schema(schema)
    checker = Draft202012Validator(schema)
    assert checker.is_valid(good)
    assert not checker.is_valid(bad)


def test_a_functions_own_schemas_win_and_a_handler_takes_and_returns_any_value() -> None:
    own = {"type": "object", "required": ["answer"]}
    assert input_schema(FunctionSpec(name="f", runtime="exec", input_schema=own)) == own
    assert input_schema(FunctionSpec(name="f", runtime="handler")) is None
    assert result_schema(FunctionSpec(name="f", runtime="exec", result_schema=own)) == own
    assert result_schema(FunctionSpec(name="f", runtime="handler")) is None


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_schemas_that_are_shown_stand_by_themselves(kind: Kind) -> None:
    for schema in (schema for pair in kind.shown.values() for schema in pair if schema is not None):
        Draft202012Validator.check_schema(schema)
        assert "$ref" not in str(schema)
        assert schema["description"]


@pytest.mark.parametrize("action", ModelAction)
def test_each_action_of_a_model_has_a_result_of_its_own(action: ModelAction) -> None:
    model = FunctionSpec(name="m", runtime="model", model=ModelSpec(path=Path("m"), action=action))
    shown = result_schema(model)
    assert shown is not None
    assert [other for other in ModelAction if KINDS["model"].shown[other][1] == shown] == [action]


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
