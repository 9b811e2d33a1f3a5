"""HTTP routes of invocations, functions, nodes, images and the state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Annotated

from msgspec import Meta
from starlette.requests import Request
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import serialization
from gateway.auth import Role
from gateway.dashboard.stream import WatchView
from gateway.errors import problem
from gateway.http.messages import (
    attend,
    read_body,
    read_call,
    read_headers,
    read_item,
    read_query,
    read_wait_s,
    record_headers,
    record_response,
    replay_headers,
    respond,
    result_response,
)
from gateway.http.openapi import ROLE, Operation, OperationLink, PathParameter, ResponseSpec, json_answer, links
from gateway.http.streaming import EVENTS, LogStream, accepts_events
from gateway.invocations.invocations import InvocationRequest, LiveInvocation
from gateway.invocations.record import Mode, Record, cursor_of
from gateway.operations import (
    READY,
    ReadCall,
    Verdict,
    check_batch,
    get_function,
    get_readiness,
    get_resources,
    invoke_batch,
    list_functions,
    list_images,
    list_invocations,
    list_queue,
    list_tasks,
    pull_images,
)
from gateway.services import Services
from gateway.store.store import LogRow
from manager.errors import CodedError, InvalidInput
from tangram.types import (
    UNSET,
    ActivityInfo,
    BatchAnswer,
    BatchQuery,
    BatchRequest,
    BatchVerdict,
    CallHeaders,
    ConfigDiff,
    ConfigFiles,
    ConfigQuery,
    DrainWanted,
    FunctionInfo,
    FunctionList,
    FunctionQuery,
    FunctionUpload,
    Health,
    ImageList,
    ImagesWanted,
    Invocation,
    InvocationPage,
    InvocationQuery,
    InvokeQuery,
    JsonObject,
    LeaseAnswer,
    LeaseRequest,
    LogAccepted,
    LogEnd,
    LogHeaders,
    LogQuery,
    LogRecord,
    LogResult,
    Name,
    NodeStatus,
    NodeStatusList,
    NodeTicket,
    Purged,
    PurgeQuery,
    QueuePage,
    QueueQuery,
    ResourcesInfo,
    StepExpectation,
    StepInfo,
    StepList,
    StepNumber,
    StepPath,
    TaskList,
    TicketWanted,
    WaitQuery,
    WatchQuery,
)

INVOCATION_ID = PathParameter(name="id", about="Id of an invocation", shape=Name)
INPUT = Annotated[JsonObject, Meta(description="The input, as the function declares it")]
#: Seconds that a cancel waits for the processes to be gone before it answers 202.
CANCEL_WAIT_S = 5.0


class InvocationOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._invocations = services.invocations

    async def invoke(self, request: Request) -> Response:
        """One call in one of the three modes."""
        asked = read_query(request, InvokeQuery)
        mode = Mode(asked.mode)
        wait_s = read_wait_s(asked.wait, self._services.bounds.wait_max_s)
        body = await read_body(request, self._services)
        call = read_call(read_headers(request, CallHeaders), request.path_params["name"], body, mode)
        if call.callback_url is not None:
            self._services.callbacks.check(call.callback_url)
        invocation = await self._invocations.invoke(call)
        replayed = invocation.replays(call)
        if mode is Mode.STREAM:
            return self._stream(request, invocation, replayed)
        if mode is Mode.ASYNC:
            await self._invocations.wait(invocation, wait_s or 0.0)
            record = self._invocations.shown(invocation.record)
            return record_response(record, 200 if record.terminal else 202, replayed=replayed)
        if await attend(request, self._invocations, invocation, wait_s):
            if invocation.refusal is not None:
                raise invocation.refusal
            return result_response(invocation.record, replayed=replayed)
        await self._invocations.detach(invocation)
        return record_response(self._invocations.shown(invocation.record), 202, replayed=replayed)

    def _stream(self, request: Request, invocation: LiveInvocation, replayed: bool) -> Response:
        record = invocation.record

        def last(position: int) -> LogResult:
            return LogResult(stream="result", offset=position, invocation=self._invocations.shown(record).as_wire())

        return LogStream(
            self._services.logs,
            self._services.logs.follow(record.seq, 0),
            events=accepts_events(request.headers.get("accept")),
            position=0,
            about={"X-Invocation-Id": record.id, **replay_headers(replayed)},
            first=LogAccepted(stream="accepted", invocation=self._invocations.shown(record).as_wire(payload=False)),
            last=last,
            gone=partial(self._invocations.leave, invocation),
        )

    async def find(self, request: Request) -> Response:
        """Records by filter, newest first unless asked otherwise, page by page."""
        found = await list_invocations(self._services, read_query(request, InvocationQuery))
        page = tuple([self._invocations.shown(record).as_wire(payload=False) for record in found.records])
        return respond(InvocationPage(invocations=page, next_cursor=cursor_of(found.before)))

    async def get(self, request: Request) -> Response:
        """The record, from the moment of acceptance on."""
        invocation = await self._invocations.get(request.path_params["id"])
        wait_s = read_wait_s(read_query(request, WaitQuery).wait, self._services.bounds.wait_max_s)
        if wait_s is not None:
            await self._invocations.wait(invocation, wait_s)
        return record_response(self._invocations.shown(invocation.record))

    async def cancel(self, request: Request) -> Response:
        """End an invocation: 200 when it has ended, 202 while its processes are being stopped."""
        invocation = await self._invocations.cancel(request.path_params["id"])
        done = await self._invocations.wait(invocation, CANCEL_WAIT_S)
        return record_response(self._invocations.shown(invocation.record), 200 if done else 202)

    async def logs(self, request: Request) -> Response:
        """The log from ``offset`` on; with ``follow`` until the invocation has ended."""
        invocation = await self._invocations.get(request.path_params["id"])
        record = invocation.record
        asked = read_query(request, LogQuery)
        position = _offset(asked, read_headers(request, LogHeaders))
        logs = self._services.logs
        pages = logs.follow(record.seq, position) if asked.follow else self._pages(record, position)

        def last(position: int) -> LogEnd:
            state, reason = serialization.state(record.state), serialization.reason(record.reason)
            shown = self._invocations.shown(record).as_wire(payload=False)
            return LogEnd(
                stream="eof",
                offset=position,
                state=state,
                reason=reason,
                queue_ms=shown.queue_ms,
                overhead_ms=shown.overhead_ms,
                execution_ms=shown.execution_ms,
            )

        return LogStream(
            self._services.logs,
            pages,
            events=accepts_events(request.headers.get("accept")),
            position=position,
            about=record_headers(self._invocations.shown(record)),
            last=last,
        )

    async def _pages(self, record: Record, position: int) -> AsyncGenerator[list[LogRow], None]:
        while page := await self._services.logs.read(record.seq, position):
            position = page[-1].position + 1
            yield page

    def operations(self) -> list[Operation]:
        """The rows of the table; the hottest first."""
        return [self._invoke_row(), *self._record_rows()]

    def _invoke_row(self) -> Operation:
        accepted = links("/id", "id", "getInvocation", "getLogs", "cancelInvocation")
        return Operation(
            id="invoke",
            method="POST",
            path="/v1/functions/{name}/invocations",
            endpoint=self.invoke,
            summary="Invoke a function",
            tag="invocations",
            parts=(PathParameter(name="name", about="A registered function", shape=Name),),
            query=InvokeQuery,
            headers=CallHeaders,
            body={"application/json": INPUT},
            answers={
                200: ResponseSpec(
                    about="It ended; X-Function-Error names the reason when the user's own work failed. "
                    "mode=stream: records of the log, then of the result",
                    content={
                        "application/json": Invocation,
                        "application/x-ndjson": LogRecord,
                        "text/event-stream": LogRecord,
                    },
                    links=accepted,
                ),
                202: json_answer("Accepted, and durable", Invocation, accepted),
            },
            problems=(404, 408, 409, 410, 413, 422, 429, 502, 504),
        )

    def _record_rows(self) -> list[Operation]:
        first = links("/invocations/0/id", "id", "getInvocation", "redriveDeadLetter", "purgeDeadLetter")
        page = (*first, *links("/next_cursor", "cursor", "listInvocations"))
        return [
            Operation(
                id="getInvocation",
                method="GET",
                path="/v1/invocations/{id}",
                endpoint=self.get,
                summary="The record of an invocation, which exists from the moment of acceptance",
                tag="invocations",
                parts=(INVOCATION_ID,),
                query=WaitQuery,
                answers={200: json_answer("The record", Invocation, links("/id", "id", "getLogs", "cancelInvocation"))},
                problems=(404, 422),
            ),
            Operation(
                id="listInvocations",
                method="GET",
                path="/v1/invocations",
                endpoint=self.find,
                summary="Records, newest first unless asked otherwise",
                tag="invocations",
                query=InvocationQuery,
                answers={200: json_answer("A page", InvocationPage, page)},
                problems=(404, 422),
            ),
            Operation(
                id="getLogs",
                method="GET",
                path="/v1/invocations/{id}/logs",
                endpoint=self.logs,
                summary="The log of an invocation: NDJSON, or Server-Sent Events by Accept",
                tag="invocations",
                parts=(INVOCATION_ID,),
                query=LogQuery,
                headers=LogHeaders,
                answers={
                    200: ResponseSpec(
                        about="Records, then one of stream eof",
                        content={"application/x-ndjson": LogRecord, "text/event-stream": LogRecord},
                    )
                },
                problems=(404, 422),
            ),
            Operation(
                id="cancelInvocation",
                method="POST",
                path="/v1/invocations/{id}/cancel",
                endpoint=self.cancel,
                summary="Cancel an invocation; 409 when it has ended already",
                tag="invocations",
                parts=(INVOCATION_ID,),
                answers={
                    200: json_answer("It has ended", Invocation),
                    202: json_answer("It is being stopped", Invocation),
                },
                problems=(404, 409, 422),
            ),
        ]


def _offset(asked: LogQuery, headers: LogHeaders) -> int:
    """Return where to begin: ``?offset``, or after the Last-Event-ID of a reconnecting event source."""
    if asked.offset is not None:
        return asked.offset
    return int(headers.last_event_id) + 1 if headers.last_event_id else 0


class BatchOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def batch(self, request: HttpRequest) -> Response:
        """Accept many asynchronous calls with one commit; each has its own verdict, in the order of the calls."""
        asked = read_query(request, BatchQuery)
        limit_s = self._services.bounds.wait_max_s
        timeout_s = (
            limit_s if asked.timeout is None else min(limit_s, serialization.duration_s(asked.timeout, "timeout"))
        )
        calls = self._calls(serialization.loads_object(await read_body(request, self._services)))
        verdicts = await invoke_batch(self._services, calls, asked.wait, timeout_s)
        answers = [self._verdict(call, verdict) for call, verdict in zip(calls, verdicts, strict=True)]
        return respond(BatchAnswer(results=tuple(answers)))

    def _calls(self, body: Mapping[str, object]) -> list[ReadCall]:
        calls = body.get("calls")
        if not isinstance(calls, list):
            raise InvalidInput("calls must be a list", detail={"path": "$.calls"})
        check_batch(self._services, len(calls))
        return [_read_call(call, f"$.calls[{index}]") for index, call in enumerate(calls)]

    def _verdict(self, call: ReadCall, verdict: Verdict) -> BatchVerdict:
        if isinstance(verdict, CodedError):
            body = problem(verdict)
            return BatchVerdict(status=body.status, problem=body)
        replayed = isinstance(call, InvocationRequest) and verdict.replays(call)
        record = self._services.invocations.shown(verdict.record)
        return BatchVerdict(
            status=200 if record.terminal else 202,
            invocation=record.as_wire(),
            replayed=True if replayed else UNSET,
        )

    async def redrive(self, request: HttpRequest) -> Response:
        """Send a dead letter again."""
        invocation = await self._services.dead_letters.redrive(request.path_params["id"])
        return record_response(self._services.invocations.shown(invocation.record), 202)

    async def purge(self, request: HttpRequest) -> Response:
        """Take a dead letter off the list."""
        await self._services.dead_letters.purge(request.path_params["id"])
        return respond(Purged(purged=1))

    async def purge_all(self, request: HttpRequest) -> Response:
        """Take all dead letters, or those of one function, off the list."""
        asked = read_query(request, PurgeQuery)
        return respond(Purged(purged=await self._services.dead_letters.purge_all(asked.function)))

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        letter = PathParameter(name="id", about="Id of a dead invocation", shape=Name)
        again = links("/id", "id", "getInvocation", "getLogs", "cancelInvocation")
        counted = json_answer("How many left the list", Purged)
        return [
            Operation(
                id="invokeBatch",
                method="POST",
                path="/v1/invocations:batch",
                endpoint=self.batch,
                summary="Accept many calls with one commit; each has its own verdict",
                tag="invocations",
                query=BatchQuery,
                body={"application/json": BatchRequest},
                body_required=True,
                answers={200: json_answer("The verdicts, in the order of the calls", BatchAnswer)},
                problems=(413, 422),
            ),
            Operation(
                id="redriveDeadLetter",
                method="POST",
                path="/v1/dead-letters/{id}/redrive",
                endpoint=self.redrive,
                summary="Send a dead letter again, as an invocation of its own",
                tag="dead letters",
                parts=(letter,),
                answers={202: json_answer("Accepted, and durable", Invocation, again)},
                problems=(404, 409, 422, 429),
            ),
            Operation(
                id="purgeDeadLetter",
                method="DELETE",
                path="/v1/dead-letters/{id}",
                endpoint=self.purge,
                summary="Take a dead letter off the list; its record stays",
                tag="dead letters",
                parts=(letter,),
                admin=True,
                answers={200: counted},
                problems=(404, 409, 422),
            ),
            Operation(
                id="purgeDeadLetters",
                method="DELETE",
                path="/v1/dead-letters",
                endpoint=self.purge_all,
                summary="Take all dead letters off the list; they are listed by GET /v1/invocations?dead=true",
                tag="dead letters",
                query=PurgeQuery,
                admin=True,
                answers={200: counted},
                problems=(422,),
            ),
        ]


def _read_call(call: object, path: str) -> ReadCall:
    """Return one call of a batch, or why it cannot be read."""
    try:
        return read_item(call, path)
    except InvalidInput as error:
        return error


TEXT_PLAIN = "text/plain; version=0.0.4; charset=utf-8"


class AdministrationOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def functions(self, request: Request) -> Response:
        return respond(FunctionList(functions=list_functions(self._services)))

    async def function(self, request: Request) -> Response:
        return respond(get_function(self._services, request.path_params["name"]))

    async def put_function(self, request: Request) -> Response:
        """Add or change one function, with the files of a handler; nothing in flight is dropped."""
        name = serialization.name(request.path_params["name"], "function")
        asked = read_query(request, FunctionQuery)
        upload = serialization.read(
            serialization.loads_object(await read_body(request, self._services)), FunctionUpload, "$"
        )
        return respond(await self._services.put(name, upload, asked.dry_run))

    async def remove_function(self, request: Request) -> Response:
        """Remove a function that was applied: no new invocations, nothing in flight is dropped."""
        name = serialization.name(request.path_params["name"], "function")
        return respond(await self._services.remove(name))

    async def put_config(self, request: Request) -> Response:
        """Add and change functions and tasks: new invocations see the new ones, nothing in flight is dropped."""
        asked = read_query(request, ConfigQuery)
        document = await read_body(request, self._services)
        return respond(await self._services.configure(document, asked.dry_run, asked.prune))

    async def resources(self, request: Request) -> Response:
        return respond(get_resources(self._services))

    async def queue(self, request: Request) -> Response:
        """A page of what waits; a cursor stays good when the action that it names has left."""
        return respond(list_queue(self._services, read_query(request, QueueQuery)))

    async def activity(self, request: Request) -> Response:
        return respond(self._services.stats.whole_info())

    async def health(self, request: Request) -> Response:
        """The process lives."""
        return respond(Health(status="ok"))

    async def ready(self, request: Request) -> Response:
        """Whether work is taken now, and if not, why."""
        found = get_readiness(self._services)
        return respond(found, 200 if found.status == READY else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._services.metrics.text(), media_type=TEXT_PLAIN)

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        of_first = links("/functions/0/name", "name", "getFunction", "invoke")
        opening = OperationLink(
            operation="openTrajectory", parameters={}, body={"function": "$response.body#/functions/0/name"}
        )
        return [
            Operation(
                id="listFunctions",
                method="GET",
                path="/v1/functions",
                endpoint=self.functions,
                summary="Registered functions",
                tag="functions",
                answers={200: json_answer("All of them", FunctionList, (*of_first, opening))},
            ),
            Operation(
                id="getFunction",
                method="GET",
                path="/v1/functions/{name}",
                endpoint=self.function,
                summary="One function",
                tag="functions",
                parts=(PathParameter(name="name", about="A registered function", shape=Name),),
                answers={200: json_answer("The function", FunctionInfo)},
                problems=(404, 422),
            ),
            *self._change_rows(),
            Operation(
                id="putConfig",
                method="PUT",
                path="/v1/config",
                endpoint=self.put_config,
                summary="Apply a configuration without dropping anything in flight",
                tag="functions",
                query=ConfigQuery,
                admin=True,
                body={"application/yaml": JsonObject, "application/json": ConfigFiles},
                answers={200: json_answer("The differences", ConfigDiff)},
                problems=(413, 422),
            ),
            *self._scheduler_rows(),
            *self._probe_rows(),
        ]

    def _change_rows(self) -> list[Operation]:
        return [
            Operation(
                id="putFunction",
                method="PUT",
                path="/v1/functions/{name}",
                endpoint=self.put_function,
                summary="Add or change one function, with a handler's files; 409 for one of the server's own files",
                tag="functions",
                query=FunctionQuery,
                admin=True,
                parts=(PathParameter(name="name", about="The function", shape=Name),),
                body={"application/json": FunctionUpload},
                body_required=True,
                answers={200: json_answer("The differences", ConfigDiff)},
                problems=(409, 413, 422),
            ),
            Operation(
                id="removeFunction",
                method="DELETE",
                path="/v1/functions/{name}",
                endpoint=self.remove_function,
                summary="Remove a function that was applied; 409 for one of the server's own files",
                tag="functions",
                admin=True,
                parts=(PathParameter(name="name", about="A registered function", shape=Name),),
                answers={200: json_answer("The differences", ConfigDiff)},
                problems=(404, 409, 422),
            ),
        ]

    def _scheduler_rows(self) -> list[Operation]:
        return [
            Operation(
                id="getResources",
                method="GET",
                path="/v1/resources",
                endpoint=self.resources,
                summary="Pools, what is held of them, and the sandboxes",
                tag="scheduler",
                answers={200: json_answer("The present state", ResourcesInfo)},
            ),
            Operation(
                id="getActivity",
                method="GET",
                path="/v1/activity",
                endpoint=self.activity,
                summary="Rates and times of the last minute, failures of the last 15",
                tag="scheduler",
                answers={200: json_answer("The present state", ActivityInfo)},
            ),
            Operation(
                id="getQueue",
                method="GET",
                path="/v1/queue",
                endpoint=self.queue,
                summary="How many wait, and a page of them in order of service, with what each waits for",
                tag="scheduler",
                query=QueueQuery,
                answers={200: json_answer("A page", QueuePage, links("/next_cursor", "cursor", "getQueue"))},
                problems=(422,),
            ),
        ]

    def _probe_rows(self) -> list[Operation]:
        return [
            Operation(
                id="getHealth",
                method="GET",
                path="/healthz",
                endpoint=self.health,
                summary="Whether the process lives",
                tag="operation",
                answers={200: json_answer("It lives", Health)},
                open=True,
            ),
            Operation(
                id="getReadiness",
                method="GET",
                path="/readyz",
                endpoint=self.ready,
                summary="Whether work is taken now",
                tag="operation",
                answers={200: json_answer("It is", Health), 503: json_answer("It is not, and why", Health)},
                open=True,
            ),
            Operation(
                id="getMetrics",
                method="GET",
                path="/metrics",
                endpoint=self.metrics,
                summary="Metrics in the Prometheus text format",
                tag="operation",
                answers={200: ResponseSpec(about="The exposition", content={"text/plain": str})},
            ),
        ]


class ImageOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def put(self, request: Request) -> Response:
        """Begin to pull images, and wait for them if that is asked; what became of each stands in the answer."""
        body = serialization.loads_object(await read_body(request, self._services))
        wanted = serialization.read(body, ImagesWanted, "$").images
        wait_s = read_wait_s(read_query(request, WaitQuery).wait, self._services.bounds.wait_max_s)
        return respond(await pull_images(self._services, wanted, wait_s or 0.0))

    async def get(self, request: Request) -> Response:
        return respond(await list_images(self._services))

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        return [
            Operation(
                id="listImages",
                method="GET",
                path="/v1/images",
                endpoint=self.get,
                summary="Container images, and how far pulls are",
                tag="images",
                answers={200: json_answer("All of them", ImageList)},
                problems=(422,),
            ),
            Operation(
                id="pullImages",
                method="PUT",
                path="/v1/images",
                endpoint=self.put,
                summary="Pull container images ahead of a run",
                tag="images",
                query=WaitQuery,
                body={"application/json": ImagesWanted},
                body_required=True,
                answers={200: json_answer("Those that were asked for", ImageList)},
                problems=(413, 422),
                admin=True,
            ),
        ]


class LeaseOperations:
    """The endpoint, and its row of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def renew(self, request: Request) -> Response:
        """Hold the client's trajectories for a while longer."""
        asked = serialization.read(
            serialization.loads_object(await read_body(request, self._services)), LeaseRequest, "$"
        )
        return respond(LeaseAnswer(gone=tuple(self._services.leases.renew(asked.trajectories, asked.lease_s))))

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        return [
            Operation(
                id="renewLeases",
                method="POST",
                path="/v1/leases",
                endpoint=self.renew,
                summary="Say that the client of these trajectories lives",
                tag="trajectories",
                body={"application/json": LeaseRequest},
                body_required=True,
                answers={200: json_answer("They are held for so long", LeaseAnswer)},
                problems=(413, 422),
            ),
        ]


