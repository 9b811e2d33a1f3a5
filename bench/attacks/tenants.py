"""One task reaches for another's units, and for all that both share of a gateway."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.serving import GATEWAY, TOKEN, process
from tangram import AsyncClient, InvalidInputError, TangramError

#: Of a gateway that is soon full.
TRAJECTORIES_MAX, QUEUED_MAX, CONNECTIONS_MAX = 8, 12, 32
#: Times that the owner asks, as a client does that is told to come again, and seconds for each answer.
TRIES, DEADLINE_S = 6, 10.0
CONFIG = f"""
server: {{state_dir: STATE, port: 0, grpc_port: 0, token: {TOKEN}, connections_max: {CONNECTIONS_MAX}}}
sandbox: {{provider: process}}
scheduler: {{memory_reserve: 0, trajectories_max: {TRAJECTORIES_MAX}, max_queued: {QUEUED_MAX}}}
functions:
  shell: {{runtime: exec, cost: {{cpu: 1}}, sandbox: {{memory: 16Mi}}}}
"""


async def crossings() -> Mapping[str, bool]:
    """Return by attempt whether the task ``thief`` got at what is the task ``owner``'s."""
    found: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="tangram-tenants-") as place:
        config = Path(place, "tangram.yaml")
        await asyncio.to_thread(config.write_text, CONFIG.replace("STATE", f"{place}/state"), encoding="utf-8")
        async with (
            process(GATEWAY, str(config), ending=signal.SIGINT) as server,
            AsyncClient(f"http://127.0.0.1:{server.port}", token=TOKEN) as client,
        ):
            held = await client.submit("shell", {"command": "sleep 60"}, task="owner", trajectory="owned")
            forged: dict[str, dict[str, Any]] = {
                "a_parent_of_another_task": {"task": "thief"},
                "a_parent_without_a_task": {},
                "a_parent_of_another_trajectory": {"task": "thief", "trajectory": "stolen"},
            }
            for name, own in forged.items():
                found[name] = not await _refused(
                    client.invoke("shell", {"command": "true"}, parent=held.id, wait_s=5.0, **own),
                    InvalidInputError,
                )
            found["all_trajectories"] = await _takes_all(
                TRAJECTORIES_MAX,
                lambda number: client.trajectory(f"thief-{number}", task="thief").open(),
                lambda: client.trajectory("owned-2", task="owner").open(),
            )
            found["the_whole_queue"] = await _takes_all(
                QUEUED_MAX + 8,
                lambda number: client.submit("shell", {"command": "sleep 60"}, task="thief", key=f"k{number}"),
                lambda: client.submit("shell", {"command": "true"}, task="owner", key="mine"),
            )
            token = await asyncio.to_thread(Path(place, "state", "invoke.token").read_text)
            asks = f"GET /v1/invocations/{held.id}?wait=60s HTTP/1.1\r\nhost: localhost\r\n"
            asks += f"authorization: Bearer {token.strip()}\r\nx-task: {{}}\r\n\r\n"
            for name, said in {"waits_on_all_connections": asks.format("thief"), "idle_connections": ""}.items():
                found[name] = await _takes_connections(server.port, said, asks.replace("?wait=60s", "").format("owner"))
            await client.cancel(held.id)
    return found


async def _takes_connections(port: int, said: str, needed: str) -> bool:
    """Have the thief open connections until there are no more; return whether the owner is answered by none."""
    async with AsyncExitStack() as stack:

        async def connected(text: str) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(lambda: writer.transport.abort())
            writer.write(text.encode("ascii"))
            return reader

        for _ in range(2 * CONNECTIONS_MAX):
            await connected(said)
        for _ in range(TRIES):
            if b" 200 " in await asyncio.wait_for((await connected(needed)).readline(), DEADLINE_S):
                return False
            await asyncio.sleep(1.0)
    return True


async def _takes_all(
    count: int, take: Callable[[int], Awaitable[object]], needed: Callable[[], Awaitable[object]]
) -> bool:
    """Have the thief take until it is refused; return whether there is nothing left for the owner."""
    for number in range(count):
        if await _refused(take(number), TangramError):
            break
    return await _refused(needed(), TangramError)


async def _refused(attempt: Awaitable[object], kind: type[TangramError]) -> bool:
    try:
        await attempt
    except kind:
        return True
    return False
