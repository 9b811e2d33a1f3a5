"""SWE-ReX's RemoteRuntime is answered as by SWE-ReX's own server."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import GatewayProcess
from tests.ecosystem.environments import ClientEnvironment

pytestmark = [pytest.mark.network, pytest.mark.slow]
START_S = 60

#: Where its own server loses its place, or shows how it works, and the door does neither: a left-over prompt ends
#: a `read` at once, a document with an expansion is cut up, and the last resort of an interrupt is seen in two answers.
BETTER: Mapping[str, Callable[[Any], bool]] = {
    "read x; echo got $x": lambda told: told[0] == "CommandTimeoutError",
    "interrupt a read": lambda told: told["output"] == "",
    "cat > in.txt": lambda told: (told["output"], told["exit_code"]) == ("3\n", 0),
    "usable after a deaf": lambda told: told["output"] == "usable after a deaf program\n",
    # Its shell may still have to say, as it ends, which job of an earlier command was killed.
    "exit() {'is_interactive_quit'": lambda told: (told["output"], told["exit_code"]) == ("", 0),
    "interrupt a deaf program": lambda told: told["output"].startswith("deaf") and "Killed" in told["output"],
}


@asynccontextmanager
async def own_server(environment: ClientEnvironment, directory: Path) -> AsyncIterator[int]:
    """SWE-ReX's server on a port of this machine; without colours, which it would take for output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    python = environment.directory / "bin" / "python"
    command = [str(python), "-m", "swerex.server", "--host", "127.0.0.1", "--port", str(port), "--auth-token", "k"]
    env = {"PATH": os.environ["PATH"], "TERM": "dumb", "HOME": str(directory)}
    with (directory / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, cwd=directory, env=env, stdout=log, stderr=log)
        try:
            async with asyncio.timeout(START_S):
                while True:
                    try:
                        (await asyncio.open_connection("127.0.0.1", port))[1].close()
                        break
                    except OSError:
                        await asyncio.sleep(0.1)
            yield port
        finally:
            process.terminate()
            await process.wait()


async def test_every_answer_is_that_of_its_own_server(
    boxes: GatewayProcess, client: Callable[[str], ClientEnvironment], tmp_path: Path
) -> None:
    environment, place = client("swerex"), tmp_path / "place"
    place.mkdir()
    async with own_server(environment, tmp_path) as port:
        own, ours = await asyncio.gather(
            environment.run("swerex_runtime", "http://127.0.0.1", str(port), "k", str(place)),
            environment.run("swerex_runtime", f"{boxes.url}/swerex/boxes/swerex", "-", "any", "/workspace"),
        )
    assert (own.pop("wrong key"), ours.pop("wrong key")) == (False, True), "the gateway of this test has no tokens"
    assert own.keys() == ours.keys()
    assert len(own) > 100
    odd = {name: (own[name], ours[name]) for name in own if plain(own[name]) != ours[name] and not better(name, ours)}
    assert not odd, odd


def plain(told: Any) -> Any:
    """Where its own server falls back to another prompt, it says so; that is no answer to what was asked."""
    if isinstance(told, dict) and told.get("expect_string") == "UNIQUESTRING29234":
        return told | {"expect_string": "SHELLPS1PREFIX"}
    return told


def better(name: str, ours: dict[str, Any]) -> bool:
    """Return whether it is one of those that are better here, and good."""
    return any(known in name and good(ours[name]) for known, good in BETTER.items())
