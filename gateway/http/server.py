"""The server: the door on Hypercorn."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import cast

from hypercorn.asyncio.run import worker_serve
from hypercorn.config import Config, Sockets
from hypercorn.typing import ASGIFramework
from hypercorn.utils import wrap_app
from starlette.types import ASGIApp

KEEP_ALIVE_S = 75
HEADERS_BYTES = 64 * 1024
BACKLOG = 4096


async def serve(app: ASGIApp, listener: socket.socket, stop: Callable[[], Awaitable[object]], grace_s: float) -> None:
    """Serve until ``stop`` returns; then open requests have ``grace_s`` to end."""
    config = Config()
    config.errorlog = None
    config.accesslog = None
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.keep_alive_max_requests = 2**31
    config.h11_max_incomplete_size = HEADERS_BYTES
    config.h2_max_concurrent_streams = 1000
    config.include_server_header = False
    config.graceful_timeout = grace_s
    config.shutdown_timeout = grace_s
    sockets = Sockets(secure_sockets=[], insecure_sockets=[listener], quic_sockets=[])
    framework = cast(ASGIFramework, app)  # the same protocol: Hypercorn types its messages, Starlette does not
    await worker_serve(wrap_app(framework, 0, "asgi"), config, sockets=sockets, shutdown_trigger=stop)


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setblocking(False)
    return listener
