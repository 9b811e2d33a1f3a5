"""Inputs: a function's JSON Schema, compiled once, and the path of what does not fit it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match

from manager.errors import InvalidInput
from manager.function import FunctionSpec
from runtimes.kinds import input_schema, kind_of

#: Compiled schemas that are kept: one for each living revision.
COMPILED_MAX = 4096


class Inputs:
    """Checks inputs against the schemas of their functions."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[str, str], Any] = {}

    def check(self, function: FunctionSpec, input: Mapping[str, object]) -> None:
        """Raise InvalidInput with the JSON path of the first thing that does not fit."""
        validator = self._validator(function)
        if function.input_schema is not None:
            added = kind_of(function).added_fields
            input = {name: value for name, value in input.items() if name not in added}
        error = None if validator is None else best_match(validator.iter_errors(input))
        if error is not None:
            raise InvalidInput(
                f"{error.json_path}: {_said(error)}", component="gateway", detail={"path": error.json_path}
            )

    def _validator(self, function: FunctionSpec) -> Any:
        """Any: jsonschema's validators have no common type. None where any object will do."""
        key = (function.name, function.revision)
        if key not in self._compiled:
            if len(self._compiled) >= COMPILED_MAX:
                self._compiled.clear()
            schema = input_schema(function)
            self._compiled[key] = None if schema is None else Draft202012Validator(schema)
        return self._compiled[key]


def _said(error: ValidationError) -> str:
    """Return what does not fit; where exactly one of some fields is needed, which they are."""
    choices: Any = error.validator_value if error.validator == "oneOf" else ()
    if choices and all(each.keys() == {"required"} and len(each["required"]) == 1 for each in choices):
        return f"needs exactly one of {', '.join(each['required'][0] for each in choices)}"
    return error.message[:500]
