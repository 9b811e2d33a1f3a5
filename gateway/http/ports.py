"""The listener of ports: HTTP and WebSockets to servers in sandboxes, under an origin that is not the gateway's own.

``/p/CAPABILITY/...`` is the server's ``/...``; so is ``/...`` where the first label of the host's name is the
capability, for browsers: each port then has an origin of its own. ``/t/CAPABILITY`` is a WebSocket whose binary
messages are the bytes of a TCP connection.

Neither side is trusted. What a caller sends is read by Hypercorn and written anew by h11, one connection for each
request, so that both ends of it are where the caller's are; what a server answers is read by h11 or wsproto, and what
it says to a browser about other origins of this host is left out.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Coroutine, Iterable
from contextlib import closing, suppress
from http import HTTPStatus
from typing import NoReturn

import h11
import structlog
from starlette.types import Message, Receive, Scope, Send
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from gateway.auth import Guard
from gateway.errors import MethodNotAllowed, PortFailed
from gateway.http.messages import problem_response
from gateway.ports import COMPONENT, SECRET_BYTES, PortConnection, PortGrant, TrajectoryPorts
from manager.errors import CodedError, NotFound, TooLarge, Unauthorized, exhaustion
from runtimes.chores import end_chores

logger = structlog.get_logger("gateway.ports")

Headers = Iterable[tuple[bytes, bytes]]

CAPABILITY = re.compile(rb"[0-9a-f]{%d}" % (2 * SECRET_BYTES))
HEAD_MAX_BYTES = 64 * 2**10
#: Bytes of a message that is passed on of what a server refuses a WebSocket with.
REJECTION_MAX_BYTES = 64 * 2**10
#: Of one connection alone (RFC 9110, 7.6.1), and what proxies have made of it.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer transfer-encoding "
    b"upgrade http2-settings".split()
)
#: What the server has no business to know: how we are reached holds the capability.
UNTOLD = frozenset(b"host expect referer forwarded x-forwarded-for x-forwarded-host x-forwarded-proto".split())
#: What an answer would say of this host as a whole, or of paths beside its own; and the date, which the listener tells.
UNHEARD = frozenset(
    b"alt-svc strict-transport-security clear-site-data service-worker-allowed public-key-pins date".split()
)
#: How the cookies of the gateway's page begin (`gateway.http.app.cookie_name`).
OWN_COOKIES = b"tangram-"
RAW_OPEN_S = 1.0
GONE, TOO_BIG, BROKEN = 1001, 1009, 1011


class PortApp:
    """What answers at the listener; ASGI."""

    def __init__(self, ports: TrajectoryPorts, guard: Guard, message_max_bytes: int) -> None:
        """``guard`` knows the gateway's own tokens; ``message_max_bytes`` bounds one message of a WebSocket."""
        self._ports = ports
        self._guard = guard
        self._message_max_bytes = message_max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(send)
        try:
            request = self._read(scope)
            if scope["type"] == "websocket":
                await receive()  # that it connects
            with closing(self._ports.connect(request.grant)) as connection:
                if scope["type"] == "http":
                    await HttpExchange(self._ports, request, connection, answer).run(scope, receive)
                elif request.raw:
                    await self._raw(connection, receive, answer)
                else:
                    await WebSocketExchange(self._ports, request, connection, answer, self._message_max_bytes).run(
                        scope.get("subprotocols", ()), receive
                    )
        except Exception as error:  # noqa: BLE001 (all is told, or the connection ends)
            await self._refuse(error, scope, receive, answer)

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, answer: _Answer) -> None:
        coded = exhaustion(error, COMPONENT) or error
        if not isinstance(coded, CodedError):
            logger.error("a request to a port failed", exc_info=coded)
            coded = CodedError("a fault of the gateway: its log tells more", component=COMPONENT)
        if not answer.begun:
            await problem_response(coded)(scope, receive, answer)
        elif scope["type"] == "websocket":
            await answer.close(BROKEN, coded.message[:100])
        # Else an answer that was begun stays without its end: Hypercorn cuts it off.

    def _read(self, scope: Scope) -> PortRequest:
        """Return what is asked of whom; raises NotFound, MethodNotAllowed."""
        if scope["type"] == "http" and scope["method"] in ("CONNECT", "TRACE"):
            raise MethodNotAllowed(f"{scope['method']} is not passed on", component=COMPONENT)
        path, headers = bytes(scope.get("raw_path") or b""), list(scope["headers"])
        host = next((value for name, value in headers if name == b"host"), b"").lower()
        label = host.partition(b".")[0]
        raw, base = False, b""
        if CAPABILITY.fullmatch(label):
            capability, rest = label, path
        else:
            first, kind, capability, rest = [*path.split(b"/", 3), b"", b"", b"", b""][:4]
            raw = kind == b"t" and scope["type"] == "websocket"
            if first or not (raw or kind == b"p") or not CAPABILITY.fullmatch(capability):
                raise NotFound("no such path; a port's is /p/CAPABILITY/", component=COMPONENT)
            rest, base = b"/" + rest, b"/p/" + capability
        if not rest.startswith(b"/") or not rest.isascii():
            raise NotFound("no such path", component=COMPONENT)
        grant = self._ports.grants.find(capability.decode())
        query = scope["query_string"]
        scheme = b"https" if scope["scheme"] in ("https", "wss") else b"http"
        return PortRequest(
            grant, self._guard, headers, target=rest + (b"?" + query if query else b""), base=base,
            origin=scheme + b"://" + host, raw=raw,
        )  # fmt: skip

    async def _raw(self, connection: PortConnection, receive: Receive, answer: _Answer) -> None:
        """Carry a TCP connection in binary messages; an empty one ends a direction."""
        settings = self._ports.settings
        connection.owe(settings.answer_s)
        await connection.opened()
        connection.owe(RAW_OPEN_S)  # there are servers that speak first
        await answer({"type": "websocket.accept", "subprotocol": None, "headers": []})

        async def upward() -> None:
            while True:
                message = await receive()
                if message["type"] == "websocket.disconnect":
                    return
                data = message.get("bytes") or b""
                if data:
                    await connection.write(data)
                    connection.owe(settings.answer_s)
                else:
                    connection.end()

        async def downward() -> None:
            while data := await connection.read():
                connection.paid()
                await answer({"type": "websocket.send", "bytes": data})
            await answer({"type": "websocket.send", "bytes": b""})
            await asyncio.Event().wait()  # the other direction may go on

        await _first_of(upward(), downward())
        await answer.close(1000, "")


