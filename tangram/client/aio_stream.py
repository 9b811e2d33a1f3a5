"""Calls over one WebSocket, for the asynchronous client.

Written by hand, as is its twin `tangram.client.sync_stream`, which runs this one in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from typing import Any

import httpx

from tangram.client.requests import Bearer
from tangram.errors import ConnectionFailed
from tangram.frames import FrameError, split
from tangram.stream import STREAM, STREAM_PATH, StreamAnswer, StreamCall, StreamCancel, StreamHello, StreamWait

#: Seconds for which a call waits for the stream to open before it goes over HTTP.
OPENING_S = 1.0
#: Seconds for which all calls go over HTTP after the stream was refused, by a proxy above all, and after it failed.
REFUSED_S, FAILED_S = 60.0, 1.0
#: Seconds after which a stream that carries nothing is closed.
IDLE_S = 30.0
#: Seconds between two questions whether the gateway is there, and for which an answer to one is waited for.
PING_S, PONG_S = 20.0, 60.0
GOING_AWAY = 1001


class AsyncCallStream:
    """The stream of calls of one client in one event loop: it opens when two calls are in flight, and again."""

    def __init__(self, server: str, bearer: Bearer, trust: ssl.SSLContext, proxy: httpx.Proxy | None) -> None:
        self._server = httpx.URL(server)
        self._bearer = bearer
        self._trust = trust
        self._proxy = proxy
        self._in_flight = 0
        #: Whether a gateway has opened it, now or before.
        self.has_opened = False
        self._connection: AsyncStreamConnection | None = None
        self._opening: asyncio.Task[None] | None = None
        #: No stream is opened before, on the monotonic clock.
        self._not_before_s = 0.0

    def enter(self) -> None:
        """One more call is in flight, until `leave`."""
        self._in_flight += 1

    def leave(self) -> None:
        self._in_flight -= 1

    def carries(self) -> bool:
        """Whether a call may go over the stream now."""
        return self._connection is not None or (self._in_flight > 1 and time.monotonic() >= self._not_before_s)

    async def carry(self, message: StreamCall | StreamWait) -> StreamAnswer | None:
        """Return the answer to a call; None if it has to go over HTTP. Raises ConnectionFailed."""
        if self._connection is None and self.carries():
            if self._opening is None:
                self._opening = asyncio.get_running_loop().create_task(self._open())
            await asyncio.wait([self._opening], timeout=OPENING_S)
        return None if self._connection is None else await self._connection.call(message)

    async def close(self) -> None:
        """Hang up."""
        self._not_before_s = float("inf")
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            await self._connection.close()

    async def _open(self) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake, InvalidStatus

        address = self._server.copy_with(scheme={"https": "wss"}.get(self._server.scheme, "ws"), path=STREAM_PATH)
        pause_s = FAILED_S
        try:
            socket = await connect(
                str(address),
                additional_headers=self._bearer.headers(self._server),
                close_timeout=1.0,
                compression=None,
                max_size=None,
                ping_interval=PING_S,
                ping_timeout=PONG_S,
                proxy=None if self._proxy is None else str(self._proxy.url),
                ssl=self._trust if address.scheme == "wss" else None,
            )
            self._connection = AsyncStreamConnection(
                str(self._server), socket, STREAM.decode(*_only(await socket.recv()))
            )
            self.has_opened = True
            self._connection.reading.add_done_callback(self._closed)
            return
        except InvalidStatus as error:
            busy = error.response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR
            pause_s = FAILED_S if busy else REFUSED_S
        except InvalidHandshake:
            pause_s = REFUSED_S
        except (OSError, EOFError, FrameError, asyncio.TimeoutError):
            pass  # HTTP tells what is wrong
        finally:
            self._opening = None
        self._not_before_s = time.monotonic() + pause_s

    def _closed(self, reading: asyncio.Task[None]) -> None:
        self._connection = None


class AsyncStreamConnection:
    """One WebSocket, until either side closes it."""

    def __init__(self, server: str, socket: Any, hello: object) -> None:
        """``socket`` is a connection of `websockets`. Any: which is not imported before it is needed."""
        if not isinstance(hello, StreamHello):
            raise FrameError("the gateway does not begin with its bounds")
        self._server = server
        self._socket = socket
        self._bounds = hello
        self._number = 0
        self._waiting: dict[int, asyncio.Future[StreamAnswer]] = {}
        self._unsent: list[bytes] = []
        self._has_unsent = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._used_s = self._loop.time()
        self._writing = self._loop.create_task(self._write())
        self._idling = self._loop.call_later(IDLE_S, self._look)
        self._closing: asyncio.Task[None] | None = None
        self.reading = self._loop.create_task(self._read())

    async def call(self, message: StreamCall | StreamWait) -> StreamAnswer | None:
        """Return the answer; None if it is too large for the stream, or one too many, or the stream has ended.

        Raises ConnectionFailed.
        A caller that is cancelled leaves the call.
        """
        if self._closing is not None:
            return None
        self._number = message.id = number = self._number + 1
        frame = STREAM.encode(message)
        if len(frame) > self._bounds.message_max_bytes or len(self._waiting) >= self._bounds.calls_max:
            return None
        answer: asyncio.Future[StreamAnswer] = self._loop.create_future()
        self._waiting[number] = answer
        self._say(frame)
        try:
            return await answer
        except asyncio.CancelledError:
            self._say(STREAM.encode(StreamCancel(number, leave=True)))
            raise
        finally:
            self._waiting.pop(number, None)
            self._used_s = self._loop.time()

    async def close(self) -> None:
        """Hang up."""
        self.reading.cancel()
        await asyncio.wait([self.reading])
        self._end()  # of a reader that was cancelled before it began
        await asyncio.wait([self._writing, *([self._closing] if self._closing else [])])

    def _say(self, frame: bytes) -> None:
        self._unsent.append(frame)
        self._has_unsent.set()

    async def _write(self) -> None:
        while True:
            await self._has_unsent.wait()
            self._has_unsent.clear()
            frames, self._unsent = self._unsent, []
            while frames:
                count = size_bytes = 0
                while count < len(frames) and (size_bytes + len(frames[count]) <= self._bounds.message_max_bytes):
                    size_bytes += len(frames[count])
                    count += 1
                await self._socket.send(b"".join(frames[:count]))
                del frames[:count]

    async def _read(self) -> None:
        try:
            async for data in self._socket:
                for kind, body in split(data):
                    message = STREAM.decode(kind, body)
                    if isinstance(message, StreamAnswer):
                        answer = self._waiting.get(message.id)
                        if answer is not None and not answer.done():
                            answer.set_result(message)
        except FrameError as error:
            await self._socket.close(1002, str(error)[:100])
        except Exception:  # noqa: BLE001, S110 (of the socket: who waits is told below)
            pass
        finally:
            self._end()

    def _end(self) -> None:
        """Nothing more comes: tell who waits. A gateway that shuts down has answered all that it has taken."""
        self._writing.cancel()
        self._idling.cancel()
        taken = self._socket.close_code != GOING_AWAY
        why = self._socket.close_reason or "the connection is lost"
        for answer in self._waiting.values():
            if not answer.done():
                message = f"{self._server}: the stream of calls broke off: {why}"
                answer.set_exception(ConnectionFailed(message, detail={"sent": taken}))
        if self._closing is None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._closing = self._loop.create_task(self._socket.close())

    def _look(self) -> None:
        """Close it if nothing has used it for long."""
        idle_s = self._loop.time() - self._used_s
        if not self._waiting and idle_s >= IDLE_S:
            self._end()  # before the next call
            self.reading.cancel()
        else:
            self._idling = self._loop.call_later(IDLE_S, self._look)


def _only(data: str | bytes) -> tuple[int, memoryview]:
    (frame,) = split(data if isinstance(data, bytes) else b"")
    return frame
