"""A function's own JSON Schema, checked when it is declared instead of at each call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

#: Keys beneath which stands data, not schemas.
DATA = ("const", "enum", "default", "examples")


def checked_schema(schema: Mapping[str, object] | None) -> Mapping[str, object] | None:
    """Return the schema; raises ValueError with the place if it is none, or refers to what is not in it."""
    if schema is None:
        return None
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"is no JSON Schema (draft 2020-12): {error.json_path}: {error.message[:300]}") from None
    resolver = Registry().with_resource("", DRAFT202012.create_resource(schema)).resolver()
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except (Unresolvable, ValueError) as error:
            raise ValueError(f"is no JSON Schema that stands alone: $ref {reference!r} leads nowhere in it") from error
    return schema


def _references(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            if key in ("$ref", "$dynamicRef") and isinstance(below, str):
                yield below
            elif key not in DATA or isinstance(below, Mapping):
                yield from _references(below)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for below in value:
            yield from _references(below)
