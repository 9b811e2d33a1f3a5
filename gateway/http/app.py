"""The HTTP application: authentication, body limits, and the page."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, lru_cache, partial
from traceback import clear_frames
from typing import Any, get_args

import structlog
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import serialization
from gateway.api import JSON, Api, Chunks, Operation, Shape, json_answer, operation, operations_of
from gateway.auth import REMEDY, Guard, PageSessions, Role
from gateway.config.schema import ServerConfig
from gateway.dashboard.files import WORKER, the_page
from gateway.errors import MethodNotAllowed
from gateway.http.calls import StreamConnection
from gateway.http.endpoints import ROLE, HttpOperations
from gateway.http.messages import (
    HELD,
    body_chunks,
    peer_of,
    problem_response,
    read_body,
    read_headers,
    read_query,
    respond,
)
from gateway.http.openapi import Shapes, document
from gateway.http.server import serve
from gateway.http.streaming import GIVE_UP_STALLS
from gateway.registry import function_info
from gateway.tls import Connections
from manager.errors import CodedError, Forbidden, InvalidInput, NotFound, StorageUnavailable, Unauthorized, exhaustion
from tangram.stream import STREAM_PATH
from tangram.types import Health, JsonObject, Name, is_loopback

# The guard: who may send a request, seen by its headers alone, before anything of it is read.
#
# A bearer token is proof enough. Whoever comes without one may be a web page in a browser of this machine, sent by its
# user or by a stranger: the browser says where the page comes from, and lets no strange page send JSON unasked.

#: Methods that change nothing: for these browsers send no Origin to a page's own server.
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class RequestGuard:
    """Lets requests in, as what they may do."""

    def __init__(self, guard: Guard, pages: PageSessions, media_types: Collection[str]) -> None:
        """``media_types`` are those of bodies that no web page can send to a stranger without asking first."""
        self._guard = guard
        self._pages = pages
        self._media_types = frozenset(kind.encode() for kind in media_types)

    def authorize(self, scope: Scope) -> Role:
        """Return what the request may do; raises Unauthorized or Forbidden with the remedy."""
        headers = dict(scope["headers"])
        if self._guard.tokenless:
            host = headers.get(b"host", b"")
            if not _is_this_machine(host):  # somebody else's name for it is how a web page reads what is on it
                raise Forbidden(
                    f"Host is {host.decode('latin-1')[:128]!r}, and without tokens (server.auth: none) this gateway is "
                    "called 127.0.0.1, [::1] or localhost only",
                    component="auth",
                )
            if b"origin" in headers or b"sec-fetch-site" in headers:
                self._check_page(scope, headers)
            if headers.get(b"content-type") not in self._media_types:
                self._check_body(headers)
            return Role.ADMIN
        cookie = None if b"authorization" in headers else _cookie(headers, cookie_name(scope))
        if cookie is None:
            return self._guard.role(headers.get(b"authorization"))
        if not self._pages.knows(cookie):
            raise Unauthorized(f"the page's cookie is of an earlier gateway: {REMEDY}", component="auth")
        self._check_page(scope, headers)
        if scope["method"] not in _READING:
            if b"origin" not in headers:
                raise Forbidden("a request with the page's cookie must say its Origin", component="auth")
            self._check_body(headers)
        return Role.ADMIN

    def _check_page(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """A page of another origin, of this machine or not, has no business here."""
        origin = headers.get(b"origin")
        own = f"{scope['scheme']}://".encode() + headers.get(b"host", b"").lower()
        site = headers.get(b"sec-fetch-site", b"none").lower()
        if (origin is not None and origin.lower() != own) or site not in (b"none", b"same-origin"):
            shown = (origin or site).decode("latin-1")[:128]
            raise Forbidden(f"a web page of another origin ({shown!r}) sends this: {REMEDY}", component="auth")

    def _check_body(self, headers: Mapping[bytes, bytes]) -> None:
        """Forms and plain text are what any page may send to anybody; it must not be one of these."""
        value = headers.get(b"content-type")
        if value is None and headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers:
            return
        kind = (value or b"").partition(b";")[0].strip().lower()
        if kind not in self._media_types:
            wanted = b", ".join(sorted(self._media_types)).decode()
            raise Forbidden(
                "without a bearer token a body must say what it is: "
                f"Content-Type is {kind.decode('latin-1')!r}, none of {wanted}",
                component="auth",
            )


def cookie_name(scope: Scope) -> str:
    """Return the name of the page's cookie: a browser sends those of all ports of a host to each of them."""
    server = scope.get("server")
    return f"tangram-{server[1] if server else 0}"


