"""The attach stream: the byte stream to the first process of a container, where no socket joins it to us.

The engine carries the bytes: what is written goes to standard input as it is, what comes is cut into chunks that name
their stream. It has no beginning that both sides see, so the two agree on one
(`runtimes.sandbox.runner.runner.Attachment`).
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from typing import Protocol, cast

from runtimes.sandbox.docker.chunks import STDOUT, chunk_decoder
from runtimes.sandbox.runner import runner as wire
from runtimes.sandbox.runner.protocol import lost

#: Bytes of an answer's head, and of what the runner complained of, that are kept.
HEAD_MAX_BYTES, COMPLAINT_MAX_BYTES = 16 * 2**10, 2 * 2**10
#: A frame that says nothing but that the gateway lives: standard input for a number that is never given.
SIGN_OF_LIFE = wire.encode(wire.STDIN, 2**32 - 1)


class AttachEngine(Protocol):
    """What an engine must do for those who attach."""

    @property
    def socket(self) -> str: ...

    def attach_path(self, container: str) -> str:
        """Return the path of the HTTP request that attaches to a container's three streams."""
        ...

    async def running(self, container: str) -> bool: ...


class AttachByteStream:
    """The standard streams of a container's first process (`runtimes.sandbox.runner.byte_stream.ByteStream`)."""

    def __init__(self, engine: AttachEngine, container: str, *, token: str, life_s: float) -> None:
        self._engine = engine
        self._container = container
        #: Known to whoever knows the token, and never part of what is spoken.
        self._mark = hashlib.sha256(b"attach " + token.encode()).digest()
        #: Seconds between two signs of life.
        self._life_s = life_s

    async def join(self, end: asyncio.BufferedProtocol, *, deadline_s: float) -> int:
        stream: AttachStream | None = None
        try:
            async with asyncio.timeout(max(0.1, deadline_s - time.monotonic())):
                loop = asyncio.get_running_loop()
                _, stream = await loop.create_unix_connection(
                    lambda: AttachStream(end, self._life_s), self._engine.socket
                )
                stream.request(self._engine.attach_path(self._container))
                await stream.answered
                if not await self._engine.running(self._container):  # it can be attached to, and says nothing
                    raise lost("the container has ended")
                await stream.agree(self._mark)
                return 0
        except BaseException as error:
            if stream is not None:
                stream.abort()
            if isinstance(error, TimeoutError):
                raise lost("the runner does not answer") from None
            if isinstance(error, OSError):
                raise lost(f"the engine cannot be reached: {error}") from None
            raise


class AttachStream(asyncio.Protocol):
    """One connection to the engine, from its HTTP request to its end; then ``end`` speaks over its transport."""

    def __init__(self, end: asyncio.BufferedProtocol, life_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._end = end
        self._life_s = life_s
        self._life: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._head = bytearray()
        self._chunks = chunk_decoder()
        #: Set when the engine has agreed to carry bytes.
        self.answered: asyncio.Future[None] = loop.create_future()
        self._agreed: asyncio.Future[None] = loop.create_future()
        self._answer = b""
        self._said = bytearray()
        self._complaint = bytearray()

    def request(self, path: str) -> None:
        assert self._transport is not None
        head = ("Host: docker", "Connection: Upgrade", "Upgrade: tcp", "Content-Length: 0")
        self._transport.write("\r\n".join((f"POST {path} HTTP/1.1", *head, "", "")).encode())

    async def agree(self, mark: bytes) -> None:
        """Let both sides begin anew; from then on the bytes are ``end``'s."""
        assert self._transport is not None
        self._answer = secrets.token_bytes(wire.ANSWER_BYTES)
        self._transport.write(mark + self._answer)
        await self._agreed

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        for future in (self.answered, self._agreed):
            future.cancel()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # a stream's is one; uvloop's does not inherit from it

    def data_received(self, data: bytes) -> None:
        if not self.answered.done():
            self._head += data
            data = self._read_head()
        try:
            for (stream, _), chunk in self._chunks.feed(data):
                self._take(stream, chunk)
        except wire.ProtocolError as error:
            self._fail(f"the engine sends {error}")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._life is not None:
            self._life.cancel()
        if self._agreed.done() and not self._agreed.cancelled() and self._agreed.exception() is None:
            self._end.connection_lost(exc)
            return
        complaint = self._complaint.decode("utf-8", "replace").strip()
        self._fail(f"the runner has ended: {complaint}" if complaint else "the runner has ended")

    def pause_writing(self) -> None:
        self._end.pause_writing()

    def resume_writing(self) -> None:
        self._end.resume_writing()

    # --- inside

    def _fail(self, message: str) -> None:
        for future in (self.answered, self._agreed):
            if not future.done():
                future.set_exception(lost(message))
                future.exception()  # seen: of the two only one is waited for

    def _read_head(self) -> bytes:
        """Return what follows the head of the engine's answer, once that has come."""
        head, separator, rest = bytes(self._head).partition(b"\r\n\r\n")
        if not separator and len(head) <= HEAD_MAX_BYTES:
            return b""
        if head.split(b" ", 2)[1:2] not in ([b"101"], [b"200"]):
            said = (head.partition(b"\r\n")[0] + b" " + rest)[:COMPLAINT_MAX_BYTES].decode("utf-8", "replace")
            self._fail(f"the engine does not attach: {said}")
            return b""
        self.answered.set_result(None)
        return rest

    def _take(self, stream: int, data: bytes) -> None:
        if stream != STDOUT:
            self._complaint += data
            del self._complaint[:-COMPLAINT_MAX_BYTES]
        elif self._agreed.done():
            self._pass_on(data)
        elif self._answer:
            self._said += data
            before, answer, rest = bytes(self._said).partition(self._answer)
            self._said = bytearray(before[-wire.ANSWER_BYTES :])  # an answer may have begun to arrive
            if answer:
                self._begin()
                self._pass_on(rest)

    def _begin(self) -> None:
        assert self._transport is not None
        self._agreed.set_result(None)
        self._end.connection_made(self._transport)
        self._life = asyncio.get_running_loop().call_later(self._life_s, self._live)

    def _pass_on(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            room = memoryview(self._end.get_buffer(len(view)))
            taken = min(len(room), len(view))
            room[:taken] = view[:taken]
            view = view[taken:]
            self._end.buffer_updated(taken)

    def _live(self) -> None:
        """Tell the runner that its gateway lives: it would see no end of the stream if it died."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(SIGN_OF_LIFE)
            self._life = asyncio.get_running_loop().call_later(self._life_s, self._live)
