"""TLS of the doors: the context that both servers speak with, and a server that tells who speaks none."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from gateway.config.sections import TlsSection
from manager.errors import InvalidConfig

#: Seconds in which a peer must have shaken hands.
HANDSHAKE_S = 20.0
#: The first byte of whoever shakes hands.
HANDSHAKE = b"\x16"
#: Seconds until connections are taken again after the machine had no descriptor for one.
AGAIN_S = 1.0
#: Bytes that a connection reads ahead.
AHEAD_BYTES = 2**16

#: Serves one connection.
Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def server_context(tls: TlsSection, protocols: Sequence[str]) -> ssl.SSLContext:
    """Return the context of a server that offers these protocols (ALPN); raises InvalidConfig for odd files."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(protocols)
    try:
        context.load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidConfig(f"server.tls: {tls.cert} and {tls.key} cannot be used: {error}", component="tls") from None
    if tls.client_ca is not None:
        try:
            context.load_verify_locations(tls.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise InvalidConfig(
                f"server.tls.client_ca: {tls.client_ca} cannot be used: {error}", component="tls"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class TlsServer:
    """Serves a listening socket: ``connected`` whoever speaks TLS, ``plain`` whoever does not."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        connected: Connected,
        plain: Connected,
        closed: Callable[[], None],
    ) -> None:
        """``closed`` is called by `close`."""
        self._listener = listener
        self._context = context
        self._connected, self._plain, self._closed = connected, plain, closed
        self._greeting: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept_for_ever())

    def close(self) -> None:
        """Take no more connections; those that are served go on."""
        self._closed()
        for task in (self._accepting, *self._greeting):
            task.cancel()
        self._listener.close()

    async def _accept_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except OSError:  # it is gone already, or there is no descriptor left
                await asyncio.sleep(AGAIN_S)
                continue
            task = loop.create_task(self._greet(accepted))
            self._greeting.add(task)
            task.add_done_callback(self._greeting.discard)

    async def _greet(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            accepted.setblocking(False)
            async with asyncio.timeout(HANDSHAKE_S):
                secure = await _first_byte(accepted) == HANDSHAKE
            reader = asyncio.StreamReader(limit=AHEAD_BYTES, loop=loop)
            serve = self._connected if secure else self._plain
            protocol = asyncio.StreamReaderProtocol(reader, serve, loop=loop)
            context, within_s = (self._context, HANDSHAKE_S) if secure else (None, None)
            await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=context, ssl_handshake_timeout=within_s)
        except (OSError, TimeoutError):  # among them what is wrong with a handshake
            accepted.close()
        except asyncio.CancelledError:
            accepted.close()
            raise


async def _first_byte(accepted: socket.socket) -> bytes:
    """Return the first byte that a peer has sent, which is still to be read; raises OSError where there is none."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def told() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(accepted, told)
    try:
        await readable
    finally:
        loop.remove_reader(accepted)
    with suppress(BlockingIOError):
        if first := accepted.recv(1, socket.MSG_PEEK):
            return first
    raise ConnectionResetError
