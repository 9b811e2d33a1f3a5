"""The server: the service on grpclib, with health, reflection, the token and the bound of a message."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from grpclib._typing import IServable
from grpclib.events import RecvRequest, listen
from grpclib.health.check import ServiceStatus
from grpclib.health.service import Health
from grpclib.reflection.service import ServerReflection
from grpclib.server import Stream

from gateway.access.auth import Role
from gateway.access.connections import Connections
from gateway.access.tls import server_context
from gateway.errors import TooSlow
from gateway.grpc.connection import BoundedServer
from gateway.grpc.messages import status_error
from gateway.grpc.service import GatewayService
from gateway.services import Services
from manager.errors import CodedError, InvalidInput, TooLarge, Unsupported

#: What a message may hold beside the body of an invocation.
ENVELOPE_BYTES = 64 * 1024
#: The first byte of what precedes a compressed message.
COMPRESSED = b"\x01"
HEALTH = "/grpc.health.v1.Health/"
#: The one method that changes the gateway for everybody.
APPLY = "/tangram.v1.Gateway/ApplyConfig"
#: The one method whose client and command may both be silent for as long as they like.
SESSION = "/tangram.v1.Gateway/Session"


class GrpcServer:
    """The gRPC server; `open` binds, `close` waits for open calls within a grace."""

    def __init__(self, services: Services, connections: Connections) -> None:
        self._services = services
        service = GatewayService(services)
        self._status = ServiceStatus()
        self._status.set(True)
        served: list[IServable] = [service, Health({service: [self._status]})]
        self._server = BoundedServer(ServerReflection.extend(served), connections, services.bounds)
        listen(self._server, RecvRequest, self._let_in)

    async def open(self, listener: socket.socket) -> None:
        tls = self._services.bounds.tls
        await self._server.start(sock=listener, ssl=None if tls is None else server_context(tls, ("h2",)))

    def drain(self) -> None:
        """Report not serving; open calls go on."""
        self._status.set(False)

    async def close(self) -> None:
        """Stop, and wait until open calls have ended."""
        self._server.close()
        await self._server.wait_closed()

    async def _let_in(self, event: RecvRequest) -> None:
        if not event.method_name.startswith(HEALTH):
            given = event.metadata.get("authorization")
            try:
                role = self._services.guard.role(str(given).encode() if given is not None else None)
                role.require(Role.ADMIN if event.method_name == APPLY else Role.INVOKE)
            except CodedError as error:
                self._services.metrics.refused("grpc", error.code)
                raise status_error(error) from None
        lasting = event.method_name == SESSION
        event.method_func = partial(_bounded, event.method_func, self._services, lasting)


async def _bounded(method: Any, services: Services, lasting: bool, stream: Stream[Any, Any]) -> None:
    """Refuse a message that is too large before any of it is read, that comes too slowly, or that nobody can read.

    grpclib has no such bounds. It reads five bytes that tell a message's form and length, and then so many through
    ``recv_data``: the one place where a message can be refused early is there, on the stream it keeps in ``_stream``.
    Nor has it one for a peer that asks and does not read: ``send_data`` would wait for it as long as it likes. A
    ``lasting`` call does: its next message may come at any time, and what it does not read holds back who writes it.
    """
    raw = stream._stream
    receive, send = raw.recv_data, raw.send_data
    stall_s = None if lasting else services.logs.spec.stall_s
    reads = 0

    async def recv_data(size: int) -> bytes:
        nonlocal reads
        reads += 1
        if lasting and reads > 2 and reads % 2:  # between two messages
            return _uncompressed(await _received(receive, size))
        if size > services.bounds.body_limit_bytes + ENVELOPE_BYTES:
            raise TooLarge(f"the message is larger than {services.bounds.body_limit_bytes} bytes", component="grpc")
        services.held.check(size)
        services.held.take(size)
        try:
            async with asyncio.timeout(services.bounds.body_timeout_s):
                data = await _received(receive, size)
        except TimeoutError:
            raise TooSlow(
                f"the message took longer than {services.bounds.body_timeout_s:g} s", component="grpc"
            ) from None
        finally:
            services.held.give(size)
        return _uncompressed(data) if reads % 2 else data

    async def send_data(data: bytes, end_stream: bool = False) -> None:
        try:
            async with asyncio.timeout(stall_s):
                await send(data, end_stream)
        except TimeoutError:
            services.logs.followers_dropped += 1
            message = f"what was sent was not read within {stall_s:g} s: a log can be resumed after its last offset"
            raise TooSlow(message, component="grpc") from None

    raw.recv_data, raw.send_data = recv_data, send_data  # type: ignore[method-assign]
    try:
        await method(stream)
    except CodedError as error:
        raise status_error(error) from None


async def _received(receive: Callable[[int], Awaitable[bytes]], size: int) -> bytes:
    """Return so many bytes, or none after the last message; raises InvalidInput if a message broke off."""
    try:
        return await receive(size)
    except AssertionError:  # grpclib's word for a client that stopped in the middle
        raise InvalidInput("the message broke off", component="grpc") from None


def _uncompressed(prefix: bytes) -> bytes:
    """Return what precedes a message; raises Unsupported for that of a compressed one."""
    if prefix[:1] == COMPRESSED:
        raise Unsupported("compressed messages are not read here: send them as they are", component="grpc")
    return prefix
