"""Responses that last: logs, sessions, the page's changes, and files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import serialization
from gateway.api import BYTES, session_end
from gateway.http.messages import disconnected, while_connected
from gateway.invocations.invocations import LiveInvocation
from gateway.invocations.logs import Logs, line_of
from gateway.store.store import LogRow
from runtimes.sandbox.session import InteractiveSession
from tangram.types import (
    LogHeartbeat,
    LogLag,
    LogRecord,
    SessionAttached,
    SessionOutput,
    SessionRecord,
    SessionSilence,
    SessionTaken,
)

NDJSON = "application/x-ndjson"
EVENTS = "text/event-stream"
#: After so many times ``stall_s`` the connection of a follower that reads nothing is cut.
GIVE_UP_STALLS = 4
#: Seconds for which a viewer of the page may take nothing before its connection is closed.
SILENT_S = 30.0


def accepts_events(accept: str | None) -> bool:
    """Whether the caller wants Server-Sent Events rather than NDJSON."""
    return accept is not None and EVENTS in accept


class LogStream(Response):
    """An ASGI response that sends pages of log records as they come.

    A caller that takes longer than ``stall_s`` to accept a page is dropped; should it read on after all, the
    last record says so and where to resume.
    """

    def __init__(
        self,
        logs: Logs,
        pages: AsyncGenerator[list[LogRow], None],
        *,
        events: bool,
        position: int,
        about: Mapping[str, str],
        first: LogRecord | None = None,
        last: Callable[[int], LogRecord],
        gone: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._logs = logs
        self._pages = pages
        self._events = events
        self._position = position
        self._about = about
        self._first = first
        self._last = last
        self._gone = gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(self._send_all(send), disconnected(receive))
        except (TimeoutError, ClientDisconnect) as error:
            self._logs.followers_dropped += isinstance(error, TimeoutError)
            self._gone()
        finally:
            await self._pages.aclose()

    async def _send_all(self, send: Send) -> None:
        media_type = EVENTS if self._events else NDJSON
        headers = {"content-type": media_type, "cache-control": "no-store", **self._about}
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        if self._first is not None:
            await self._send(send, self._line(self._first))
        async for page in self._pages:
            data = b"".join(self._line(line_of(row)) for row in page) if page else self._heartbeat()
            in_time = await self._send(send, data)
            self._position = page[-1].position + 1 if page else self._position
            if not in_time:
                self._logs.followers_dropped += 1
                await self._send(send, self._line(self._dropped()))
                await send({"type": "http.response.body", "body": b""})
                return
        await self._send(send, self._line(self._last(self._position)))
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, data: bytes) -> bool:
        """Send, and tell whether the caller took it in time; TimeoutError when it seems not to read at all."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.timeout(GIVE_UP_STALLS * self._logs.settings.stall_s):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        return loop.time() - began_s <= self._logs.settings.stall_s

    def _line(self, record: LogRecord) -> bytes:
        data = serialization.encode(record)
        if not self._events:
            return data + b"\n"
        offset = getattr(record, "offset", None)
        name = b"" if offset is None else f"id: {offset}\n".encode()
        return name + f"event: {record.stream}\ndata: ".encode() + data + b"\n\n"

    def _heartbeat(self) -> bytes:
        return b": heartbeat\n\n" if self._events else self._line(LogHeartbeat(stream="heartbeat"))

    def _dropped(self) -> LogLag:
        seconds = self._logs.settings.stall_s
        message = f"this follower took longer than {seconds:g} s to read; resume at next_offset"
        return LogLag(stream="dropped", next_offset=self._position, data=message)


class WatchStream(Response):
    """An ASGI response that sends a viewer changes; nothing is made for one that does not read."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], packed: bool) -> None:
        super().__init__()
        self._chunks, self._is_packed = chunks, packed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(self._send_all(send), disconnected(receive))
        except TimeoutError:
            pass
        finally:
            await self._chunks.aclose()

    async def _send_all(self, send: Send) -> None:
        headers = [(b"content-type", EVENTS.encode()), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
        headers.append((b"vary", b"Accept-Encoding"))
        if self._is_packed:
            headers.append((b"content-encoding", b"gzip"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for data in self._chunks:
            async with asyncio.timeout(SILENT_S):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class SessionStream(Response):
    """An ASGI response that lasts as long as the session, or until its caller goes or another attaches."""

    media_type = NDJSON

    def __init__(
        self, invocation: LiveInvocation, session: InteractiveSession | None, offset: int, heartbeat_s: float
    ) -> None:
        super().__init__()
        self._invocation = invocation
        self._session = session
        self._offset = offset
        self._heartbeat_s = heartbeat_s
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self.headers["x-invocation-id"] = invocation.record.id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(self._send_all(send), disconnected(receive))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if self._session is None or await self._send_output(send, self._session):
            while not await self._invocation.has_ended(self._heartbeat_s):
                await _send_record(send, SessionSilence(stream="heartbeat"))
            end = 0 if self._session is None else self._session.end
            await _send_record(send, session_end(self._invocation.record, end))
        else:
            await _send_record(send, SessionTaken(stream="detached"))
        await send({"type": "http.response.body", "body": b""})

    async def _send_output(self, send: Send, session: InteractiveSession) -> bool:
        """Send what it says; return whether that is all, and not another caller's from now on."""
        while not await session.opened(self._heartbeat_s):
            await _send_record(send, SessionSilence(stream="heartbeat"))
        attached = SessionAttached(stream="attached", offset=session.start, input_offset=session.input_offset)
        await _send_record(send, attached)
        async with aclosing(session.read(self._offset, self._heartbeat_s)) as pages:
            async for page in pages:
                for piece in page:
                    await _send_record(send, SessionOutput(stream=piece.stream, offset=piece.offset, data=piece.data))
                if not page:
                    await _send_record(send, SessionSilence(stream="heartbeat"))
        return session.ended


async def _send_record(send: Send, record: SessionRecord) -> None:
    await send({"type": "http.response.body", "body": serialization.encode(record) + b"\n", "more_body": True})


class FileResponse(Response):
    """An ASGI response that sends a file or an archive as it is read, and lets go of it at its end."""

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        opening: AsyncExitStack,
        media_type: str = BYTES,
        size_bytes: int | None = None,
    ) -> None:
        super().__init__(media_type=media_type)
        self._chunks = chunks
        self._opening = opening
        del self.headers["content-length"]
        if size_bytes is not None:
            self.headers["content-length"] = str(size_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._opening:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body"})