def _cookie(headers: Mapping[bytes, bytes], name: str) -> bytes | None:
    for pair in headers.get(b"cookie", b"").split(b";"):
        result, equals, value = pair.strip().partition(b"=")
        if equals and result == name.encode():
            return value
    return None


@lru_cache(maxsize=64)
def _is_this_machine(host: bytes) -> bool:
    """Return whether a Host header names this machine's loopback."""
    text = host.decode("latin-1")
    name, colon, port = text.rpartition(":")
    has_port = colon and port.isdigit() and (not name or name[-1] == "]" or ":" not in name)
    return is_loopback(name if has_port else text)


#: Seconds after which to come again.
AGAIN_S = 1.0
#: Seconds that open requests have to end when it closes.
CLOSE_GRACE_S = 5.0


async def starting(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer while there is no gateway yet: it lives, and takes no work."""
    if scope["type"] != "http":
        await send({"type": "websocket.close"})
    elif scope["path"] == "/healthz":
        await respond(Health(status="ok"))(scope, receive, send)
    elif scope["path"] == "/readyz":
        await respond(Health(status="starting"), 503)(scope, receive, send)
    else:
        message = "the gateway starts: it has not taken up its record yet"
        refusal = StorageUnavailable(message, component="gateway", retry_after_s=AGAIN_S)
        await problem_response(refusal)(scope, receive, send)


class HttpListener:
    """The HTTP server, from the moment it is made until `close`."""

    def __init__(self, listener: socket.socket, connections_max: int, bounds: ServerConfig) -> None:
        #: What answers: `starting` until `open`.
        self._app: ASGIApp = starting
        self._closing = asyncio.Event()
        self.connections = Connections(limit=connections_max)
        self.serving = asyncio.get_running_loop().create_task(
            serve(
                lambda scope, receive, send: self._app(scope, receive, send),
                listener,
                self._closing.wait,
                CLOSE_GRACE_S,
                self.connections,
                bounds,
            )
        )

    def open(self, app: ASGIApp) -> None:
        """From now on ``app`` answers."""
        self._app = app

    async def close(self) -> None:
        """Let open requests end, and stop; idempotent."""
        self._closing.set()
        await asyncio.gather(self.serving, return_exceptions=True)


#: What any connection takes at once, whether its peer reads or not.
SMALL_BYTES = 16 * 1024


class BoundedSend:
    """An ASGI ``send`` that knows whether an answer has begun."""

    def __init__(self, send: Send, stall_s: float) -> None:
        self._send = send
        self._stall_s = stall_s
        self.started = False

    async def __call__(self, message: Message) -> None:
        """Send; raises ClientDisconnect when the caller, though it is there, does not read."""
        self.started = True
        if len(message.get("body", b"")) <= SMALL_BYTES:
            await self._send(message)
            return
        try:
            async with asyncio.timeout(GIVE_UP_STALLS * self._stall_s):
                await self._send(message)
        except TimeoutError:
            raise ClientDisconnect() from None


def _holding(scope: Scope) -> AbstractContextManager[None]:
    """Return the block in which a request, if it is somebody's, holds its connection; raises CapacityExceeded."""
    asked = scope.get("state", {}).get(HELD)
    if asked is None or ROLE not in scope:
        return nullcontext()
    task = next((value for name, value in scope["headers"] if name == b"x-task"), b"").decode("latin-1")
    held: AbstractContextManager[None] = asked(task or "default", is_admin=scope[ROLE] is Role.ADMIN)
    return held


class GuardedApp(ABC):
    """Routes behind a guard. What fails before its answer has begun is answered as a refusal."""

    def __init__(self, api: Api, component: str, media_types: Collection[str]) -> None:
        """``media_types`` are those of bodies that no web page can send to a stranger without asking first."""
        self.api = api
        self.guard = RequestGuard(api.guard, api.pages, media_types)
        self._component = component
        self._log = structlog.get_logger(f"gateway.{component}")
        self._router: ASGIApp

    def route(self, routes: Sequence[Route]) -> None:
        """Serve these, tried in order."""
        self._router = Router(routes, redirect_slashes=False)

    @abstractmethod
    def refuse(self, error: CodedError, scope: Scope) -> Response:
        """Return the answer of a request that is refused or has failed."""

    @abstractmethod
    def no_route(self, status: int, scope: Scope) -> CodedError:
        """Return what is told of a path (404) or a method (405) that there is not."""

    async def answer(self, scope: Scope, receive: Receive, send: Send, *, checked: bool = True) -> None:
        """Answer one request, who may send it ``checked`` first."""
        scope["app"] = self  # makes Starlette raise for a wrong method instead of answering in plain text
        bounded = BoundedSend(send, self.api.server.stall_s)
        try:
            if checked:
                scope[ROLE] = self.guard.authorize(scope)
            with _holding(scope):
                await self._router(scope, receive, bounded)
        except ClientDisconnect:
            return
        except Exception as error:
            # No local of this frame holds the typed error: it holds its traceback, and that this frame.
            response = self._refusal(error, scope)
            if bounded.started:
                raise
            # The frames that it came through hold the request's body, often with the error itself: in a circle, which
            # would stay until the collector comes. Under an overload of large requests that is too late.
            clear_frames(error.__traceback__)
            await response(scope, receive, bounded)

    def _refusal(self, error: Exception, scope: Scope) -> Response:
        failure = self._coded(exhaustion(error, self._component) or error, scope)
        self.api.metrics.refused(self._component, failure.code)
        return self.refuse(failure, scope)

    def _coded(self, error: Exception, scope: Scope) -> CodedError:
        if isinstance(error, CodedError):
            return error
        if isinstance(error, HTTPException):
            return self.no_route(error.status_code, scope)
        self._log.exception("a request failed", error=str(error))
        return CodedError("a fault of the gateway: its log tells more", component=self._component)


# The page, which holds nothing of the gateway, and the key by which a browser comes in.
#
# Whoever reaches the server may load it: what it shows is asked for like everything else, with the cookie or a token
# that its user types.

#: Where the views are.
UI = "/ui/"
#: What somebody types.
BARE_UI = "/ui"
#: Nothing is run that is not the page's own script to the letter, or the worker that it starts; nothing is loaded, sent
#: to or framed elsewhere.
_POLICY = (
    f"default-src 'none'; script-src {the_page().script}; style-src {the_page().style}; connect-src 'self'; "
    "worker-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
#: A worker may ask its own gateway, and nothing else.
_WORKER_POLICY = "default-src 'none'; connect-src 'self'"


class LandingPage:
    """`GET /` and everything below `/ui/`."""

    def __init__(self, guard: RequestGuard, pages: PageSessions) -> None:
        self._guard = guard
        self._pages = pages

    async def show(self, request: Request) -> Response:
        """Lead a browser to the page, with the right key with a cookie; others as far as they may come in."""
        cookie = self._pages.open(request.query_params.get("key", ""))
        if cookie is None:
            if "text/html" not in request.headers.get("accept", ""):
                self._guard.authorize(request.scope)
            return await self.lead(request)
        # Not the page itself: the key must not stay in the browser's history, nor reach another page as its referrer.
        answer = RedirectResponse("/", 303, {**_PAGE_HEADERS, "Cache-Control": "no-store"})
        secure = request.scope["scheme"] == "https"
        answer.set_cookie(cookie_name(request.scope), cookie, httponly=True, samesite="strict", secure=secure)
        return answer

    async def lead(self, request: Request) -> Response:
        """Lead a browser to the first view."""
        return RedirectResponse(UI + "now", 303, {**_PAGE_HEADERS, "Cache-Control": "no-store"})

    async def file(self, request: Request) -> Response:
        """Every view is the same page; beside it is only its worker."""
        is_worker = request.url.path == UI + WORKER
        sent = the_page().worker if is_worker else the_page()
        headers = {**_PAGE_HEADERS, "ETag": sent.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
        if is_worker:
            headers["Content-Security-Policy"] = _WORKER_POLICY
        if request.headers.get("if-none-match") == sent.etag:
            return Response(status_code=304, headers=headers)
        packed = "gzip" in request.headers.get("accept-encoding", "")
        if packed:
            headers["Content-Encoding"] = "gzip"
        kind = "text/javascript" if is_worker else "text/html"
        return Response(sent.packed if packed else sent.data, media_type=kind, headers=headers)


PAGE = "/"


class HttpApp(GuardedApp):
    """The ASGI application."""

    def __init__(self, api: Api) -> None:
        self.operations = [*operations(api), *operations_of(self)]
        self._open = {PAGE, BARE_UI, *(each.path for each in self.operations if each.open)}
        self._routes = [Route(each.path, _endpoint(each, api), methods=[each.method]) for each in self.operations]
        media_types = {kind for each in self.operations for kind in each.body}
        super().__init__(api, "http", media_types)
        self._streams: set[StreamConnection] = set()
        page = LandingPage(self.guard, api.pages)
        self._routes.append(Route(PAGE, page.show, methods=["GET"]))
        self._routes.append(Route(BARE_UI, page.lead, methods=["GET"]))
        self._routes.append(Route(UI + "{rest:path}", page.file, methods=["GET"]))
        self.route(self._routes)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._carry(scope, receive, send)
        peer = peer_of(scope)
        if peer is not None and peer.unread and scope["http_version"] != "2":
            peer.asks()
        path = scope["path"]
        return self.answer(scope, receive, send, checked=path not in self._open and not path.startswith(UI))

    async def _carry(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry a stream of calls; who may not open one is answered as over HTTP."""
        asked = {**scope, "method": "POST", "scheme": "https" if scope["scheme"] in ("wss", "https") else "http"}
        with ExitStack() as holding:
            try:
                scope[ROLE] = self.guard.authorize(asked)
                if scope["path"] != STREAM_PATH:
                    raise self.no_route(404, scope)
                holding.enter_context(_holding(scope))
            except CodedError as error:
                await self._refusal(error, scope)(scope, receive, send)
                return
            stream = StreamConnection(self.api)
            self._streams.add(stream)
            try:
                await stream.serve(receive, send)
            finally:
                self._streams.discard(stream)

    def close_streams(self) -> None:
        """Close streams of calls as soon as what is in flight is answered."""
        for stream in self._streams:
            stream.close()

    def refuse(self, error: CodedError, scope: Scope) -> Response:
        if isinstance(error, MethodNotAllowed):
            here = [route for route in self._routes if route.matches(scope)[0] is not Match.NONE]
            allowed = ", ".join(sorted({method for route in here for method in route.methods or ()}))
            return problem_response(error, {"Allow": allowed})
        return problem_response(error)

    def no_route(self, status: int, scope: Scope) -> CodedError:
        if status == 405:
            return MethodNotAllowed("the method is not allowed here", component="http")
        return NotFound("no such path", component="http")

    @cached_property
    def _shapes(self) -> Shapes:
        """Made when it is first asked for: it takes as long as a tenth of the gateway's start."""
        return Shapes(self.operations)

    @operation("GET /openapi.json", "operation", {200: json_answer("OpenAPI 3.1", JsonObject)}, open=True)
    async def get_openapi(self, request: Request) -> Response:
        """This document.

        Who may not call the functions is not told of them.
        """
        try:
            self.guard.authorize(request.scope)
        except (Unauthorized, Forbidden):
            return Response(serialization.encode(document(self.operations, self._shapes)), media_type=JSON)
        functions = [function_info(spec) for spec in self.api.functions.all()]
        callbacks = bool(self.api.server.callbacks.allow)
        shown = document(self.operations, self._shapes, functions, callbacks=callbacks)
        return Response(serialization.encode(shown), media_type=JSON)


def operations(api: Api) -> list[Operation]:
    """Return the declared operations; the hottest first, as routes are tried in order."""
    return [*operations_of(HttpOperations(api)), *operations_of(api)]


def _endpoint(row: Operation, api: Api) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint that reads what the operation's signature names, calls it, and answers what it returns."""
    known = () if row.query is None else row.query.__struct_encode_fields__
    parts = [(name, _part_reader(shape)) for name, shape in row.parts.items()]

    async def endpoint(request: Request) -> Response:
        if row.admin:
            request.scope[ROLE].require(Role.ADMIN)
        if request.scope["query_string"]:
            unknown = [name for name in request.query_params if name not in known]
            if unknown:
                message = f"no such query parameter: {unknown[0][:64]!r}; known here: {', '.join(known) or 'none'}"
                raise InvalidInput(message, component="http", detail={"path": unknown[0]})
        fields: dict[str, Any] = {}  # Any: each is of the type that the signature says
        for name, read in parts:
            fields[name] = read(request.path_params[name])
        if row.takes_request:
            fields["request"] = request
        if row.query is not None:
            fields["query"] = read_query(request, row.query)
        if row.headers is not None:
            fields["headers"] = read_headers(request, row.headers)
        if row.reads == Chunks:
            fields["body"] = body_chunks(request, api, api.server.file_limit_bytes)
        elif row.reads is not None:
            body = await read_body(request, api)
            if row.reads is bytes:
                fields["body"] = body
            elif body or row.body_required:
                fields["body"] = serialization.read(serialization.loads_object(body), row.reads, "$")
        answer = await row.call(**fields)
        if isinstance(answer, Response):
            return answer
        return Response(status_code=row.status) if answer is None else respond(answer, row.status)

    return endpoint


def _part_reader(shape: Shape) -> Callable[[str], Any]:
    """Return what reads a part of the path; messages call it by the title of its type. Any: what the type says."""
    metas = [each for each in get_args(shape) if isinstance(each, Meta)]
    title = next(str(each.title) for each in metas if each.title)
    if get_args(Name)[1] in metas:
        return partial(serialization.name, what=title)
    return partial(serialization.read, kind=shape, what=title)
