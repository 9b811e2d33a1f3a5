"""The operation: one row of the table that both the routes and the OpenAPI document are made from.

Bodies and parameters are given as types: their JSON Schemas are derived from them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

#: What the caller may do, in the scope of a request that was let in.
ROLE = "tangram.role"
Endpoint = Callable[[Request], Awaitable[Response]]
#: A JSON Schema. Any: its values nest without end.
Schema = Mapping[str, Any]
#: What a schema is made of: a wire type or any other type that JSON can hold. Any: the checker has no name for it.
Shape = Any

BINARY = Annotated[str, Meta(extra_json_schema={"format": "binary"})]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathParameter:
    """A part of the path."""

    name: str
    about: str
    shape: Shape


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
    """What comes back with one status: a shape by media type, empty for no body."""

    about: str
    content: Mapping[str, Shape] = field(default_factory=dict)
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
    parts: tuple[PathParameter, ...] = ()
    #: What its query and its headers may say.
    query: type[Struct] | None = None
    headers: type[Struct] | None = None
    #: Shape of the request body by media type; empty for none.
    body: Mapping[str, Shape] = field(default_factory=dict)
    #: Whether it means anything without a body.
    body_required: bool = False
    #: Statuses of problem bodies that it can answer with, besides 401, 500 and 503.
    problems: tuple[int, ...] = ()
    #: Whether it is served without a token (health).
    open: bool = False
    #: Whether it changes the gateway for everybody, and the invoke token does not do.
    admin: bool = False

    @property
    def shapes(self) -> list[Shape]:
        """Every type that the row names."""
        answers = [shape for answer in self.answers.values() for shape in answer.content.values()]
        given = [shape for shape in (self.query, self.headers) if shape is not None]
        return [*answers, *self.body.values(), *given, *(part.shape for part in self.parts)]


def json_answer(about: str, shape: Shape, links: tuple[OperationLink, ...] = ()) -> ResponseSpec:
    return ResponseSpec(about=about, content={"application/json": shape}, links=links)


def links(pointer: str, parameter: str, *operations: str) -> tuple[OperationLink, ...]:
    """One value of the answer is one parameter of each of these operations."""
    return tuple(OperationLink(operation=operation, parameters={parameter: pointer}) for operation in operations)
