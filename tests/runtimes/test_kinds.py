"""The kinds say what the runtimes take and return."""

from __future__ import annotations

from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from manager.function import DurationSpec, FunctionSpec, ModelAction, ModelSpec, RequestSpec
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
