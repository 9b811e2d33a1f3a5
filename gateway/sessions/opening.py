"""Opening a session and finding it again: the one way of the doors on which somebody types."""

from __future__ import annotations

from gateway import wire
from gateway.invocations.invocation import InvocationRequest, LiveInvocation
from gateway.invocations.record import Record
from gateway.services import Services
from manager.errors import Conflict, InvalidInput
from runtimes.sandbox.exec import terminal_of
from runtimes.sandbox.session import InteractiveSession
from tangram.types import SessionEnd, SessionOpening

COMPONENT = "session"


def session_input(services: Services, asked: SessionOpening) -> bytes:
    """Return the input of the exec function whose invocation the session is.

    Raises NotFound for the function, InvalidInput with the field that does not fit, CapacityExceeded if there may be
    no more sessions.
    """
    if services.functions.get(asked.function).runtime != "exec":
        told = f"$.function: {asked.function!r} is no exec function, and others have no sessions"
        raise InvalidInput(told, component=COMPONENT, detail={"path": "$.function"})
    services.sessions.check()
    given: dict[str, object] = {
        "argv": list(asked.argv),
        "cwd": asked.cwd,
        "env": None if asked.env is None else dict(asked.env),
        "user": asked.user,
    }
    terminal = asked.terminal
    size = {} if terminal is None else {"terminal": True, "rows": terminal.rows, "columns": terminal.columns}
    chosen = {**{name: value for name, value in given.items() if value is not None}, "session": size}
    terminal_of(chosen)
    return wire.dumps(chosen)


async def open_session(services: Services, call: InvocationRequest) -> LiveInvocation:
    """Accept the invocation of a session, which goes on without its caller; raises as any call does.

    ``call`` is detached, and its input that of `session_input`.
    """
    invocation = await services.invocations.invoke(call)
    services.invocations.leave(invocation)
    return invocation


def session_of(services: Services, invocation: LiveInvocation) -> InteractiveSession | None:
    """Return the session of an invocation, None if it has ended and is forgotten; raises Conflict if it is none."""
    record = invocation.record
    given = wire.loads_object(record.input or b"{}")
    if "session" not in given or record.trajectory is None:
        told = "it is no session: begin one by POST /v1/trajectories/{id}/sessions, or on gRPC by Session"
        raise Conflict(told, component=COMPONENT, invocation_id=record.id)
    if record.terminal:
        return services.sessions.get(record.id)
    return services.sessions.living(record.id, terminal_of(given))


def session_end(record: Record, offset: int) -> SessionEnd:
    """Return how an ended invocation that was a session ended."""
    result = {} if record.result is None else wire.loads_object(record.result)
    exit_code, signal = result.get("exit_code"), result.get("signal")
    return SessionEnd(
        stream="eof",
        offset=offset,
        state=wire.state(record.state),
        reason=wire.reason(record.reason),
        message=record.message,
        exit_code=exit_code if isinstance(exit_code, int) else None,
        signal=signal if isinstance(signal, int) else None,
    )
