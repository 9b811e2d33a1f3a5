"""The door: every request is let in, routed, and answered, also when something fails."""

from __future__ import annotations

from functools import cached_property
from traceback import clear_frames

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import wire
from gateway.access.auth import Role
from gateway.errors import MethodNotAllowed
from gateway.functions import function_info
from gateway.http.administration import AdministrationOperations
from gateway.http.archives import ArchiveOperations
from gateway.http.batches import BatchOperations
from gateway.http.door import Door
from gateway.http.images import ImageOperations
from gateway.http.invocations import InvocationOperations
from gateway.http.leases import LeaseOperations
from gateway.http.messages import JSON, problem_response
from gateway.http.nodes.operations import NodeOperations
from gateway.http.openapi import Shapes, document
from gateway.http.operation import ROLE, Endpoint, Operation, json_answer
from gateway.http.page import BARE_UI, UI, LandingPage
from gateway.http.sending import BoundedSend
from gateway.http.sessions.operations import SessionOperations
from gateway.http.snapshots import SnapshotOperations
from gateway.http.tasks.operations import TaskOperations
from gateway.http.trajectories import TrajectoryOperations
from gateway.http.watch import WatchOperations
from gateway.services import Services
from manager.errors import CodedError, Forbidden, InvalidInput, NotFound, Unauthorized, exhaustion
from tangram.types import JsonObject

PAGE = "/"


class HttpApp:
    """The ASGI application."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._log = structlog.get_logger("gateway.http")
        self.operations = [*operations(services), self._openapi_row()]
        self._open = {PAGE, BARE_UI, *(operation.path for operation in self.operations if operation.open)}
        self._door = Door(services.guard, services.session, {kind for row in self.operations for kind in row.body})
        page = LandingPage(self._door, services.session)
        self._routes = [Route(row.path, _checked(row), methods=[row.method]) for row in self.operations]
        self._routes.append(Route(PAGE, page.show, methods=["GET"]))
        self._routes.append(Route(BARE_UI, page.lead, methods=["GET"]))
        self._routes.append(Route(UI + "{rest:path}", page.file, methods=["GET"]))
        self._router: ASGIApp = Router(self._routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close"})  # before it was accepted: a 403
            return
        scope["app"] = self  # makes Starlette raise for a wrong method instead of answering in plain text
        noting = BoundedSend(send, self._services.logs.spec.stall_s)
        try:
            if scope["path"] not in self._open and not scope["path"].startswith(UI):
                scope[ROLE] = self._door.let_in(scope)
            await self._router(scope, receive, noting)
        except ClientDisconnect:
            return
        except Exception as error:
            response = self._failed(error, scope)
            if noting.started:
                raise
            # The frames that it came through hold the request's body, often with the error itself: in a circle, which
            # would stay until the collector comes. Under an overload of large requests that is too late.
            clear_frames(error.__traceback__)
            await response(scope, receive, send)

    def _failed(self, error: Exception, scope: Scope) -> Response:
        error = exhaustion(error, "http") or error
        if isinstance(error, CodedError):
            self._services.metrics.refused("http", error.code)
            return problem_response(error)
        if isinstance(error, HTTPException):
            if error.status_code == 405:
                refusal = MethodNotAllowed("the method is not allowed here", component="http")
                return problem_response(refusal, {"Allow": self._allowed(scope)})
            return problem_response(NotFound("no such path", component="http"))
        self._log.exception("a request failed", error=str(error))
        self._services.metrics.refused("http", "internal")
        return problem_response(CodedError("a fault of the gateway: its log tells more", component="http"))

    def _allowed(self, scope: Scope) -> str:
        """The methods of every row of this path."""
        here = [route for route in self._routes if route.matches(scope)[0] is not Match.NONE]
        return ", ".join(sorted({method for route in here for method in route.methods or ()}))

    @cached_property
    def _shapes(self) -> Shapes:
        """Made when it is first asked for: it takes as long as a tenth of the gateway's start."""
        return Shapes(self.operations)

    async def _openapi_page(self, request: Request) -> Response:
        """The document; who may not call the functions is not told of them."""
        try:
            self._door.let_in(request.scope)
        except (Unauthorized, Forbidden):
            return Response(wire.encode(document(self.operations, self._shapes)), media_type=JSON)
        functions = [function_info(spec) for spec in self._services.functions.all()]
        pattern = self._services.callbacks.url_pattern()
        return Response(wire.encode(document(self.operations, self._shapes, functions, pattern)), media_type=JSON)

    def _openapi_row(self) -> Operation:
        return Operation(
            id="getOpenapi",
            method="GET",
            path="/openapi.json",
            endpoint=self._openapi_page,
            summary="This document",
            tag="operation",
            answers={200: json_answer("OpenAPI 3.1", JsonObject)},
            open=True,
        )


def operations(services: Services) -> list[Operation]:
    """The table; the hottest first, as routes are tried in order."""
    return [
        *InvocationOperations(services).operations(),
        *BatchOperations(services).operations(),
        *TrajectoryOperations(services).operations(),
        *ArchiveOperations(services).operations(),
        *SessionOperations(services).operations(),
        *SnapshotOperations(services).operations(),
        *ImageOperations(services).operations(),
        *LeaseOperations(services).operations(),
        *AdministrationOperations(services).operations(),
        *TaskOperations(services).operations(),
        *NodeOperations(services).operations(),
        *WatchOperations(services).operations(),
    ]


def _checked(row: Operation) -> Endpoint:
    """Return the endpoint behind what is common to all: who may ask, and that nothing is asked which nobody reads."""
    needed = Role.ADMIN if row.admin else Role.INVOKE
    known = {} if row.query is None else dict.fromkeys(row.query.__struct_encode_fields__)

    async def endpoint(request: Request) -> Response:
        if not row.open:
            request.scope[ROLE].require(needed)
        if request.scope["query_string"]:
            unknown = [name for name in request.query_params if name not in known]
            if unknown:
                told = f"no such query parameter: {unknown[0][:64]!r}; known here: {', '.join(known) or 'none'}"
                raise InvalidInput(told, component="http", detail={"path": unknown[0]})
        return await row.endpoint(request)

    return endpoint
