"""The door before the gateway behind it is open: it tells that the process lives, and to come again soon."""

from __future__ import annotations

import asyncio
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.connections import Connections
from gateway.config.sections import ServerConfig
from gateway.http.messages import problem_response, respond
from gateway.http.server import serve
from manager.errors import StorageUnavailable
from tangram.types import Health

#: Seconds after which to come again.
AGAIN_S = 1.0
#: Seconds that open requests have to end when it closes.
CLOSE_GRACE_S = 5.0


class EarlyApp:
    """Passes everything to ``app`` once there is one."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close"})
        elif scope["path"] == "/healthz":
            await respond(Health(status="ok"))(scope, receive, send)
        elif scope["path"] == "/readyz":
            await respond(Health(status="starting"), 503)(scope, receive, send)
        else:
            told = "the gateway starts: it has not taken up its record yet"
            refusal = StorageUnavailable(told, component="gateway", retry_after_s=AGAIN_S)
            await problem_response(refusal)(scope, receive, send)


class HttpDoor:
    """The HTTP door, served from the moment it is made until `close`."""

    def __init__(self, listener: socket.socket, connections_max: int, bounds: ServerConfig) -> None:
        self._early = EarlyApp()
        self._closing = asyncio.Event()
        self.connections = Connections(limit=connections_max)
        self.serving = asyncio.get_running_loop().create_task(
            serve(self._early, listener, self._closing.wait, CLOSE_GRACE_S, self.connections, bounds)
        )

    def open(self, app: ASGIApp) -> None:
        """From now on ``app`` answers."""
        self._early.app = app

    async def close(self) -> None:
        """Let open requests end, and stop; idempotent."""
        self._closing.set()
        await asyncio.gather(self.serving, return_exceptions=True)
