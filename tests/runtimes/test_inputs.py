"""The built-in input schemas say what the runtimes take."""

from __future__ import annotations

from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from manager.function import DurationSpec, FunctionSpec, ModelAction, ModelSpec, RequestSpec, RuntimeKind
from runtimes.inputs import input_schema

MODEL = ModelSpec(path=Path("reward"), action=ModelAction.SCORE)
SUITE = FunctionSpec(name="suite", runtime=RuntimeKind.PYTEST, duration=DurationSpec(key="repo"))
SEARCH = FunctionSpec(
    name="search", runtime=RuntimeKind.API, request=RequestSpec(method="GET", url="https://api.test/{lang}?q={query}")
)


@pytest.mark.parametrize(
    ("function", "good", "bad"),
    [
        (FunctionSpec(name="sh", runtime=RuntimeKind.EXEC), {"command": "ls", "cwd": "a"}, {"command": 7}),
        (FunctionSpec(name="sh", runtime=RuntimeKind.EXEC), {"argv": ["ls"]}, {"argv": ["ls"], "command": "ls"}),
        (SUITE, {"repo": "x/y", "fail_to_pass": ["t.py::a"]}, {"fail_to_pas": ["t.py::a"]}),
        (FunctionSpec(name="rm", runtime=RuntimeKind.MODEL, model=MODEL), {"texts": ["a"]}, {"texts": []}),
        (FunctionSpec(name="rm", runtime=RuntimeKind.MODEL, model=MODEL), {"token_ids": [[1]]}, {"seed": 1}),
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


def test_a_functions_own_schema_wins_and_a_handler_takes_any_object() -> None:
    own = {"type": "object", "required": ["answer"]}
    assert input_schema(FunctionSpec(name="f", runtime=RuntimeKind.EXEC, input_schema=own)) == own
    assert input_schema(FunctionSpec(name="f", runtime=RuntimeKind.HANDLER)) is None
