"""The kind of a runtime: everything that the rest of the house must know of it, declared once beside the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from manager.function import FunctionSpec

#: A JSON Schema.
Schema = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One runtime kind. A new one is its module, its row in `runtimes.kinds`, and its tests."""

    #: As the YAML's ``runtime`` names it.
    name: str
    #: What it does, in a line for people.
    meaning: str
    #: What a function of this kind takes; None if any JSON object will do.
    input_schema: Callable[[FunctionSpec], Schema | None]
    #: What a function of this kind returns; None if that is the function's own affair.
    result_schema: Callable[[FunctionSpec], Schema | None]
    #: (input, result) by variant, for people: the model's actions, or one of no name; None stands for what varies.
    shown: Mapping[str, tuple[Schema | None, Schema | None]]


def schema_of(noun: type, **also: object) -> Schema:
    """Return the JSON Schema of a TypedDict, complete in itself, with the keywords of ``also`` added to it."""
    _, components = msgspec.json.schema_components([noun], ref_template="{name}")
    inlined = _inline(components[noun.__name__], components)
    assert isinstance(inlined, dict)
    return {**inlined, **also}


def _inline(node: object, components: Mapping[str, Schema]) -> object:
    if isinstance(node, list):
        return [_inline(each, components) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline({**components[node["$ref"]], **{key: node[key] for key in node if key != "$ref"}}, components)
    return {key: _inline(value, components) for key, value in node.items()}
