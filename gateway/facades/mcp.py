"""MCP over streamable HTTP: functions as the tools of a model's client; a session is a trajectory.

Each request is answered by one JSON body. A call that failed is a result that says so, for the model to see; what was
never run is an error of JSON-RPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from gateway import wire
from gateway.config.facades import FacadeSection, McpFacade
from gateway.errors import retry_after
from gateway.facades.calls import ForeignCalls
from gateway.facades.facade import Facade, ForeignRoute, result_of
from gateway.facades.faults import Dialect, Fault, FaultKind, fault_of, fault_of_end
from gateway.facades.mcp_rpc import (
    ASSUMED,
    CANCELLED,
    HANDSHAKE,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    SHOWN,
    SINGLE,
    SINGLE_STATUS,
    RequestId,
    RpcMessage,
    RpcRefused,
    check_single,
    check_version,
    read_message,
    read_tool_call,
    server_info,
    single_result,
    text_content,
)
from gateway.facades.mcp_sessions import McpSession, McpSessions
from gateway.http.messages import JSON, read_body, record_headers
from gateway.invocations.invocation import InvocationRequest, LiveInvocation
from gateway.invocations.record import Record
from gateway.services import Services
from manager.errors import CodedError, InvalidInput, TrajectoryHasEnded
from manager.function import FunctionSpec
from runtimes.kinds import input_schema, kind_of

#: Seconds after which the Python client gives up; others say so by ``notifications/cancelled``.
CLIENT_S = 300.0
SESSION, TRAJECTORY, VERSION = "mcp-session-id", "x-trajectory-id", "mcp-protocol-version"
#: Of a schema's top level, which interfaces of models refuse there. What they say is checked all the same.
COMBINED = frozenset({"oneOf", "anyOf", "allOf", "not", "if", "then", "else"})
#: Where arguments stand in the path of what does not fit: a model's own mistake, which it is told (SEP-1303).
ARGUMENTS = "$"


class Mcp(Facade):
    """The door of MCP's clients."""

    name: ClassVar[str] = "mcp"
    dialect: ClassVar[Dialect] = Dialect.MCP
    roots: ClassVar[frozenset[str]] = frozenset({"mcp"})

    def __init__(self, services: Services, calls: ForeignCalls, section: FacadeSection) -> None:
        super().__init__(services, calls, section)
        assert isinstance(section, McpFacade)
        self._names = section.functions
        self.sessions = McpSessions(services, section.sessions)

    def routes(self) -> Sequence[ForeignRoute]:
        """Return every route of the door. ``GET`` is 405: nothing is told unasked."""
        return (
            ForeignRoute(method="POST", path="/mcp", endpoint=self.post),
            ForeignRoute(method="DELETE", path="/mcp", endpoint=self.end),
        )

    def body(self, fault: Fault, status: int) -> object:
        """Return a fault of a request that was not read as an error without an id."""
        return _error_body(None, fault.said(self.dialect).code, fault.message, _told(fault))

    async def end(self, request: Request) -> Response:
        """End a session, with its trajectory."""
        try:
            await self.sessions.end(self._session(request))
        except CodedError as error:
            return self._refused(request, None, error)
        return Response(status_code=200)

    async def post(self, request: Request) -> Response:
        """Answer one message."""
        body = await read_body(request, self.services)
        message: RpcMessage | None = None
        try:
            message = read_message(body)
            if message.id is UNSET:
                return self._notified(request, message)
            if _is_single(request):
                return await self._single(request, message)
            return await self._handshake(request, message)
        except CodedError as error:
            return self._refused(request, message, error)

    # The two eras

    async def _handshake(self, request: Request, message: RpcMessage) -> Response:
        """Answer a request of a client that shakes hands first."""
        if message.method == "initialize":
            return self._initialize(message)
        check_version(request.headers.get(VERSION, ASSUMED))
        session = self._session(request) if SESSION in request.headers else None
        match message.method:
            case "ping":
                return _result(message, {})
            case "tools/list":
                return _result(message, self._tools(message))
            case "tools/call":
                return await self._call(request, message, session)
        raise _unknown(message, ("initialize", "ping", "tools/list", "tools/call"))

    async def _single(self, request: Request, message: RpcMessage) -> Response:
        """Answer a request that stands alone; its trajectory is the one that its header names."""
        check_single(message, request.headers)
        match message.method:
            case "server/discover":
                return _result(message, single_result(self._discovered(request), cacheable=True))
            case "tools/list":
                return _result(message, single_result(self._tools(message), cacheable=True))
            case "tools/call":
                return await self._call(request, message, None)
        raise _unknown(message, ("server/discover", "tools/list", "tools/call"))

    def _initialize(self, message: RpcMessage) -> Response:
        """Open a session, in the client's version if it is served, else in the newest."""
        asked = message.given.get("protocolVersion")
        if not isinstance(asked, str):
            raise RpcRefused(INVALID_PARAMS, "params.protocolVersion is no text")
        session = self.sessions.open()
        told = {
            "protocolVersion": asked if asked in HANDSHAKE else HANDSHAKE[-1],
            "capabilities": {"tools": {"listChanged": False}},
            "serverInfo": server_info(),
        }
        return _result(message, told, {SESSION: session.name})

    def _discovered(self, request: Request) -> dict[str, object]:
        """Return what is served. Who can keep no sandbox in the newer era is led to the older, where a session does."""
        stateless = not any(kind_of(each).works_in_sandbox for each in self._functions())
        versions = (*HANDSHAKE, *SINGLE) if stateless or TRAJECTORY in request.headers else HANDSHAKE
        return {"supportedVersions": versions, "capabilities": {"tools": {"listChanged": False}}}

    def _notified(self, request: Request, message: RpcMessage) -> Response:
        """Take a notification in; only what concerns a session's own call means anything here."""
        if not _is_single(request) and SESSION in request.headers:
            session = self._session(request)
            if message.method == "notifications/cancelled":
                session.cancel(message.given.get("requestId"))
        return Response(status_code=202)

    # Tools

    def _functions(self) -> list[FunctionSpec]:
        """Return the functions that are tools, as far as there are any of these names now."""
        known = {each.name: each for each in self.services.functions.all()}
        return [known[name] for name in self._names if name in known]

    def _tools(self, message: RpcMessage) -> dict[str, object]:
        """Return every tool, on one page."""
        if message.given.get("cursor") is not None:
            raise RpcRefused(INVALID_PARAMS, "params.cursor: there is only one page, and it has no cursor")
        return {"tools": [_tool(each) for each in self._functions()]}

    async def _call(self, request: Request, message: RpcMessage, session: McpSession | None) -> Response:
        """Call a tool, in the session's trajectory unless a header names another."""
        asked = read_tool_call(message)
        function = next((each for each in self._functions() if each.name == asked.name), None)
        if function is None:
            named = ", ".join(each.name for each in self._functions()) or "none"
            raise RpcRefused(INVALID_PARAMS, f"no such tool: {asked.name[:SHOWN]!r}; there are {named}")
        call = self.call(request, function.name, asked.arguments or {})
        if session is None and call.trajectory is None and not _is_single(request):
            raise RpcRefused(INVALID_REQUEST, "tools/call needs Mcp-Session-Id (see initialize)", status=400)
        if session is not None and call.trajectory is None:
            call = replace(call, trajectory=session.name, living=session.begun)
        try:
            record = await self._run(request, message, session, call)
        except InvalidInput as error:
            if not str(error.detail.get("path", "")).startswith(ARGUMENTS):
                raise
            self.services.metrics.refused(self.name, error.code)
            told = {"content": text_content([f"{function.name}: {error.code}: {error.message}"]), "isError": True}
            return _tool_result(request, message, told)
        fault = fault_of_end(record)
        if fault is not None and fault.kind is FaultKind.BUSY:
            # It was not run, and may be sent again: an error, which no model is to see.
            return self._error(request, message, fault, fault.said(self.dialect).code)
        return _tool_result(request, message, _call_result(function, record, fault), record_headers(record))

    async def _run(
        self, request: Request, message: RpcMessage, session: McpSession | None, call: InvocationRequest
    ) -> Record:
        """Return the ended call; raises RpcRefused for one that its client took back."""
        assert message.id is not UNSET
        if session is not None and message.id in session.running:
            raise RpcRefused(INVALID_REQUEST, f"a request with the id {message.id!r} is under way in this session")
        work = asyncio.get_running_loop().create_task(self._run_one(request, call))
        if session is not None:
            session.running[message.id] = work
        try:
            return (await work).record
        except asyncio.CancelledError:
            here = asyncio.current_task()
            if here is None or here.cancelling():
                raise
            raise RpcRefused(CANCELLED, "the request was cancelled by its client") from None
        except TrajectoryHasEnded:
            if session is None or call.trajectory != session.name:
                raise
            raise RpcRefused(INVALID_REQUEST, "the session has ended: initialize another", status=404) from None
        finally:
            if session is not None:
                del session.running[message.id]
                self.sessions.settle(session)

    async def _run_one(self, request: Request, call: InvocationRequest) -> LiveInvocation:
        (invocation,) = await self.calls.run(request, [call], self.until_s(CLIENT_S))
        return invocation

    # What is refused

    def _session(self, request: Request) -> McpSession:
        """Return the session that the request names; raises RpcRefused."""
        name = request.headers.get(SESSION)
        if name is None:
            raise RpcRefused(INVALID_REQUEST, "the header Mcp-Session-Id is missing", status=400)
        return self.sessions.get(name)

    def _refused(self, request: Request, message: RpcMessage | None, error: CodedError) -> Response:
        """Return a refusal as an error of the request's id."""
        self.services.metrics.refused(self.name, error.code)
        fault = fault_of(error)
        if not isinstance(error, RpcRefused):
            return self._error(request, message, fault, fault.said(self.dialect).code)
        data = _told(fault) | dict(error.data)
        return self._error(request, message, fault, error.rpc, error.status, data)

    def _error(
        self,
        request: Request,
        message: RpcMessage | None,
        fault: Fault,
        code: int,
        status: int | None = None,
        data: Mapping[str, object] | None = None,
    ) -> Response:
        """Return an error, with the HTTP status that clients of the request's era read."""
        known = None if message is None or message.id is UNSET else message.id
        body = _error_body(known, code, fault.message, data or _told(fault))
        by_era = SINGLE_STATUS.get(code, 200) if _is_single(request) else 200
        headers = {} if fault.invocation_id is None else {"X-Invocation-Id": fault.invocation_id}
        if fault.retry_after_s is not None:
            headers["Retry-After"] = retry_after(fault.retry_after_s)
        return Response(wire.dumps(body), status or by_era, headers, JSON)


