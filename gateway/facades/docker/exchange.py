"""HTTP/1.1 with what ASGI has no words for: an answer that becomes a stream of bytes in both directions."""

from __future__ import annotations

import asyncio
import fcntl
import select
import sys
import termios
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Protocol
from urllib.parse import parse_qsl, unquote

import h11

from gateway import wire
from gateway.errors import TooSlow
from gateway.http.messages import JSON, too_large
from manager.errors import InvalidInput

READ_BYTES = 64 * 1024
#: Of a request's line and headers together.
HEADERS_BYTES = 64 * 1024
#: Bytes of a body that nobody wanted which are still read, so that its client finds the answer.
UNREAD_MAX_BYTES = 2**20
#: Seconds between two looks at whether a client that ended its input is still there.
LOOK_S = 0.5
#: Looks at whether a client has read the head of its stream: the first between two turns of the loop, as it comes at
#: once where a core is free for it, and seconds between two of the others.
TAKEN_TURNS, TAKEN_LOOKS, TAKEN_EVERY_S = 20, 500, 0.002
#: Query parameters of one request at most.
QUERY_MAX = 64
#: The versions of the engine's API that are spoken.
API_VERSION, API_VERSION_MIN = (1, 44), (1, 24)
#: What every answer says of the engine.
_ENGINE = {
    "Api-Version": ".".join(map(str, API_VERSION)),
    "Docker-Experimental": "false",
    "Ostype": "linux",
}
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}


class ClientGone(Exception):
    """The client closed its connection, or reads no more."""


class ExchangeBounds(Protocol):
    """How much and how long: `gateway.facades.docker.listener.DockerDoor`."""

    @property
    def body_timeout_s(self) -> float: ...

    @property
    def stall_s(self) -> float: ...


