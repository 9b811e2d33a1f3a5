"""HTTP operations on invocations: invoke, batch, list, get, logs, cancel."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from gateway import wire
from gateway.http.call import read_call, read_mode, read_wait_s
from gateway.http.messages import (
    attend,
    json_response,
    read_body,
    record_headers,
    record_response,
    result_response,
)
from gateway.http.operation import (
    DURATION,
    EXPECT,
    FLAG,
    KEY,
    NAME,
    Operation,
    Parameter,
    ResponseSpec,
    header,
    json_answer,
    links,
    page_of,
    path_parameter,
    query,
    ref,
)
from gateway.http.stream import LogStream, accepts_events
from gateway.invocations.invocation import LiveInvocation
from gateway.invocations.record import Mode, Record, invalid_state, seq_of
from gateway.services import Services
from gateway.store.store import LIST_LIMIT_MAX, Filter, LogRow
from manager.outcome import State

INVOCATION_ID = path_parameter("id", "Id of an invocation")
WAIT = query("wait", "Wait so long for the end before answering", DURATION)
#: Seconds that a cancel waits for the processes to be gone before it answers 202.
CANCEL_WAIT_S = 5.0


class InvocationOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._invocations = services.invocations

    async def invoke(self, request: Request) -> Response:
        """One call in one of the three modes."""
        mode = read_mode(request)
        wait_s = read_wait_s(request, self._services.limits.wait_s)
        body = await read_body(request, self._services)
        call = read_call(request, request.path_params["name"], body)
        if call.callback_url is not None:
            self._services.callbacks.check(call.callback_url)
        invocation = await self._invocations.invoke(call)
        if mode is Mode.STREAM:
            return self._stream(request, invocation)
        if mode is Mode.ASYNC:
            done = await self._invocations.wait(invocation, wait_s or 0.0)
            return record_response(invocation.record, 200 if done else 202)
        if await attend(request, self._invocations, invocation, wait_s):
            if invocation.refusal is not None:
                raise invocation.refusal
            return result_response(invocation.record)
        await self._invocations.detach(invocation)
        return record_response(invocation.record, 202)

    def _stream(self, request: Request, invocation: LiveInvocation) -> Response:
        record = invocation.record

        def last(position: int) -> Mapping[str, object]:
            return {"stream": "result", "offset": position, "invocation": record.as_json()}

        return LogStream(
            self._services.logs,
            self._services.logs.follow(record.seq, 0),
            events=accepts_events(request.headers.get("accept")),
            position=0,
            about={"X-Invocation-Id": record.id},
            first={"stream": "accepted", "invocation": record.as_json(payload=False)},
            last=last,
            gone=partial(self._invocations.leave, invocation),
        )

    async def find(self, request: Request) -> Response:
        """Records by filter, newest first, page by page."""
        chosen = _filter(request)
        records = await self._invocations.find(chosen)
        cursor = records[-1].id if len(records) == chosen.limit else None
        return json_response(
            {"invocations": [record.as_json(payload=False) for record in records], "next_cursor": cursor}
        )

    async def get(self, request: Request) -> Response:
        """The record, from the moment of acceptance on."""
        invocation = await self._invocations.get(request.path_params["id"])
        wait_s = read_wait_s(request, self._services.limits.wait_s)
        if wait_s is not None:
            await self._invocations.wait(invocation, wait_s)
        return record_response(invocation.record)

    async def cancel(self, request: Request) -> Response:
        """End an invocation: 200 when it has ended, 202 while its processes are being stopped."""
        invocation = await self._invocations.cancel(request.path_params["id"])
        done = await self._invocations.wait(invocation, CANCEL_WAIT_S)
        return record_response(invocation.record, 200 if done else 202)

    async def logs(self, request: Request) -> Response:
        """The log from ``offset`` on; with ``follow`` until the invocation has ended."""
        invocation = await self._invocations.get(request.path_params["id"])
        record = invocation.record
        position = wire.whole(_offset(request), "offset")
        follow = wire.flag(request.query_params.get("follow", "false"), "follow")
        pages = self._services.logs.follow(record.seq, position) if follow else self._pages(record, position)

        def last(position: int) -> Mapping[str, object]:
            return {"stream": "eof", "offset": position, "state": record.state, "reason": record.reason}

        return LogStream(
            self._services.logs,
            pages,
            events=accepts_events(request.headers.get("accept")),
            position=position,
            about=record_headers(record),
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
        record = ref("Invocation")
        accepted = links("/id", "id", "getInvocation", "getLogs", "cancelInvocation")
        return Operation(
            id="invoke",
            method="POST",
            path="/v1/functions/{name}/invocations",
            endpoint=self.invoke,
            summary="Invoke a function",
            tag="invocations",
            parameters=(
                path_parameter("name", "A registered function"),
                query("mode", "How to attend to the result", {"enum": ["sync", "async", "stream"], "default": "sync"}),
                query("wait", "sync: answer 202 when it takes longer; async: wait so long first", DURATION),
                *CALL_HEADERS,
            ),
            body={"application/json": {"type": "object", "description": "The input, as the function declares it"}},
            answers={
                200: ResponseSpec(
                    about="It ended; X-Function-Error names the reason when the user's own work failed. "
                    "mode=stream: records of the log, then of the result",
                    content={
                        "application/json": record,
                        "application/x-ndjson": ref("LogRecord"),
                        "text/event-stream": ref("LogRecord"),
                    },
                    links=accepted,
                ),
                202: json_answer("Accepted, and durable", record, accepted),
            },
            problems=(404, 408, 409, 410, 413, 422, 429, 502, 504),
        )

    def _record_rows(self) -> list[Operation]:
        record = ref("Invocation")
        filters = tuple(query(name, f"Only those of this {name}", NAME) for name in ("function", "task"))
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
                parameters=(INVOCATION_ID, WAIT),
                answers={200: json_answer("The record", record, links("/id", "id", "getLogs", "cancelInvocation"))},
                problems=(404, 422),
            ),
            Operation(
                id="listInvocations",
                method="GET",
                path="/v1/invocations",
                endpoint=self.find,
                summary="Records, newest first",
                tag="invocations",
                parameters=(
                    *filters,
                    query("trajectory", "Only those of this trajectory", NAME),
                    query("parent", "Only those that this invocation made", NAME),
                    query("state", "Only those in this state", {"enum": [state.value for state in State]}),
                    query("dead", "Only those in (or not in) the dead-letter list", FLAG),
                    *page_of("Records"),
                ),
                answers={200: json_answer("A page", ref("InvocationPage"), page)},
                problems=(404, 422),
            ),
            Operation(
                id="getLogs",
                method="GET",
                path="/v1/invocations/{id}/logs",
                endpoint=self.logs,
                summary="The log of an invocation: NDJSON, or Server-Sent Events by Accept",
                tag="invocations",
                parameters=(
                    INVOCATION_ID,
                    query("follow", "Go on until it has ended, with heartbeats", FLAG),
                    query("offset", "First record to send", {"type": "integer", "minimum": 0}),
                    header("Last-Event-ID", "The last offset that was received (Server-Sent Events)"),
                ),
                answers={
                    200: ResponseSpec(
                        about="Records, then one of stream eof",
                        content={"application/x-ndjson": ref("LogRecord"), "text/event-stream": ref("LogRecord")},
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
                parameters=(INVOCATION_ID,),
                answers={200: json_answer("It has ended", record), 202: json_answer("It is being stopped", record)},
                problems=(404, 409, 422),
            ),
        ]


CALL_HEADERS: tuple[Parameter, ...] = (
    header("Idempotency-Key", "The same key and body latch on to the first invocation", KEY),
    header("X-Trajectory-Id", "The rollout whose environment it needs", NAME),
    EXPECT,
    header("X-Task", "The RL task it belongs to", NAME),
    header("X-Timeout", "Bound of the execution, at most the function's", DURATION),
    header("X-Max-Age", "Asynchronous work that still waits at this age is given up", DURATION),
    header("X-Parent-Id", "The invocation that makes this one", NAME),
    header("X-Callback-Url", "Where the ended record is posted to, if server.callbacks.allow names it"),
    header("X-On-Disconnect", "What happens when the caller goes away", {"enum": ["cancel", "continue"]}),
    header("traceparent", "W3C trace context, passed on"),
)


def _offset(request: Request) -> str:
    """Where to begin: ``?offset``, or after the Last-Event-ID of a reconnecting event source."""
    given = request.query_params.get("offset")
    if given is not None:
        return given
    last = request.headers.get("last-event-id")
    return "0" if last is None else str(wire.whole(last, "Last-Event-ID") + 1)


def _filter(request: Request) -> Filter:
    params = request.query_params
    names = {
        name: wire.name(params[name], name) for name in ("function", "task", "trajectory", "parent") if name in params
    }
    return Filter(
        **names,
        state=_state(params.get("state")),
        dead=wire.flag(params["dead"], "dead") if "dead" in params else None,
        before=seq_of(params["cursor"]) if "cursor" in params else None,
        limit=wire.whole(params.get("limit", "100"), "limit", minimum=1, maximum=LIST_LIMIT_MAX),
    )


def _state(text: str | None) -> State | None:
    try:
        return None if text is None else State(text)
    except ValueError:
        raise invalid_state(text or "") from None
