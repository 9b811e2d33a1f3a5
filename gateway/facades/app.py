"""The ASGI application of the foreign doors: who comes in, which door it is, and every failure in its words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from traceback import clear_frames

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import MethodNotAllowed
from gateway.facades.calls import ForeignCalls
from gateway.facades.credentials import split_path, with_bearer
from gateway.facades.facade import Endpoint, Facade
from gateway.facades.faults import fault_of
from gateway.facades.models import Models
from gateway.facades.rewards import Rewards
from gateway.facades.sandboxfusion import SandboxFusion
from gateway.facades.swerex.door import Swerex
from gateway.http.door import Door
from gateway.http.sending import BoundedSend
from gateway.services import Services
from manager.errors import CodedError, InvalidInput, NotFound, exhaustion

#: Every door but MCP's, whose library is in an extra, by its name in ``server.facades``.
FACADES: Mapping[str, type[Facade]] = {kind.name: kind for kind in (Rewards, SandboxFusion, Models, Swerex)}

#: Characters of a foreign path or method that are told back.
SHOWN = 200


def make_facades(services: Services, calls: ForeignCalls) -> dict[str, Facade]:
    """Return the doors that the configuration opens, by name."""
    opened = dict(services.bounds.facades.opened())
    made = {name: FACADES[name](services, calls, section) for name, section in opened.items() if name in FACADES}
    if "mcp" in opened:
        from gateway.facades.mcp import Mcp

        made["mcp"] = Mcp(services, calls, opened["mcp"])
    return made


class FacadeApp:
    """One door behind its guard; ASGI."""

    def __init__(self, facade: Facade) -> None:
        self._facade = facade
        self._services = facade.services
        self._log = structlog.get_logger("gateway.facades")
        self._door = Door(self._services.guard, self._services.session, facade.media_types)
        self._routes = facade.routes()
        self._router = Router(
            [Route(row.path, _checked(row.endpoint), methods=[row.method]) for row in self._routes],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        segments, token = split_path(scope)
        await self.serve(scope, receive, send, segments, token)

    async def serve(self, scope: Scope, receive: Receive, send: Send, segments: list[str], token: bytes | None) -> None:
        """Answer one request, whose path has these segments within the door."""
        bounded = BoundedSend(send, self._services.logs.spec.stall_s)
        path = "/" + "/".join(segments)
        scope = {
            **with_bearer(self._facade.admitted(scope, segments), token),
            "path": path,
            "root_path": "",
            "app": self,
        }
        try:
            self._door.let_in(scope)
            await self._router(scope, receive, bounded)
        except ClientDisconnect:
            return
        except Exception as error:
            response = self._failed(error, scope)
            if bounded.started:
                raise
            clear_frames(error.__traceback__)  # they hold the request's body
            await response(scope, receive, bounded)

    def _failed(self, error: Exception, scope: Scope) -> Response:
        told = self._coded(exhaustion(error, "facades") or error, scope)
        self._services.metrics.refused(self._facade.name, told.code)
        return self._facade.refuse(fault_of(told))

    def _coded(self, error: Exception, scope: Scope) -> CodedError:
        if isinstance(error, CodedError):
            return error
        if isinstance(error, HTTPException):
            asked = f"{scope['method']} {scope['path']}"[:SHOWN]
            rows = ", ".join(f"{row.method} {row.path}" for row in self._routes)
            kind = MethodNotAllowed if error.status_code == 405 else NotFound
            return kind(f"no such route: {asked}; the door {self._facade.name} has {rows}", component="facades")
        self._log.exception("a request failed", door=self._facade.name, error=str(error))
        return CodedError("a fault of the gateway: its log tells more", component="facades")


class FrontApp:
    """The gateway's own port: foreign paths go to their doors, all others to the gateway's own application."""

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


def _checked(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint behind the check that nothing is asked in the query."""

    async def checked(request: Request) -> Response:
        if request.scope["query_string"]:
            for name in request.query_params:
                told = f"no such query parameter: {name[:64]!r}; this door has none"
                raise InvalidInput(told, component="facades", detail={"path": name[:64]})
        return await endpoint(request)

    return checked
