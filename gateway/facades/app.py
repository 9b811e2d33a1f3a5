"""The facades that a gateway serves, and their listeners."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api import Api
from gateway.config.schema import ServerConfig
from gateway.errors import MethodNotAllowed
from gateway.facades.docker.api import DockerEngineApi
from gateway.facades.docker.http import DockerListener
from gateway.facades.e2b.app import E2b
from gateway.facades.facade import (
    CallFailed,
    Endpoint,
    Facade,
    ForeignCalls,
    ForeignRoute,
    fault_of,
    split_path,
    with_bearer,
)
from gateway.facades.models import Models
from gateway.facades.rewards import Rewards
from gateway.facades.sandboxfusion import SandboxFusion
from gateway.facades.swerex.app import Swerex
from gateway.http.app import GuardedApp, HttpListener
from gateway.http.endpoints import ROLE
from gateway.http.server import listen
from gateway.tls import Connections
from manager.errors import CodedError, InvalidInput, NotFound

#: Every facade but MCP's, whose library is in an extra, by its name in ``server.facades``.
FACADES: Mapping[str, type[Facade]] = {kind.name: kind for kind in (Rewards, SandboxFusion, Models, Swerex, E2b)}

#: Characters of a foreign path or method that are told back.
SHOWN = 200


def make_facades(api: Api, calls: ForeignCalls) -> dict[str, Facade]:
    """Return the facades that the configuration opens, by name."""
    opened = dict(api.server.facades.opened())
    created = {name: FACADES[name](api, calls, section) for name, section in opened.items() if name in FACADES}
    if "mcp" in opened:
        from gateway.facades.mcp import Mcp

        created["mcp"] = Mcp(api, calls, opened["mcp"])
    return created


class FacadeApp(GuardedApp):
    """One facade behind its guard; ASGI."""

    def __init__(self, facade: Facade) -> None:
        self._facade = facade
        rows = facade.routes()
        self._rows = ", ".join(f"{row.method} {row.path}" for row in rows)
        super().__init__(facade.api, facade.name, facade.media_types)
        self.route([Route(row.path, self._checked(row), methods=[row.method]) for row in rows])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        segments, token = split_path(scope)
        await self.serve(scope, receive, send, segments, token)

    async def serve(self, scope: Scope, receive: Receive, send: Send, segments: list[str], token: bytes | None) -> None:
        """Answer one request, whose path has these segments within the facade."""
        admitted = with_bearer(self._facade.admitted(scope, segments), token)
        inner = {**admitted, "path": "/" + "/".join(segments), "root_path": ""}
        await self.answer(inner, receive, send, checked=ROLE not in inner)

    def _checked(self, row: ForeignRoute) -> Endpoint:
        """Return the endpoint behind the check of what is asked in the query; a failed call is its answer."""

        async def checked(request: Request) -> Response:
            if request.scope["query_string"]:
                for name in request.query_params.keys() - set(row.query):
                    message = f"no such query parameter: {name[:64]!r}; there are {', '.join(row.query) or 'none'} here"
                    raise InvalidInput(message, component="facades", detail={"path": name[:64]})
            try:
                return await row.endpoint(request)
            except CallFailed as failed:
                return self._facade.refuse(failed.fault)

        return checked

    def refuse(self, error: CodedError, scope: Scope) -> Response:
        return self._facade.refuse(fault_of(error))

    def no_route(self, status: int, scope: Scope) -> CodedError:
        request = f"{scope['method']} {scope['path']}"[:SHOWN]
        kind = MethodNotAllowed if status == 405 else NotFound
        return kind(f"no such route: {request}; the facade {self._facade.name} has {self._rows}", component="facades")


class FrontApp:
    """The gateway's own port: foreign paths go to their facades, all others to the gateway's own application."""

    def __init__(self, facades: Sequence[Facade], otherwise: ASGIApp) -> None:
        self._otherwise = otherwise
        self._prefixed: dict[str, FacadeApp] = {}
        self._rooted: dict[str, FacadeApp] = {}
        for facade in facades:
            app = FacadeApp(facade)
            if facade.prefix:
                self._prefixed[facade.prefix] = app
            self._rooted.update(dict.fromkeys(facade.roots, app))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            segments, token = split_path(scope)
            first = segments[0] if segments else ""
            if first in self._prefixed:
                await self._prefixed[first].serve(scope, receive, send, segments[1:], token)
                return
            if first in self._rooted:
                await self._rooted[first].serve(scope, receive, send, segments, token)
                return
        await self._otherwise(scope, receive, send)


class FacadeListeners:
    """The ports of the facades: bound at the start, answering 503 until `open`."""

    def __init__(self, server: ServerConfig, connections_max: int, silent_s: float, closers: AsyncExitStack) -> None:
        """Bind them; ``closers`` closes what was bound. Raises Conflict for a port that is taken."""
        self._listeners: dict[str, HttpListener] = {}
        #: What makes the facades' calls; None until `open`.
        self.calls: ForeignCalls | None = None
        self.ports: dict[str, int] = {}
        self._facades: dict[str, Facade] = {}
        self._docker: DockerListener | None = None
        closers.push_async_callback(self.close)
        for name, port in server.facades.ports.items():
            listener: socket.socket = closers.enter_context(listen(server.host, port, silent_s))
            self._listeners[name] = HttpListener(listener, connections_max, server)
            self.ports[name] = listener.getsockname()[1]
        docker = server.facades.docker
        if docker is not None:
            self._docker = DockerListener(docker, server, connections_max, closers)
        #: Where each facade is: a path at the gateway's own port, a port of its own, or a socket's path.
        self.addresses: dict[str, str | int] = dict.fromkeys(dict(server.facades.opened()), "/") | self.ports
        if docker is not None:
            self.addresses["docker"] = docker.socket

    @property
    def connections(self) -> Mapping[str, Connections]:
        """Open connections by facade."""
        opened = {} if self._docker is None else {"docker": self._docker.connections}
        return {name: each.connections for name, each in self._listeners.items()} | opened

    def open(self, api: Api, own: ASGIApp) -> ASGIApp:
        """Open the facades, and return what answers at the gateway's own port: ``own`` behind those that are there."""
        self.calls = ForeignCalls(api)
        facades = self._facades = make_facades(api, self.calls)
        for name, listener in self._listeners.items():
            listener.open(FacadeApp(facades[name]))
        if self._docker is not None and (section := api.server.facades.docker) is not None:
            engine = DockerEngineApi(api, self.calls, section)
            self._docker.on_close = engine.close
            self._docker.open(engine.serve)
        return FrontApp(list(facades.values()), own) if facades else own

    async def close(self) -> None:
        """Let open requests end, and stop; idempotent."""
        docker = () if self._docker is None else (self._docker,)
        await asyncio.gather(*(each.close() for each in (*self._listeners.values(), *docker)))
        await asyncio.gather(*(each.stop() for each in self._facades.values()))
