"""HTTP operations on interactive sessions: open, attach, type, steer. A session is an invocation, and ends as one."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from gateway import wire
from gateway.http.call import read_call, read_headers, read_query
from gateway.http.invocations import INVOCATION_ID
from gateway.http.messages import read_body, record_response, respond
from gateway.http.operation import BINARY, Operation, ResponseSpec, json_answer, links
from gateway.http.sessions.answer import SessionStream
from gateway.http.stream import NDJSON
from gateway.http.trajectories import BYTES, TRAJECTORY_ID
from gateway.invocations.invocation import LiveInvocation
from gateway.invocations.record import Mode
from gateway.services import Services
from gateway.sessions.opening import open_session, session_input, session_of
from manager.errors import Conflict
from runtimes.sandbox.session import InteractiveSession, TerminalSize
from tangram.types import (
    CallHeaders,
    Invocation,
    SessionFed,
    SessionOpening,
    SessionReadQuery,
    SessionRecord,
    SessionSteering,
    SessionWriteQuery,
)


class SessionOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._invocations = services.invocations

    async def open(self, request: Request) -> Response:
        """Begin a command in the trajectory's sandbox that somebody types to; it goes on without its caller."""
        trajectory = wire.name(request.path_params["id"], "trajectory")
        asked = wire.read(wire.loads_object(await read_body(request, self._services)), SessionOpening, "$")
        given = session_input(self._services, asked)
        call = read_call(read_headers(request, CallHeaders), asked.function, given, Mode.SYNC)
        call = replace(call, trajectory=trajectory, detached=True)
        invocation = await open_session(self._services, call)
        shown = self._invocations.shown(invocation.record)
        return record_response(shown, 201, replayed=invocation.replays(call))

    async def attach(self, request: Request) -> Response:
        """Send what the session says, from a byte on, to its end; whoever was attached is detached."""
        asked = read_query(request, SessionReadQuery)
        invocation = await self._invocations.get(request.path_params["id"])
        session = session_of(self._services, invocation)
        return SessionStream(invocation, session, asked.offset, self._services.logs.spec.heartbeat_s)

    async def write(self, request: Request) -> Response:
        """Pass on input."""
        asked = read_query(request, SessionWriteQuery)
        session = self._living(await self._invocations.get(request.path_params["id"]))
        body = await read_body(request, self._services)
        position = await session.write(body, asked.offset, end=asked.end)
        return respond(SessionFed(input_offset=position, reads=session.reads))

    async def steer(self, request: Request) -> Response:
        """Resize its terminal, or signal what runs in its foreground."""
        session = self._living(await self._invocations.get(request.path_params["id"]))
        asked = wire.read(wire.loads_object(await read_body(request, self._services)), SessionSteering, "$")
        session.require_reached()
        if asked.terminal is not None:
            await session.resize(TerminalSize(asked.terminal.rows, asked.terminal.columns))
        if asked.signal is not None:
            await session.signal(asked.signal)
        return Response(status_code=204)

    def _living(self, invocation: LiveInvocation) -> InteractiveSession:
        session = session_of(self._services, invocation)
        if session is None or session.ended:
            raise Conflict("the session has ended", component="http", invocation_id=invocation.record.id)
        return session

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        place, problems = "/v1/invocations/{id}/session", (404, 409, 422)
        return [
            self._opening_row(),
            Operation(
                id="attachSession",
                method="GET",
                path=place,
                endpoint=self.attach,
                summary="A session's output, from a byte on, to its end",
                tag="sessions",
                parts=(INVOCATION_ID,),
                query=SessionReadQuery,
                answers={200: ResponseSpec(about="One record a line", content={NDJSON: SessionRecord})},
                problems=problems,
            ),
            Operation(
                id="writeSession",
                method="POST",
                path=f"{place}/input",
                endpoint=self.write,
                summary="Pass input to a session",
                tag="sessions",
                parts=(INVOCATION_ID,),
                query=SessionWriteQuery,
                body={BYTES: BINARY},
                answers={200: json_answer("How far it came", SessionFed)},
                problems=(*problems, 408, 413),
            ),
            Operation(
                id="steerSession",
                method="POST",
                path=f"{place}/control",
                endpoint=self.steer,
                summary="Resize a session's terminal, or signal what runs in it",
                tag="sessions",
                parts=(INVOCATION_ID,),
                body={"application/json": SessionSteering},
                body_required=True,
                answers={204: ResponseSpec(about="It was told")},
                problems=(*problems, 413),
            ),
        ]

    def _opening_row(self) -> Operation:
        next_ones = ("attachSession", "writeSession", "steerSession", "cancelInvocation")
        return Operation(
            id="openSession",
            method="POST",
            path="/v1/trajectories/{id}/sessions",
            endpoint=self.open,
            summary="Begin a command that somebody types to",
            tag="sessions",
            parts=(TRAJECTORY_ID,),
            headers=CallHeaders,
            body={"application/json": SessionOpening},
            body_required=True,
            answers={201: json_answer("It is accepted", Invocation, links("/id", "id", *next_ones))},
            problems=(404, 409, 410, 413, 422, 429),
        )
