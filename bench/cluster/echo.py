"""The floor: what a frame to another process and one back take over a bare TLS connection of two loops.

``python -m bench.cluster.echo HOST PORT`` answers whatever it is sent, until it is killed.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import cast

import uvloop

from bench.cluster.children import child
from manager.function import FunctionSpec
from runtimes.node.certificate import NodeCertificate, node_side, server_side

#: Bytes of a no-op's frames as they travel together: what is asked, and its end.
ASKED_BYTES, ANSWERED_BYTES = 640, 256
DIAL_S = 30.0


class EchoPeer(asyncio.Protocol):
    """One end: it says so many bytes when it has heard all that the other end says at once."""

    def __init__(self, says_bytes: int, hears_bytes: int) -> None:
        self._says, self._hears_bytes = bytes(says_bytes), hears_bytes
        self._left_bytes = hears_bytes
        self._transport: asyncio.Transport | None = None
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Who waits for the other end's next word; nobody where it is answered by itself.
        self._waiting: asyncio.Future[None] | None = None
        self.answers = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.connected.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._left_bytes -= len(data)
        if self._left_bytes <= 0:
            self._left_bytes += self._hears_bytes
            if self.answers:
                self.say()
            elif self._waiting is not None:
                self._waiting.set_result(None)

    def say(self) -> None:
        assert self._transport is not None
        self._transport.write(self._says)

    async def ask(self) -> None:
        """Say it, and wait for the answer."""
        self._waiting = asyncio.get_running_loop().create_future()
        self.say()
        await self._waiting


class EchoWay:
    """A bare round trip in place of an action."""

    name = "echo"

    def __init__(self, peer: EchoPeer) -> None:
        self._peer = peer

    async def act(self, function: FunctionSpec, given: Mapping[str, object], trajectory: str | None = None) -> None:
        """Ask once."""
        await self._peer.ask()


@asynccontextmanager
async def echoing(certificate: NodeCertificate) -> AsyncIterator[EchoWay]:
    """A process that answers over TLS."""
    peer = EchoPeer(ASKED_BYTES, ANSWERED_BYTES)
    server = await asyncio.get_running_loop().create_server(lambda: peer, "127.0.0.1", 0, ssl=server_side(certificate))
    try:
        async with child("-m", "bench.cluster.echo", *map(str, server.sockets[0].getsockname())):
            await asyncio.wait_for(peer.connected, DIAL_S)
            yield EchoWay(peer)
    finally:
        server.close()


async def answer(host: str, port: int, context: ssl.SSLContext) -> None:
    """Dial, and answer for ever."""

    def made() -> EchoPeer:
        peer = EchoPeer(ANSWERED_BYTES, ASKED_BYTES)
        peer.answers = True
        return peer

    await asyncio.get_running_loop().create_connection(made, host, port, ssl=context, server_hostname="")
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    uvloop.run(answer(sys.argv[1], int(sys.argv[2]), node_side()))
