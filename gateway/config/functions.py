"""A function's section of the YAML: what every function has, and the keys of its runtime's kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, Union

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    create_model,
    model_validator,
)

from gateway.config.declared_schema import checked_schema
from gateway.config.derive import Section, given_of, model_of, refuse_boolean, section_of, values
from gateway.config.forms import Name
from manager.action import Amdahl, EfficiencyTable, Elasticity, UnitSet
from manager.errors import Reason
from manager.function import FunctionSpec, RetrySpec, SandboxSpec
from runtimes.kind import Kind
from runtimes.kinds import KINDS

#: Most units of a resource that one action may ask for: the search for the best count grows with it.
UNITS_MAX = 65536

Units = Annotated[int, Field(ge=1, le=UNITS_MAX), BeforeValidator(refuse_boolean)]
Efficiency = Annotated[float, Field(gt=0, le=1), BeforeValidator(refuse_boolean)]


class UnitRange(Section):
    """Every count from ``min`` to ``max``."""

    min: Units = Field(description="fewest units")
    max: Units = Field(description="most units")

    @model_validator(mode="after")
    def _ordered(self) -> UnitRange:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}")
        return self

    def unit_set(self) -> UnitSet:
        return UnitSet.span(self.min, self.max)


class UnitChoices(Section):
    """Some counts only, for example 1, 2, 4, 8."""

    choices: tuple[Units, ...] = Field(min_length=1, description="admissible counts")

    def unit_set(self) -> UnitSet:
        return UnitSet.of(self.choices)


def _amount_form(value: object) -> str | None:
    if isinstance(value, dict):
        return "choices" if "choices" in value else "range"
    return "units" if isinstance(value, int | float | str) else None


Amount = Annotated[
    Annotated[Units, Tag("units")] | Annotated[UnitRange, Tag("range")] | Annotated[UnitChoices, Tag("choices")],
    Discriminator(
        _amount_form,
        custom_error_type="amount",
        custom_error_message="write a count, {min: ..., max: ...} or {choices: [...]}",
    ),
]


def unit_set(amount: int | UnitRange | UnitChoices) -> UnitSet:
    return UnitSet.fixed(amount) if isinstance(amount, int) else amount.unit_set()


class ElasticitySection(Section):
    """How much faster more units of the key resource make it; learned unless it is given."""

    key: Name = Field(description="the resource whose amount changes the duration")
    serial_fraction: Annotated[float, Field(ge=0, le=1), BeforeValidator(refuse_boolean)] | None = Field(
        default=None, description="part of the work that cannot be shared (Amdahl)"
    )
    table: dict[Units, Efficiency] | None = Field(
        default=None, min_length=1, description="efficiency E by units: {1: 1.0, 2: 0.9}"
    )
    learned: bool = Field(default=False, description="fit it to the history (also when nothing is given)")

    @model_validator(mode="after")
    def _one_form(self) -> ElasticitySection:
        if [self.serial_fraction is not None, self.table is not None, self.learned].count(True) > 1:
            raise ValueError("give one of serial_fraction, table and learned")
        return self

    def elasticity(self) -> Elasticity | None:
        """The declared curve, or None to learn it."""
        if self.serial_fraction is not None:
            return Amdahl(self.serial_fraction)
        return None if self.table is None else EfficiencyTable(tuple(sorted(self.table.items())))


def _reason_or_status(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool) and 400 <= value <= 599:
        return value
    if isinstance(value, str) and value in set(Reason):
        return Reason(value)
    raise ValueError(f"{value!r} is neither a reason ({', '.join(Reason)}) nor an HTTP status from 400 to 599")


def _parted(retry: RetrySpec) -> RetrySpec:
    """Part what is tried again into reasons and statuses, which the YAML writes in one list."""
    if retry.max_attempts > 1 and not retry.on:
        raise ValueError("say on what it is tried again, for example on: [environment_lost, 503]")
    reasons = tuple(each for each in retry.on if isinstance(each, Reason))
    return replace(retry, on=reasons, on_status=tuple(int(each) for each in retry.on if each not in reasons))


TriedAgain = Annotated[
    Reason | int,
    BeforeValidator(_reason_or_status),
    WithJsonSchema({"enum": [*Reason, *range(400, 600)]}),
]
Retry: Any = Annotated[section_of(RetrySpec, on=tuple[TriedAgain, ...]), AfterValidator(_parted)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSection:
    """A function as its section describes it."""

    kind: Kind
    #: Fields of its `FunctionSpec`.
    settings: Mapping[str, Any]
    cost: Mapping[str, UnitSet] | None
    elasticity: ElasticitySection | None
    #: The keys of its kind: an instance of its `Kind.section`.
    own: object
    #: What it says of its sandbox, by field; None for kinds without one.
    sandbox: Mapping[str, Any] | None


class _Costs(Section):
    """What a function takes, and what that makes of its duration."""

    cost: dict[Name, Amount] | None = Field(
        default=None, description="units of each resource; one cpu (gpu for a model, nothing for an api) by default"
    )
    elasticity: ElasticitySection | None = Field(default=None, description="how more units make it faster")


#: A schema that callers' inputs are checked against, or that results are said to follow.
DeclaredSchema = Annotated[Mapping[str, object] | None, AfterValidator(checked_schema)]
_Every = model_of(FunctionSpec, retry=Retry, input_schema=DeclaredSchema, result_schema=DeclaredSchema)


def form_name(kind: Kind) -> str:
    """Return the name of a kind's functions in the JSON Schema."""
    return f"{kind.name.title()}Function"


def _form(kind: Kind) -> Any:
    """Return the type that makes a `FunctionSection` of one kind."""
    own = () if kind.section is None else (model_of(kind.section),)
    found: dict[str, Any] = {"runtime": (Literal[kind.name], Field(description=kind.meaning))}
    if kind.sandbox:
        found["sandbox"] = (given_of(SandboxSpec), Field(default={}, description=kind.sandbox))
    meaning = f"{kind.meaning[0].upper()}{kind.meaning[1:]}."
    bases = (*own, _Every, _Costs)
    model = create_model(form_name(kind), __base__=bases, __doc__=meaning, **found)
    return Annotated[model, AfterValidator(partial(_made, kind))]


def _made(kind: Kind, checked: Any) -> FunctionSection:
    cost = checked.cost
    return FunctionSection(
        kind=kind,
        settings=values(FunctionSpec, checked),
        cost=None if cost is None else {name: unit_set(amount) for name, amount in cost.items()},
        elasticity=checked.elasticity,
        own=None if kind.section is None else kind.section(**values(kind.section, checked)),
        sandbox=checked.sandbox if kind.sandbox else None,
    )


#: Any of the kinds, chosen by ``runtime``.
Function: Any = Annotated[Union[tuple(map(_form, KINDS.values()))], Field(discriminator="runtime")]  # noqa: UP007
