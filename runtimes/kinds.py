"""The runtime kinds by name; the registry, the configuration and the documents derive from them."""

from __future__ import annotations

from collections.abc import Mapping

from manager.function import FunctionSpec
from runtimes.api import API
from runtimes.kind import Kind, Schema
from runtimes.model.runtime import MODEL
from runtimes.sandbox.exec import EXEC
from runtimes.sandbox.handler.runtime import HANDLER
from runtimes.sandbox.pytest.runtime import PYTEST

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in (EXEC, PYTEST, HANDLER, MODEL, API)}


def kind_of(function: FunctionSpec) -> Kind:
    """Return the kind of a function's runtime."""
    return KINDS[function.runtime]


def input_schema(function: FunctionSpec) -> Schema | None:
    """Return the function's own schema, else what its runtime takes; None if any JSON object will do."""
    return kind_of(function).input_schema(function) if function.input_schema is None else function.input_schema


def result_schema(function: FunctionSpec) -> Schema | None:
    """Return the function's own schema, else what its runtime returns; None if nothing is known of it."""
    return kind_of(function).result_schema(function) if function.result_schema is None else function.result_schema
