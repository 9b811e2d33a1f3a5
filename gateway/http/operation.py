"""The operation: one row of the table that both the routes and the OpenAPI document are made from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.store.store import LIST_LIMIT_MAX

Endpoint = Callable[[Request], Awaitable[Response]]
#: A JSON Schema. Any: its values nest without end.
Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$"}
KEY: Schema = {"type": "string", "pattern": "^[!-~]{1,255}$"}
DURATION: Schema = {"type": "string", "pattern": r"^\d{1,9}(\.\d{1,6})?(ms|s|m|h|d)?$", "examples": ["30s"]}
LIMIT: Schema = {"type": "integer", "minimum": 1, "maximum": LIST_LIMIT_MAX}
FLAG: Schema = {"type": "string", "enum": ["true", "false", "1", "0"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A path, query or header parameter."""

    name: str
    place: str
    about: str
    schema: Schema = field(default_factory=lambda: TEXT)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "in": self.place,
            "required": self.place == "path",
            "description": self.about,
            "schema": dict(self.schema),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationLink:
    """What can be asked next: an operation, and which of its parameters are in the answer (RFC 6901 pointers)."""

    operation: str
    parameters: Mapping[str, str]
    #: Its body, where the answer knows it.
    body: object = None

    def as_json(self) -> dict[str, object]:
        parameters = {name: f"$response.body#{pointer}" for name, pointer in self.parameters.items()}
        body = {} if self.body is None else {"requestBody": self.body}
        return {"operationId": self.operation, "parameters": parameters, **body}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSpec:
    """What comes back with one status: a schema by media type, empty for no body."""

    about: str
    content: Mapping[str, Schema] = field(default_factory=dict)
    links: tuple[OperationLink, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method on one path. ``id`` is the operationId; statuses of problems are listed once for all."""

    id: str
    method: str
    path: str
    endpoint: Endpoint
    summary: str
    tag: str
    answers: Mapping[int, ResponseSpec]
    parameters: tuple[Parameter, ...] = ()
    #: Schema of the request body by media type; empty for none.
    body: Mapping[str, Schema] = field(default_factory=dict)
    #: Whether it means anything without a body.
    body_required: bool = False
    #: Statuses of problem bodies that it can answer with, besides 401, 500 and 503.
    problems: tuple[int, ...] = ()
    #: Whether it is served without a token (health).
    open: bool = False


def path_parameter(name: str, about: str, schema: Schema = NAME) -> Parameter:
    return Parameter(name=name, place="path", about=about, schema=schema)


def query(name: str, about: str, schema: Schema = TEXT) -> Parameter:
    return Parameter(name=name, place="query", about=about, schema=schema)


def page_of(what: str) -> tuple[Parameter, Parameter]:
    """The parameters of whatever is read in pages of ``what``."""
    return query("cursor", "next_cursor of the page before", NAME), query("limit", f"{what} of a page", LIMIT)


def header(name: str, about: str, schema: Schema = TEXT) -> Parameter:
    return Parameter(name=name, place="header", about=about, schema=schema)


EXPECT = header(
    "X-Trajectory-Expect",
    "living: if the trajectory has ended the request is refused with 410, where otherwise a new one would begin",
    {"type": "string", "enum": ["living"]},
)


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def json_answer(about: str, schema: Schema, links: tuple[OperationLink, ...] = ()) -> ResponseSpec:
    return ResponseSpec(about=about, content={"application/json": schema}, links=links)


def links(pointer: str, parameter: str, *operations: str) -> tuple[OperationLink, ...]:
    """One value of the answer is one parameter of each of these operations."""
    return tuple(OperationLink(operation=operation, parameters={parameter: pointer}) for operation in operations)
