"""What each runtime takes, as JSON Schema: the input of a function that declares none of its own."""

from __future__ import annotations

from collections.abc import Mapping

from manager.function import FunctionSpec, ModelAction, RuntimeKind
from runtimes.api.template import RequestTemplate

_TEXT: Mapping[str, object] = {"type": "string"}
_TEXTS: Mapping[str, object] = {"type": "array", "items": _TEXT}
_ENVIRONMENT: Mapping[str, object] = {"type": "object", "additionalProperties": _TEXT}

EXEC: Mapping[str, object] = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "shell text"},
        "argv": {"type": "array", "items": _TEXT, "minItems": 1},
        "cwd": _TEXT,
        "env": _ENVIRONMENT,
        "stdin": _TEXT,
        "user": _TEXT,
    },
    "oneOf": [{"required": ["command"]}, {"required": ["argv"]}],
    "additionalProperties": False,
}

_PYTEST: Mapping[str, object] = {
    "targets": _TEXTS,
    "fail_to_pass": _TEXTS,
    "pass_to_pass": _TEXTS,
    "args": _TEXTS,
    "cwd": _TEXT,
    "env": _ENVIRONMENT,
    "suite": _TEXT,
    "workers": {"type": "integer", "minimum": 1},
    "test_timeout_s": {"type": "number", "exclusiveMinimum": 0},
}

_SEQUENCES: Mapping[str, object] = {
    "texts": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    "token_ids": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        "minItems": 1,
    },
    "messages": {"type": "array", "items": {"type": ["object", "array"]}, "minItems": 1},
}
_SAMPLING: Mapping[str, object] = {
    "max_new_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0, "maximum": 100},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "seed": {"type": "integer", "minimum": 0},
}


def input_schema(function: FunctionSpec) -> Mapping[str, object] | None:
    """The function's own schema, else what its runtime takes; None where any object will do."""
    if function.input_schema is not None:
        return function.input_schema
    match function.runtime:
        case RuntimeKind.EXEC:
            return EXEC
        case RuntimeKind.PYTEST:
            return {"type": "object", "properties": {**_learned(function), **_PYTEST}, "additionalProperties": False}
        case RuntimeKind.MODEL:
            return _model(function)
        case RuntimeKind.API:
            return _api(function)
        case RuntimeKind.HANDLER:
            return None


def _learned(function: FunctionSpec) -> Mapping[str, object]:
    """The field that keys the learning may be any value."""
    return {function.duration.key: True} if function.duration.key else {}


def _api(function: FunctionSpec) -> Mapping[str, object]:
    """Exactly the fields of the request template."""
    assert function.request is not None, f"{function.name} has no request section"
    fields = sorted(RequestTemplate(function.request).field_names())
    return {
        "type": "object",
        "properties": {**_learned(function), **dict.fromkeys(fields, True)},
        "required": fields,
        "additionalProperties": False,
    }


def _model(function: FunctionSpec) -> Mapping[str, object]:
    generates = function.model is not None and function.model.action is ModelAction.GENERATE
    return {
        "type": "object",
        "properties": {**_SEQUENCES, **(_SAMPLING if generates else {})},
        "oneOf": [{"required": [kind]} for kind in _SEQUENCES],
        "additionalProperties": False,
    }
