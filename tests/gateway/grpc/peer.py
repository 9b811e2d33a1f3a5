"""A peer that speaks HTTP/2, and says on it whatever it is told to."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, ResponseReceived, StreamEnded, StreamReset, TrailersReceived

from gateway import tls
from gateway.grpc.generated import tangram_pb2 as pb
from tests.gateway.conftest import DEADLINE_S, RunningGateway

Pairs = Sequence[tuple[bytes, bytes]]
INVOKE = "/tangram.v1.Gateway/Invoke"
PING = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + bytes(8)


@dataclass(slots=True)
class PeerAnswer:
    """What came back of one call."""

    headers: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    #: The error code of a reset stream.
    reset: int | None = None
    #: Whether the whole connection was closed first.
    closed: bool = False

    @property
    def status(self) -> str | None:
        return self.headers.get("grpc-status")


def head(changes: Mapping[str, str | None] | None = None) -> list[tuple[bytes, bytes]]:
    """The headers of a call to `INVOKE`, with changes; None leaves one out."""
    given: dict[str, str | None] = {
        ":method": "POST",
        ":scheme": "http",
        ":path": INVOKE,
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
        **(changes or {}),
    }
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in given.items() if value is not None]


def framed(data: bytes, flag: int = 0) -> bytes:
    """A gRPC message with its prefix."""
    return struct.pack(">BI", flag, len(data)) + data


def echo() -> bytes:
    """The simplest call."""
    return framed(pb.InvokeRequest(function="echo", input_json=b"{}").SerializeToString())


def random_frame(chance: random.Random) -> bytes:
    """A frame of HTTP/2, well formed in its first nine bytes at best."""
    payload = chance.randbytes(chance.choice((0, 1, 4, 5, 8, 40)))
    kind, flags, stream = chance.randrange(14), chance.randrange(256), chance.choice((0, 1, 2, 3, 2**31 - 1))
    length = len(payload) if chance.random() < 0.8 else chance.randrange(2**14)
    return length.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


class ReadingMeter:
    """How many bytes of HTTP/2 the servers read in one turn of the loop, at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most_bytes = self._now_bytes = 0
        receive = H2Connection.receive_data

        def received(connection: H2Connection, data: bytes) -> list[Event]:
            if not connection.config.client_side:
                self._now_bytes += len(data)
                self.most_bytes = max(self.most_bytes, self._now_bytes)
                asyncio.get_running_loop().call_soon(self._turn)
            return receive(connection, data)

        monkeypatch.setattr(H2Connection, "receive_data", received)
        monkeypatch.setattr(tls, "PIECE_S", 0.0)  # every piece takes long

    def _turn(self) -> None:
        self._now_bytes = 0


class Peer:
    """One connection. Nothing that it sends is checked on this side."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._h2 = H2Connection(
            H2Configuration(
                client_side=True,
                header_encoding="latin-1",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                validate_inbound_headers=False,
            )
        )
        self._h2.initiate_connection()
        self._answers: dict[int, PeerAnswer] = {}
        self._ended: set[int] = set()
        self.flush()

    def flush(self) -> None:
        self.writer.write(self._h2.data_to_send())

    def send(self, headers: Pairs, body: bytes | None, *, end: bool = True) -> int:
        """Begin a call; its number. ``body`` None sends the headers alone."""
        stream = self._h2.get_next_available_stream_id()
        self._h2.send_headers(stream, headers, end_stream=end and body is None)
        if body is not None:
            self._h2.send_data(stream, body, end_stream=end)
        self.flush()
        return stream

    async def pour(self, stream: int, body: bytes) -> None:
        """Send a body as fast as the server takes it, and end the call."""
        async with asyncio.timeout(DEADLINE_S):
            while body:
                room = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size, len(body))
                self._h2.send_data(stream, body[:room], end_stream=room == len(body))
                body = body[room:]
                self.flush()
                if body and not self._h2.local_flow_control_window(stream):
                    self._take(await self.reader.read(65536))

    def drop(self, stream: int) -> None:
        """Take a call back."""
        self._h2.reset_stream(stream)
        self.flush()

    def send_raw(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, stream: int) -> PeerAnswer:
        """What comes back until the call, or its connection, is over."""
        async with asyncio.timeout(DEADLINE_S):
            while stream not in self._ended:
                try:
                    data = await self.reader.read(65536)
                except ConnectionResetError:
                    data = b""
                if not data:
                    found = self._answers.setdefault(stream, PeerAnswer())
                    found.closed = True
                    return found
                self._take(data)
        return self._answers[stream]

    async def ask(self, headers: Pairs, body: bytes | None) -> PeerAnswer:
        return await self.answer(self.send(headers, body))

    def _take(self, data: bytes) -> None:
        events = self._h2.receive_data(data)
        theirs = self._h2.remote_settings
        theirs.max_concurrent_streams = 2**31 - 1  # what the server asks for is not kept to here
        theirs.acknowledge()
        for event in events:
            if not isinstance(event, ResponseReceived | TrailersReceived | DataReceived | StreamEnded | StreamReset):
                continue
            found = self._answers.setdefault(event.stream_id, PeerAnswer())
            if isinstance(event, ResponseReceived | TrailersReceived):
                found.headers |= {str(name): str(value) for name, value in event.headers or ()}
            elif isinstance(event, DataReceived):
                found.data += event.data or b""
            else:
                if isinstance(event, StreamReset):
                    found.reset = int(event.error_code or 0)
                self._ended.add(event.stream_id)
        self.flush()


@asynccontextmanager
async def peer(gateway: RunningGateway) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.app.grpc_port)
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()
