"""A scripted gateway on real sockets: for clients in many tasks, threads, loops and processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager

import h11
import httpx

from tangram.testing import ScriptedGateway
from tests.gateway.conftest import DEADLINE_S
from tests.listening import listening


class ScriptedServer:
    """Serves one scripted gateway over HTTP/1.1, and counts its connections."""

    def __init__(self, gateway: ScriptedGateway) -> None:
        self.gateway = gateway
        self.address = ""
        self.open = 0
        self.opened = 0
        #: Most connections that were open at once.
        self.open_max = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after the other."""
        self.open += 1
        self.opened += 1
        self.open_max = max(self.open, self.open_max)
        connection = h11.Connection(h11.SERVER)
        try:
            while (request := await _received(connection, reader)) is not None:
                answer = await self.gateway.handle_async_request(request)
                body = await answer.aread()
                headers = [(b"content-length", str(len(body)).encode()), *_content_type(answer)]
                head = h11.Response(status_code=answer.status_code, headers=headers)
                for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                    writer.write(connection.send(event) or b"")
                await writer.drain()
                connection.start_next_cycle()
        except (h11.RemoteProtocolError, httpx.TransportError):
            pass  # an answer that breaks the connection, or a client that did
        finally:
            self.open -= 1


def _content_type(answer: httpx.Response) -> list[tuple[bytes, bytes]]:
    kind = answer.headers.get("content-type")
    return [] if kind is None else [(b"content-type", kind.encode())]


async def _received(connection: h11.Connection, reader: asyncio.StreamReader) -> httpx.Request | None:
    """The next request; None when the client has closed the connection."""
    head: h11.Request | None = None
    body = b""
    while True:
        event = connection.next_event()
        match event:
            case h11.NEED_DATA:
                connection.receive_data(await reader.read(65536))
            case h11.Request():
                head = event
            case h11.Data():
                body += bytes(event.data)
            case h11.EndOfMessage():
                assert head is not None
                target = head.target.decode()
                url = target if target.startswith("http:") else f"http://server{target}"
                return httpx.Request(head.method.decode(), url, headers=list(head.headers), content=body)
            case _:
                return None


@asynccontextmanager
async def serving_script(gateway: ScriptedGateway) -> AsyncIterator[ScriptedServer]:
    """Serve it from entering to leaving, on this event loop."""
    server = ScriptedServer(gateway)
    async with listening(server.handle, backlog=1024) as port:
        server.address = f"http://127.0.0.1:{port}"
        yield server


@contextmanager
def served(gateway: ScriptedGateway) -> Iterator[ScriptedServer]:
    """Serve it from entering to leaving, in a thread of its own."""
    started: Future[tuple[ScriptedServer, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        async with serving_script(gateway) as server:
            started.set_result((server, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="scripted-server")
    thread.start()
    server, loop, stop = started.result(DEADLINE_S)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(DEADLINE_S)
