"""Inputs: a function's JSON Schema, compiled once, and the path of what does not fit it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from manager.errors import InvalidInput
from manager.function import FunctionSpec

#: Compiled schemas that are kept: one for each living revision.
COMPILED_MAX = 4096


class Inputs:
    """Checks inputs against the schemas of their functions."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[str, str], Any] = {}

    def check(self, function: FunctionSpec, input: Mapping[str, object]) -> None:
        """Raise InvalidInput with the JSON path of the first thing that does not fit."""
        schema = function.input_schema
        if schema is None:
            return
        error = best_match(self._validator(function, schema).iter_errors(input))
        if error is not None:
            raise InvalidInput(
                f"{error.json_path}: {error.message[:500]}", component="gateway", detail={"path": error.json_path}
            )

    def _validator(self, function: FunctionSpec, schema: Mapping[str, object]) -> Any:
        key = (function.name, function.revision)
        validator = self._compiled.get(key)
        if validator is None:
            if len(self._compiled) >= COMPILED_MAX:
                self._compiled.clear()
            validator = self._compiled[key] = Draft202012Validator(schema)
        return validator
