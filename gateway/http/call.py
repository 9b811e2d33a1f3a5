"""What an HTTP request asks for: its query, its headers and its body, read as their types."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TypeVar

from msgspec import Struct
from starlette.requests import Request as HttpRequest

from gateway import wire
from gateway.invocations.invocation import InvocationRequest
from gateway.invocations.record import Mode
from manager.errors import InvalidInput
from tangram.types import BatchItem, CallHeaders

T = TypeVar("T", bound=Struct)


def read_query(request: HttpRequest, kind: type[T]) -> T:
    """Return the query parameters; raises InvalidInput."""
    given = dict(request.query_params) if request.scope["query_string"] else {}
    return _without_null(wire.read(given, kind), given)


def read_headers(request: HttpRequest, kind: type[T]) -> T:
    """Return the headers that the type names; raises InvalidInput."""
    names = _header_names(kind)
    found = {
        names[name]: value.decode("latin-1") for name, value in reversed(request.scope["headers"]) if name in names
    }
    return _without_null(wire.read(found, kind), found)


def _without_null(read: T, given: Mapping[str, str]) -> T:
    """Return what was read of texts; raises InvalidInput for one that says null, as if it had not been given."""
    assert isinstance(read, Struct)
    for name, field in zip(read.__struct_encode_fields__, read.__struct_fields__, strict=True):
        if name in given and getattr(read, field) is None:
            raise InvalidInput(f"{name}: {given[name]!r} is no value; leave it out", detail={"path": name})
    return read


@cache
def _header_names(kind: type[Struct]) -> Mapping[bytes, str]:
    return {name.lower().encode(): name for name in kind.__struct_encode_fields__}


def read_call(headers: CallHeaders, function: str, body: bytes, mode: Mode) -> InvocationRequest:
    """Return the request of one invocation; raises InvalidInput for anything odd."""
    return InvocationRequest(
        function=wire.name(function, "function"),
        input=wire.loads_object(body),
        body=body or b"{}",
        mode=mode,
        task=headers.task or "default",
        step=headers.step,
        trajectory=headers.trajectory,
        living=headers.expect == "living",
        parent=headers.parent,
        timeout_s=_seconds(headers.timeout, "X-Timeout"),
        max_age_s=_seconds(headers.max_age, "X-Max-Age"),
        key=headers.key,
        callback_url=headers.callback_url,
        detached=headers.on_disconnect == "continue",
        **wire.trace(headers.traceparent, headers.tracestate),
    )


def read_item(call: object, path: str) -> InvocationRequest:
    """Return the request of one call of a batch; raises InvalidInput. An empty task is the default one."""
    if isinstance(call, dict) and call.get("task") == "":
        call = {**call, "task": None}
    item = wire.read(call, BatchItem, path)
    return InvocationRequest(
        function=wire.name(item.function, f"{path}.function"),
        input=item.input,
        body=wire.dumps(item.input),
        mode=Mode.ASYNC,
        task=wire.name(item.task or "default", f"{path}.task"),
        step=item.step,
        trajectory=None if item.trajectory is None else wire.name(item.trajectory, f"{path}.trajectory"),
        timeout_s=_seconds(item.timeout, f"{path}.timeout"),
        max_age_s=_seconds(item.max_age, f"{path}.max_age"),
        key=item.key,
    )


def read_wait_s(text: str | None, limit_s: float) -> float | None:
    """Return the seconds of ``?wait=30s``; None where it is absent."""
    return None if text is None else min(wire.duration_s(text, "wait"), limit_s)


def _seconds(text: str | None, what: str) -> float | None:
    return None if text is None else wire.duration_s(text, what)
