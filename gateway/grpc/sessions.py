"""Sessions over gRPC: one call carries what is typed and what is said, and the next one goes on where it broke off."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import NamedTuple

from grpclib.server import Stream

from gateway import wire
from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.messages import invocation as invocation_message
from gateway.grpc.messages import read_call, read_message, read_request, tell_replay
from gateway.invocations.invocation import LiveInvocation
from gateway.invocations.record import Mode
from gateway.services import Services
from gateway.sessions.opening import open_session, session_end, session_input, session_of
from manager.errors import InvalidInput
from runtimes.sandbox.session import InteractiveSession, TerminalSize
from tangram.types import SessionEnd, SessionOpening, SessionSteering, SessionTerminal
from tangram.types.requests import SessionReadQuery, SessionWriteQuery

COMPONENT = "grpc"
#: Bytes of input that are passed on, and acknowledged, at once.
PIECE_BYTES = 64 * 2**10
#: Bytes of input that may wait for the command; while so many do, no message is read. A piece counts for a little more.
WAITING_BYTES, PIECE_COST = 256 * 2**10, 64


class SessionCall:
    """One call of `Session`: it opens a session or attaches to one, and is attached for as long as it lasts.

    Whatever ends the call but the session's own end leaves the session to whoever attaches next. A client that does
    not read holds the command back, and a command that does not read holds back the client's input.
    """

    def __init__(self, services: Services, stream: Stream[pb.SessionRequest, pb.SessionEvent]) -> None:
        self._services = services
        self._stream = stream
        self._heartbeat_s = services.logs.spec.heartbeat_s
        self._input = WaitingInput()
        self._sending = asyncio.Lock()
        #: Whether the last message was sent, or a failure is to be told.
        self._over = False

    async def serve(self) -> None:
        """Carry the session to its end, or until another caller attaches; raises what is wrong with a message."""
        first = await read_request(self._stream)
        match first.WhichOneof("request"):
            case "open":
                invocation, offset = await self._open(first.open), 0
            case "attach":
                offset = wire.read({"offset": first.attach.offset}, SessionReadQuery).offset
                invocation = await self._services.invocations.get(first.attach.id)
            case _:
                raise InvalidInput("the first message is open or attach, and this is neither", component=COMPONENT)
        session = session_of(self._services, invocation)
        if session is None:
            await self._tell(_end(session_end(invocation.record, 0)), last=True)
            return
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._or_fail(do, session)) for do in (self._hear, self._type)]
                await self._show(invocation, session, offset)
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _open(self, asked: pb.OpenSession) -> LiveInvocation:
        """Begin a session, and say under which id."""
        trajectory = wire.name(asked.trajectory, "trajectory")
        opening = read_session(asked)
        request = pb.InvokeRequest(
            function=opening.function,
            input_json=session_input(self._services, opening),
            trajectory=trajectory,
            task=asked.task,
            step=asked.step if asked.HasField("step") else None,
            parent=asked.parent,
            idempotency_key=asked.idempotency_key,
            timeout_s=asked.timeout_s,
            max_age_s=asked.max_age_s,
            traceparent=asked.traceparent,
            tracestate=asked.tracestate,
            detached=True,
            living=asked.living,
        )
        call = read_call(request, Mode.SYNC)
        invocation = await open_session(self._services, call)
        await tell_replay(self._stream, invocation, call)
        shown = self._services.invocations.shown(invocation.record)
        await self._tell(pb.SessionEvent(accepted=invocation_message(shown)))
        return invocation

    # --- what it says

    async def _show(self, invocation: LiveInvocation, session: InteractiveSession, offset: int) -> None:
        """Send what it says from an offset on, and how it ended."""
        while not await session.opened(self._heartbeat_s):
            await self._beat()
        attached = pb.SessionAttached(offset=session.start, input_offset=session.input_offset)
        await self._tell(pb.SessionEvent(attached=attached))
        async with aclosing(session.read(offset, self._heartbeat_s)) as pages:
            async for page in pages:
                for piece in page:
                    output = pb.SessionOutput(stream=piece.stream, offset=piece.offset, data=piece.data)
                    await self._tell(pb.SessionEvent(output=output))
                if not page:
                    await self._beat()
        if not session.ended:
            await self._tell(pb.SessionEvent(detached=pb.SessionDetached()), last=True)
            return
        while not await invocation.has_ended(self._heartbeat_s):
            await self._beat()
        await self._tell(_end(session_end(invocation.record, session.end)), last=True)

    async def _beat(self) -> None:
        await self._tell(pb.SessionEvent(heartbeat=pb.SessionHeartbeat()))

    async def _tell(self, event: pb.SessionEvent, *, last: bool = False) -> None:
        """Send one message, whole; after the last one wait to be cancelled."""
        async with self._sending:
            if not self._over:
                await self._stream.send_message(event)
                self._over = last
                return
        await asyncio.get_running_loop().create_future()

    # --- what it is told

    async def _or_fail(self, do: Callable[[InteractiveSession], Awaitable[None]], session: InteractiveSession) -> None:
        """Do it; if it fails, what is being sent is sent whole, and then nothing but the failure."""
        try:
            await do(session)
        except Exception:
            async with self._sending:
                self._over = True
            raise

    async def _hear(self, session: InteractiveSession) -> None:
        """Do what the client says until it has said all; it may go on listening then."""
        while (message := await read_message(self._stream)) is not None:
            match message.WhichOneof("request"):
                case "input":
                    await self._put(message.input)
                case "resize":
                    size = _terminal(message.resize)
                    await _reached(session)
                    await session.resize(TerminalSize(size.rows, size.columns))
                case "signal":
                    asked = wire.read({"signal": message.signal}, SessionSteering, "$")
                    await _reached(session)
                    await session.signal(asked.signal or "")
                case _:
                    told = "a message after the first is input, resize or signal, and this is none"
                    raise InvalidInput(told, component=COMPONENT)

    async def _put(self, given: pb.SessionInput) -> None:
        """Have input passed on behind what waits."""
        asked = {"offset": given.offset} if given.HasField("offset") else {}
        offset = wire.read(asked, SessionWriteQuery).offset
        for start in range(0, max(1, len(given.data)), PIECE_BYTES):
            data = given.data[start : start + PIECE_BYTES]
            end = given.end and start + PIECE_BYTES >= len(given.data)
            await self._input.put(InputPiece(data, None if offset is None else offset + start, end))

    async def _type(self, session: InteractiveSession) -> None:
        """Pass on what is typed, and say how far it came."""
        while True:
            piece = await self._input.take()
            stands = await session.write(piece.data, piece.offset, end=piece.end, patient=True)
            fed = pb.SessionFed(input_offset=stands, reads=session.reads)
            await self._tell(pb.SessionEvent(fed=fed))


class InputPiece(NamedTuple):
    """Input that is passed on at once."""

    data: bytes
    offset: int | None
    end: bool


class WaitingInput:
    """Input in its order, within a bound. One task puts, one takes."""

    def __init__(self) -> None:
        self._pieces: deque[InputPiece] = deque()
        self._bytes = 0
        self._changed = asyncio.Condition()

    async def put(self, piece: InputPiece) -> None:
        """Add a piece as soon as there is room."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._bytes < WAITING_BYTES)
            self._pieces.append(piece)
            self._bytes += len(piece.data) + PIECE_COST
            self._changed.notify()

    async def take(self) -> InputPiece:
        """Return the next piece."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._pieces))
            piece = self._pieces.popleft()
            self._bytes -= len(piece.data) + PIECE_COST
            self._changed.notify()
        return piece


def read_session(asked: pb.OpenSession) -> SessionOpening:
    """Return the opening of a session; raises InvalidInput with its field."""
    texts = {name: getattr(asked, name) for name in ("function", "cwd", "user")}
    given: dict[str, object] = {name: text for name, text in texts.items() if text}
    if asked.env:
        given["env"] = dict(asked.env)
    if asked.HasField("terminal"):
        given["terminal"] = _given_size(asked.terminal)
    return wire.read({"argv": list(asked.argv), **given}, SessionOpening, "$")


def _terminal(size: pb.SessionTerminal) -> SessionTerminal:
    return wire.read(_given_size(size), SessionTerminal, "$.resize")


def _given_size(size: pb.SessionTerminal) -> dict[str, int]:
    """Return what is given of a size: 0 is what stands where nothing was said."""
    return {name: side for name, side in (("rows", size.rows), ("columns", size.columns)) if side}


async def _reached(session: InteractiveSession) -> None:
    """Wait until its command runs or has ended; raises CapacityExceeded if its node is not reached then."""
    await session.opened(None)
    session.require_reached()


def _end(told: SessionEnd) -> pb.SessionEvent:
    """How it ended, as a message."""
    ended = pb.SessionEnd(
        offset=told.offset,
        state=told.state,
        reason=told.reason or "",
        message=told.message,
        exit_code=told.exit_code,
        signal=told.signal,
    )
    return pb.SessionEvent(ended=ended)