#: Seconds for which a viewer may take nothing before its connection is closed.
SILENT_S = 30.0


class WatchOperations:
    """The endpoint, and its row of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def watch(self, request: Request) -> Response:
        """The stream, from ``since`` on where that is kept."""
        asked = read_query(request, WatchQuery)
        self._services.watch.check()
        packed = "gzip" in request.headers.get("accept-encoding", "")
        view, is_admin = WatchView(asked.bars, packed), request.scope[ROLE] is Role.ADMIN
        return WatchStream(self._services.watch.follow(view, asked.since, asked.history, is_admin), packed)

    def operations(self) -> list[Operation]:
        return [
            Operation(
                id="watch",
                method="GET",
                path="/v1/watch",
                endpoint=self.watch,
                summary="What the page shows, as Server-Sent Events of small changes",
                tag="scheduler",
                query=WatchQuery,
                answers={200: ResponseSpec(about="hello, state, then ticks", content={EVENTS: str})},
                problems=(422,),
            )
        ]


class WatchStream(Response):
    """Sends what a viewer is told; nothing is made for one that does not read, and it is let go in the end."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], packed: bool) -> None:
        super().__init__()
        self._chunks, self._is_packed = chunks, packed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.get_running_loop().create_task(self._send_all(send))
        watching = asyncio.get_running_loop().create_task(self._watch(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            sending.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)
            await self._chunks.aclose()
        error = None if sending.cancelled() else sending.exception()
        if error is not None and not isinstance(error, TimeoutError):
            raise error

    @staticmethod
    async def _watch(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _send_all(self, send: Send) -> None:
        headers = [(b"content-type", EVENTS.encode()), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
        headers.append((b"vary", b"Accept-Encoding"))
        if self._is_packed:
            headers.append((b"content-encoding", b"gzip"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for data in self._chunks:
            async with asyncio.timeout(SILENT_S):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class NodeOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def find(self, request: Request) -> Response:
        return respond(self._services.machines.info())

    async def drain(self, request: Request) -> Response:
        """Nothing new starts there; the machine leaves when it is empty, or when its grace is over."""
        name = serialization.name(request.path_params["name"], "node")
        body = await read_body(request, self._services)
        asked = serialization.read(serialization.loads_object(body), DrainWanted, "$") if body else DrainWanted()
        return respond(self._services.machines.drain(name, asked.why))

    async def issue(self, request: Request) -> Response:
        asked = serialization.read(
            serialization.loads_object(await read_body(request, self._services)), TicketWanted, "$"
        )
        return respond(self._services.machines.ticket(asked.name), 201)

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        return [
            Operation(
                id="listNodes",
                method="GET",
                path="/v1/nodes",
                endpoint=self.find,
                summary="The machines that actions run on, and how they are",
                tag="operation",
                answers={200: json_answer("All of them", NodeStatusList, links("/nodes/0/node", "name", "drainNode"))},
            ),
            Operation(
                id="drainNode",
                method="POST",
                path="/v1/nodes/{name}/drain",
                endpoint=self.drain,
                summary="Have a machine take no new work, and leave when it is empty",
                tag="operation",
                admin=True,
                parts=(PathParameter(name="name", about="A machine that has joined", shape=Name),),
                body={"application/json": DrainWanted},
                answers={200: json_answer("How it is now", NodeStatus)},
                problems=(404, 413, 422),
            ),
            Operation(
                id="issueTicket",
                method="POST",
                path="/v1/node-tickets",
                endpoint=self.issue,
                summary="What admits one machine once, soon",
                tag="operation",
                admin=True,
                body={"application/json": TicketWanted},
                body_required=True,
                answers={201: json_answer("The ticket", NodeTicket)},
                problems=(409, 413, 422),
            ),
        ]


TASK = PathParameter(name="task", about="An RL task", shape=Name)


class TaskOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def tasks(self, request: Request) -> Response:
        """Every task, with its steps that have not ended; one that was only told of has an empty account."""
        return respond(list_tasks(self._services))

    async def steps(self, request: Request) -> Response:
        task = serialization.name(request.path_params["task"], "task")
        return respond(StepList(steps=tuple(self._services.steps.of(task))))

    async def tell_step(self, request: Request) -> Response:
        """Open a step, or change what is expected of it; it is durable."""
        meant = serialization.read(request.path_params, StepPath)
        self._services.functions.task(meant.task)
        asked = serialization.read(
            serialization.loads_object(await read_body(request, self._services)), StepExpectation, "$"
        )
        return respond(await self._services.steps.tell(meant.task, meant.step, asked.expected))

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        number = PathParameter(name="step", about="A step, as the trainer numbers it", shape=StepNumber)
        return [
            Operation(
                id="getTasks",
                method="GET",
                path="/v1/tasks",
                endpoint=self.tasks,
                summary="RL tasks: weights, bounds and use, and the steps that have not ended",
                tag="scheduler",
                answers={200: json_answer("The present state", TaskList)},
            ),
            Operation(
                id="listSteps",
                method="GET",
                path="/v1/tasks/{task}/steps",
                endpoint=self.steps,
                summary="The steps of a task that are kept, that opened last first",
                tag="scheduler",
                parts=(TASK,),
                answers={200: json_answer("All of them; none if none was told of", StepList)},
                problems=(422,),
            ),
            Operation(
                id="putStep",
                method="PUT",
                path="/v1/tasks/{task}/steps/{step}",
                endpoint=self.tell_step,
                summary="Tell of a step of a task: how many rollouts it is to have",
                tag="scheduler",
                parts=(TASK, number),
                body={"application/json": StepExpectation},
                body_required=True,
                answers={200: json_answer("The step as it stands", StepInfo, links("/task", "task", "listSteps"))},
                problems=(413, 422),
            ),
        ]
