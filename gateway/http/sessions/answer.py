"""The answer to who attaches: a session's output as NDJSON, from a byte on, with heartbeats and its end."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import wire
from gateway.http.stream import NDJSON
from gateway.invocations.invocation import LiveInvocation
from gateway.sessions.opening import session_end
from runtimes.sandbox.session import InteractiveSession
from tangram.types import (
    SessionAttached,
    SessionOutput,
    SessionRecord,
    SessionSilence,
    SessionTaken,
)


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
        loop = asyncio.get_running_loop()
        sending, watching = loop.create_task(self._send_all(send)), loop.create_task(_gone(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            sending.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)
        error = None if sending.cancelled() else sending.exception()
        if error is not None and not isinstance(error, ClientDisconnect):
            raise error

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if self._session is None or await self._send_output(send, self._session):
            while not await self._invocation.has_ended(self._heartbeat_s):
                await _tell(send, SessionSilence(stream="heartbeat"))
            end = 0 if self._session is None else self._session.end
            await _tell(send, session_end(self._invocation.record, end))
        else:
            await _tell(send, SessionTaken(stream="detached"))
        await send({"type": "http.response.body", "body": b""})

    async def _send_output(self, send: Send, session: InteractiveSession) -> bool:
        """Send what it says; return whether that is all, and not another caller's from now on."""
        while not await session.opened(self._heartbeat_s):
            await _tell(send, SessionSilence(stream="heartbeat"))
        await _tell(send, SessionAttached(stream="attached", offset=session.start, input_offset=session.input_offset))
        async with aclosing(session.read(self._offset, self._heartbeat_s)) as pages:
            async for page in pages:
                for piece in page:
                    await _tell(send, SessionOutput(stream=piece.stream, offset=piece.offset, data=piece.data))
                if not page:
                    await _tell(send, SessionSilence(stream="heartbeat"))
        return session.ended


async def _tell(send: Send, record: SessionRecord) -> None:
    await send({"type": "http.response.body", "body": wire.encode(record) + b"\n", "more_body": True})


async def _gone(receive: Receive) -> None:
    """Return when the connection closes."""
    while (await receive())["type"] != "http.disconnect":
        pass