class PortRequest:
    """One request, as it is passed on to its server."""

    def __init__(
        self,
        grant: PortGrant,
        guard: Guard,
        headers: list[tuple[bytes, bytes]],
        *,
        target: bytes,
        base: bytes,
        origin: bytes,
        raw: bool,
    ) -> None:
        self.grant = grant
        self.target = target
        self.host = f"localhost:{grant.port}".encode()
        self.raw = raw
        self._guard = guard
        self._headers = headers
        #: Under which path and origin the caller finds the server.
        self._base = base
        self._origin = origin

    def is_chunked(self, scope: Scope) -> bool:
        """Return whether a body is to be sent whose length nobody has said."""
        names = {name for name, _ in self._headers}
        unsaid = scope["http_version"] == "2" and b"content-length" not in names
        return b"transfer-encoding" in names or (unsaid and scope["method"] in ("POST", "PUT", "PATCH"))

    def headers(self, *, without: Collection[bytes] = ()) -> list[tuple[bytes, bytes]]:
        """Return what the server is sent: nothing of ours, nothing of one connection alone."""
        dropped = HOP_BY_HOP | UNTOLD | _named(self._headers) | frozenset(without)
        passed: list[tuple[bytes, bytes]] = []
        for name, value in self._headers:
            if name in dropped or name.startswith(b":"):
                continue
            if name == b"authorization" and self._is_ours(value):
                continue
            if name == b"cookie":
                pairs = [pair.strip() for pair in value.split(b";")]
                value = b"; ".join(pair for pair in pairs if not pair.startswith(OWN_COOKIES))
                if not value:
                    continue
            if name == b"origin" and value.lower() == self._origin:
                value = b"http://" + self.host
            passed.append((name, value))
        return passed

    def answered(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return what the caller is told of an answer's headers."""
        headers = [(name.lower(), value) for name, value in headers]
        dropped = HOP_BY_HOP | UNHEARD | _named(headers)
        told: list[tuple[bytes, bytes]] = []
        for name, value in headers:
            if name in dropped:
                continue
            if name == b"set-cookie":
                cookie = self._cookie(value)
                if cookie is None:
                    continue
                value = cookie
            elif name == b"location":
                value = self._place(value)
            told.append((name, value))
        if all(name != b"referrer-policy" for name, _ in told):
            told.append((b"referrer-policy", b"no-referrer"))  # the path is the key to the port
        return told

    def _is_ours(self, value: bytes) -> bool:
        if self._guard.tokenless:
            return False
        with suppress(Unauthorized):
            self._guard.role(value)
            return True
        return False

    def _cookie(self, value: bytes) -> bytes | None:
        """Return a cookie for this port alone; None for one that has the name of ours."""
        pair, *attributes = [part.strip() for part in value.split(b";")]
        if pair.lower().startswith(OWN_COOKIES):
            return None
        kept = [each for each in attributes if each.partition(b"=")[0].strip().lower() not in (b"domain", b"path")]
        return b"; ".join([pair, *kept, b"Path=" + (self._base or b"") + b"/"])

    def _place(self, value: bytes) -> bytes:
        """Return where a redirection leads, as the caller finds it: to the same server, or wherever it says."""
        own = b"http://" + self.host
        if value.lower().startswith(own + b"/") or value.lower() == own:
            value = value[len(own) :] or b"/"
        return self._base + value if value.startswith(b"/") and not value.startswith((b"//", b"/\\")) else value


def _named(headers: Headers) -> frozenset[bytes]:
    """Return the headers that the Connection header says are of one connection alone."""
    values = [value for name, value in headers if name == b"connection"]
    return frozenset(part.strip().lower() for value in values for part in value.split(b","))


class HttpExchange:
    """A request and its answer, over a connection of their own."""

    def __init__(
        self, ports: TrajectoryPorts, request: PortRequest, connection: PortConnection, answer: _Answer
    ) -> None:
        self._ports = ports
        self._request = request
        self._connection = connection
        self._answer = answer
        self._h11 = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_MAX_BYTES)

    async def run(self, scope: Scope, receive: Receive) -> None:
        """Pass both on until the answer ends, or the caller hangs up; raises CodedError."""
        sending = asyncio.ensure_future(self._send(scope, receive))
        answering = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                try:
                    await sending
                    return
                except PortFailed:  # a server may answer, and read no more: its answer counts
                    pass
            await answering
        finally:
            await end_chores(sending, answering)

    async def _send(self, scope: Scope, receive: Receive) -> None:
        """Pass the request on, and return when the caller hangs up."""
        request, left_bytes = self._request, self._ports.settings.body_limit_bytes
        chunked = request.is_chunked(scope)
        headers = request.headers(without=(b"content-length",) if chunked else ())
        headers += [(b"host", request.host), (b"connection", b"close")]
        if chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        await self._pass_on(h11.Request(method=scope["method"], target=request.target, headers=headers))
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body = message.get("body", b"")
            left_bytes -= len(body)
            if left_bytes < 0:
                bound = self._ports.settings.body_limit_bytes
                raise TooLarge(f"the body has more than {bound} bytes (server.ports.body_limit)", component=COMPONENT)
            if body:
                await self._pass_on(h11.Data(data=body))
            if not message.get("more_body", False):
                break
        await self._pass_on(h11.EndOfMessage())
        self._connection.owe(self._ports.settings.answer_s)
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _pass_on(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        try:
            data = self._h11.send(event)
        except h11.LocalProtocolError as error:
            raise PortFailed(f"the request cannot be passed on: {error}", component=COMPONENT) from None
        if data:
            await self._connection.write(data)

    async def _receive(self) -> None:
        connection, left_bytes = self._connection, self._ports.settings.body_limit_bytes
        await connection.opened()
        while True:
            event = await self._event()
            if isinstance(event, h11.Response):
                headers = self._request.answered(event.headers.raw_items())
                if any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers):
                    connection.paid()  # what it says is for nobody in particular
                await self._answer({"type": "http.response.start", "status": event.status_code, "headers": headers})
            elif isinstance(event, h11.Data):
                left_bytes -= len(event.data)
                if left_bytes < 0:
                    return  # cut off
                await self._answer({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
            elif isinstance(event, h11.EndOfMessage):
                connection.paid()
                await self._answer({"type": "http.response.body", "body": b"", "more_body": False})
                return
            elif isinstance(event, h11.InformationalResponse):
                if event.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
                    self._fail("switches protocols unasked")
            else:
                self._fail("hung up without an answer")

    async def _event(self) -> object:
        """Return the next event of the answer; raises PortFailed for what is none, and for silence before it."""
        while True:
            try:
                event = self._h11.next_event()
            except h11.RemoteProtocolError as error:
                self._fail(f"does not speak HTTP: {error}")
            if not isinstance(event, type) or event is h11.PAUSED:
                return event
            patience_s = None if self._answer.begun else self._ports.settings.answer_s
            try:
                async with asyncio.timeout(patience_s):
                    data = await self._connection.read()
            except TimeoutError:
                self._fail(f"gave no answer for {patience_s:g} s (server.ports.answer)")
            self._h11.receive_data(data)

    def _fail(self, why: str) -> NoReturn:
        raise PortFailed(f"the server on port {self._request.grant.port} {why}", component=COMPONENT)


class WebSocketExchange:
    """A WebSocket that ends here on both sides: messages are passed on, pings of either side are answered."""

    def __init__(
        self,
        ports: TrajectoryPorts,
        request: PortRequest,
        connection: PortConnection,
        answer: _Answer,
        message_max_bytes: int,
    ) -> None:
        self._answer_s = ports.settings.answer_s
        self._request = request
        self._connection = connection
        self._answer = answer
        self._message_max_bytes = message_max_bytes
        self._socket = WSConnection(ConnectionType.CLIENT)
        self._rejection: list[bytes] = []

    async def run(self, subprotocols: Iterable[str], receive: Receive) -> None:
        """Shake hands, then carry it to its end; raises CodedError."""
        request, connection = self._request, self._connection
        own = {b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-extensions", b"sec-websocket-protocol"}
        headers = request.headers(without=own)
        await connection.opened()
        host, target = request.host.decode("ascii"), request.target.decode("ascii", "replace")
        hello = Request(host=host, target=target, subprotocols=list(subprotocols), extra_headers=headers)
        await connection.write(self._socket.send(hello))
        connection.owe(self._answer_s)
        if await self._begun():
            connection.paid()
            await _first_of(self._upward(receive), self._downward())

    async def _begun(self) -> bool:
        """Return whether the server accepts; what it answers otherwise is passed on."""
        status, headers = 0, list[tuple[bytes, bytes]]()
        while True:
            data = await self._connection.read()
            for event in self._events(data):
                if isinstance(event, AcceptConnection):
                    told = self._request.answered(event.extra_headers)
                    told = [(name, value) for name, value in told if name != b"referrer-policy"]
                    await self._answer({"type": "websocket.accept", "subprotocol": event.subprotocol, "headers": told})
                    return True
                if isinstance(event, RejectConnection):
                    status, headers = event.status_code, self._request.answered(event.headers)
                    if not event.has_body:
                        await self._reject(status, headers)
                        return False
                elif isinstance(event, RejectData):
                    self._rejection.append(event.data)
                    if event.body_finished or sum(map(len, self._rejection)) > REJECTION_MAX_BYTES:
                        await self._reject(status, headers)
                        return False
            if not data:
                self._fail("hung up without an answer")

    async def _reject(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        headers = [(name, value) for name, value in headers if name != b"content-length"]
        body = b"".join(self._rejection)[:REJECTION_MAX_BYTES]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._answer({"type": "websocket.http.response.start", "status": status, "headers": headers})
        await self._answer({"type": "websocket.http.response.body", "body": body, "more_body": False})

    async def _upward(self, receive: Receive) -> None:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                with suppress(LocalProtocolError, CodedError):
                    code = message.get("code") or GONE
                    await self._connection.write(self._socket.send(CloseConnection(code=_sendable(code))))
                return
            data = message.get("bytes")
            event = TextMessage(data=message.get("text", "")) if data is None else BytesMessage(data=data)
            await self._connection.write(self._socket.send(event))
            self._connection.owe(self._answer_s)

    async def _downward(self) -> None:
        parts: list[str | bytes] = []
        size_bytes = 0
        while True:
            data = await self._connection.read()
            for event in self._events(data):
                if isinstance(event, TextMessage | BytesMessage):
                    parts.append(event.data if isinstance(event, TextMessage) else bytes(event.data))
                    size_bytes += len(event.data)
                    if size_bytes > self._message_max_bytes:
                        await self._answer.close(TOO_BIG, f"a message of more than {self._message_max_bytes} bytes")
                        return
                    if event.message_finished:
                        await self._show(parts)
                        parts, size_bytes = [], 0
                elif isinstance(event, Ping):
                    await self._connection.write(self._socket.send(event.response()))
                elif isinstance(event, CloseConnection):
                    with suppress(LocalProtocolError, CodedError):
                        await self._connection.write(self._socket.send(event.response()))
                    await self._answer.close(_sendable(event.code), event.reason or "")
                    return
            if not data:
                await self._answer.close(BROKEN, "the server hung up")
                return

    async def _show(self, parts: list[str | bytes]) -> None:
        self._connection.paid()
        texts = [part for part in parts if isinstance(part, str)]
        whole = {"text": "".join(texts)} if texts else {"bytes": b"".join(p for p in parts if isinstance(p, bytes))}
        await self._answer({"type": "websocket.send", **whole})

    def _events(self, data: bytes) -> list[object]:
        try:
            self._socket.receive_data(data or None)
            return list(self._socket.events())
        except RemoteProtocolError as error:
            self._fail(f"does not speak WebSocket: {error}")

    def _fail(self, why: str) -> NoReturn:
        raise PortFailed(f"the server on port {self._request.grant.port} {why}", component=COMPONENT)


async def _first_of(*works: Coroutine[None, None, None]) -> None:
    """Return, or raise, when the first ends; the others are cancelled."""
    tasks = {asyncio.ensure_future(work) for work in works}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end_chores(*tasks)


def _sendable(code: int) -> int:
    """Return a close code that may be sent: some are for one side's own use."""
    return code if 1000 <= code <= 4999 and code not in (1004, 1005, 1006, 1015) else GONE


class _Answer:
    """An ASGI ``send`` that knows whether an answer has begun, and ended."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = self._closed = False

    async def __call__(self, message: Message) -> None:
        self.begun = True
        await self._send(message)

    async def close(self, code: int, reason: str) -> None:
        """Close a WebSocket; idempotent."""
        if not self._closed:
            self._closed = True
            await self({"type": "websocket.close", "code": code, "reason": reason[:100]})
