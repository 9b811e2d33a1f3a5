"""MCP over streamable HTTP: functions as the tools of a model's client; a session is a trajectory.

The protocol itself (its messages, both of its eras, what a version may hold) is the official SDK's, in the extra
``mcp``. Sessions are ours: each is a trajectory, which outlives the gateway. A request has one JSON body for an answer.
A call that failed is a result that says so, for the model to see; what was never run is an error of JSON-RPC.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, ClassVar

import anyio
from mcp.server.caching import CacheHint
from mcp.server.connection import Connection
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.runner import serve_one
from mcp.shared.dispatcher import CallOptions
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.inbound import (
    ERROR_CODE_HTTP_STATUS,
    MCP_PROTOCOL_VERSION_HEADER,
    InboundLadderRejection,
    classify_inbound_request,
    unsupported_protocol_version_rejection,
)
from mcp.shared.message import ServerMessageMetadata
from mcp.shared.transport_context import TransportContext
from mcp_types import (
    DEFAULT_NEGOTIATED_VERSION,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    CallToolRequestParams,
    JSONRPCNotification,
    JSONRPCRequest,
    PaginatedRequestParams,
    RequestId,
    RequestParams,
)
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from gateway import serialization
from gateway.api import JSON, Api
from gateway.config.schema import FacadeSection, McpFacade
from gateway.errors import FaultKind, retry_after
from gateway.facades.facade import (
    STATUSES,
    CallFailed,
    Facade,
    Fault,
    ForeignCalls,
    ForeignRoute,
    fault_of,
    fault_of_end,
    result_of,
)
from gateway.http.messages import read_body, record_headers
from gateway.invocations.invocations import InvocationRequest, LiveInvocation
from gateway.invocations.record import Record
from manager.errors import CapacityExceeded, CodedError, InvalidInput, TrajectoryHasEnded
from manager.function import FunctionSpec
from runtimes.kinds import input_schema, kind_of

#: Seconds after which the Python client gives up; others say so by ``notifications/cancelled``.
CLIENT_S = 300.0
#: Sessions that live at once: each may hold the memory of a sandbox.
SESSIONS_MAX = 1024
#: Seconds after which a client comes again where every session lives.
FULL_S = 5.0
INITIALIZE = "initialize"
SESSION, TRAJECTORY = "mcp-session-id", "x-trajectory-id"
#: What the names of sessions' trajectories begin with.
PREFIX = "mcp-"
#: A request that its client took back; the SDK has no number for it.
CANCELLED = -32800
#: The number of each fault in JSON-RPC.
RPC_CODES: Mapping[FaultKind, int] = {
    FaultKind.INPUT: INVALID_PARAMS,
    FaultKind.UNAUTHORIZED: -32001,
    FaultKind.FORBIDDEN: -32003,
    **dict.fromkeys((FaultKind.NOT_FOUND, FaultKind.METHOD), METHOD_NOT_FOUND),
    **dict.fromkeys((FaultKind.CONFLICT, FaultKind.TOO_LARGE), INVALID_REQUEST),
    FaultKind.UNSUPPORTED: INVALID_PARAMS,
    **dict.fromkeys((FaultKind.BUSY, FaultKind.TIMEOUT, FaultKind.LOST), -32000),
    **dict.fromkeys((FaultKind.FAILED, FaultKind.INTERNAL), INTERNAL_ERROR),
}
#: Characters of a stranger's words that are told back.
SHOWN = 64
#: What does not fit of one message, told at once.
SHOWN_WRONG = 4
#: Of a schema's top level, which interfaces of models refuse there. What they say is checked all the same.
COMBINED = frozenset({"oneOf", "anyOf", "allOf", "not", "if", "then", "else"})
#: Where arguments stand in the path of what does not fit: a model's own mistake, which it is told (SEP-1303).
ARGUMENTS = "$"
JsonObject = dict[str, Any]
#: What the newer era asks of each result; the SDK takes it from those of the older.
COMPLETE: JsonObject = {"resultType": "complete"}


class RpcRefused(InvalidInput):
    """A message that is refused with a number of the protocol's own; ``status`` None leaves it to the era."""

    def __init__(
        self, rpc: int, message: str, *, status: int | None = None, data: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(message, component="mcp")
        self.rpc = rpc
        self.status = status
        self.data = data or {}


@dataclass(eq=False, slots=True)
class McpSession:
    """One session; ``name`` is its id and its trajectory's."""

    name: str
    #: Whether its sandbox has begun: from then on it is not to begin anew, empty, without a word.
    begun: bool = False
    #: The calls that are under way, each the work of one request.
    running: dict[RequestId, asyncio.Task[object]] = field(default_factory=dict)

    def cancel(self, request_id: object) -> None:
        """Take a call back, if it is under way: a number is no text of it."""
        if isinstance(request_id, str | int) and (work := self.running.get(request_id)) is not None:
            work.cancel()


class McpSessions:
    """The sessions, the one unused longest first; `SESSIONS_MAX` at once."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._known: OrderedDict[str, McpSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def open(self) -> McpSession:
        """Return a new session; raises CapacityExceeded."""
        self._make_room()
        session = McpSession(f"{PREFIX}{secrets.token_hex(16)}")
        self._known[session.name] = session
        return session

    def get(self, name: str) -> McpSession:
        """Return a living session; raises RpcRefused, 404, on which a client begins a new one."""
        session = self._known.get(name) or self._of_earlier_gateway(name)
        if session is None or self._is_over(session):
            self._known.pop(name, None)
            message = "no such session: it has ended, or never began, or the gateway began anew; initialize another"
            raise RpcRefused(INVALID_REQUEST, message, status=404)
        self._known.move_to_end(name)
        return session

    async def end(self, session: McpSession) -> None:
        """End it with its trajectory; calls that are under way are told so."""
        self._known.pop(session.name, None)
        await self._api.engine.end_trajectory(session.name)

    def settle(self, session: McpSession) -> None:
        """Take note, after a call, of whether its sandbox has begun."""
        session.begun = session.begun or self._api.environments.get(session.name) is not None

    def _is_over(self, session: McpSession) -> bool:
        """Whether its trajectory has ended: by somebody's request, or idle for too long."""
        return session.begun and not session.running and self._api.engine.trajectory(session.name) is None

    def _of_earlier_gateway(self, name: str) -> McpSession | None:
        """Return a session whose trajectory has outlived the gateway that opened it."""
        if not name.startswith(PREFIX) or self._api.environments.get(name) is None:
            return None
        self._make_room()
        session = self._known[name] = McpSession(name, begun=True)
        return session

    def _make_room(self) -> None:
        """Forget what is over, then the session unused longest that has nothing to lose."""
        if len(self._known) < SESSIONS_MAX:
            return
        for session in [each for each in self._known.values() if self._is_over(each)]:
            del self._known[session.name]
        idle = (each for each in self._known.values() if not each.begun and not each.running)
        if len(self._known) >= SESSIONS_MAX and (oldest := next(idle, None)) is not None:
            del self._known[oldest.name]
        if len(self._known) >= SESSIONS_MAX:
            message = f"{SESSIONS_MAX} sessions live, as many as may be: end one, or come again"
            raise CapacityExceeded(message, component="mcp", retry_after_s=FULL_S)


@dataclass(slots=True, kw_only=True)
class McpExchange:
    """One request and its answer, the SDK's ``DispatchContext``: nothing but the one answer goes to the client."""

    request: Request
    message: JSONRPCRequest
    #: Whether the request is of the newer era, where each stands alone.
    single: bool
    session: McpSession | None
    #: Headers of the answer.
    headers: dict[str, str] = field(default_factory=dict)
    can_send_request: bool = False
    cancel_requested: anyio.Event = field(default_factory=anyio.Event)

    @property
    def transport(self) -> TransportContext:
        return TransportContext(kind="streamable-http", can_send_request=False)

    @property
    def request_id(self) -> RequestId:
        return self.message.id

    @property
    def message_metadata(self) -> ServerMessageMetadata:
        return ServerMessageMetadata(request_context=self)

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> JsonObject:
        raise NoBackChannelError(method)

    async def notify(self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None) -> None:
        """Do nothing: there are no streams."""

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Do nothing, likewise."""


Context = ServerRequestContext[Any, McpExchange]


class Mcp(Facade):
    """The facade of MCP's clients."""

    name: ClassVar[str] = "mcp"
    #: Of requests that were refused unread; an error that answers a message is 200.
    statuses: ClassVar[Mapping[FaultKind, int]] = STATUSES | {FaultKind.INPUT: 400}
    roots: ClassVar[frozenset[str]] = frozenset({"mcp"})

    def __init__(self, api: Api, calls: ForeignCalls, section: FacadeSection) -> None:
        super().__init__(api, calls, section)
        assert isinstance(section, McpFacade)
        self._names = section.functions
        self.sessions = McpSessions(api)
        self._server: Server[Any] = Server(
            "tangram",
            version=version("tangram-gateway"),
            cache_hints={"tools/list": CacheHint(), "server/discover": CacheHint()},
        )
        self._server.middleware.clear()  # spans are those of the invocations
        self._server.add_request_handler("server/discover", RequestParams, self._discovered)
        self._server.add_request_handler("tools/list", PaginatedRequestParams, self._tools)
        self._server.add_request_handler("tools/call", CallToolRequestParams, self._call)

    def routes(self) -> Sequence[ForeignRoute]:
        """Return every route of the facade. ``GET`` is 405: nothing is told unasked."""
        return (
            ForeignRoute(method="POST", path="/mcp", endpoint=self.post),
            ForeignRoute(method="DELETE", path="/mcp", endpoint=self.end),
        )

    def body(self, fault: Fault, status: int) -> object:
        """Return a fault of a request that was not read as an error without an id."""
        return _error_body(None, RPC_CODES[fault.kind], fault.message, _error_data(fault))

    async def end(self, request: Request) -> Response:
        """End a session, with its trajectory."""
        try:
            await self.sessions.end(self._session(request))
        except CodedError as error:
            return self._refused(request, None, error)
        return Response(status_code=200)

    async def post(self, request: Request) -> Response:
        """Answer one message."""
        body = await read_body(request, self.api)
        message: JSONRPCRequest | JSONRPCNotification | None = None
        try:
            message = _read_message(body)
            if isinstance(message, JSONRPCNotification):
                return self._notified(request, message)
            return await self._answer(request, message)
        except CodedError as error:
            return self._refused(request, message, error)
        except CallFailed as error:
            return self._error(request, message, error.fault, RPC_CODES[error.fault.kind])

    async def _answer(self, request: Request, message: JSONRPCRequest) -> Response:
        """Answer a request, by the SDK; raises CodedError, CallFailed."""
        single = _is_single(request)
        connection = _connection(request, message, single=single)
        exchange = McpExchange(request=request, message=message, single=single, session=None)
        if SESSION in request.headers and not single and message.method != INITIALIZE:
            exchange.session = self._session(request)
        try:
            result = await serve_one(
                self._server, exchange, message.method, message.params, connection=connection, lifespan_state=None
            )
        except MCPError as error:
            problem, data = error.error.message, error.error.data
            problem = f"{problem}: {data[:SHOWN]}" if isinstance(data, str) and data else problem
            raise RpcRefused(error.error.code, problem) from None
        except ValidationError as error:
            raise RpcRefused(INVALID_PARAMS, _explained(error)) from None
        if message.method == INITIALIZE:
            exchange.headers[SESSION] = self.sessions.open().name
        body = {"jsonrpc": "2.0", "id": message.id, "result": result}
        return Response(serialization.dumps(body), 200, exchange.headers, JSON)

    def _notified(self, request: Request, message: JSONRPCNotification) -> Response:
        """Take a notification in; only what concerns a session's own call means anything here."""
        if not _is_single(request) and SESSION in request.headers:
            session = self._session(request)
            if message.method == "notifications/cancelled":
                session.cancel((message.params or {}).get("requestId"))
        return Response(status_code=202)

    # Tools

    async def _discovered(self, context: Context, params: RequestParams) -> JsonObject:
        """Return what is served. Who can keep no sandbox in the newer era is led to the older, where a session does."""
        stateless = not any(kind_of(each).works_in_sandbox for each in self._functions())
        alone = stateless or TRAJECTORY in _exchange(context).request.headers
        versions = (*HANDSHAKE_PROTOCOL_VERSIONS, *(MODERN_PROTOCOL_VERSIONS if alone else ()))
        return COMPLETE | {"supportedVersions": list(versions), "capabilities": {"tools": {"listChanged": False}}}

    def _functions(self) -> list[FunctionSpec]:
        """Return the functions that are tools, as far as there are any of these names now."""
        known = {each.name: each for each in self.api.functions.all()}
        return [known[name] for name in self._names if name in known]

    async def _tools(self, context: Context, params: PaginatedRequestParams) -> JsonObject:
        """Return every tool, on one page."""
        if params.cursor is not None:
            raise RpcRefused(INVALID_PARAMS, "params.cursor: there is only one page, and it has no cursor")
        return COMPLETE | {"tools": [_tool(each) for each in self._functions()]}

    async def _call(self, context: Context, request: CallToolRequestParams) -> JsonObject:
        """Call a tool, in the session's trajectory unless a header names another."""
        exchange = _exchange(context)
        function = next((each for each in self._functions() if each.name == request.name), None)
        if function is None:
            named = ", ".join(each.name for each in self._functions()) or "none"
            raise RpcRefused(INVALID_PARAMS, f"no such tool: {request.name[:SHOWN]!r}; there are {named}")
        call = self.call(exchange.request, function.name, request.arguments or {})
        if call.trajectory is None and not exchange.single:
            if exchange.session is None:
                raise RpcRefused(INVALID_REQUEST, "tools/call needs Mcp-Session-Id (see initialize)", status=400)
            call = replace(call, trajectory=exchange.session.name, living=exchange.session.begun)
        try:
            record = await self._run(exchange, call)
        except InvalidInput as error:
            if not str(error.detail.get("path", "")).startswith(ARGUMENTS):
                raise
            self.api.metrics.refused(self.name, error.code)
            return _call_content([f"{function.name}: {error.code}: {error.message}"], failed=True)
        fault = fault_of_end(record)
        if fault is not None and fault.kind is FaultKind.BUSY:
            raise CallFailed(fault)  # an error, which no model is to see
        exchange.headers.update(record_headers(record))
        return _call_result(function, record, fault)

    async def _run(self, exchange: McpExchange, call: InvocationRequest) -> Record:
        """Return the ended call; raises RpcRefused for one that its client took back."""
        session, request_id = exchange.session, exchange.message.id
        if session is not None and request_id in session.running:
            raise RpcRefused(INVALID_REQUEST, f"a request with the id {request_id!r} is under way in this session")
        work = asyncio.get_running_loop().create_task(self._run_one(exchange.request, call))
        if session is not None:
            session.running[request_id] = work
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
                del session.running[request_id]
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

    def _refused(
        self, request: Request, message: JSONRPCRequest | JSONRPCNotification | None, error: CodedError
    ) -> Response:
        """Return a refusal as an error of the request's id."""
        self.api.metrics.refused(self.name, error.code)
        fault = fault_of(error)
        if not isinstance(error, RpcRefused):
            return self._error(request, message, fault, RPC_CODES[fault.kind])
        return self._error(request, message, fault, error.rpc, error.status, _error_data(fault) | dict(error.data))

    def _error(
        self,
        request: Request,
        message: JSONRPCRequest | JSONRPCNotification | None,
        fault: Fault,
        code: int,
        status: int | None = None,
        data: Mapping[str, object] | None = None,
    ) -> Response:
        """Return an error, with the HTTP status that clients of the request's era read."""
        known = message.id if isinstance(message, JSONRPCRequest) else None
        body = _error_body(known, code, fault.message, data or _error_data(fault))
        by_era = ERROR_CODE_HTTP_STATUS.get(code, 200) if _is_single(request) else 200
        headers = {} if fault.invocation_id is None else {"X-Invocation-Id": fault.invocation_id}
        if fault.retry_after_s is not None:
            headers["Retry-After"] = retry_after(fault.retry_after_s)
        return Response(serialization.dumps(body), status or by_era, headers, JSON)


def _is_single(request: Request) -> bool:
    """Whether the request is of the newer era."""
    return request.headers.get(MCP_PROTOCOL_VERSION_HEADER) in MODERN_PROTOCOL_VERSIONS


def _exchange(context: Context) -> McpExchange:
    assert context.request is not None
    return context.request


def _read_message(body: bytes) -> JSONRPCRequest | JSONRPCNotification:
    """Return the one message of a body; raises RpcRefused."""
    try:
        value = serialization.loads(body)
    except InvalidInput as error:
        raise RpcRefused(PARSE_ERROR, error.message, status=400) from None
    if not isinstance(value, dict):
        raise RpcRefused(INVALID_REQUEST, "no batches: one message a request, a JSON object", status=400)
    try:
        return (JSONRPCRequest if "id" in value else JSONRPCNotification).model_validate(value)
    except ValidationError as error:
        raise RpcRefused(INVALID_REQUEST, _explained(error), status=400) from None


def _connection(request: Request, message: JSONRPCRequest, *, single: bool) -> Connection:
    """Return the connection of a request, in the version that it names; raises RpcRefused."""
    body = request.headers.get(MCP_PROTOCOL_VERSION_HEADER, DEFAULT_NEGOTIATED_VERSION)
    served = (*HANDSHAKE_PROTOCOL_VERSIONS, *MODERN_PROTOCOL_VERSIONS)
    if (unserved := unsupported_protocol_version_rejection(body[:SHOWN], served)) is not None:
        raise RpcRefused(unserved.code, unserved.message, status=400, data=unserved.data)
    if not single:
        return Connection.from_envelope(body, None, None)
    route = classify_inbound_request({"method": message.method, "params": message.params}, headers=request.headers)
    if isinstance(route, InboundLadderRejection):
        raise RpcRefused(route.code, route.message, data=route.data)
    return Connection.from_envelope(route.protocol_version, route.client_info, route.client_capabilities)


def _explained(error: ValidationError) -> str:
    """Return what does not fit the protocol, and where, without the client's own words."""
    wrong = error.errors(include_url=False, include_context=False, include_input=False)[:SHOWN_WRONG]
    return "; ".join(f"{'.'.join(map(str, each['loc']))[:SHOWN]}: {each['msg']}" for each in wrong)


def _tool(function: FunctionSpec) -> dict[str, object]:
    """Return a function as a tool."""
    schema = dict(input_schema(function) or {})
    shown = {name: value for name, value in schema.items() if name not in COMBINED}
    about = function.description or kind_of(function).meaning
    return {"name": function.name, "description": about, "inputSchema": shown | {"type": "object"}}


def _call_result(function: FunctionSpec, record: Record, fault: Fault | None) -> JsonObject:
    """Return the end of an invocation as a tool's result: for the model in text, and as it is."""
    value = result_of(record)
    texts = [] if fault is None else [fault.message]
    if value is not None or fault is None:
        texts.append(_text(function, value))
    structured = {"structuredContent": value} if isinstance(value, dict) else {}
    return _call_content(texts, failed=fault is not None) | structured | {"_meta": {"tangram/invocation": record.id}}


def _call_content(texts: Sequence[str], *, failed: bool) -> JsonObject:
    return COMPLETE | {"content": [{"type": "text", "text": text} for text in texts], "isError": failed}


def _text(function: FunctionSpec, value: object) -> str:
    """Return a result as a model reads it; of a command what a terminal would show."""
    if isinstance(value, str):
        return value
    if function.runtime != "exec" or not isinstance(value, dict):
        return serialization.dumps(value).decode("utf-8", "replace")
    shown = [str(value.get("stdout", ""))]
    if value.get("stderr"):
        shown.append(f"[stderr]\n{value['stderr']}")
    ending = value.get("exit_code")
    shown.append(f"[signal {value.get('signal')}]" if ending is None else f"[exit code {ending}]")
    return "\n".join(text.removesuffix("\n") for text in shown if text)


def _error_data(fault: Fault) -> dict[str, object]:
    """Return what a program may want to know of a fault."""
    fields = {"code": fault.code, "path": fault.path or None, "invocation_id": fault.invocation_id}
    more = {"retry_after_s": fault.retry_after_s}
    return {name: value for name, value in (fields | more).items() if value is not None}


def _error_body(request_id: RequestId | None, code: int, message: str, data: Mapping[str, object]) -> object:
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message, "data": data}}
