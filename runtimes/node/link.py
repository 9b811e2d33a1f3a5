"""One connection between a gateway and a node: frames out and in, beats, and the bounds of both."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, TypeVar, cast

from manager.clock import Clock, MonotonicClock
from manager.errors import CodedError
from manager.function import Setting
from runtimes.node.message import Message
from runtimes.node.wire import (
    COMPONENT,
    GREETING_BYTES,
    PROTOCOL,
    Beat,
    ChannelError,
    FrameReader,
    NodeHello,
    NodeRefused,
    encode,
)

#: Bytes that are kept for who reads a greeting; beyond these nothing more is taken from the peer meanwhile.
READ_BYTES = 128 * 2**10
#: Bytes that are handed to the transport ahead of the peer. More waits here, frame by frame: a transport keeps all in
#: one piece, which it moves as a whole whenever that grows.
HANDED_BYTES = 2**20
#: Seconds for the last bytes and TLS's own farewell.
FAREWELL_S = 0.5
#: Seconds for which what is in no hurry waits for something to travel with.
PATIENCE_S = 0.02
#: Moments in the time of a beat at which links tick.
_MOMENTS = 16
_BEAT = encode(Beat())
_M = TypeVar("_M", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """The bounds of a link."""

    beat_s: Annotated[float, Setting("seconds between two signs of life", gt=0)] = 1.0
    silent_s: Annotated[float, Setting("seconds of silence after which the other side is gone", gt=0)] = 3.0
    frame_max_bytes: Annotated[int, Setting("largest frame", ge=2**10)] = 64 * 2**20
    unsent_max_bytes: Annotated[int, Setting("most that the other side may leave unread", ge=2**10)] = 128 * 2**20
    transfers_max: Annotated[int, Setting("most transfers of files at once", ge=1)] = 64


class LinkClosed(CodedError):
    """The link is gone."""

    code = "capacity_exceeded"


class LinkStream(asyncio.Protocol):
    """The bytes of one connection: kept for who asks for them, until somebody takes them as they come."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._kept = bytearray()
        self._paused = False
        self._take: Callable[[bytes], None] | None = None
        #: Done when there is nothing more to come, with why if that is an error.
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._over.add_done_callback(lambda over: over.cancelled() or over.exception())  # nobody may be waiting
        self._lost = asyncio.Event()
        #: Something has come, or nothing more does.
        self._came = asyncio.Event()
        #: The transport has room.
        self._room = asyncio.Event()
        self._room.set()

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None, "it is not connected yet"
        return self._transport

    async def read(self) -> bytes:
        """Return what has come; raises OSError or LinkClosed if nothing more does."""
        while not self._kept:
            if self._over.done():
                self._over.result()
                raise LinkClosed("the other side hung up", component=COMPONENT)
            self._came.clear()
            await self._came.wait()
        return self._let_go()

    async def hand_over(self, take: Callable[[bytes], None]) -> None:
        """Call ``take`` with what has come and with all that comes, until nothing more does.

        Raises what ``take`` raises, which ends it, and OSError or LinkClosed as `read` does.
        """
        if self._kept:
            take(self._let_go())
        self._take = take
        try:
            await asyncio.shield(self._over)
        finally:
            self._take = None
        raise LinkClosed("the other side hung up", component=COMPONENT)

    def end(self) -> None:
        """Nothing more is taken."""
        self._finish(None)

    async def drain(self) -> None:
        """Wait until the transport has room; raises OSError if it is gone."""
        await self._room.wait()
        if self._lost.is_set():
            raise ConnectionResetError("the connection is gone")

    async def wait_closed(self) -> None:
        await self._lost.wait()

    def _let_go(self) -> bytes:
        data = bytes(self._kept)
        self._kept.clear()
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        return data

    def _finish(self, error: BaseException | None) -> None:
        if not self._over.done():
            if error is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(error)
        self._came.set()

    # --- what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if self._over.done():
            return
        if self._take is not None:
            try:
                self._take(data)
            except Exception as error:  # noqa: BLE001  # it is raised where it is waited for
                self._finish(error)
            return
        self._kept += data
        self._came.set()
        if len(self._kept) > READ_BYTES and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def eof_received(self) -> None:
        self._finish(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(error)
        self._lost.set()
        self._room.set()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()


class Pulse:
    """When links tick: those of many meet at few moments, and the loop wakes up once for them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        #: By moment, who ticks then.
        self._meeting: dict[float, list[Callable[[], None]]] = {}

    def call_at(self, moment_s: float, tick: Callable[[], None]) -> None:
        """Call ``tick`` at an instant of the loop's clock; it is not taken back."""
        meeting = self._meeting.get(moment_s)
        if meeting is None:
            meeting = self._meeting[moment_s] = []
            self._loop.call_at(moment_s, self._tick, moment_s)
        meeting.append(tick)

    def _tick(self, moment_s: float) -> None:
        for tick in self._meeting.pop(moment_s):
            tick()


class NodeLink:
    """Frames over a stream. What is sent in one turn of the loop travels together; nothing here waits for the peer."""

    def __init__(
        self,
        stream: LinkStream,
        settings: LinkSettings | None = None,
        *,
        clock: Clock | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """``pulse``: that of all the links of this side, if it has many."""
        self.settings = settings or LinkSettings()
        self._stream, self._transport = stream, stream.transport
        self._clock = clock or MonotonicClock()
        self._loop = asyncio.get_running_loop()
        self._frames = FrameReader(self.settings.frame_max_bytes)
        self._received: deque[Message] = deque()
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        #: So much may wait here without a look at what the transport has.
        self._watched_bytes = self.settings.unsent_max_bytes - self.settings.frame_max_bytes - HANDED_BYTES
        #: Whether what is unsent is handed over in this turn; when it is if nothing else is sent.
        self._leaving = False
        self._patience: asyncio.TimerHandle | None = None
        #: Hands over what waits for the peer to read.
        self._pumping: asyncio.Task[None] | None = None
        self._pulse = pulse or Pulse()
        #: When something was heard last, but for the time since in which this process slept; when it ticks next.
        self._heard_s = self._due_s = self._clock.now()
        #: Whether nothing was heard for too long at the last tick.
        self._in_doubt = False
        self.peer = str(self._transport.get_extra_info("peername") or "")
        self.closed = asyncio.Event()
        #: Why it was closed.
        self.why = ""

    # --- out

    def send(self, message: Message, *, in_no_hurry: bool = False) -> None:
        """Send a message soon. Never waits and never raises: who leaves too much unread is cut off.

        ``in_no_hurry``: it leaves with what is said next, or within `PATIENCE_S`.
        """
        if self.closed.is_set():
            return
        frame = encode(message)
        self._unsent.append(frame)
        self._unsent_bytes += len(frame)
        if in_no_hurry and not self._leaving:
            if self._patience is None:
                self._patience = self._loop.call_later(PATIENCE_S, self._lose_patience)
        elif not self._leaving:
            self._leaving = True
            self._loop.call_soon(self._flush)
        if self._unsent_bytes > self._watched_bytes and self.unsent_bytes > self.settings.unsent_max_bytes:
            self.close(f"the other side left more than {self.settings.unsent_max_bytes} bytes unread")

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the operating system has not taken yet."""
        return self._unsent_bytes + self._transport.get_write_buffer_size()

    async def drained(self) -> None:
        """Wait until there is little unsent, or the link is gone."""
        self._flush()
        if self._pumping is not None:
            await asyncio.wait([self._pumping])
        with suppress(OSError):
            await self._stream.drain()

    def _lose_patience(self) -> None:
        self._patience = None
        if not self._leaving:
            self._flush()

    def _flush(self) -> None:
        self._leaving = False
        self._hand_over()
        if self._unsent and self._pumping is None and not self.closed.is_set():
            self._pumping = self._loop.create_task(self._pump())

    def _hand_over(self) -> None:
        """Hand frames to the transport as far as it has room, all in one piece."""
        frames, room_bytes = [], HANDED_BYTES - self._transport.get_write_buffer_size()
        while self._unsent and room_bytes > 0:
            frames.append(self._unsent.popleft())
            room_bytes -= len(frames[-1])
        if frames:
            data = frames[0] if len(frames) == 1 else b"".join(frames)
            self._unsent_bytes -= len(data)
            if not self._transport.is_closing():
                self._transport.write(data)

    async def _pump(self) -> None:
        """Hand over the rest as the peer reads."""
        with suppress(OSError):
            while self._unsent and not self.closed.is_set():
                await self._stream.drain()
                self._hand_over()
        self._pumping = None

    # --- in

    async def receive(self, wanted: type[_M], within_s: float, *, frame_max_bytes: int = GREETING_BYTES) -> _M:
        """Return the next message, which must be a ``wanted``: for the greeting.

        Raises LinkClosed if none comes in time, ChannelError for another one, or a `NodeHello` of another protocol,
        which is told so. Afterwards the link is closed.
        """
        self._frames.frame_max_bytes = frame_max_bytes
        try:
            async with asyncio.timeout(within_s):
                while not self._received:
                    self._heard(await self._stream.read())
        except TimeoutError:
            self.close(f"nothing was said within {within_s:g} s")
            raise LinkClosed(self.why, component=COMPONENT) from None
        except (OSError, CodedError) as error:
            if isinstance(error, ChannelError):
                self._refuse(error)
            self.close(str(error) or type(error).__name__)
            raise error if isinstance(error, CodedError) else LinkClosed(self.why, component=COMPONENT) from None
        finally:
            self._frames.frame_max_bytes = self.settings.frame_max_bytes
        message = self._received.popleft()
        if isinstance(message, NodeHello) and message.protocol != PROTOCOL:
            wrong = ChannelError(f"the node speaks protocol {message.protocol}, the gateway {PROTOCOL}: upgrade one")
        elif not isinstance(message, wanted):
            wrong = ChannelError(f"a {type(message).__name__} where a {wanted.__name__} was expected")
        else:
            return message
        self._refuse(wrong)
        self.close(wrong.message)
        raise wrong

    def _refuse(self, error: ChannelError) -> None:
        self.send(NodeRefused(code=error.code, message=error.message, retry_after_s=60.0))

    async def run(self, handle: Callable[[Message], None]) -> str:
        """Hand over every message until the link is closed; return why it was. Beats go to and fro meanwhile.

        ``handle`` must not wait. It may raise ChannelError, which cuts the link.
        """

        def take(data: bytes) -> None:
            if data == _BEAT and self._frames.is_whole:
                self._heard_s = self._clock.now()
                return
            self._heard(data)
            while self._received and not self.closed.is_set():
                message = self._received.popleft()
                if type(message) is not Beat:
                    handle(message)

        self._heard_s = self._due_s = self._clock.now()
        self._arm()
        try:
            take(b"")
            await self._stream.hand_over(take)
        except ChannelError as error:
            self.close(error.message)
        except (OSError, LinkClosed) as error:
            self.close(str(error) or type(error).__name__)
        finally:
            self.close("its reader was stopped")
        return self.why

    def _heard(self, data: bytes) -> None:
        self._heard_s = self._clock.now()
        self._received.extend(self._frames.feed(data))

    # --- life

    def tick(self) -> None:
        """Send a beat; close the link if nothing was heard for too long, at this tick and at the one before.

        Time that this process slept is not the other side's silence, and what came meanwhile is read between two ticks.
        """
        now_s, settings = self._clock.now(), self.settings
        if now_s > self._due_s:
            self._heard_s = min(now_s, self._heard_s + now_s - self._due_s)
        self._due_s = now_s + settings.beat_s
        silent, doubted = now_s - self._heard_s > settings.silent_s, self._in_doubt
        self._in_doubt = silent
        if silent and doubted:
            self.close(f"nothing was heard for {now_s - self._heard_s:.1f} s")
        elif not self._unsent and not self._transport.is_closing():  # what waits to leave is a sign of life as well
            self._transport.write(_BEAT)

    def _tick_again(self) -> None:
        self.tick()
        if not self.closed.is_set():
            self._arm()

    def _arm(self) -> None:
        """Come back for the next beat, or when the other side has been silent for too long if that is earlier.

        Either at the next of the moments that links have in common, or if it was just missed, at the last one.
        """
        settings, clock_s, now_s = self.settings, self._clock.now(), self._loop.time()
        wait_s, left_s = settings.beat_s, self._heard_s + settings.silent_s - clock_s
        step_s = (wait_s if wait_s < settings.silent_s else settings.silent_s) / _MOMENTS
        if left_s < wait_s:
            wait_s = left_s
        moment_s = int((now_s + wait_s) / step_s + 0.75) * step_s
        if moment_s <= now_s:
            moment_s = (int(now_s / step_s) + 1) * step_s
        self._due_s = clock_s + moment_s - now_s
        self._pulse.call_at(moment_s, self._tick_again)

    def close(self, why: str) -> None:
        """Close it, after what was sent already and the peer has room for; the first reason counts. Idempotent."""
        if self.closed.is_set():
            return
        self.why = why
        self._hand_over()
        self.closed.set()
        self._unsent.clear()
        self._unsent_bytes = 0
        if self._pumping is not None:
            self._pumping.cancel()
        if self._patience is not None:
            self._patience.cancel()
        self._stream.end()
        self._transport.close()
        self._loop.call_later(FAREWELL_S, self._transport.abort)  # a peer that is silent answers no farewell

    async def wait_closed(self) -> None:
        """Wait until the connection is gone."""
        await self.closed.wait()
        await self._stream.wait_closed()
