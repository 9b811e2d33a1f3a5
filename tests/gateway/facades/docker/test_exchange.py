"""One connection of the door: what is sent is sent whole, and the head of a stream is read before what follows."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from gateway.facades.docker.http import TAKEN_TURNS, EngineExchange, EnginePeer


@dataclass(frozen=True, slots=True)
class FewSeconds:
    """Bounds of a peer."""

    body_timeout_s: float = 30.0
    stall_s: float = 30.0


@dataclass(frozen=True, slots=True)
class PeerPair:
    """The door's end of a connection, and its client's."""

    peer: EnginePeer
    client: socket.socket

    async def asked(self, request: bytes) -> EngineExchange:
        """Return the exchange of a request that the client sends."""
        self.client.sendall(request)
        event = await self.peer.event()
        assert not isinstance(event, type)
        return EngineExchange(self.peer, event)  # type: ignore[arg-type]  # a whole request was sent


@pytest.fixture
async def pair() -> AsyncIterator[PeerPair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    theirs.settimeout(30)
    reader, writer = await asyncio.open_connection(sock=ours)
    yield PeerPair(EnginePeer(reader, writer, FewSeconds()), theirs)
    writer.close()
    theirs.close()


async def test_an_answer_is_one_piece(pair: PeerPair) -> None:
    exchange = await pair.asked(b"GET /_ping HTTP/1.1\r\nHost: engine\r\n\r\n")
    await exchange.answer(200, {"a": 1})
    heard = await asyncio.to_thread(pair.client.recv, 65536)
    assert heard.startswith(b"HTTP/1.1 200 OK\r\n")
    assert heard.endswith(b'\r\n\r\n{"a":1}')
    assert await pair.peer.next_cycle()


async def test_a_stream_follows_when_its_head_was_read(pair: PeerPair) -> None:
    head = b"POST /exec/x/start HTTP/1.1\r\nHost: engine\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
    exchange = await pair.asked(head)
    upgrade = asyncio.create_task(exchange.upgraded("application/vnd.docker.raw-stream"))
    for _ in range(TAKEN_TURNS * 2):
        await asyncio.sleep(0)
    assert not upgrade.done()
    heard = await asyncio.to_thread(pair.client.recv, 65536)
    assert heard.startswith(b"HTTP/1.1 101 UPGRADED\r\n")
    async with asyncio.timeout(30):
        await upgrade
