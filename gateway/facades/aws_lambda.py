"""AWS Lambda's Invoke: boto3, the AWS command line and the SDKs of other languages as they are.

All tries of one call have the same ``amz-sdk-invocation-id``, which is the call's Idempotency-Key here: a client that
broke off, or was told to come again, joins the invocation that runs already.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway import wire
from gateway.facades.facade import Facade, ForeignRoute
from gateway.facades.faults import Dialect, Fault, FaultKind, fault_of_end
from gateway.http.messages import JSON, read_body, record_headers
from gateway.invocations.invocation import InvocationRequest
from gateway.invocations.record import Mode, Record
from manager.errors import InvalidInput, NotFound, Reason, Unsupported
from manager.function import FunctionSpec
from runtimes import exact_json

#: Seconds after which boto3 breaks off a read.
READ_TIMEOUT_S = 60.0
LATEST = "$LATEST"
ACCOUNT = "arn:aws:lambda:local:000000000000:function:"
#: Bytes of a log's end that are sent with an answer.
TAIL_BYTES = 4096
#: Of the client context before it is decoded, as AWS has it.
CONTEXT_BYTES = 3583
PAGE_MAX = 50
#: Headers of what this door has not; one of these would change what is asked.
REFUSED_HEADERS = ("x-amz-tenant-id", "x-amz-durable-execution-name")
#: How a failure of the function's own work is told: as an answer, which no client sends again.
FUNCTION_ERRORS = frozenset({FaultKind.FAILED, FaultKind.TIMEOUT})
STATES = {"preparing": "Pending", "ready": "Active", "unavailable": "Failed"}


class AwsLambda(Facade):
    """The door of Lambda's clients."""

    name: ClassVar[str] = "aws_lambda"
    dialect: ClassVar[Dialect] = Dialect.LAMBDA
    prefix: ClassVar[str] = "lambda"
    roots: ClassVar[frozenset[str]] = frozenset({"2015-03-31", "2014-11-13", "2021-11-15"})

    def routes(self) -> Sequence[ForeignRoute]:
        """Return every route of the door."""
        functions = "/2015-03-31/functions"
        return (
            ForeignRoute(
                method="POST", path=functions + "/{name}/invocations", endpoint=self.invoke, query=("Qualifier",)
            ),
            ForeignRoute(method="POST", path="/2014-11-13/functions/{name}/invoke-async", endpoint=self.invoke_async),
            ForeignRoute(
                method="POST",
                path="/2021-11-15/functions/{name}/response-streaming-invocations",
                endpoint=self.invoke_streaming,
                query=("Qualifier",),
            ),
            ForeignRoute(method="GET", path=functions, endpoint=self.find, query=("MaxItems", "Marker")),
            ForeignRoute(method="GET", path=functions + "/", endpoint=self.find, query=("MaxItems", "Marker")),
            ForeignRoute(method="GET", path=functions + "/{name}", endpoint=self.get, query=("Qualifier",)),
            ForeignRoute(
                method="GET",
                path=functions + "/{name}/configuration",
                endpoint=self.configuration,
                query=("Qualifier",),
            ),
        )

    def body(self, fault: Fault, status: int) -> object:
        """Return a fault as the service says it."""
        told = {"Type": "Server" if status >= 500 else "User", "Message": fault.message, "message": fault.message}
        return told | ({"Reason": "CallerRateLimitExceeded"} if fault.kind is FaultKind.BUSY else {})

    def headers(self, fault: Fault) -> Mapping[str, str]:
        """Return the name by which clients know the error."""
        named = {"x-amzn-ErrorType": fault.said(self.dialect).name}
        return named if fault.invocation_id is None else named | {"x-amzn-RequestId": fault.invocation_id}

    # Invoke

    async def invoke(self, request: Request) -> Response:
        """Invoke in one of the three ways."""
        function = self._named(request)
        for name in REFUSED_HEADERS:
            if name in request.headers:
                raise InvalidInput(f"the header {name} is not served here", component=self.name, detail={"path": name})
        kind = request.headers.get("x-amz-invocation-type", "RequestResponse")
        payload = await read_body(request, self.services)
        if kind == "DryRun":
            return Response(status_code=204)
        call = self._call(request, function, payload)
        if kind == "Event":
            return await self._event(call)
        if kind != "RequestResponse":
            told = f"X-Amz-Invocation-Type is {kind[:64]!r}, none of RequestResponse, Event and DryRun"
            raise InvalidInput(told, component=self.name, detail={"path": "X-Amz-Invocation-Type"})
        (invocation,) = await self.calls.run(request, [call], self.until_s(READ_TIMEOUT_S))
        return await self._ended(invocation.record, tail=request.headers.get("x-amz-log-type") == "Tail")

    async def invoke_async(self, request: Request) -> Response:
        """The old way to send an event."""
        function = self._named(request)
        await self._event(self._call(request, function, await read_body(request, self.services)))
        return Response(b"{}", 202, media_type=JSON)

    async def invoke_streaming(self, request: Request) -> Response:
        """Not here: a result is whole."""
        raise Unsupported("InvokeWithResponseStream is not served here: use Invoke", component=self.name)

    async def _event(self, call: InvocationRequest) -> Response:
        invocation = await self.calls.accept(replace(call, mode=Mode.ASYNC), self.until_s(READ_TIMEOUT_S))
        headers = {"x-amzn-RequestId": invocation.record.id, "X-Invocation-Id": invocation.record.id}
        return Response(status_code=202, headers=headers)

    def _call(self, request: Request, function: FunctionSpec, payload: bytes) -> InvocationRequest:
        """Return the call, whose tries have one key; raises InvalidInput."""
        try:
            given = exact_json.loads(payload) if payload else {}
        except orjson.JSONDecodeError as error:
            raise InvalidInput(f"Could not parse request body into json: {error}", component=self.name) from None
        if given is not None and not isinstance(given, dict):
            raise InvalidInput("the payload must be a JSON object (or nothing) at this gateway", component=self.name)
        call = self.call(request, function.name, wire.loads_object(payload) if given else {})
        attempt_id = request.headers.get("amz-sdk-invocation-id")
        if call.key is None and attempt_id:
            call = replace(call, key=wire.name(f"aws-lambda:{attempt_id}", "amz-sdk-invocation-id"))
        return replace(call, **_custom(request.headers.get("x-amz-client-context")))

    async def _ended(self, record: Record, *, tail: bool) -> Response:
        fault = fault_of_end(record)
        if fault is not None and fault.kind not in FUNCTION_ERRORS:
            return self.refuse(fault)
        headers = {**record_headers(record), "X-Amz-Executed-Version": LATEST, "x-amzn-RequestId": record.id}
        if tail:
            headers["X-Amz-Log-Result"] = base64.b64encode(await self._tail(record)).decode()
        if fault is None:
            return Response(record.result or b"null", 200, headers, JSON)
        headers["X-Amz-Function-Error"] = "Unhandled"
        return Response(wire.dumps(_function_error(record)), 200, headers, JSON)

    async def _tail(self, record: Record) -> bytes:
        """Return the end of the log, from a whole character on."""
        end, position = b"", 0
        while page := await self.services.logs.read(record.seq, position):
            position = page[-1].position + 1
            end = (end + "".join(row.data for row in page).encode("utf-8", "replace"))[-TAIL_BYTES:]
        return end.decode("utf-8", "ignore").encode()

    # What there is

    async def find(self, request: Request) -> Response:
        """Functions by name, page by page."""
        asked = request.query_params.get("MaxItems", str(PAGE_MAX))
        if not asked.isdigit() or not int(asked):
            raise InvalidInput(
                f"MaxItems is {asked[:64]!r}, no count", component=self.name, detail={"path": "MaxItems"}
            )
        after, count = request.query_params.get("Marker", ""), min(int(asked), PAGE_MAX)
        rest = [each for each in self.services.functions.all() if each.name > after]
        marker = rest[count - 1].name if len(rest) > count else None
        return _json({"Functions": [self._told(each) for each in rest[:count]], "NextMarker": marker})

    async def get(self, request: Request) -> Response:
        """One function, and where its code would be."""
        function = self._named(request)
        code = {"RepositoryType": "Tangram", "Location": f"/v1/functions/{function.name}"}
        return _json({"Configuration": self._told(function), "Code": code, "Tags": {}})

    async def configuration(self, request: Request) -> Response:
        """One function."""
        return _json(self._told(self._named(request)))

    def _told(self, function: FunctionSpec) -> dict[str, object]:
        readiness = self.services.functions.readiness(function.name)
        memory = 128 if function.sandbox is None else max(1, function.sandbox.memory_bytes // 2**20)
        return {
            "FunctionName": function.name,
            "FunctionArn": ACCOUNT + function.name,
            "Description": function.description,
            "Runtime": function.runtime,
            "Handler": "" if function.handler is None else f"{function.handler.module}:{function.handler.callable}",
            "Timeout": math.ceil(function.timeout_s),
            "MemorySize": memory,
            "CodeSize": 0,
            "CodeSha256": function.revision,
            "RevisionId": function.revision,
            "Version": LATEST,
            "LastModified": "1970-01-01T00:00:00.000+0000",
            "State": STATES[readiness.status],
            "StateReason": readiness.problem,
            "LastUpdateStatus": "Successful",
            "PackageType": "Zip",
        }

    def _named(self, request: Request) -> FunctionSpec:
        """Return the function by its name, ``name:$LATEST``, or a partial or full ARN; raises NotFound."""
        given = request.path_params["name"]
        known = {each.name: each for each in self.services.functions.all()}
        if given in known:
            return known[given]
        parts = given.rpartition("function:")[2].split(":") if "function:" in given else given.split(":")
        if "function:" not in given and len(parts) >= 2 and parts[0].isdigit():
            parts = parts[1:]  # the account
        qualifier = request.query_params.get("Qualifier") or (parts[1] if len(parts) > 1 else LATEST)
        if parts[0] not in known or len(parts) > 2:
            raise NotFound(f"Function not found: {ACCOUNT}{given[:200]}", component=self.name)
        if qualifier != LATEST:
            told = f"{parts[0]} has no version or alias {qualifier[:64]!r}: only {LATEST}"
            raise NotFound(told, component=self.name)
        return known[parts[0]]


def _custom(context: str | None) -> dict[str, Any]:
    """Return what the client context chooses: ``custom``: trajectory, task and timeout; raises InvalidInput.

    Any: they are fields of an `InvocationRequest`, each of its own type.
    """
    if not context:
        return {}
    place = {"path": "X-Amz-Client-Context"}
    if len(context) > CONTEXT_BYTES:
        raise InvalidInput(f"X-Amz-Client-Context is longer than {CONTEXT_BYTES} bytes", detail=place)
    try:
        read = orjson.loads(base64.b64decode(context, validate=True))
        custom = (read.get("custom") or {}) if isinstance(read, dict) else None
    except (binascii.Error, ValueError):
        custom = None
    if not isinstance(custom, dict):
        raise InvalidInput("X-Amz-Client-Context is no JSON object in base64, with an object as custom", detail=place)
    chosen: dict[str, Any] = {}
    for name in ("trajectory", "task"):
        if name in custom:
            chosen[name] = wire.name(str(custom[name]), f"custom.{name}")
    if "timeout" in custom:
        chosen["timeout_s"] = wire.duration_s(str(custom["timeout"]), "custom.timeout")
    return chosen


def _function_error(record: Record) -> dict[str, object]:
    """Return a failure of the function as Lambda tells it."""
    if record.reason is Reason.TIMEOUT:
        told = f"{record.id} Task timed out: {record.message}"
        return {"errorMessage": told, "errorType": "Sandbox.Timedout", "stackTrace": []}
    trace = str(record.detail.get("traceback", ""))
    last = trace.strip().splitlines()[-1] if trace.strip() else ""
    name = last.partition(":")[0]
    kind = name if name.isidentifier() else str(record.reason)
    return {"errorMessage": record.message, "errorType": kind, "stackTrace": trace.splitlines()}


def _json(value: object) -> Response:
    return Response(wire.dumps(value), media_type=JSON)
