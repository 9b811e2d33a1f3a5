"""Where a Docker engine listens, and how a connection of our own to it is opened."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast
from urllib.parse import urlsplit

T = TypeVar("T", bound=asyncio.BaseProtocol)

#: Seconds of silence of a network after which it is asked, between two questions, and until it counts as gone.
ALIVE_AFTER_S, ALIVE_EVERY_S, GONE_AFTER_S = 10, 5, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """The end of a connection to an engine: a Unix socket, or a port with TLS or without."""

    #: As it was given, for people.
    url: str
    path: str = ""
    host: str = ""
    port: int = 0
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, url: str, tls: ssl.SSLContext | None = None) -> EngineAddress:
        """Parse ``unix:///path`` or ``tcp://host:port``; raises ValueError for anything else."""
        parts = urlsplit(url)
        if parts.scheme in ("unix", "http+unix"):
            return cls(url=url, path=f"/{parts.netloc}{parts.path}".replace("//", "/"))
        if parts.scheme not in ("tcp", "http", "https") or not parts.hostname or not parts.port:
            raise ValueError(f"{url!r} is neither unix:///path nor tcp://host:port")
        return cls(url=url, host=parts.hostname, port=parts.port, tls=tls)

    async def connect(self, protocol: Callable[[], T]) -> T:
        """Open a connection; raises OSError (ssl.SSLError is one)."""
        loop = asyncio.get_running_loop()
        if self.path:
            return (await loop.create_unix_connection(protocol, self.path))[1]
        transport, made = await loop.create_connection(
            protocol, self.host, self.port, ssl=self.tls, server_hostname=self.host if self.tls else None
        )
        # A network that is cut says nothing by itself.
        _keep_alive(cast(socket.socket, transport.get_extra_info("socket")))  # a TCP transport has one
        return made


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ALIVE_AFTER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (GONE_AFTER_S - ALIVE_AFTER_S) // ALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_AFTER_S * 1000)
