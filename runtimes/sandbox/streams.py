"""The streams: a connection that becomes the standard input and output of one long-lived process.

The runner hands it to the process and keeps no end of it, so that what is said passes through nobody. It is a socket:
the process cannot open it again by name (``/dev/stdin``).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import cast

from runtimes.sandbox import runner as wire
from runtimes.sandbox.link import Link
from runtimes.sandbox.protocol import Decoder, ProtocolError, encode_json, lost

#: Seconds for the runner to take a connection.
TAKE_S = 5.0
#: Seconds of silence after a process's end in which what it said last is still awaited: others may hold its output.
LINGER_S = 1.0


class Streams(asyncio.BufferedProtocol):
    """The gateway's end. ``said`` gets what the process writes; `over` is done when nothing more can come."""

    def __init__(self, said: Callable[[bytes], None]) -> None:
        #: What the runner knows it by until it has handed it on.
        self.name = secrets.token_hex(8)
        loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = loop.create_future()
        self._said = said
        self._decoder: Decoder | None = Decoder()
        self._buffer = memoryview(bytearray(wire.CHUNK_BYTES))
        self._transport: asyncio.Transport | None = None
        self._taken: asyncio.Future[None] = loop.create_future()
        self._writable = asyncio.Event()
        self._writable.set()
        self._heard_s = 0.0

    @classmethod
    async def open(cls, link: Link, token: str, said: Callable[[bytes], None]) -> Streams:
        """Have the runner take a connection more; raises ActionFailed(environment_lost) where it does not."""
        streams = cls(said)
        deadline_s = time.monotonic() + TAKE_S
        await link.join(streams, deadline_s=deadline_s)
        streams._write(encode_json(wire.STREAMS, 0, {"token": token, "name": streams.name}))
        try:
            async with asyncio.timeout(max(0.1, deadline_s - time.monotonic())):
                await streams._taken
        except TimeoutError:
            streams.close()
            raise lost("the runner takes no connection more") from None
        except BaseException:
            streams.close()
            raise
        return streams

    async def write(self, data: bytes) -> None:
        """Append to the process's standard input; raises ActionFailed(environment_lost) when nobody reads it."""
        if self.over.done():
            raise lost("the process reads no more")
        self._write(data)
        if not self._writable.is_set():
            await self._writable.wait()

    def write_eof(self) -> None:
        """End the standard input; idempotent."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write_eof()

    def linger(self) -> None:
        """The process has ended: `over` as soon as all that it said was heard, or nothing comes for `LINGER_S`."""
        self._heard_s = time.monotonic()
        asyncio.get_running_loop().call_later(LINGER_S, self._give_up)

    def close(self) -> None:
        """Hang up; idempotent."""
        if self._transport is not None:
            self._transport.abort()
        self.connection_lost(None)

    def pause_reading(self) -> None:
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing() and not self._transport.is_reading():
            self._heard_s = time.monotonic()
            self._transport.resume_reading()

    # --- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # a stream's is one; uvloop's does not inherit from it

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._decoder is None:
            self._heard_s = time.monotonic()
            self._said(bytes(self._buffer[:nbytes]))
            return
        try:
            for kind, _, _ in self._decoder.feed(self._buffer[:nbytes]):
                if kind != wire.READY:
                    raise ProtocolError(f"a frame of kind {kind}")
                self._decoder = None
                self._taken.set_result(None)
        except ProtocolError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        if not self._taken.done():
            self._taken.set_exception(lost("the runner takes no connection more"))
            self._taken.exception()  # seen: nobody may be waiting for it
        if not self.over.done():
            self.over.set_result(None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # --- inside

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _give_up(self) -> None:
        if self.over.done():
            return
        assert self._transport is not None
        if not self._transport.is_reading():  # whoever reads is slow, and is waited for
            self._heard_s = time.monotonic()
        left_s = self._heard_s + LINGER_S - time.monotonic()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self._give_up)
        else:
            self.close()
