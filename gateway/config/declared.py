"""The ``resources`` section: each declared resource by its kind, derived from the specs, and what it needs."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from functools import partial, reduce
from operator import or_
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Discriminator, Field, Tag, create_model

from gateway.config.sections import Name, Seconds, Section, refuse_boolean
from manager.resources.declared import ResourceSpec
from manager.resources.kinds import KINDS
from manager.setting import Setting, settings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One entry of the section."""

    spec: ResourceSpec
    #: Resources of which a unit is taken with each unit of this one.
    needs: tuple[str, ...] = ()


def _resource(spec: type[ResourceSpec], checked: BaseModel) -> Resource:
    given = dict(checked)
    needs = given.pop("needs")
    del given["kind"]
    return Resource(spec=spec(**given), needs=needs)


def _form(spec: type[ResourceSpec]) -> Any:
    """Return what pydantic checks one kind with; Any: it is made at run time."""
    told: dict[str, Any] = {"kind": (Literal[spec.kind], Field(description=spec.meaning))}
    defaults = {each.name: each.default for each in fields(spec)}  # type: ignore[arg-type]  # kinds are dataclasses
    for name, hint, setting in settings_of(spec):
        given: dict[str, Any] = {} if defaults[name] is MISSING else {"default": defaults[name]}
        field = Field(validation_alias=name.removesuffix("_s"), description=setting.meaning, **given)
        told[name] = (_number(hint, setting), field)
    needs = Field(default=(), description="resources of which a unit is taken with each unit of this one")
    told["needs"] = (tuple[Name, ...], needs)
    model = create_model(spec.__name__, __base__=Section, __doc__=spec.__doc__, **told)
    return Annotated[model, AfterValidator(partial(_resource, spec))]


def _number(hint: Any, setting: Setting) -> Any:
    """Return the form of a count or of seconds, which may be absent."""
    declared = get_args(hint)[0]
    kinds = get_args(declared) or (declared,)
    if float in kinds:
        form: Any = Annotated[Seconds, Field(gt=setting.gt)]
    else:
        form = Annotated[int, Field(ge=setting.ge, le=2**53), BeforeValidator(refuse_boolean)]
    return form | None if type(None) in kinds else form


#: What pydantic checks an entry with.
RESOURCE: Any = Annotated[
    reduce(or_, [Annotated[_form(spec), Tag(spec.kind)] for spec in KINDS]), Discriminator("kind")
]
