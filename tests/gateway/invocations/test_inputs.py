"""What callers are told of an input that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from gateway.config.load import load
from gateway.invocations.inputs import Inputs
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


def test_what_a_function_declares_is_told_with_its_path(config: Path) -> None:
    scored = load([config], {}).functions["scored"]
    with pytest.raises(InvalidInput, match=r"^\$.n: 'x' is not of type 'integer'$"):
        Inputs().check(scored, {"n": "x", "command": "true"})
