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
from manager.errors import Conflict, InvalidInput
from runtimes.sandbox.exec.runtime import terminal_of
from runtimes.sandbox.session import InteractiveSession, TerminalSize
from tangram.types import Invocation, SessionFed, SessionOpening, SessionRecord, SessionSteering
from tangram.types.requests import CallHeaders, SessionReadQuery, SessionWriteQuery


class SessionOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._invocations = services.invocations

    async def open(self, request: Request) -> Response:
        """Begin a command in the trajectory's sandbox that somebody types to; it goes on without its caller."""
        trajectory = wire.name(request.path_params["id"], "trajectory")
        asked = wire.read(wire.loads_object(await read_body(request, self._services)), SessionOpening, "$")
        if self._services.functions.get(asked.function).runtime != "exec":
            told = f"$.function: {asked.function!r} is no exec function, and others have no sessions"
            raise InvalidInput(told, component="http", detail={"path": "$.function"})
        self._services.sessions.check()
        given = _input(asked)
        terminal_of(given)
        call = read_call(read_headers(request, CallHeaders), asked.function, wire.dumps(given), Mode.SYNC)
        call = replace(call, trajectory=trajectory, detached=True)
        invocation = await self._invocations.invoke(call)
        self._invocations.leave(invocation)
        shown = self._invocations.shown(invocation.record)
        return record_response(shown, 201, replayed=invocation.replays(call))

    async def attach(self, request: Request) -> Response:
        """Send what the session says, from a byte on, to its end; whoever was attached is detached."""
        asked = read_query(request, SessionReadQuery)
        invocation = await self._invocations.get(request.path_params["id"])
        session = self._session(invocation)
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

    def _session(self, invocation: LiveInvocation) -> InteractiveSession | None:
        """Return the session of an invocation, None if it has ended and is forgotten; raises Conflict if it is none."""
        record = invocation.record
        given = wire.loads_object(record.input or b"{}")
        if "session" not in given or record.trajectory is None:
            told = "it is no session: begin one by POST /v1/trajectories/{id}/sessions"
            raise Conflict(told, component="http", invocation_id=record.id)
        if record.terminal:
            return self._services.sessions.get(record.id)
        return self._services.sessions.living(record.id, terminal_of(given))

    def _living(self, invocation: LiveInvocation) -> InteractiveSession:
        session = self._session(invocation)
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


def _input(asked: SessionOpening) -> dict[str, object]:
    """Return the opening as the input of an exec function."""
    given: dict[str, object] = {
        "argv": list(asked.argv),
        "cwd": asked.cwd,
        "env": None if asked.env is None else dict(asked.env),
        "user": asked.user,
    }
    terminal = asked.terminal
    size = {} if terminal is None else {"terminal": True, "rows": terminal.rows, "columns": terminal.columns}
    return {**{name: value for name, value in given.items() if value is not None}, "session": size}
