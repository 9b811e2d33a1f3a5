"""Read HTTP requests and write their responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import cache
from http import HTTPStatus
from typing import Any, TypeVar

from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from gateway import serialization
from gateway.api import JSON, Api, bounded_chunks
from gateway.errors import REASON_STATUSES, error_status, problem, retry_after
from gateway.invocations.invocations import InvocationRequest, LiveInvocation
from gateway.invocations.record import Mode, Record
from gateway.trajectory_records import ConnectionPeer
from manager.errors import CodedError, InvalidInput, TooLarge
from runtimes.chores import end_chores
from tangram.types import REPLAY, BatchItem, CallHeaders, Problem

T = TypeVar("T", bound=Struct)
R = TypeVar("R")
#: Where the scope of a request has, below ``state``, the other end of its connection.
PEER = "tangram.peer"
#: And what has a request hold it, as `gateway.tls.Connections.asked` does.
HELD = "tangram.held"


def read_query(request: Request, kind: type[T]) -> T:
    """Return the query parameters; raises InvalidInput."""
    return _read_texts(dict(request.query_params), kind) if request.scope["query_string"] else _without_query(kind)


@cache
def _without_query(kind: type[T]) -> T:
    return serialization.read({}, kind)


def read_headers(request: Request, kind: type[T]) -> T:
    """Return the headers that the type names; raises InvalidInput."""
    names = _header_names(kind)
    result = {
        names[name]: value.decode("latin-1") for name, value in reversed(request.scope["headers"]) if name in names
    }
    return _read_texts(result, kind)


def _read_texts(fields: Mapping[str, str], kind: type[T]) -> T:
    """Return texts as a type; raises InvalidInput, also for one that says null, as if it had not been given."""
    read = serialization.read(fields, kind)
    for name, field in zip(read.__struct_encode_fields__, read.__struct_fields__, strict=True):
        if name in fields and getattr(read, field) is None:
            raise InvalidInput(f"{name}: {fields[name]!r} is no value; leave it out", detail={"path": name})
    return read


@cache
def _header_names(kind: type[Struct]) -> Mapping[bytes, str]:
    return {name.lower().encode(): name for name in kind.__struct_encode_fields__}


def read_call(headers: CallHeaders, function: str, body: bytes, mode: Mode) -> InvocationRequest:
    """Return the request of one invocation of a function; raises InvalidInput for anything odd."""
    return InvocationRequest(
        function=function,
        input=serialization.loads_object(body),
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
        **serialization.trace(headers.traceparent, headers.tracestate),
    )


def read_item(call: object, path: str) -> InvocationRequest:
    """Return the request of one call of a batch; raises InvalidInput. An empty task is the default one."""
    if isinstance(call, dict) and call.get("task") == "":
        call = {**call, "task": None}
    item = serialization.read(call, BatchItem, path)
    return InvocationRequest(
        function=serialization.name(item.function, f"{path}.function"),
        input=item.input,
        body=serialization.dumps(item.input),
        mode=Mode.ASYNC,
        task=serialization.name(item.task or "default", f"{path}.task"),
        step=item.step,
        trajectory=None if item.trajectory is None else serialization.name(item.trajectory, f"{path}.trajectory"),
        timeout_s=_seconds(item.timeout, f"{path}.timeout"),
        max_age_s=_seconds(item.max_age, f"{path}.max_age"),
        key=item.key,
    )


def _seconds(text: str | None, what: str) -> float | None:
    return None if text is None else serialization.duration_s(text, what)


PROBLEM = "application/problem+json"
#: Reason phrases of status lines: there are clients that read no line without one.
PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
#: Seconds for which a caller is taken to be there without a look.
UNWATCHED_S = 0.1


async def read_body(request: Request, api: Api) -> bytes:
    """The whole body of an input, within the configured bounds.

    Raises TooLarge before more is held, CapacityExceeded while all that arrives is too much, TooSlow.
    """
    limit_bytes, held = api.server.body_limit_bytes, api.held
    length = request.headers.get("content-length")
    if length is not None and length.isdigit() and int(length) > limit_bytes:
        raise TooLarge(f"the body is larger than {limit_bytes} bytes (server.body_limit)", component="http")
    chunks, size_bytes = list[bytes](), 0
    try:
        async for chunk in body_chunks(request, api, limit_bytes, "server.body_limit"):
            held.check(len(chunk))
            held.take(len(chunk))
            size_bytes += len(chunk)
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)
    finally:
        held.give(size_bytes)


def body_chunks(
    request: Request, api: Api, limit_bytes: int, setting: str = "server.file_limit"
) -> AsyncIterator[bytes]:
    """Yield the body as it arrives, within its bounds and without holding it; raises TooLarge and TooSlow."""
    return bounded_chunks(request.stream(), limit_bytes, setting, api.server.body_timeout_s, "http")


def respond(value: Struct, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a wire type as a response."""
    return Response(serialization.encode(value), status, headers, JSON)


