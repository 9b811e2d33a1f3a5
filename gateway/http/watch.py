"""HTTP operation of the page's stream: `GET /v1/watch`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.access.auth import Role
from gateway.dashboard.watch import WatchView
from gateway.http.call import read_query
from gateway.http.operation import ROLE, Operation, ResponseSpec
from gateway.http.stream import EVENTS
from gateway.services import Services
from tangram.types import WatchQuery

#: Seconds for which a viewer may take nothing before its connection is closed.
SILENT_S = 30.0


class WatchOperations:
    """The endpoint, and its row of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def watch(self, request: Request) -> Response:
        """The stream, from ``since`` on where that is kept."""
        asked = read_query(request, WatchQuery)
        self._services.watch.check()
        packed = "gzip" in request.headers.get("accept-encoding", "")
        view, is_admin = WatchView(asked.bars, packed), request.scope[ROLE] is Role.ADMIN
        return WatchStream(self._services.watch.follow(view, asked.since, asked.history, is_admin), packed)

    def operations(self) -> list[Operation]:
        return [
            Operation(
                id="watch",
                method="GET",
                path="/v1/watch",
                endpoint=self.watch,
                summary="What the page shows, as Server-Sent Events of small changes",
                tag="scheduler",
                query=WatchQuery,
                answers={200: ResponseSpec(about="hello, state, then ticks", content={EVENTS: str})},
                problems=(422,),
            )
        ]


class WatchStream(Response):
    """Sends what a viewer is told; nothing is made for one that does not read, and it is let go in the end."""

    def __init__(self, chunks: AsyncGenerator[bytes, None], packed: bool) -> None:
        super().__init__()
        self._chunks, self._is_packed = chunks, packed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.get_running_loop().create_task(self._send_all(send))
        watching = asyncio.get_running_loop().create_task(self._watch(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            sending.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)
            await self._chunks.aclose()
        error = None if sending.cancelled() else sending.exception()
        if error is not None and not isinstance(error, TimeoutError):
            raise error

    @staticmethod
    async def _watch(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

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
