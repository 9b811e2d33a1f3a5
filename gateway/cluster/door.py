"""The door of the nodes: TLS connections are accepted, bounded in number until they have shown who they are."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from manager.errors import CodedError, InvalidConfig
from runtimes.node.link import LinkSettings, NodeLink

#: Seconds until the next try where the process has no descriptor left.
_FULL_S = 0.2
_BACKLOG = 1024


def bind(address: str) -> socket.socket:
    """Return the listening socket of HOST:PORT; raises InvalidConfig."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, place = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InvalidConfig(f"cluster.listen: {address} cannot be listened on: {error}", component="cluster") from None
    listener.setblocking(False)
    return listener


class NodeDoor:
    """Accepts connections and hands over each as a link; whoever says nothing for ``greeting_s`` is cut."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        settings: LinkSettings,
        *,
        greeting_s: float,
        greetings_max: int,
        greet: Callable[[NodeLink, Callable[[], None]], Awaitable[None]],
    ) -> None:
        """``greet`` serves a link to its end, and calls what it is given when the other side has shown who it is."""
        self._listener = listener
        self._context = context
        self._settings = settings
        self._greeting_s = greeting_s
        self._greetings_max = greetings_max
        self._greet = greet
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("gateway.cluster")
        #: Connections that have not shown who they are, and those that were cut because there were too many.
        self.greeting = 0
        self.cut = 0

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def open(self) -> None:
        """Accept from now on."""
        self._accepting = asyncio.create_task(self._accept_for_ever(), name="nodes' door")

    async def close(self) -> None:
        """Accept no more, and drop what is open."""
        tasks = [*self._tasks, *([] if self._accepting is None else [self._accepting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                self._log.warning("no connection of a node can be accepted", why=str(error))
                await asyncio.sleep(_FULL_S)
                continue
            if self.greeting >= self._greetings_max:
                self.cut += 1
                connection.close()
                continue
            self.greeting += 1
            task = asyncio.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        greeted = False

        def has_greeted() -> None:
            nonlocal greeted
            if not greeted:
                greeted = True
                self.greeting -= 1

        link: NodeLink | None = None
        try:
            link = await self._linked(connection)
            if link is not None:
                await self._greet(link, has_greeted)
        except CodedError as error:
            self._log.info("a connection at the nodes' door was refused", why=error.message)
        except Exception:  # noqa: BLE001  # one connection must not end the door
            self._log.exception("a node's connection failed")
        finally:
            has_greeted()
            if link is None:
                connection.close()
            else:
                link.close("the gateway is done with it")

    async def _linked(self, connection: socket.socket) -> NodeLink | None:
        """Return the link over a connection; None if no TLS came about in time."""
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            async with asyncio.timeout(self._greeting_s):
                transport, _ = await loop.connect_accepted_socket(
                    lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=self._greeting_s
                )
        except (OSError, TimeoutError, ssl.SSLError):
            return None
        return NodeLink(reader, asyncio.StreamWriter(transport, protocol, reader, loop), self._settings)
