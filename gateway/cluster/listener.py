"""The listener for nodes: TLS connections are accepted, bounded in number until they have shown who they are."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from manager.errors import CodedError, InvalidConfig
from runtimes.chores import end_chores
from runtimes.node.protocol import LinkSettings, NodeLink, Pulse

#: Seconds until the next try where the process has no descriptor left.
_FULL_S = 0.2
_BACKLOG = 1024
#: Connections that are accepted in one turn of the loop.
_TOGETHER = 4
#: Bits of an IPv6 address that tell one network from another: a host has as many of the rest as it wants.
_NETWORK_BITS = 64


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


class NodeListener:
    """Accepts connections and hands over each as a link.

    Whoever has not shown who he is within ``handshake_s`` is cut, however he spends it. While ``handshakes_max`` are at
    it, one that comes is cut at once, unless another address has more of these places: that one gives up its oldest.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        settings: LinkSettings,
        *,
        handshake_s: float,
        handshakes_max: int,
        greet: Callable[[NodeLink, Callable[[], None]], Awaitable[None]],
    ) -> None:
        """``greet`` serves a link to its end, and calls what it is given when the other side has shown who it is."""
        self._listener = listener
        self._context = context
        self._settings = settings
        self._pulse = Pulse()
        self._handshake_s = handshake_s
        self._handshakes_max = handshakes_max
        self._handshake = greet
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("gateway.cluster")
        #: By address, the connections that have not shown who they are, the oldest first.
        self._strangers: dict[str, dict[asyncio.Task[None], None]] = {}
        #: How many these are, and how many were cut because there were too many.
        self.handshaking = 0
        self.cut = 0

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def open(self) -> None:
        """Accept from now on."""
        self._accepting = asyncio.create_task(self._accept_for_ever(), name="nodes' listener")

    async def close(self) -> None:
        """Accept no more, and drop what is open."""
        await end_chores(self._accepting, *self._tasks)
        self._listener.close()

    async def _accept_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)  # a crowd that waits to be accepted keeps nobody else from his turn
            try:
                self._let_in(*await loop.sock_accept(self._listener))
                with suppress(BlockingIOError):
                    for _ in range(_TOGETHER - 1):
                        self._let_in(*self._listener.accept())
            except OSError as error:
                self._log.warning("no connection of a node can be accepted", why=str(error))
                await asyncio.sleep(_FULL_S)

    def _let_in(self, connection: socket.socket, place: tuple[object, ...]) -> None:
        """Serve a connection, if there is room for it among those that have not shown who they are."""
        address = _network(str(place[0]))
        if self.handshaking >= self._handshakes_max and not self._made_room(address):
            self.cut += 1
            connection.close()
            return
        task = asyncio.create_task(self._serve(connection, address))
        self._strangers.setdefault(address, {})[task] = None
        self.handshaking += 1
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _made_room(self, address: str) -> bool:
        """Cut the oldest of the address that has the most, if that leaves it no fewer than the one that comes has."""
        most = max(self._strangers, key=lambda each: len(self._strangers[each]))
        if len(self._strangers[most]) <= len(self._strangers.get(address, ())) + 1:
            return False
        oldest = next(iter(self._strangers[most]))
        self._is_known(oldest, most)
        oldest.cancel()
        self.cut += 1
        return True

    def _is_known(self, task: asyncio.Task[None], address: str) -> None:
        """A connection takes no place of a stranger any more; idempotent."""
        strangers = self._strangers.get(address, {})
        if task in strangers:
            del strangers[task]
            self.handshaking -= 1
            if not strangers:
                del self._strangers[address]

    async def _serve(self, connection: socket.socket, address: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        link: NodeLink | None = None
        limit = asyncio.timeout(self._handshake_s)

        def authenticated() -> None:
            self._is_known(task, address)
            limit.reschedule(None)

        try:
            async with limit:
                link = await self._linked(connection)
                if link is not None:
                    await self._handshake(link, authenticated)
        except CodedError as error:
            self._log.info("a connection at the nodes' port was refused", why=error.message)
        except Exception:  # noqa: BLE001  # one connection must not end the listener
            if limit.expired():
                self._log.info("a connection at the nodes' port has not shown who it is", peer=address)
            else:
                self._log.exception("a node's connection failed")
        finally:
            self._is_known(task, address)
            if link is None:
                connection.close()
            else:
                link.close("the gateway is done with it")

    async def _linked(self, connection: socket.socket) -> NodeLink | None:
        """Return the link over a connection; None if no TLS came about."""
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = NodeLink(self._settings, pulse=self._pulse)
        try:
            await loop.connect_accepted_socket(  # its answer is not the link where the loop is uvloop's
                lambda: link, connection, ssl=self._context, ssl_handshake_timeout=self._handshake_s
            )
        except (OSError, ssl.SSLError):
            return None
        return link


def _network(address: str) -> str:
    """Return what is counted as one place of strangers: an address, or a network of IPv6."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        mapped = parsed.ipv4_mapped
        return str(mapped or ipaddress.ip_network((parsed, _NETWORK_BITS), strict=False))
    return address