def _is_single(request: Request) -> bool:
    """Whether the request is of the newer era."""
    return request.headers.get(VERSION, ASSUMED) in SINGLE


def _unknown(message: RpcMessage, known: Sequence[str]) -> RpcRefused:
    return RpcRefused(METHOD_NOT_FOUND, f"no method {message.method[:SHOWN]!r} here; there are {', '.join(known)}")


def _tool(function: FunctionSpec) -> dict[str, object]:
    """Return a function as a tool."""
    schema = dict(input_schema(function) or {})
    shown = {name: value for name, value in schema.items() if name not in COMBINED}
    about = function.description or kind_of(function).meaning
    return {"name": function.name, "description": about, "inputSchema": shown | {"type": "object"}}


def _call_result(function: FunctionSpec, record: Record, fault: Fault | None) -> dict[str, object]:
    """Return the end of an invocation as a tool's result: for the model in text, and as it is."""
    value = result_of(record)
    texts = [] if fault is None else [fault.message]
    if value is not None or fault is None:
        texts.append(_text(function, value))
    structured = {"structuredContent": value} if isinstance(value, dict) else {}
    meta = {"tangram/invocation": record.id}
    return {"content": text_content(texts), **structured, "isError": fault is not None, "_meta": meta}


def _text(function: FunctionSpec, value: object) -> str:
    """Return a result as a model reads it; of a command what a terminal would show."""
    if isinstance(value, str):
        return value
    if function.runtime != "exec" or not isinstance(value, dict):
        return wire.dumps(value).decode("utf-8", "replace")
    shown = [str(value.get("stdout", ""))]
    if value.get("stderr"):
        shown.append(f"[stderr]\n{value['stderr']}")
    ending = value.get("exit_code")
    shown.append(f"[signal {value.get('signal')}]" if ending is None else f"[exit code {ending}]")
    return "\n".join(text.removesuffix("\n") for text in shown if text)


def _tool_result(
    request: Request, message: RpcMessage, result: dict[str, object], headers: Mapping[str, str] | None = None
) -> Response:
    return _result(message, single_result(result, cacheable=False) if _is_single(request) else result, headers)


def _told(fault: Fault) -> dict[str, object]:
    """Return what a program may want to know of a fault."""
    told = {"code": fault.code, "path": fault.path or None, "invocation_id": fault.invocation_id}
    more = {"retry_after_s": fault.retry_after_s}
    return {name: value for name, value in (told | more).items() if value is not None}


def _result(message: RpcMessage, result: Mapping[str, object], headers: Mapping[str, str] | None = None) -> Response:
    body = {"jsonrpc": "2.0", "id": message.id, "result": result}
    return Response(wire.dumps(body), 200, headers, JSON)


def _error_body(request_id: RequestId | None, code: int, message: str, data: Mapping[str, object]) -> object:
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message, "data": data}}
