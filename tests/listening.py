"""Servers on this machine for a test: in its loop, with no connection left open at the end, or in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(handle: Handler, backlog: int = 100, path: Path | None = None) -> AsyncIterator[int]:
    """Serve on a free port, whose number it gives, or on a Unix socket at ``path``.

    At the end close every connection, whatever its handler waits for.

    Raises what a handler raised, but for the end of its connection.
    """
    open_: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def handled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (OSError, EOFError):
            pass  # the peer is gone
        finally:
            writer.close()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_[asyncio.get_running_loop().create_task(handled(reader, writer))] = writer

    if path is None:
        server = await asyncio.start_server(accepted, "127.0.0.1", 0, backlog=backlog)
    else:
        server = await asyncio.start_unix_server(accepted, path)
    try:
        yield 0 if path is not None else int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for _ in range(2):  # a connection that was accepted in this turn of the loop is known after two more
            await asyncio.sleep(0)
        for task, writer in open_.items():
            if not task.done():
                writer.transport.abort()  # also where the handler never began
                task.cancel()
        ended = await asyncio.gather(*open_, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error


async def piped(one: Streams, other: Streams) -> None:
    """Carry what each side says to the other, until both have ended."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # cut
        finally:
            writer.close()

    await asyncio.gather(carry(one[0], other[1]), carry(other[0], one[1]))


class ThreadedServer(ThreadingHTTPServer):
    """An HTTP server on a free port that serves from threads while it is entered."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class Answering(BaseHTTPRequestHandler):
    """Answers in silence what a class of it finds in `asked`."""

    def asked(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.asked()

    def do_POST(self) -> None:
        self.asked()

    def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} if headers is None else headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
