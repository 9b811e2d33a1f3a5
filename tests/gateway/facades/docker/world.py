"""What the tests of this door share: a gateway with its socket open, over process sandboxes, and who speaks to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import docker

from manager.action import UnitSet
from manager.function import Background, FunctionSpec, SandboxSpec, TrajectoryChoices
from runtimes.testing import ScriptStep
from tests.gateway.conftest import RunningGateway, until
from tests.gateway.facades.world import doors

T = TypeVar("T")
IMAGE = "tangram-base:bookworm"
SANDBOX = SandboxSpec(
    image=IMAGE, images=("other/*",), trajectory=TrajectoryChoices(env=("*",), memory_bytes=2**30), memory_bytes=2**28,
    background=Background.RUN,
)  # fmt: skip
BOX = FunctionSpec(
    name="box", runtime="exec", cost={"cpu": UnitSet.fixed(1)}, timeout_s=60.0, sandbox=SANDBOX,
    output_limit_bytes=256 * 1024,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineWorld:
    """A gateway, docker-py as its client, and the socket itself."""

    running: RunningGateway
    client: docker.DockerClient
    socket: Path

    async def do(self, work: Callable[[], T]) -> T:
        """Return what a client that blocks returns."""
        return await asyncio.to_thread(work)

    async def keep_alive(self, name: str = "box", **given: Any) -> Any:
        """Return a container that runs, and does nothing."""
        run = self.client.containers.run
        container = await self.do(lambda: run(IMAGE, "sleep infinity", detach=True, name=name, **given))
        await self.do(container.reload)  # it is as it was created until then
        return container

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Return the status and the JSON of one request without any client."""
        return await self.do(lambda: ask(self.socket, method, path, body))


@asynccontextmanager
async def engine_world(directory: Path, **settings: object) -> AsyncIterator[EngineWorld]:
    """Serve; when the block has ended nothing is left of what was made in it."""
    path = directory / "docker.sock"
    section = {"socket": str(path), "function": "box", **settings}
    async with doors(directory, {"docker": section}, lambda _: ScriptStep(), {"box": BOX}) as running:
        client = await asyncio.to_thread(lambda: docker.DockerClient(base_url=f"unix://{path}"))
        world = EngineWorld(running, client, path)
        try:
            yield world
            for container in await world.do(lambda: client.containers.list(all=True)):
                await world.do(lambda one=container: one.remove(force=True))  # type: ignore[misc]
        finally:
            client.close()
        await until(lambda: not running.app.invocations.living)
        await until(lambda: running.app.connections["docker"].open == 0)
        assert (await running.http.get("/v1/trajectories")).json()["trajectories"] == []
        assert running.app.facades.calls is not None
        assert len(running.app.facades.calls.line) == running.app.held.bytes == running.app.admission.queued == 0
    assert not path.exists()


def ask(path: Path, method: str, target: str, body: object = None) -> tuple[int, Any]:
    """Return the status and the JSON of one request."""
    conn = http.client.HTTPConnection("engine", timeout=30)
    conn.sock = socket.socket(socket.AF_UNIX)
    conn.sock.settimeout(30)
    conn.sock.connect(str(path))
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        conn.request(method, target, data, {"Content-Type": "application/json"})
        answer = conn.getresponse()
        said = answer.read()
        return answer.status, json.loads(said) if said.strip() else None
    finally:
        conn.close()


def upgraded(path: Path, exec_id: str) -> socket.socket:
    """Start a command, and return the stream that its connection is then."""
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(30)
    stream.connect(str(path))
    named = {"Host": "engine", "Connection": "Upgrade", "Upgrade": "tcp", "Content-Length": "2"}
    head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    stream.sendall(f"POST /v1.41/exec/{exec_id}/start HTTP/1.1\r\n{head}\r\n{{}}".encode())
    heard = b""
    while not heard.endswith(b"\r\n\r\n"):
        heard += stream.recv(1)
    assert heard.startswith(b"HTTP/1.1 101 UPGRADED\r\n"), heard
    return stream