def problem_response(error: CodedError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the problem body of a refused request."""
    shown = dict(headers or {})
    if error.retry_after_s is not None:
        shown["Retry-After"] = retry_after(error.retry_after_s)
    if error.invocation_id is not None:
        shown["X-Invocation-Id"] = error.invocation_id
    if error_status(error).http == 401:
        shown["WWW-Authenticate"] = "Bearer"
    return Response(serialization.encode(problem(error)), error_status(error).http, shown, PROBLEM)


def record_headers(record: Record) -> dict[str, str]:
    """What every response about one invocation carries; the three parts of the ACT in milliseconds."""
    parts = {"Queue": record.queue_s, "Overhead": record.overhead_s, "Execution": record.execution_s}
    times = {f"X-{part}-Ms": "0" if part_s is None else f"{part_s * 1000:.3f}" for part, part_s in parts.items()}
    return {"X-Invocation-Id": record.id, **times}


def record_response(record: Record, status: int = 200, *, replayed: bool = False) -> Response:
    """The record as it stands."""
    return respond(record.as_wire(), status, record_headers(record) | replay_headers(replayed))


def replay_headers(replayed: bool) -> dict[str, str]:
    """What says that a call with a known key ran nothing, and this is the answer of the first one."""
    return {REPLAY: "true"} if replayed else {}


def result_of(record: Record) -> tuple[int, Struct]:
    """Status and body of the end of a synchronous invocation: its record, or a problem with the record in it.

    A failure of the user's own work is an answer: 200.
    """
    shown = None if record.reason is None else REASON_STATUSES[record.reason]
    if shown is None or shown.http == 200:
        return 200, record.as_wire()
    return shown.http, Problem(
        type=f"urn:tangram:reason:{record.reason}",
        title=shown.title,
        status=shown.http,
        code=str(record.reason),
        detail=record.message,
        component=record.component,
        invocation_id=record.id,
        retry_after_s=record.retry_after_s,
        invocation=record.as_wire(),
    )


def result_response(record: Record, *, replayed: bool = False) -> Response:
    """The end of a synchronous invocation; of a failure of the user's own work ``X-Function-Error`` tells."""
    status, body = result_of(record)
    headers = record_headers(record) | replay_headers(replayed)
    if record.reason is not None:
        headers["X-Function-Error"] = record.reason.value
    if status == 200:
        return respond(body, 200, headers)
    if record.retry_after_s is not None:
        headers["Retry-After"] = retry_after(record.retry_after_s)
    return Response(serialization.encode(body), status, headers, PROBLEM)


async def attend(request: Request, api: Api, invocation: LiveInvocation, wait_s: float | None) -> bool:
    """Wait for the end while the caller is there; whether it has ended. A caller that goes leaves it.

    Who goes within `UNWATCHED_S` is found gone after it: most calls have ended by then, and need no watcher.
    """
    if invocation.ended.is_set():
        return True
    loop, watchers = asyncio.get_running_loop(), list[asyncio.Task[None]]()

    async def watch() -> None:
        await disconnected(request.receive)
        api.invocations.leave(invocation)

    timer = loop.call_later(UNWATCHED_S, lambda: watchers.append(loop.create_task(watch())))
    try:
        return await invocation.has_ended(wait_s)
    finally:
        timer.cancel()
        for watcher in watchers:
            watcher.cancel()


async def while_connected(
    work: Coroutine[Any, Any, R],
    gone: Coroutine[Any, Any, None],
    undo: Callable[[R], Awaitable[object]] | None = None,
) -> R:
    """Return what the work returns; raises ClientDisconnect, the work cancelled, if ``gone`` returns before.

    What it returns at that very moment is undone, if ``undo`` says how.
    """
    loop = asyncio.get_running_loop()
    working, leaving = loop.create_task(work), loop.create_task(gone)
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done() and (undo is None or not leaving.done()):
            return working.result()
        working.cancel()
        (made,) = await asyncio.gather(working, return_exceptions=True)
        if undo is not None and not isinstance(made, BaseException):
            with suppress(CodedError):
                await undo(made)
        raise ClientDisconnect()
    finally:
        await end_chores(working, leaving)


def peer_of(scope: Scope) -> ConnectionPeer | None:
    """Return the other end of a request's connection; None where it is not told."""
    found: ConnectionPeer | None = scope.get("state", {}).get(PEER)
    return found


async def disconnected(receive: Receive) -> None:
    """Wait until the connection closes; the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
