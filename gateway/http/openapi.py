"""The OpenAPI document of the declared operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from types import UnionType
from typing import Any, get_args

import msgspec
from msgspec import Struct

from gateway.api import Operation, OperationLink, Shape
from gateway.errors import ERROR_STATUSES, REASON_STATUSES
from gateway.http.messages import PROBLEM
from gateway.http.streaming import EVENTS, NDJSON
from tangram.types import FunctionInfo, Invocation, LogRecord, Problem

#: A JSON Schema. Any: its values nest without end.
Schema = Mapping[str, Any]
REF = "#/components/schemas/{name}"
#: Statuses that every operation may answer with.
ALWAYS = (401, 403, 500, 503)
INVOKE = "/v1/functions/{name}/invocations"
CALLBACK_URL = "X-Callback-Url"


class Shapes:
    """The schemas of all shapes that a table names, and the components that they refer to."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        named = [shape for operation in operations for shape in operation.shapes]
        result = list(dict.fromkeys(arm for shape in [*named, Problem] for arm in _arms(shape)))
        schemas, components = msgspec.json.schema_components(result, ref_template=REF)
        self._schemas = dict(zip(result, schemas, strict=True))
        #: Parameters are shown one by one, and not as the type that reads them.
        parameters = {each.__name__ for row in operations for each in (row.query, row.headers) if each is not None}
        self.components = {name: schema for name, schema in components.items() if name not in parameters}
        self._parameters = {name: components[name] for name in parameters}
        codes = dict.fromkeys([*ERROR_STATUSES, *(reason.value for reason in REASON_STATUSES)])
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
        shown = {} if kind is None else self._parameters[kind.__name__]
        required = shown.get("required", ())
        return [
            {**_parameter(name, place, schema), "required": name in required}
            for name, schema in shown.get("properties", {}).items()
        ]


def document(
    operations: Sequence[Operation],
    shapes: Shapes,
    functions: Iterable[FunctionInfo] = (),
    *,
    callbacks: bool = False,
) -> dict[str, object]:
    """Return the whole document, with an operation for each of the functions.

    Without ``callbacks`` there is no header X-Callback-Url.
    """
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = operation.path.replace(":path}", "}")
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, shapes)
    invoke = paths[INVOKE]["post"]
    invoke["parameters"] = [each for each in invoke["parameters"] if callbacks or each["name"] != CALLBACK_URL]
    shared = {each["name"]: each for each in invoke["parameters"] if each["in"] != "path"}
    for function in functions:
        paths[INVOKE.replace("{name}", function.name)] = {"post": _invoke(function, list(shared), shapes)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tangram gateway",
            "version": version("tangram-gateway"),
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
            **({"links": {link.operation: _link(link) for link in answer.links}} if answer.links else {}),
        }
    for status in sorted({*operation.problems, *(() if operation.open else ALWAYS)}):
        answers.setdefault(str(status), {"description": "A problem", "content": _content({PROBLEM: Problem}, shapes)})
    parts = [
        {**_parameter(name, "path", shapes.of(shape)), "required": True} for name, shape in operation.parts.items()
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


def _link(link: OperationLink) -> dict[str, object]:
    parameters = {name: f"$response.body#{pointer}" for name, pointer in link.parameters.items()}
    body = {} if link.body is None else {"requestBody": link.body}
    return {"operationId": link.operation, "parameters": parameters, **body}


def _invoke(function: FunctionInfo, parameters: Iterable[str], shapes: Shapes) -> dict[str, object]:
    """Return the operation that invokes one function: its input and its result are those that it declares."""
    value = _resource(function, "input", function.input_schema or {"type": "object"})
    result = _resource(function, "result", function.result_schema or {})
    invocation, log = shapes.of(Invocation), _content(dict.fromkeys((NDJSON, EVENTS), LogRecord), shapes)
    typed = {"allOf": [invocation, {"properties": {"result": {"anyOf": [result, {"type": "null"}]}}}]}
    return {
        "operationId": f"invoke.{function.name}",
        "summary": function.description or f"Invoke {function.name}",
        "tags": ["functions"],
        "parameters": [{"$ref": f"#/components/parameters/{name}"} for name in parameters],
        "requestBody": {"required": bool(function.input_schema), "content": {"application/json": {"schema": value}}},
        "responses": {
            "200": {"description": "It ended", "content": {"application/json": {"schema": typed}, **log}},
            "202": {"description": "Accepted", "content": {"application/json": {"schema": invocation}}},
            "default": {"description": "A problem", "content": _content({PROBLEM: Problem}, shapes)},
        },
    }


def _resource(function: FunctionInfo, what: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function's schema for use within the document: its references begin at itself. Any: JSON Schema."""
    return {"$id": f"urn:tangram:function:{function.name}:{what}", **schema} if schema else {}


def _content(content: Mapping[str, Shape], shapes: Shapes) -> dict[str, object]:
    return {media: {"schema": shapes.of(shape)} for media, shape in content.items()}


def _parameter(name: str, place: str, schema: Mapping[str, Any]) -> dict[str, object]:
    """Return one parameter. Absent is what null stands for in its type. Any: a JSON Schema."""
    shown = {key: value for key, value in schema.items() if key not in ("title", "description")}
    if "anyOf" in shown:
        (arm,) = [arm for arm in shown.pop("anyOf") if arm != {"type": "null"}]
        del shown["default"]
        shown |= arm
    return {"name": name, "in": place, "required": False, "description": schema["description"], "schema": shown}


def _arms(shape: Shape) -> tuple[Shape, ...]:
    return get_args(shape) if isinstance(shape, UnionType) else (shape,)
