"""Functions as callers see them: the definition, what goes in and comes out, and what was learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import msgspec

from gateway.preparation import Readiness
from manager.action import UnitSet
from manager.function import FunctionSpec
from runtimes.kinds import input_schema, result_schema
from runtimes.secrets import REDACTED, SECRET
from tangram.types import UNSET, FunctionInfo, LearnedInfo, RevisionChange, UnitsInfo, UnsetType

#: Fields that functions of every kind have.
_COMMON = {each.name for each in fields(FunctionSpec)}


def function_info(
    spec: FunctionSpec,
    learned: Mapping[str, object] | UnsetType = UNSET,
    readiness: Readiness | None = None,
    source: str | None = None,
    changes: Sequence[RevisionChange] = (),
) -> FunctionInfo:
    """Return a registered function. What is not set is left out; secrets are references and stay so."""
    found = msgspec.to_builtins(spec, enc_hook=str)
    if (sandbox := found.get("sandbox")) is not None:
        sandbox["env"] = {name: masked(value) for name, value in sandbox["env"].items()}
    found |= {
        "cost": {kind: _units(units) for kind, units in spec.cost.items()},
        "input_schema": input_schema(spec),
        "result_schema": result_schema(spec),
        "own": {each.name: found[each.name] for each in fields(spec) if each.name not in _COMMON} or None,
        "learned": None if learned is UNSET else msgspec.convert(learned, Mapping[str, LearnedInfo]),
        "source": source,
        "changes": list(changes) or None,
        "status": None if readiness is None else readiness.status,
        "problem": (readiness.problem or None) if readiness is not None else None,
    }
    return msgspec.convert({name: value for name, value in found.items() if value is not None}, FunctionInfo)


def masked(value: str) -> str:
    """A value of an environment, which may be a secret, for anybody's eyes; a reference to one is none."""
    return value if SECRET.fullmatch(value) else REDACTED


def _units(units: UnitSet) -> int | UnitsInfo:
    if units.choices is not None:
        return UnitsInfo(choices=units.choices)
    return UnitsInfo(min=units.minimum, max=units.maximum) if units.elastic else units.minimum
