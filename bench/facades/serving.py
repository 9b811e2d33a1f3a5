"""A gateway with its doors open, in a process of its own and on the loop that `tangram serve` runs on."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.serving import GATEWAY, TOKEN, process

#: What every configuration of doors begins with; ``facades`` comes next.
SERVER = """
version: 1
server:
  token: bench-bench-bench
  state_dir: {directory}/state
  port: 0
  grpc_port: 0
  drain_grace: 100ms
"""
#: Seconds for any one answer.
ANSWER_S = 120.0


@dataclass(frozen=True, slots=True)
class ServedDoors:
    """A gateway that serves, and how to reach it."""

    port: int
    http: httpx.AsyncClient

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, path: str, body: Mapping[str, object], **headers: str) -> Any:
        """Return the JSON of a 200; raises httpx.HTTPStatusError."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await self.http.post(path, json=body, headers=given)
        answer.raise_for_status()
        return answer.json()

    async def records(self, function: str) -> list[dict[str, Any]]:
        """Return the records of a function's invocations, at most 1000."""
        answer = await self.http.get("/v1/invocations", params={"function": function, "limit": "1000"})
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()["invocations"]
        return found


@asynccontextmanager
async def served(directory: Path, config: str, **sources: str) -> AsyncIterator[ServedDoors]:
    """Serve a configuration, and ``sources`` as modules of Python beside it; ``{directory}`` in it is ``directory``."""
    file = _written(directory, config, sources)
    # SIGTERM would keep the sandboxes of trajectories for a next gateway.
    async with process(GATEWAY, str(file), ending=signal.SIGINT) as gateway:
        port = gateway.port
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=ANSWER_S) as http:
            yield ServedDoors(port, http)


def _written(directory: Path, config: str, sources: Mapping[str, str]) -> Path:
    """Return where a configuration lies, written now."""
    directory.mkdir(exist_ok=True)
    directory.chmod(0o755)  # the sandbox's user reads handlers in it
    for name, text in sources.items():
        (directory / f"{name}.py").write_text(text)
    file = directory / "tangram.yaml"
    file.write_text(config.format(directory=directory))
    return file
