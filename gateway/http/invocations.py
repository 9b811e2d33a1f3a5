"""HTTP operations on invocations: invoke, batch, list, get, logs, cancel."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from gateway import wire
from gateway.http.call import read_call, read_headers, read_query, read_wait_s
from gateway.http.messages import (
    attend,
    read_body,
    record_headers,
    record_response,
    replay_headers,
    respond,
    result_response,
)
from gateway.http.operation import (
    Operation,
    PathParameter,
    ResponseSpec,
    json_answer,
    links,
)
from gateway.http.stream import LogStream, accepts_events
from gateway.invocations.invocation import LiveInvocation
from gateway.invocations.record import Mode, Record, cursor_of
from gateway.operations.lists import list_invocations
from gateway.services import Services
from gateway.store.store import LogRow
from tangram.types import (
    CallHeaders,
    Invocation,
    InvocationPage,
    InvocationQuery,
    InvokeQuery,
    JsonObject,
    LogAccepted,
    LogEnd,
    LogHeaders,
    LogQuery,
    LogRecord,
    LogResult,
    Name,
    WaitQuery,
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
            state, reason = wire.state(record.state), wire.reason(record.reason)
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
