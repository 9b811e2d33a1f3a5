"""Listeners of foreign doors that want a port of their own, with their paths at its root."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack

from starlette.types import ASGIApp

from gateway.access.connections import Connections
from gateway.config.sections import ServerConfig
from gateway.facades.app import FacadeApp, FrontApp, make_facades
from gateway.facades.calls import ForeignCalls
from gateway.facades.docker.door import DockerEngineApi
from gateway.facades.docker.listener import DockerDoor
from gateway.http.early import HttpDoor
from gateway.http.server import listen
from gateway.services import Services


class FacadeListeners:
    """The ports of the doors: bound at the start, answering 503 until `open`."""

    def __init__(self, server: ServerConfig, connections_max: int, silent_s: float, closers: AsyncExitStack) -> None:
        """Bind them; ``closers`` closes what was bound. Raises Conflict for a port that is taken."""
        self._doors: dict[str, HttpDoor] = {}
        #: What makes the doors' calls; None until `open`.
        self.calls: ForeignCalls | None = None
        self.ports: dict[str, int] = {}
        self._docker: DockerDoor | None = None
        closers.push_async_callback(self.close)
        for name, port in server.facades.ports.items():
            listener: socket.socket = closers.enter_context(listen(server.host, port, silent_s))
            self._doors[name] = HttpDoor(listener, connections_max, server)
            self.ports[name] = listener.getsockname()[1]
        docker = server.facades.docker
        if docker is not None:
            self._docker = DockerDoor(docker, server, connections_max, closers)
        #: Where each door is: a path at the gateway's own port, a port of its own, or a socket's path.
        self.addresses: dict[str, str | int] = dict.fromkeys(dict(server.facades.opened()), "/") | self.ports
        if docker is not None:
            self.addresses["docker"] = docker.socket

    @property
    def connections(self) -> Mapping[str, Connections]:
        """Open connections by door."""
        opened = {} if self._docker is None else {"docker": self._docker.connections}
        return {name: door.connections for name, door in self._doors.items()} | opened

    def open(self, services: Services, own: ASGIApp) -> ASGIApp:
        """Open the doors, and return what answers at the gateway's own port: ``own`` behind those that are there."""
        self.calls = ForeignCalls(services)
        facades = make_facades(services, self.calls)
        for name, door in self._doors.items():
            door.open(FacadeApp(facades[name]))
        if self._docker is not None and (section := services.bounds.facades.docker) is not None:
            engine = DockerEngineApi(services, self.calls, section)
            self._docker.on_close = engine.close
            self._docker.open(engine.serve)
        return FrontApp(list(facades.values()), own) if facades else own

    async def close(self) -> None:
        """Let open requests end, and stop; idempotent."""
        docker = () if self._docker is None else (self._docker,)
        await asyncio.gather(*(door.close() for door in (*self._doors.values(), *docker)))
