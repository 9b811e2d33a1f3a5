"""What callers are told of an input that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from gateway.config.load import load
from gateway.invocations.invocations import Inputs
from manager.errors import InvalidInput

FUNCTIONS = """
version: 1
functions:
  shell: {runtime: exec}
  scored:
    runtime: exec
    input: {type: object, properties: {n: {type: integer}}, required: [n]}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tangram.yaml"
    path.write_text(FUNCTIONS)
    return path


@pytest.mark.parametrize("given", [{}, {"command": "true", "argv": ["true"]}])
def test_where_one_of_some_fields_is_needed_they_are_named(config: Path, given: Mapping[str, object]) -> None:
    shell = load([config], {}).functions["shell"]
    with pytest.raises(InvalidInput, match=r"^\$: needs exactly one of command, argv$"):
        Inputs().check(shell, given)


def test_a_function_that_declares_its_input_has_sessions_like_any_other(tmp_path: Path) -> None:
    own = "input: {type: object, properties: {argv: {type: array}}, additionalProperties: false}"
    path = tmp_path / "tangram.yaml"
    path.write_text(f"version: 1\nfunctions: {{shell: {{runtime: exec, {own}}}}}")
    shell = load([path], {}).functions["shell"]
    Inputs().check(shell, {"argv": ["bash"], "session": {"terminal": True, "rows": 24, "columns": 80}})
    with pytest.raises(InvalidInput, match="'sessions' was unexpected"):
        Inputs().check(shell, {"argv": ["bash"], "sessions": {}})


def test_what_a_function_declares_is_told_with_its_path(config: Path) -> None:
    scored = load([config], {}).functions["scored"]
    with pytest.raises(InvalidInput, match=r"^\$.n: 'x' is not of type 'integer'$"):
        Inputs().check(scored, {"n": "x", "command": "true"})
