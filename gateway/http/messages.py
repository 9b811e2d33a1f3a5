"""Messages: bodies read within their bound, JSON and problem responses, and callers that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway import wire
from gateway.errors import TooSlow, face, problem, reason_face, retry_after
from gateway.invocations.admission import HeldInputs
from gateway.invocations.invocation import LiveInvocation
from gateway.invocations.invocations import Invocations
from gateway.invocations.record import Record
from gateway.services import Services
from manager.errors import CodedError, TooLarge
from tangram.types import REPLAY, Problem

JSON = "application/json"
PROBLEM = "application/problem+json"
#: Seconds for which a caller is taken to be there without a look.
UNWATCHED_S = 0.1


async def read_body(request: Request, services: Services, limit_bytes: int | None = None) -> bytes:
    """The whole body, within the configured bounds (``limit_bytes`` in place of that of an input).

    Raises TooLarge before more is held, CapacityExceeded while all that arrives is too much, TooSlow.
    """
    timeout_s = services.bounds.body_timeout_s
    reading = _Reading(services.held)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_body(request, limit_bytes or services.bounds.body_limit_bytes, reading)
    except TimeoutError:
        raise TooSlow(slow_body(timeout_s), component="http") from None
    finally:
        services.held.give(reading.size_bytes)


async def body_chunks(
    request: Request, services: Services, limit_bytes: int, setting: str = "server.file_limit"
) -> AsyncIterator[bytes]:
    """Yield the body as it arrives, within its bounds and without holding it; raises TooLarge and TooSlow.

    ``setting`` is the key of the bound, for who has to raise it.
    """
    timeout_s = services.bounds.body_timeout_s
    deadline_s, size_bytes = asyncio.get_running_loop().time() + timeout_s, 0
    while True:
        try:
            async with asyncio.timeout_at(deadline_s):
                message = await request.receive()
        except TimeoutError:
            raise TooSlow(slow_body(timeout_s), component="http") from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect()
        chunk: bytes = message.get("body", b"")
        size_bytes += len(chunk)
        if size_bytes > limit_bytes:
            raise too_large(limit_bytes, setting)
        if chunk:
            yield chunk
        if not message.get("more_body", False):
            return


@dataclass(slots=True)
class _Reading:
    """What has arrived of a body."""

    held: HeldInputs
    size_bytes: int = 0

    def add(self, chunk: bytes) -> None:
        self.held.check(len(chunk))
        self.held.take(len(chunk))
        self.size_bytes += len(chunk)


async def _read_body(request: Request, limit_bytes: int, reading: _Reading) -> bytes:
    length = request.headers.get("content-length")
    if length is not None and length.isdigit() and int(length) > limit_bytes:
        raise too_large(limit_bytes)
    chunks: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect()
        chunk: bytes = message.get("body", b"")
        reading.add(chunk)
        if reading.size_bytes > limit_bytes:
            raise too_large(limit_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def too_large(limit_bytes: int, setting: str = "server.body_limit") -> TooLarge:
    """Return what is told of a body that is larger than a setting allows."""
    return TooLarge(f"the body is larger than {limit_bytes} bytes ({setting})", component="http")


def slow_body(timeout_s: float) -> str:
    """Return what is told of a body that does not arrive in time."""
    return f"the body took longer than {timeout_s:g} s to arrive (server.body_timeout)"


def respond(value: Struct, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a wire type as a response."""
    return Response(wire.encode(value), status, headers, JSON)


def problem_response(error: CodedError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the problem body of a refused request."""
    shown = dict(headers or {})
    if error.retry_after_s is not None:
        shown["Retry-After"] = retry_after(error.retry_after_s)
    if error.invocation_id is not None:
        shown["X-Invocation-Id"] = error.invocation_id
    if face(error).http == 401:
        shown["WWW-Authenticate"] = "Bearer"
    return Response(wire.encode(problem(error)), face(error).http, shown, PROBLEM)


def record_headers(record: Record) -> dict[str, str]:
    """What every response about one invocation carries; the three parts of the ACT in milliseconds."""
    return {
        "X-Invocation-Id": record.id,
        "X-Queue-Ms": _milliseconds(record.queue_s),
        "X-Overhead-Ms": _milliseconds(record.overhead_s),
        "X-Execution-Ms": _milliseconds(record.execution_s),
    }


def record_response(record: Record, status: int = 200, *, replayed: bool = False) -> Response:
    """The record as it stands."""
    return respond(record.as_wire(), status, record_headers(record) | replay_headers(replayed))


def replay_headers(replayed: bool) -> dict[str, str]:
    """What says that a call with a known key ran nothing, and this is the answer of the first one."""
    return {REPLAY: "true"} if replayed else {}


def result_response(record: Record, *, replayed: bool = False) -> Response:
    """The end of a synchronous invocation: its record, or a problem body with the record in it.

    A failure of the user's own work is an answer: 200 with ``X-Function-Error``.
    """
    shown = reason_face(record.reason)
    headers = record_headers(record) | replay_headers(replayed)
    if record.reason is not None:
        headers["X-Function-Error"] = record.reason.value
    if shown.http == 200:
        return respond(record.as_wire(), 200, headers)
    if record.retry_after_s is not None:
        headers["Retry-After"] = retry_after(record.retry_after_s)
    body = Problem(
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
    return Response(wire.encode(body), shown.http, headers, PROBLEM)


async def attend(request: Request, invocations: Invocations, invocation: LiveInvocation, wait_s: float | None) -> bool:
    """Wait for the end while the caller is there; whether it has ended. A caller that goes leaves it.

    Who goes within `UNWATCHED_S` is found gone after it: most calls have ended by then, and need no watcher.
    """
    if invocation.ended.is_set():
        return True
    loop, watchers = asyncio.get_running_loop(), list[asyncio.Task[None]]()

    def begin() -> None:
        watchers.append(loop.create_task(watch(request, invocations, invocation)))

    timer = loop.call_later(UNWATCHED_S, begin)
    try:
        return await invocations.wait(invocation, wait_s)
    finally:
        timer.cancel()
        for watcher in watchers:
            watcher.cancel()


async def watch(request: Request, invocations: Invocations, invocation: LiveInvocation) -> None:
    """Leave the invocation when the connection closes."""
    await disconnected(request)
    invocations.leave(invocation)


async def disconnected(request: Request) -> None:
    """Wait until the connection closes; the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _milliseconds(seconds: float | None) -> str:
    return "0" if seconds is None else f"{seconds * 1000:.3f}"
