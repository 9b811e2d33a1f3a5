"""Streams: a log as NDJSON or Server-Sent Events, with heartbeats, and with an end that tells why it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import serialization
from gateway.invocations.logs import Logs, line_of
from gateway.store.store import LogRow
from tangram.types import LogHeartbeat, LogLag, LogRecord

NDJSON = "application/x-ndjson"
EVENTS = "text/event-stream"
#: After so many times ``stall_s`` the connection of a follower that reads nothing is cut.
GIVE_UP_STALLS = 4


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
        sending = asyncio.get_running_loop().create_task(self._send_all(send))
        watching = asyncio.get_running_loop().create_task(self._watch(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                self._gone()
        finally:
            watching.cancel()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await self._pages.aclose()
        error = None if sending.cancelled() else sending.exception()
        if isinstance(error, TimeoutError):
            self._logs.followers_dropped += 1
            self._gone()
        elif error is not None:
            raise error

    @staticmethod
    async def _watch(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

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
        async with asyncio.timeout(GIVE_UP_STALLS * self._logs.spec.stall_s):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        return loop.time() - began_s <= self._logs.spec.stall_s

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
        seconds = self._logs.spec.stall_s
        told = f"this follower took longer than {seconds:g} s to read (server.logs.stall); resume at next_offset"
        return LogLag(stream="dropped", next_offset=self._position, data=told)
