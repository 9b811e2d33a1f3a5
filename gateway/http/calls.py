"""The stream of calls: many calls and answers over one WebSocket, by the operations and with the errors of HTTP."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress

import msgspec
from starlette.types import Receive, Send

from gateway import serialization
from gateway.api import Api
from gateway.config.schema import nearest
from gateway.errors import problem
from gateway.http.messages import read_call, result_of
from gateway.http.streaming import GIVE_UP_STALLS
from gateway.invocations.invocations import YIELD_EVERY, InvocationRequest, LiveInvocation
from gateway.invocations.logs import line_of
from gateway.invocations.record import Mode
from manager.errors import CodedError, InvalidInput, QuotaExceeded, TooLarge
from tangram.frames import FrameError, split
from tangram.stream import (
    STREAM,
    StreamAnswer,
    StreamCall,
    StreamCancel,
    StreamHello,
    StreamLog,
    StreamMessage,
    StreamWait,
)
from tangram.types import CallOptions, LogAccepted, LogRecord, explained

COMPONENT = "stream"
#: Bytes that one message sends if several frames fill it, and beyond which no more is read until they have left.
PIECE_BYTES = 2**20
#: Seconds after which a call that was too many may be sent again.
AGAIN_S = 1.0
#: Codes of a close (RFC 6455, 7.4.1), and seconds in which its frame must have left.
GOING_AWAY, UNREADABLE, UNREAD, CLOSE_S = 1001, 1007, 1008, 1.0
REASON_BYTES = 120
UNKNOWN = re.compile(r"unknown field `(.*)`$")


class StreamedCall:
    """A call or a wait that is in flight. It waits without a task: its invocation tells it the end."""

    __slots__ = ("attends", "id", "invocation", "is_answered", "is_result", "replayed", "stream", "timer", "wish")

    def __init__(self, stream: StreamConnection, id: int, *, attends: bool) -> None:
        """``attends``: it is a call, which its invocation counts among its callers."""
        self.stream = stream
        self.id = id
        self.attends = attends
        #: None until it is accepted.
        self.invocation: LiveInvocation | None = None
        #: Whether an earlier call with its key made that.
        self.replayed = False
        #: Whether the answer is the result, as of a synchronous call, and not the record as it stands.
        self.is_result = False
        self.is_answered = False
        #: What came before it was accepted.
        self.wish: StreamCancel | None = None
        #: The end of the time for which it waits.
        self.timer: asyncio.TimerHandle | None = None

    def __call__(self) -> None:
        """Its invocation has ended, or is waited for no longer."""
        self.stream.answer(self)

    def await_end(self, wait_s: float | None, late: Callable[[], object]) -> None:
        """Answer at the end; ``late`` is called instead after ``wait_s``."""
        assert self.invocation is not None
        if wait_s is not None and not self.invocation.ended.is_set():
            self.timer = asyncio.get_running_loop().call_later(wait_s, late)
        self.invocation.ended.then(self)

    def forget(self) -> None:
        """Wait no longer."""
        if self.timer is not None:
            self.timer.cancel()
        if self.invocation is not None:
            self.invocation.ended.forget(self)

    def message(self) -> StreamAnswer:
        """Return the answer."""
        assert self.invocation is not None
        record, refusal = self.invocation.record, self.invocation.refusal
        if self.is_result and self.invocation.ended.is_set():
            if refusal is not None:
                return _refused(self.id, refusal)
            status, body = result_of(record)
        else:
            record = self.stream.api.invocations.shown(record)
            status, body = 200 if record.terminal else 202, record.as_wire()
        return StreamAnswer(self.id, status, serialization.encode(body), self.replayed)


class StreamConnection:
    """One connection, from its first word to its last."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._invocations = api.invocations
        self._in_flight: dict[int, StreamedCall] = {}
        #: Calls that came in this turn of the loop, and are accepted together at its end.
        self._fresh: list[tuple[StreamedCall, InvocationRequest, float | None]] = []
        #: What has to be said: answers of what has ended, which are written as they leave, and frames.
        self._ready: deque[StreamedCall | bytes] = deque()
        self._ready_bytes = 0
        self._has_ready, self._has_room = asyncio.Event(), asyncio.Event()
        #: To be closed; and from then on nothing more is taken or said.
        self._is_closing = self._is_over = False
        #: Work under way that is not cancelled (what is accepted has to be submitted), and followed logs.
        self._chores: set[asyncio.Task[None]] = set()
        self._logs: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Close it as soon as all that is in flight is answered: with 1001, if nothing was taken that was not."""
        self._is_closing = True
        self._has_ready.set()

    async def serve(self, receive: Receive, send: Send) -> None:
        """Carry calls until either side hangs up. What is in flight then is left, as by a caller of HTTP."""
        await receive()  # that it has come
        await send({"type": "websocket.accept"})
        self._say(StreamHello(self.api.server.stream_message_bytes, self.api.server.stream_calls_max))
        loop = asyncio.get_running_loop()
        reading, writing = loop.create_task(self._read(receive)), loop.create_task(self._write(send))
        why: tuple[int, str] | None = None
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                why = writing.result()
            elif isinstance(error := reading.exception(), FrameError):
                why = UNREADABLE, str(error)
            else:
                reading.result()
        finally:
            under_way = {reading, writing, *self._logs}
            for task in under_way:
                task.cancel()
            for call in self._in_flight.values():
                self._leave(call)
            await asyncio.wait(under_way | self._chores)
            if reading.cancelled() or reading.exception() is not None:  # what still comes must not keep its connection
                self._start(self._pass_over(receive), self._chores)
        if why is not None:
            reason = why[1].encode()[:REASON_BYTES].decode(errors="ignore")
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await send({"type": "websocket.close", "code": why[0], "reason": reason})

    # --- in

    async def _read(self, receive: Receive) -> None:
        while (message := await receive())["type"] != "websocket.disconnect":
            if message.get("bytes") is None:
                raise FrameError("a message of text; frames are binary")
            for count, (kind, body) in enumerate(split(message["bytes"]), 1):
                if self._is_over:
                    return
                self._take(kind, body)
                if count % YIELD_EVERY == 0:
                    await asyncio.sleep(0)
            await self._room()

    async def _pass_over(self, receive: Receive) -> None:
        while (await receive())["type"] != "websocket.disconnect":
            pass

    def _take(self, kind: int, body: memoryview) -> None:
        try:
            message = STREAM.decode(kind, body)
        except FrameError as error:
            id, refusal = _unread(kind, body, error)
            self._check(id)
            self._say(_refused(id, refusal))
            return
        match message:
            case StreamCall():
                self._call(message)
            case StreamWait():
                self._wait(message)
            case StreamCancel():
                self._cancel(message)
            case _:
                raise FrameError(f"a {type(message).__name__}, which is the gateway's to send")

    def _check(self, id: int) -> None:
        """Raise FrameError for a number that is taken: two answers to it could not be told apart."""
        if id in self._in_flight:
            raise FrameError(f"number {id} is in flight already")

    def _enter(self, id: int, *, attends: bool) -> StreamedCall | None:
        """Return what is in flight from now on; None if it is answered already, as there are too many."""
        self._check(id)
        count = len(self._in_flight)
        if count >= self.api.server.stream_calls_max:
            message = f"{count} calls of this stream are in flight, which is server.stream_calls_max"
            self._say(_refused(id, QuotaExceeded(message, component=COMPONENT, retry_after_s=AGAIN_S)))
            return None
        call = self._in_flight[id] = StreamedCall(self, id, attends=attends)
        return call

    def _call(self, message: StreamCall) -> None:
        call, options = self._enter(message.id, attends=True), message.options
        if call is None:
            return
        try:
            request = read_call(options, message.function, message.input, Mode(options.mode))
            if len(message.input) > self.api.server.body_limit_bytes:
                raise TooLarge("the input is larger than server.body_limit", component=COMPONENT)
            if request.callback_url is not None:
                self.api.callbacks.check(request.callback_url)
            wait_s = None if options.wait is None else self.api.wait_s(options.wait)
        except CodedError as error:
            self._refuse(call, error)
            return
        if not self._fresh:
            asyncio.get_running_loop().call_soon(self._accept)
        self._fresh.append((call, request, wait_s))

    def _accept(self) -> None:
        fresh, self._fresh = self._fresh, []
        self._start(self._accept_all(fresh), self._chores)

    async def _accept_all(self, fresh: Sequence[tuple[StreamedCall, InvocationRequest, float | None]]) -> None:
        verdicts = await self._invocations.invoke_all([request for _, request, _ in fresh])
        for (call, request, wait_s), verdict in zip(fresh, verdicts, strict=True):
            if isinstance(verdict, CodedError):
                self._refuse(call, verdict)
                continue
            call.invocation, call.replayed = verdict, verdict.replays(request)
            if call.wish is None:
                self._attend(call, request.mode, wait_s)
            elif call.wish.leave:
                self._invocations.leave(verdict)
            else:
                self._attend(call, request.mode, wait_s)
                self._invocations.stop(verdict)

    def _attend(self, call: StreamedCall, mode: Mode, wait_s: float | None) -> None:
        """See to the answer of an accepted call."""
        call.is_result = mode is not Mode.ASYNC
        if mode is Mode.STREAM:
            self._start(self._tell_log(call), self._logs)
        elif mode is Mode.SYNC:
            call.await_end(wait_s, lambda: self._start(self._detach(call), self._chores))
        elif wait_s:
            call.await_end(wait_s, call)
        else:
            self.answer(call)

    async def _detach(self, call: StreamedCall) -> None:
        """It has been waited for long enough: its work goes on, and the answer tells how it stands."""
        assert call.invocation is not None
        try:
            await self._invocations.detach(call.invocation)
        except CodedError as error:
            self._refuse(call, error)
        else:
            self.answer(call)

    async def _tell_log(self, call: StreamedCall) -> None:
        assert call.invocation is not None
        record = call.invocation.record
        try:
            shown = self._invocations.shown(record).as_wire(payload=False)
            async with aclosing(self.api.logs.follow(record.seq, 0, record.task)) as pages:
                self._say(StreamLog(call.id, _lines([LogAccepted(stream="accepted", invocation=shown)])))
                async for page in pages:
                    await self._room()
                    if page:
                        self._say(StreamLog(call.id, _lines(map(line_of, page))))
        except CodedError as error:  # too many logs are followed
            self._leave(call)
            self._refuse(call, error)
        else:
            call.await_end(None, call)

    def _wait(self, message: StreamWait) -> None:
        call = self._enter(message.id, attends=False)
        if call is not None:
            self._start(self._begin_wait(call, message), self._chores)

    async def _begin_wait(self, call: StreamedCall, message: StreamWait) -> None:
        try:
            wait_s = self.api.wait_s(message.wait)
            invocation = await self._invocations.get(message.invocation)
        except CodedError as error:
            self._refuse(call, error)
            return
        if call.wish is None:
            call.invocation = invocation
            call.await_end(wait_s, call)

    def _cancel(self, message: StreamCancel) -> None:
        call = self._in_flight.get(message.id)
        if call is None:
            return  # it is answered
        if message.leave or not call.attends:
            del self._in_flight[message.id]
            self._leave(call)
            self._has_ready.set()
        elif call.invocation is None:
            call.wish = message
        else:
            self._invocations.stop(call.invocation)

    def _leave(self, call: StreamedCall) -> None:
        """Nobody waits for its answer any more."""
        call.forget()
        if call.invocation is None:
            call.wish = StreamCancel(call.id, leave=True)
        elif call.attends and not call.is_answered:
            self._invocations.leave(call.invocation)

    # --- out

    def answer(self, call: StreamedCall) -> None:
        """Say how its invocation has ended, or how it stands."""
        if not call.is_answered:
            call.is_answered = True
            call.forget()
            self._ready.append(call)
            self._has_ready.set()

    def _refuse(self, call: StreamedCall, error: CodedError) -> None:
        if not call.is_answered and self._in_flight.get(call.id) is call:
            call.is_answered = True
            call.forget()
            del self._in_flight[call.id]
            self._say(_refused(call.id, error))

    def _say(self, message: StreamMessage) -> None:
        frame = STREAM.encode(message)
        self._ready.append(frame)
        self._ready_bytes += len(frame)
        self._has_ready.set()

    async def _room(self) -> None:
        """Wait until the other side has read most of what was said."""
        while self._ready_bytes > PIECE_BYTES:
            self._has_room.clear()
            await self._has_room.wait()

    async def _write(self, send: Send) -> tuple[int, str]:
        """Say what is ready, all of it in one message; return why nothing more is said."""
        stall_s = GIVE_UP_STALLS * self.api.server.stall_s
        while not (self._is_closing and not self._in_flight and not self._ready):
            frames, size_bytes = list[bytes](), 0
            while self._ready and size_bytes < PIECE_BYTES:
                frames.append(self._frame(self._ready.popleft()))
                size_bytes += len(frames[-1])
            self._has_room.set()
            if size_bytes:
                try:
                    async with asyncio.timeout(stall_s):
                        await send({"type": "websocket.send", "bytes": b"".join(frames)})
                except TimeoutError:
                    return UNREAD, f"nothing was read for {stall_s:g} s"
            elif not self._ready:
                self._has_ready.clear()
                await self._has_ready.wait()
        self._is_over = True
        return GOING_AWAY, "the gateway shuts down"

    def _frame(self, ready: StreamedCall | bytes) -> bytes:
        """Return what is to be said, nothing of a call that was left."""
        if isinstance(ready, bytes):
            self._ready_bytes -= len(ready)
            return ready
        if self._in_flight.get(ready.id) is not ready:
            return b""
        del self._in_flight[ready.id]
        return STREAM.encode(ready.message())

    def _start(self, work: Coroutine[object, object, None], among: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        among.add(task)
        task.add_done_callback(among.discard)


def _refused(id: int, error: CodedError) -> StreamAnswer:
    shown = problem(error)
    return StreamAnswer(id, shown.status, serialization.encode(shown))


def _lines(records: Iterable[LogRecord]) -> bytes:
    return b"".join(serialization.encode(record) + b"\n" for record in records)


def _unread(kind: int, body: memoryview, error: FrameError) -> tuple[int, InvalidInput]:
    """Return the number of a frame that does not fit, and why; raises ``error`` if it has none."""
    cause = error.__cause__
    if not isinstance(cause, msgspec.ValidationError):
        raise error
    fields = msgspec.msgpack.decode(body)
    if not (isinstance(fields, list) and fields and type(fields[0]) is int):
        raise error
    wrong, place = explained(cause)
    index, _, path = place.removeprefix("[").partition("]")
    if index:
        path = STREAM.kinds[kind].__struct_fields__[int(index)] + path
    unknown = UNKNOWN.search(wrong)
    if unknown is not None:
        wrong = f"no option is called {unknown[1][:64]!r}{nearest(unknown[1], CallOptions.__struct_fields__)}"
    return fields[0], InvalidInput(f"{path}: {wrong}", component=COMPONENT, detail={"path": path})
