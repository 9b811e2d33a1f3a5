"""The server: the service on grpclib, with health, reflection, the token and the bound of a message."""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

from grpclib._typing import IServable
from grpclib.const import Status
from grpclib.events import RecvRequest, listen
from grpclib.exceptions import GRPCError
from grpclib.health.check import ServiceStatus
from grpclib.health.service import Health
from grpclib.reflection.service import ServerReflection
from grpclib.server import Server, Stream

from gateway.grpc.messages import status_error
from gateway.grpc.service import GatewayService
from gateway.house import House
from manager.errors import TangramError

#: What a message may hold beside the body of an invocation.
ENVELOPE_BYTES = 64 * 1024
HEALTH = "/grpc.health.v1.Health/"


class GrpcServer:
    """Serves the house; `open` binds, `close` waits for open calls within a grace."""

    def __init__(self, house: House) -> None:
        self._house = house
        service = GatewayService(house)
        self._status = ServiceStatus()
        self._status.set(True)
        services: list[IServable] = [service, Health({service: [self._status]})]
        self._server = Server(ServerReflection.extend(services))
        listen(self._server, RecvRequest, self._let_in)

    async def open(self, listener: socket.socket) -> None:
        await self._server.start(sock=listener)

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
                self._house.guard.check(str(given).encode() if given is not None else None)
            except TangramError as error:
                self._house.metrics.refused("grpc", error.code)
                raise status_error(error) from None
        limit_bytes = self._house.limits.body_bytes + ENVELOPE_BYTES
        event.method_func = partial(_bounded, event.method_func, limit_bytes)


async def _bounded(method: Any, limit_bytes: int, stream: Stream[Any, Any]) -> None:
    """Refuse a message that announces more than the bound, before any of it is read.

    grpclib has no such bound. It reads a message's length and then so many bytes through ``recv_data``: the one
    place where a message can be refused early is there, on the stream it keeps in ``_stream``.
    """
    raw = stream._stream
    receive = raw.recv_data

    async def recv_data(size: int) -> bytes:
        if size > limit_bytes:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, f"too_large: the message is larger than {limit_bytes} bytes")
        return await receive(size)

    raw.recv_data = recv_data  # type: ignore[method-assign]
    await method(stream)
