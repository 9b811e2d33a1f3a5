"""The server: the door on Hypercorn, with a bound on connections and on peers that neither read nor answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import cast

from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.typing import ASGIFramework, LifespanState
from hypercorn.utils import wrap_app
from starlette.types import ASGIApp

from gateway import wire
from gateway.connections import LINGER_S, Connections
from gateway.errors import problem, retry_after
from manager.errors import CodedError

#: Seconds in which a new request's headers must arrive, and for which an idle connection stays open.
KEEP_ALIVE_S = 75
HEADERS_BYTES = 64 * 1024
BACKLOG = 4096
#: Seconds without a sign of life after which a peer is asked for one, and between two such questions.
PROBE_AFTER_S, PROBE_EVERY_S = 60, 15


class HttpConnection(TCPServer):
    """Hypercorn's connection, let go of the moment its peer has closed it, not when its keep-alive would have ended."""

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    stop: Callable[[], Awaitable[object]],
    grace_s: float,
    connections: Connections | None = None,
    streams_max: int = 1000,
) -> None:
    """Serve until ``stop`` returns; then open requests have ``grace_s`` to end.

    ``streams_max`` bounds the open requests of one HTTP/2 connection.
    """
    counted = connections or Connections()
    loop = asyncio.get_running_loop()
    framework = cast(ASGIFramework, app)  # the same protocol: Hypercorn types its messages, Starlette does not
    wrapped, config, context = wrap_app(framework, 0, "asgi"), _config(streams_max), WorkerContext(None)
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            refusal = counted.enter("http")
            if refusal is not None:
                await _refuse(reader, writer, refusal)
                return
            try:
                await HttpConnection(wrapped, loop, config, context, LifespanState({}), reader, writer)
            except* OSError:
                pass  # the peer is gone; Hypercorn handles it everywhere but while it waits for the end
            finally:
                counted.leave()
        except asyncio.CancelledError:
            writer.transport.abort()  # the grace is over; to end as cancelled would be logged as an error of ours
        finally:
            tasks.discard(task)

    server = await asyncio.start_server(connected, sock=listener, backlog=BACKLOG)
    try:
        await stop()
    finally:
        await context.terminated.set()
        server.close()
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, error: CodedError) -> None:
    """Answer 503 to whatever is asked, and close."""
    body = wire.encode(problem(error))
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/problem+json\r\n"
        f"retry-after: {retry_after(error.retry_after_s or 0.0)}\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    try:
        async with asyncio.timeout(LINGER_S):
            writer.write(head.encode() + body)
            writer.write_eof()
            await reader.read(HEADERS_BYTES)  # closing on unread bytes would take the answer back
    except (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()


def _config(streams_max: int) -> Config:
    config = Config()
    config.errorlog = None
    config.accesslog = None
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 2**31
    config.h11_max_incomplete_size = HEADERS_BYTES
    config.h2_max_concurrent_streams = streams_max
    config.include_server_header = False
    return config


def listen(host: str, port: int, silent_s: float = 120.0) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises OSError.

    The kernel cuts a connection whose peer has taken nothing of what was sent to it for ``silent_s``, and finds
    peers that vanished without a word.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setblocking(False)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(silent_s * 1000)))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    return listener
