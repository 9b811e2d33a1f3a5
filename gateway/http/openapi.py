"""The OpenAPI 3.1 document, made from the table of operations."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from gateway.errors import FACES, REASON_FACES
from gateway.http.messages import PROBLEM
from gateway.http.operation import NAME, TEXT, Operation, Schema, ref
from gateway.invocations.logs import DROPPED, EXPIRED, STREAMS, TRUNCATED
from gateway.invocations.record import Mode
from manager.errors import Reason
from manager.outcome import State

NUMBER: Schema = {"type": ["number", "null"]}
MAYBE: Schema = {"type": ["string", "null"]}
INSTANT: Schema = {"type": ["string", "null"], "format": "date-time"}
COUNTS: Schema = {"type": "object", "additionalProperties": {"type": "number"}}
#: Statuses that every operation may answer with.
ALWAYS = (401, 500, 503)


def document(operations: Iterable[Operation]) -> dict[str, object]:
    """The whole document."""
    paths: dict[str, dict[str, object]] = {}
    for operation in operations:
        path = operation.path.replace(":path}", "}")
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation)
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
            "schemas": schemas(),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}, {}],
    }


def _operation(operation: Operation) -> dict[str, object]:
    answers: dict[str, object] = {}
    for status, answer in operation.answers.items():
        content = {media: {"schema": dict(schema)} for media, schema in answer.content.items()}
        answers[str(status)] = {
            "description": answer.about,
            **({"content": content} if content else {}),
            **({"links": {link.operation: link.as_json() for link in answer.links}} if answer.links else {}),
        }
    for status in sorted({*operation.problems, *(() if operation.open else ALWAYS)}):
        problem = {"description": "A problem", "content": {PROBLEM: {"schema": dict(ref("Problem"))}}}
        answers.setdefault(str(status), problem)
    body: dict[str, object] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "tags": [operation.tag],
        "parameters": [parameter.as_json() for parameter in operation.parameters],
        "responses": answers,
    }
    if operation.body:
        content = {media: {"schema": dict(schema)} for media, schema in operation.body.items()}
        body["requestBody"] = {"required": operation.body_required, "content": content}
    if operation.open:
        body["security"] = []
    return body


def schemas() -> dict[str, Schema]:
    """The components by name."""
    reasons = [None, *(reason.value for reason in Reason)]
    states = [state.value for state in State]
    attempt: dict[str, Schema] = {
        "attempt": {"type": "integer"},
        "state": {"enum": states},
        "reason": {"enum": reasons},
        "message": TEXT,
        "ended_at": INSTANT,
        "queue_ms": NUMBER,
        "overhead_ms": NUMBER,
        "execution_ms": NUMBER,
    }
    invocation: dict[str, Schema] = {
        "id": NAME,
        "function": TEXT,
        "revision": TEXT,
        "task": TEXT,
        "trajectory": MAYBE,
        "parent": MAYBE,
        "mode": {"enum": [mode.value for mode in Mode]},
        "state": {"enum": states},
        "reason": {"enum": reasons},
        "message": TEXT,
        "component": TEXT,
        "detail": {"type": "object"},
        "retry_after_s": NUMBER,
        "accepted_at": INSTANT,
        "started_at": INSTANT,
        "ended_at": INSTANT,
        "queue_ms": NUMBER,
        "overhead_ms": NUMBER,
        "execution_ms": NUMBER,
        "act_ms": NUMBER,
        "node": MAYBE,
        "units": COUNTS,
        "usage": COUNTS,
        "attempt": {"type": "integer"},
        "attempts": {"type": "array", "items": _object(attempt)},
        "dead": {"type": "boolean"},
        "callback": {"enum": [None, "pending", "delivered", "failed"]},
    }
    payload: dict[str, Schema] = {
        "input": {"description": "What was sent"},
        "result": {"description": "The function's result, or null"},
    }
    return {
        "Invocation": {**_object(invocation), "properties": {**invocation, **payload}},
        **_pages(),
        "LogRecord": {
            "type": "object",
            "required": ["stream"],
            "properties": {
                "offset": {"type": "integer", "description": "offset + 1 is where to resume"},
                "time": INSTANT,
                "stream": {
                    "enum": [*STREAMS, TRUNCATED, DROPPED, EXPIRED, "heartbeat", "eof", "accepted", "result"],
                },
                "data": TEXT,
            },
        },
        "Trajectory": {"type": "object"},
        "Function": {"type": "object", "required": ["name", "runtime"], "properties": {"name": TEXT, "runtime": TEXT}},
        "Problem": _problem(),
    }


def _pages() -> dict[str, Schema]:
    invocations: Schema = {"type": "array", "items": ref("Invocation")}
    queue: Schema = {"type": "array", "items": {"type": "object"}}
    trajectories: Schema = {"type": "array", "items": ref("Trajectory")}
    return {
        "TrajectoryPage": _object({"trajectories": trajectories, "next_cursor": MAYBE}),
        "InvocationPage": _object({"invocations": invocations, "next_cursor": MAYBE}),
        "QueuePage": _object({"waiting": {"type": "integer"}, "queue": queue, "next_cursor": MAYBE}),
    }


def _problem() -> Schema:
    codes = [*FACES, *(reason.value for reason in REASON_FACES)]
    required: dict[str, Schema] = {
        "type": {"type": "string"},
        "title": TEXT,
        "status": {"type": "integer"},
        "code": {"enum": list(dict.fromkeys(codes))},
        "detail": TEXT,
        "component": TEXT,
    }
    optional: dict[str, Schema] = {
        "invocation_id": NAME,
        "retry_after_s": NUMBER,
        "errors": {"type": "object"},
        "invocation": ref("Invocation"),
    }
    return {**_object(required), "properties": {**required, **optional}}


def _object(properties: dict[str, Schema]) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


def _version() -> str:
    try:
        return version("tangram-gateway")
    except PackageNotFoundError:
        return "0"
