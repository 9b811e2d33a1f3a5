"""HTTP operations as declared, and the OpenAPI document made from them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import UnionType
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import FACES, REASON_FACES
from gateway.http.messages import PROBLEM
from gateway.http.streaming import EVENTS, NDJSON
from tangram.types import FunctionInfo, Invocation, LogRecord, Problem

# The operation: one row of the table that both the routes and the OpenAPI document are made from.
#
# Bodies and parameters are given as types: their JSON Schemas are derived from them.

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


REF = "#/components/schemas/{name}"
#: Statuses that every operation may answer with.
ALWAYS = (401, 403, 500, 503)
#: Of any operation with a body: it did not arrive within `server.body_timeout`.
SLOW_BODY = 408
INVOKE = "/v1/functions/{name}/invocations"
CALLBACK_URL = "X-Callback-Url"


class Shapes:
    """The schemas of all shapes that a table names, and the components that they refer to."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        named = [shape for operation in operations for shape in operation.shapes]
        found = list(dict.fromkeys(arm for shape in [*named, Problem] for arm in _arms(shape)))
        schemas, components = msgspec.json.schema_components(found, ref_template=REF)
        self._schemas = dict(zip(found, schemas, strict=True))
        #: Parameters are shown one by one, and not as the type that reads them.
        parameters = {each.__name__ for row in operations for each in (row.query, row.headers) if each is not None}
        self.components = {name: schema for name, schema in components.items() if name not in parameters}
        self._parameters = {name: components[name] for name in parameters}
        codes = dict.fromkeys([*FACES, *(reason.value for reason in REASON_FACES)])
        self.components["Problem"]["properties"]["code"]["enum"] = list(codes)
        # An odd call is refused by its own verdict, so the request takes anything in its place.
        calls = self.components["BatchRequest"]["properties"]["calls"]
        calls["items"] = {"anyOf": [calls["items"], {"description": "Anything else: its verdict is 422"}]}

    def of(self, shape: Shape) -> Schema:
        """Return the schema of a shape; of a union, any of its arms."""
        schemas = [self._schemas[arm] for arm in _arms(shape)]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}

    def parameters(self, kind: type[Struct] | None, place: str) -> list[dict[str, object]]:
        """Return the fields of a type as parameters of a query or of headers."""
        properties = {} if kind is None else self._parameters[kind.__name__]["properties"]
        return [_parameter(name, place, schema) for name, schema in properties.items()]


def document(
    operations: Sequence[Operation],
    shapes: Shapes,
    functions: Iterable[FunctionInfo] = (),
    callback_pattern: str | None = None,
) -> dict[str, object]:
    """Return the whole document, with an operation for each of the functions.

    ``callback_pattern`` is what an X-Callback-Url must match; without it there is no such header.
    """
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = operation.path.replace(":path}", "}")
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, shapes)
    invoke = paths[INVOKE]["post"]
    invoke["parameters"] = _callable(invoke["parameters"], callback_pattern)
    shared = {each["name"]: each for each in invoke["parameters"] if each["in"] != "path"}
    for function in functions:
        paths[INVOKE.replace("{name}", function.name)] = {"post": _invoke(function, list(shared), shapes)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tangram gateway",
            "version": _version(),
            "description": "Invocations of registered functions, scheduled as actions onto elastic resources.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": shapes.components,
            "parameters": shared,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}, {}],
    }


def _operation(operation: Operation, shapes: Shapes) -> dict[str, object]:
    answers: dict[str, object] = {}
    for status, answer in operation.answers.items():
        content = _content(answer.content, shapes)
        answers[str(status)] = {
            "description": answer.about,
            **({"content": content} if content else {}),
            **({"links": {link.operation: link.as_json() for link in answer.links}} if answer.links else {}),
        }
    everywhere = (*(() if operation.open else ALWAYS), *((SLOW_BODY,) if operation.body else ()))
    for status in sorted({*operation.problems, *everywhere}):
        answers.setdefault(str(status), {"description": "A problem", "content": _content({PROBLEM: Problem}, shapes)})
    parts = [
        {"name": part.name, "in": "path", "required": True, "description": part.about, "schema": shapes.of(part.shape)}
        for part in operation.parts
    ]
    body: dict[str, object] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "tags": [operation.tag],
        "parameters": [
            *parts,
            *shapes.parameters(operation.query, "query"),
            *shapes.parameters(operation.headers, "header"),
        ],
        "responses": answers,
    }
    if operation.body:
        body["requestBody"] = {"required": operation.body_required, "content": _content(operation.body, shapes)}
    if operation.open:
        body["security"] = []
    return body


def _invoke(function: FunctionInfo, parameters: Iterable[str], shapes: Shapes) -> dict[str, object]:
    """Return the operation that invokes one function: its input and its result are those that it declares."""
    given = _resource(function, "input", function.input_schema or {"type": "object"})
    result = _resource(function, "result", function.result_schema or {})
    invocation, log = shapes.of(Invocation), _content(dict.fromkeys((NDJSON, EVENTS), LogRecord), shapes)
    typed = {"allOf": [invocation, {"properties": {"result": {"anyOf": [result, {"type": "null"}]}}}]}
    return {
        "operationId": f"invoke.{function.name}",
        "summary": function.description or f"Invoke {function.name}",
        "tags": ["functions"],
        "parameters": [{"$ref": f"#/components/parameters/{name}"} for name in parameters],
        "requestBody": {"required": bool(function.input_schema), "content": {"application/json": {"schema": given}}},
        "responses": {
            "200": {"description": "It ended", "content": {"application/json": {"schema": typed}, **log}},
            "202": {"description": "Accepted", "content": {"application/json": {"schema": invocation}}},
            "default": {"description": "A problem", "content": _content({PROBLEM: Problem}, shapes)},
        },
    }


def _resource(function: FunctionInfo, what: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function's schema for use within the document: its references begin at itself. Any: JSON Schema."""
    return {"$id": f"urn:tangram:function:{function.name}:{what}", **schema} if schema else {}


def _callable(parameters: Iterable[dict[str, Any]], pattern: str | None) -> list[dict[str, Any]]:
    """Return the parameters of an invocation where callbacks may go where ``pattern`` says. Any: they are JSON."""
    kept = [each for each in parameters if each["name"] != CALLBACK_URL or pattern is not None]
    schema = {"type": "string", "pattern": pattern}
    return [{**each, "schema": schema} if each["name"] == CALLBACK_URL else each for each in kept]


def _content(content: Mapping[str, Shape], shapes: Shapes) -> dict[str, object]:
    return {media: {"schema": shapes.of(shape)} for media, shape in content.items()}


def _parameter(name: str, place: str, schema: Mapping[str, Any]) -> dict[str, object]:
    """Return one parameter. Absent is what null stands for in its type. Any: a JSON Schema."""
    shown = {key: value for key, value in schema.items() if key != "description"}
    if "anyOf" in shown:
        (arm,) = [arm for arm in shown.pop("anyOf") if arm != {"type": "null"}]
        del shown["default"]
        shown |= arm
    return {"name": name, "in": place, "required": False, "description": schema["description"], "schema": shown}


def _arms(shape: Shape) -> tuple[Shape, ...]:
    return get_args(shape) if isinstance(shape, UnionType) else (shape,)


def _version() -> str:
    try:
        return version("tangram-gateway")
    except PackageNotFoundError:
        return "0"
