"""Views: frozen nouns of the thinking as JSON values, for every door."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

from manager.action import UnitSet
from manager.function import FunctionSpec


def function_json(spec: FunctionSpec) -> dict[str, object]:
    """A registered function. What is not set is left out; secrets are references and stay so."""
    body = plain(spec)
    assert isinstance(body, dict)
    return {name: value for name, value in body.items() if value is not None}


def plain(value: object) -> object:
    """Dataclasses, enums, paths and unit sets as the JSON values that the YAML would write."""
    if isinstance(value, UnitSet):
        return _units(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value


def _units(units: UnitSet) -> object:
    if units.choices is not None:
        return {"choices": list(units.choices)}
    return {"min": units.minimum, "max": units.maximum} if units.elastic else units.minimum
