"""The Connect protocol over HTTP with JSON, as far as envd speaks it: messages, streams and errors."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import serialization
from gateway.api import JSON
from gateway.errors import REASON_STATUSES, FaultKind
from gateway.facades.facade import CallFailed, Fault, fault_of
from gateway.http.messages import disconnected, while_connected
from gateway.http.streaming import GIVE_UP_STALLS
from manager.errors import ActionFailed, CodedError, InvalidInput, TooLarge
from runtimes.chores import end_chores

COMPONENT = "e2b"
STREAM = "application/connect+json"
#: Before each message of a stream: its flags, and how many bytes it has.
_PREFIX = struct.Struct(">BI")
#: The flags of the last message.
END = 2
#: What a fault is to a client: its code, and the status of an answer that is no stream.
CODES: Mapping[FaultKind, tuple[str, int]] = {
    FaultKind.INPUT: ("invalid_argument", 400),
    FaultKind.UNAUTHORIZED: ("unauthenticated", 401),
    FaultKind.FORBIDDEN: ("permission_denied", 403),
    FaultKind.NOT_FOUND: ("not_found", 404),
    FaultKind.METHOD: ("unimplemented", 501),
    FaultKind.CONFLICT: ("failed_precondition", 400),
    FaultKind.TOO_LARGE: ("resource_exhausted", 429),
    FaultKind.UNSUPPORTED: ("unimplemented", 501),
    FaultKind.BUSY: ("resource_exhausted", 429),
    FaultKind.TIMEOUT: ("deadline_exceeded", 504),
    FaultKind.LOST: ("unavailable", 503),
    FaultKind.FAILED: ("unknown", 500),
    FaultKind.INTERNAL: ("internal", 500),
}


class RpcFailed(Exception):
    """A call that ends with a code of Connect's own."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


#: What a call may end with.
FAILURES = (RpcFailed, CodedError, CallFailed)


def as_failed(error: Exception) -> RpcFailed:
    """Return one of `FAILURES` with its code."""
    if isinstance(error, RpcFailed):
        return error
    if isinstance(error, ActionFailed):
        kind, message = REASON_STATUSES[error.reason].fault, error.message
    else:
        fault: Fault = error.fault if isinstance(error, CallFailed) else fault_of(error)  # type: ignore[arg-type]  # FAILURES
        kind, message = fault.kind, fault.message
    code, status = CODES[kind]
    return RpcFailed(code, message, status)


def error_response(error: RpcFailed) -> Response:
    """Return the answer of a call that is no stream."""
    body = serialization.dumps({"code": error.code, "message": str(error)})
    return Response(body, error.status, media_type=JSON)


def enveloped(message: object, flags: int = 0) -> bytes:
    """Return a message as a stream carries it."""
    data = serialization.dumps(message)
    return _PREFIX.pack(flags, len(data)) + data


async def messages(chunks: AsyncIterator[bytes], limit_bytes: int) -> AsyncIterator[bytes]:
    """Yield the messages of a stream as they arrive, holding one at most.

    Raises InvalidInput for one that is compressed or breaks off, TooLarge for one that says it is longer than
    ``limit_bytes``, before more of it is read.
    """
    held = bytearray()
    async for chunk in chunks:
        held += chunk
        while len(held) >= _PREFIX.size:
            flags, size_bytes = _PREFIX.unpack_from(held)
            if flags:
                raise InvalidInput(f"a message of the stream has flags {flags}: send it as it is", component=COMPONENT)
            if size_bytes > limit_bytes:
                message = f"a message of {size_bytes} bytes is longer than {limit_bytes} bytes (server.body_limit)"
                raise TooLarge(message, component=COMPONENT)
            end = _PREFIX.size + size_bytes
            if len(held) < end:
                break
            yield bytes(held[_PREFIX.size : end])
            del held[:end]
    if held:
        raise InvalidInput(f"the stream breaks off within a message: {len(held)} bytes are left", component=COMPONENT)


Emit = Callable[[object], Awaitable[None]]


class EventStream(Response):
    """An ASGI response of messages that are sent as they come, with how it ended as the last one.

    A caller that takes nothing for `GIVE_UP_STALLS` times ``stall_s`` is dropped; so is nobody whose silence is the
    server's: after ``keepalive_s`` without a message, once there was one, ``keepalive`` is sent.
    """

    def __init__(
        self, produce: Callable[[Emit], Awaitable[None]], stall_s: float, keepalive_s: float, keepalive: object
    ) -> None:
        super().__init__(media_type=STREAM)
        self._produce = produce
        self._stall_s = stall_s
        self._keepalive_s = keepalive_s
        self._keepalive = keepalive
        self._turn = asyncio.Lock()
        self._sent_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(self._send_all(send), disconnected(receive))
        except (TimeoutError, ClientDisconnect):
            return

    async def _send_all(self, send: Send) -> None:
        head = [(b"content-type", STREAM.encode()), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": head})

        async def emit(message: object, flags: int = 0) -> None:
            async with self._turn, asyncio.timeout(GIVE_UP_STALLS * self._stall_s):
                await send({"type": "http.response.body", "body": enveloped(message, flags), "more_body": True})
            self._sent_s = asyncio.get_running_loop().time()

        end: dict[str, object] = {}
        beating = asyncio.get_running_loop().create_task(self._beat(emit))
        try:
            await self._produce(emit)
        except FAILURES as error:
            failed = as_failed(error)
            end = {"error": {"code": failed.code, "message": str(failed)}}
        finally:
            await end_chores(beating)
        await emit(end, END)
        await send({"type": "http.response.body", "body": b""})

    async def _beat(self, emit: Emit) -> None:
        now = asyncio.get_running_loop().time
        while True:
            left_s = self._keepalive_s if self._sent_s is None else self._sent_s + self._keepalive_s - now()
            if left_s > 0:
                await asyncio.sleep(left_s)
            elif self._sent_s is not None:
                await emit(self._keepalive)
