"""The ``resources`` section: each declared resource by its kind, derived from the specs, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, create_model

from gateway.config.derive import made, model_of
from gateway.config.forms import Name
from manager.resources.pools import KINDS as RESOURCE_KINDS
from manager.resources.pools import ResourceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One entry of the section."""

    spec: ResourceSpec
    #: Resources of which a unit is taken with each unit of this one.
    needs: tuple[str, ...] = ()


def _resource(spec: type[ResourceSpec], checked: Any) -> Resource:
    return Resource(spec=made(spec, checked), needs=checked.needs)


def _form(spec: type[ResourceSpec]) -> Any:
    """Return what pydantic checks one kind with; Any: it is made at run time."""
    needs = Field(default=(), description="resources of which a unit is taken with each unit of this one")
    told: dict[str, Any] = {
        "kind": (Literal[spec.kind], Field(description=spec.meaning)),
        "needs": (tuple[Name, ...], needs),
    }
    model = create_model(spec.__name__, __base__=model_of(spec), __doc__=spec.__doc__, **told)
    return Annotated[model, AfterValidator(partial(_resource, spec))]


#: What pydantic checks an entry with.
RESOURCE: Any = Annotated[
    reduce(or_, [Annotated[_form(spec), Tag(spec.kind)] for spec in RESOURCE_KINDS]), Discriminator("kind")
]
