"""The kind api: a templated HTTP call, what it takes (the fields of its template) and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from manager.errors import InvalidConfig
from manager.function import FunctionSpec, RequestSpec, Setting
from runtimes.api.template import RequestTemplate
from runtimes.kind import DeclarationSite, Kind, Schema, schema_of
from runtimes.materials import Materials
from runtimes.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeys:
    """The keys of an api function."""

    request: Annotated[RequestSpec, Setting("the call")]


class ApiResult(TypedDict):
    """What the service answered, secrets removed."""

    status: Annotated[int, Meta(description="HTTP status: 2xx, or one of request.accept")]
    headers: Annotated[dict[str, str], Meta(description="Response headers; cookies are left out")]
    body: Annotated[Any, Meta(description="The value of a JSON answer, else its text")]


RESULT = schema_of(ApiResult)


def _input_schema(function: FunctionSpec) -> Schema:
    """Exactly the fields of the request template, and those that the learning looks at."""
    assert function.request is not None, f"{function.name} has no request section"
    fields = sorted(RequestTemplate(function.request).field_names())
    return {
        "type": "object",
        "properties": dict.fromkeys((*function.duration.fields, *fields), True),
        "required": fields,
        "additionalProperties": False,
    }


def _spec(section: ApiKeys, place: DeclarationSite) -> Mapping[str, object]:
    try:
        RequestTemplate(section.request)
    except InvalidConfig as error:
        place.refuse(("request",), error.message.removeprefix("request: "))
    return {"request": section.request}


def _make(materials: Materials) -> Runtime:
    from runtimes.api.runtime import ApiRuntime

    return ApiRuntime(materials.secrets)


API = Kind(
    name="api",
    meaning="a templated HTTP call under quotas",
    make=_make,
    section=ApiKeys,
    cost=None,
    spec=_spec,
    input_schema=_input_schema,
    result_schema=lambda function: RESULT,
    shown={"": (None, RESULT)},
)
