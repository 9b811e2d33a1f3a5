"""The server: the service on grpclib, with health, reflection, the token and the bound of a message."""

from __future__ import annotations

import socket
from functools import partial

from grpclib._typing import IServable
from grpclib.events import RecvRequest, listen
from grpclib.health.service import Health
from grpclib.reflection.service import ServerReflection

from gateway.access.auth import Role
from gateway.access.connections import Connections
from gateway.access.renewal import RenewedContext
from gateway.grpc.bounds import bounded
from gateway.grpc.connection import BoundedServer
from gateway.grpc.health import ReadinessCheck
from gateway.grpc.messages import status_error
from gateway.grpc.service import GatewayService
from gateway.services import Services
from manager.errors import CodedError

SERVICE = "/tangram.v1.Gateway/"
HEALTH = "/grpc.health.v1.Health/"
#: Methods that change the gateway for everybody: the invoke token does not do. The same as on HTTP.
ADMIN = frozenset(
    {
        "ApplyConfig",
        "PutFunction",
        "RemoveFunction",
        "PurgeDeadLetter",
        "PurgeDeadLetters",
        "PullImages",
        "DrainNode",
        "IssueTicket",
    }
)
#: Methods that are served without a token, as health is.
OPEN = frozenset({"GetReadiness"})


class GrpcServer:
    """The gRPC server; `open` binds, `close` waits for open calls within a grace."""

    def __init__(self, services: Services, connections: Connections) -> None:
        self._services = services
        self._tls: RenewedContext | None = None
        service = GatewayService(services)
        self._readiness = ReadinessCheck(services.unready)
        served: list[IServable] = [service, Health({service: [self._readiness]})]
        self._server = BoundedServer(ServerReflection.extend(served), connections, services.bounds)
        listen(self._server, RecvRequest, self._let_in)

    async def open(self, listener: socket.socket) -> None:
        tls = self._services.bounds.tls
        self._tls = None if tls is None else RenewedContext(tls, ("h2",), "grpc")
        await self._server.start(sock=listener, ssl=None if self._tls is None else self._tls.context)

    def drain(self) -> None:
        """Tell those who watch its health; open calls go on."""
        self._readiness.look()

    async def close(self) -> None:
        """Stop, and wait until open calls have ended."""
        if self._tls is not None:
            self._tls.close()
        self._server.close()
        await self._server.wait_closed()

    async def _let_in(self, event: RecvRequest) -> None:
        name = event.method_name.removeprefix(SERVICE)
        if name not in OPEN and not event.method_name.startswith(HEALTH):
            given = event.metadata.get("authorization")
            try:
                role = self._services.guard.role(str(given).encode() if given is not None else None)
                role.require(Role.ADMIN if name in ADMIN else Role.INVOKE)
            except CodedError as error:
                self._services.metrics.refused("grpc", error.code)
                raise status_error(error) from None
        event.method_func = partial(bounded, event.method_func, self._services, name)
