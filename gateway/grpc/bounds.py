"""Bounds of what a call sends and reads, which grpclib does not have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from grpclib.server import Stream

from gateway.errors import TooSlow
from gateway.grpc.messages import PIECE_MAX_BYTES, status_error
from gateway.services import Services
from manager.errors import CodedError, InvalidInput, TooLarge, Unsupported

#: What a message may hold beside the body of an invocation, or the piece of a file.
ENVELOPE_BYTES = 64 * 1024
#: The first byte of what precedes a compressed message.
COMPRESSED = b"\x01"
#: The one method whose client and command may both be silent for as long as they like.
LASTING = "Session"
#: Methods whose messages are pieces of a file: many that are small, and none of them an input that is held.
UPLOADS = frozenset({"WriteFile", "WriteArchive"})
#: Methods of which a reader who was given up finds the rest in a log.
LOGS = frozenset({"Invoke", "InvokeStream", "TailLogs"})


async def bounded(method: Any, services: Services, name: str, stream: Stream[Any, Any]) -> None:
    """Run a call within its bounds. Any: whatever grpclib calls, of whatever messages.

    grpclib reads five bytes that tell a message's form and length, and then so many through ``recv_data``: the one
    place where a message can be refused early is there, on the stream that it keeps in ``_stream``.
    """
    raw = stream._stream
    bounds = _CallBounds(services, name, raw.recv_data, raw.send_data)
    raw.recv_data, raw.send_data = bounds.recv_data, bounds.send_data  # type: ignore[method-assign]
    try:
        await method(stream)
    except CodedError as error:
        raise status_error(error) from None


class _CallBounds:
    """Stands before the two ways of one call's bytes.

    Refuses a message that is too large before any of it is read, that comes too slowly, or that nobody can read; and
    gives up a peer that asks and does not read. A lasting call is waited for: its next message may come at any time,
    and what it does not read holds back who writes it.
    """

    def __init__(
        self,
        services: Services,
        name: str,
        receive: Callable[[int], Awaitable[bytes]],
        send: Callable[[bytes, bool], Awaitable[None]],
    ) -> None:
        self._services = services
        self._receive = receive
        self._send = send
        self._is_lasting = name == LASTING
        self._follows_log = name in LOGS
        self._holds = name not in UPLOADS
        self._message_max = services.bounds.body_limit_bytes if self._holds else PIECE_MAX_BYTES
        self._stall_s = None if self._is_lasting else services.logs.spec.stall_s
        self._reads = 0

    async def recv_data(self, size: int) -> bytes:
        """Return so many bytes of a message, or of what precedes it."""
        self._reads += 1
        if self._is_lasting and self._reads > 2 and self._reads % 2:  # between two messages
            return _uncompressed(await self._received(size))
        if size > self._message_max + ENVELOPE_BYTES:
            raise TooLarge(f"the message is larger than {self._message_max} bytes{self._remedy}", component="grpc")
        data = await (self._held(size) if self._holds else self._timely(size))
        return _uncompressed(data) if self._reads % 2 else data

    @property
    def _remedy(self) -> str:
        return " (server.body_limit)" if self._holds else ": send the file in smaller pieces"

    async def _held(self, size: int) -> bytes:
        """Receive what counts among the inputs that arrive."""
        held = self._services.held
        held.check(size)
        held.take(size)
        try:
            return await self._timely(size)
        finally:
            held.give(size)

    async def _timely(self, size: int) -> bytes:
        timeout_s = self._services.bounds.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._received(size)
        except TimeoutError:
            raise TooSlow(
                f"the message took longer than {timeout_s:g} s (server.body_timeout)", component="grpc"
            ) from None

    async def _received(self, size: int) -> bytes:
        """Return so many bytes, or none after the last message; raises InvalidInput if a message broke off."""
        try:
            return await self._receive(size)
        except AssertionError:  # grpclib's word for a client that stopped in the middle
            raise InvalidInput("the message broke off", component="grpc") from None

    async def send_data(self, data: bytes, end_stream: bool = False) -> None:
        """Send; raises TooSlow if it is not read in time."""
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(data, end_stream)
        except TimeoutError:
            told = f"what was sent was not read within {self._stall_s:g} s (server.logs.stall)"
            if self._follows_log:
                self._services.logs.followers_dropped += 1
                told += ": a log can be resumed after its last offset"
            raise TooSlow(told, component="grpc") from None


def _uncompressed(prefix: bytes) -> bytes:
    """Return what precedes a message; raises Unsupported for that of a compressed one."""
    if prefix[:1] == COMPRESSED:
        raise Unsupported("compressed messages are not read here: send them as they are", component="grpc")
    return prefix