class EnginePeer:
    """One connection: bytes both ways, each write within its bound."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bounds: ExchangeBounds) -> None:
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADERS_BYTES)
        self.bounds = bounds
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes:
        """Return what comes next; empty at the end of its input."""
        try:
            return await self._reader.read(READ_BYTES)
        except OSError:
            return b""

    async def write(self, data: bytes) -> None:
        """Send; raises ClientGone if it is gone or takes nothing for a while."""
        if self._writer.is_closing():  # which a write to it would take for a mistake of ours
            raise ClientGone
        try:
            self._writer.write(data)
            if self._writer.transport.get_write_buffer_size():
                async with asyncio.timeout(self.bounds.stall_s):
                    await self._writer.drain()
        except (OSError, TimeoutError):
            raise ClientGone from None

    async def event(self) -> h11.Event | type[h11.PAUSED]:
        """Return the next event of the HTTP conversation; raises h11.RemoteProtocolError."""
        while True:
            event = self.http.next_event()
            if event is not h11.NEED_DATA:
                assert not isinstance(event, type) or event is h11.PAUSED
                return event
            if self.http.they_are_waiting_for_100_continue:
                await self.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
            self.http.receive_data(await self.read())

    async def send(self, *events: h11.Event) -> None:
        """Send events with one write, which wakes the client once; raises ClientGone."""
        data = b"".join([self.http.send(event) or b"" for event in events])
        if data:
            await self.write(data)

    async def taken(self) -> None:
        """Return when the client has read what was sent, or a moment later.

        docker-py reads an answer's headers through a buffer, and loses what else is in it.
        """
        descriptor = self._writer.get_extra_info("socket").fileno()
        for look in range(TAKEN_LOOKS):
            try:
                if not int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder):
                    return
            except OSError:
                raise ClientGone from None
            await asyncio.sleep(0 if look < TAKEN_TURNS else TAKEN_EVERY_S)

    async def next_cycle(self) -> bool:
        """Read what is left of a request that was answered; return whether another may come."""
        try:
            if self.http.their_state is h11.SEND_BODY:
                async with asyncio.timeout(self.bounds.stall_s):
                    await self._pass_over()
        except TimeoutError:
            return False
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        self.http.start_next_cycle()
        return True

    async def _pass_over(self) -> None:
        left_bytes = UNREAD_MAX_BYTES
        while self.http.their_state is h11.SEND_BODY and left_bytes > 0:
            event = await self.event()
            left_bytes -= len(event.data) if isinstance(event, h11.Data) else 0

    def hung_up(self) -> bool:
        """Return whether the client closed both directions, which a half-closed one has not."""
        poll = select.poll()
        try:
            poll.register(self._writer.get_extra_info("socket").fileno(), 0)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    async def gone(self) -> None:
        """Return when the client has closed its connection."""
        # Of a connection whose input has ended nothing tells more.
        while not self._writer.is_closing() and not self.hung_up():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)


class EngineExchange:
    """One request, and its answer."""

    def __init__(self, peer: EnginePeer, request: h11.Request) -> None:
        self.peer = peer
        self.method = request.method.decode("ascii")
        path, _, query = request.target.decode("latin-1").partition("?")
        self.path = unquote(path, errors="replace")
        try:
            pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=QUERY_MAX, errors="replace")
        except ValueError:
            raise InvalidInput(f"the query has more than {QUERY_MAX} parameters", component="docker") from None
        self.query = dict(pairs)
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        #: Whether an answer has begun.
        self.started = False

    async def chunks(self, limit_bytes: int) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives; raises TooLarge, TooSlow, ClientGone."""
        timeout_s = self.peer.bounds.body_timeout_s
        deadline_s, size_bytes = asyncio.get_running_loop().time() + timeout_s, 0
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    event = await self.peer.event()
            except TimeoutError:
                raise TooSlow(f"the body took longer than {timeout_s:g} s to arrive", component="docker") from None
            if isinstance(event, h11.EndOfMessage):
                return
            if not isinstance(event, h11.Data):
                raise ClientGone
            size_bytes += len(event.data)
            if size_bytes > limit_bytes:
                raise too_large(limit_bytes)
            yield bytes(event.data)

    async def read_object(self, limit_bytes: int) -> dict[str, object]:
        """Return the body, a JSON object or nothing; raises InvalidInput and as `chunks`."""
        body = b"".join([chunk async for chunk in self.chunks(limit_bytes)])
        return wire.loads_object(body) if body.strip() else {}

    async def answer(self, status: int, value: object = None, headers: Mapping[str, str] | None = None) -> None:
        """Answer with a JSON value, or with nothing at all for None."""
        body = b"" if value is None else wire.dumps(value)
        shown = dict(headers or {})
        if status not in (204, 304):
            shown["Content-Length"] = str(len(body))
            if body:
                shown.setdefault("Content-Type", JSON)
        await self._send_whole(status, shown, body)

    async def answer_text(self, text: str, headers: Mapping[str, str]) -> None:
        """Answer 200 with plain text."""
        kind = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(text))}
        await self._send_whole(200, {**headers, **kind}, text.encode())

    @asynccontextmanager
    async def streamed(self, media_type: str, headers: Mapping[str, str] | None = None) -> AsyncIterator[ChunkSender]:
        """Answer 200 with what is sent within the block, as it is sent."""
        await self.peer.send(self._head(200, {**(headers or {}), "Content-Type": media_type}))
        yield ChunkSender(self.peer)
        await self.peer.send(h11.EndOfMessage())

    async def upgraded(self, media_type: str) -> EnginePipe:
        """Answer, and return the stream that the connection is from now on; it ends with the connection."""
        self.started = True
        words = [word.strip().lower() for word in self.headers.get("connection", "").split(",")]
        if "upgrade" in words and "upgrade" in self.headers:  # without the second there is nothing to switch to
            headers = [("Content-Type", media_type), ("Connection", "Upgrade"), ("Upgrade", "tcp"), *_ENGINE.items()]
            await self.peer.send(h11.InformationalResponse(status_code=101, headers=headers, reason=b"UPGRADED"))
        else:
            said = "".join(f"{name}: {value}\r\n" for name, value in {"Content-Type": media_type, **_ENGINE}.items())
            await self.peer.write(f"HTTP/1.1 200 OK\r\n{said}\r\n".encode())
        await self.peer.taken()
        return EnginePipe(self.peer, self.peer.http.trailing_data[0])

    async def _send_whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        said = (h11.Data(data=body),) if body and self.method != "HEAD" else ()
        await self.peer.send(self._head(status, headers), *said, h11.EndOfMessage())

    def _head(self, status: int, headers: Mapping[str, str]) -> h11.Response:
        self.started = True
        shown = list((_ENGINE | dict(headers)).items())
        return h11.Response(status_code=status, headers=shown, reason=_PHRASES.get(status, b"Unknown"))


class ChunkSender:
    """The body of an answer that is sent piece by piece."""

    def __init__(self, peer: EnginePeer) -> None:
        self._peer = peer

    async def send(self, data: bytes) -> None:
        """Send a piece; raises ClientGone."""
        await self._peer.send(h11.Data(data=data))


class EnginePipe:
    """A connection after its upgrade: bytes as they are."""

    def __init__(self, peer: EnginePeer, read_already: bytes) -> None:
        self._peer = peer
        self._unread = read_already

    async def read(self) -> bytes:
        """Return what comes next; empty at the end of its input."""
        if self._unread:
            data, self._unread = self._unread, b""
            return data
        return await self._peer.read()

    async def send(self, data: bytes) -> None:
        """Send; raises ClientGone."""
        await self._peer.write(data)
