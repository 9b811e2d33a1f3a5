"""Clients that are cancelled, timed out and killed in the midst of each call that makes something on the gateway.

Each call is broken off at its first await, then at its second, and so on to its last; who is killed dies there. Five
seconds later nothing may be left that nobody knows of, and whatever was answered must be there. What is made by a name
through a foreign door is known by that: it is ended by its name, and then nothing of it may be left.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from types import coroutine
from typing import Any

import httpx

from bench.report import BenchReport, parser, play
from bench.serving import GATEWAY, IMAGE, TOKEN, process
from tangram import AsyncClient, TangramError

#: Tries in all, and seconds after the last one in which everything is to be gone.
TRIES, QUICK_TRIES, GONE_S = 2000, 200, 5.0
#: Of the awaits of a call each is broken off at one, in the quick form at every third.
AWAITS_MAX, QUICK_STRIDE = 30, 3
#: What is timed out has at most so many seconds.
TIMEOUT_MAX_S = 0.1
CONFIG = f"""
server:
  state_dir: ROOT/state
  port: 0
  grpc_port: 0
  token: {TOKEN}
  facades:
    swerex: {{function: shell}}
    mcp: {{functions: [shell]}}
    docker: {{socket: ROOT/state/docker.sock, function: shell}}
sandbox: {{provider: process}}
node: {{memory: 4Gi}}
scheduler: {{memory_reserve: 0}}
functions:
  shell: {{runtime: exec, cost: {{cpu: 1}}, sandbox: {{memory: 16Mi}}}}
  large: {{runtime: exec, cost: {{cpu: 1}}, sandbox: {{memory: 2560Mi}}}}
"""
#: Tries that are under way at a time; the processors of a small machine are busy with half as many.
AT_ONCE = 6
#: Trajectories that live from the beginning to the end: one is copied, which needs its files to stand still, to another
#: files are written, and in the third somebody types; the last has the memory that others wait for.
LIVING, WRITTEN, TYPED, FULL = "living", "written", "typed", "full"
HANDLER = {"runtime": "handler", "handler": "made:handle"}
SOURCES = {"made.py": "def handle(input, context):\n    return {}\n"}


async def bash_session(client: AsyncClient, name: str) -> str:
    """Begin a session as SWE-ReX's client does."""
    async with httpx.AsyncClient(
        base_url=client.server, timeout=30.0, verify=False, headers={"X-API-Key": TOKEN}
    ) as door:
        body = {"session": "default", "session_type": "bash", "startup_source": [], "startup_timeout": 10.0}
        return known(name, await door.post(f"/swerex/shell/{name}/create_session", json=body))


async def tool_call(client: AsyncClient, name: str) -> str:
    """Open a session of MCP and call a tool in it."""
    about = {"Authorization": f"Bearer {TOKEN}", "Accept": "application/json, text/event-stream"}
    async with httpx.AsyncClient(base_url=client.server, timeout=30.0, verify=False, headers=about) as door:
        who = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": name, "version": "1"}}
        begun = await door.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": who})
        session = {"mcp-session-id": begun.headers["mcp-session-id"], "X-Trajectory-Id": name}
        asked = {"name": "shell", "arguments": {"command": "true"}}
        call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": asked}
        return known(name, await door.post("/mcp", json=call, headers=session))


async def container(client: AsyncClient, name: str) -> str:
    """Create a container and start it, as the Docker client does."""
    transport = httpx.AsyncHTTPTransport(uds=SOCKET.get(), verify=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://docker", timeout=30.0, verify=False) as door:
        body = {"Image": IMAGE, "Cmd": ["sleep", "60"]}
        known(name, await door.post("/v1.43/containers/create", params={"name": name}, json=body))
        return known(name, await door.post(f"/v1.43/containers/{name}/start"))


def known(name: str, answer: httpx.Response) -> str:
    """Return the name of what a door has made; raises RuntimeError where it has refused."""
    if answer.is_error:
        raise RuntimeError(f"{answer.request.url}: {answer.status_code} {answer.text[:300]}")
    return name


#: Where the engine's door listens.
SOCKET: ContextVar[str] = ContextVar("SOCKET")
#: What makes something, with a client and a name of its own.
CALLS: dict[str, Callable[[AsyncClient, str], Coroutine[Any, Any, Any]]] = {
    "opened": lambda client, name: client.trajectory(name).open(),
    "waiting": lambda client, name: client.trajectory(name, function="large").open(),
    "forked": lambda client, name: client.trajectory(LIVING).fork([f"{name}-a", f"{name}-b"]),
    "snapshot": lambda client, name: client.trajectory(LIVING).snapshot(),
    "uploaded": lambda client, name: client.trajectory(WRITTEN).upload(name, os.urandom(300_000)),
    "session": lambda client, name: client.trajectory(TYPED).session("cat"),
    "submitted": lambda client, name: client.submit("shell", {"command": "true"}, key=name),
    "registered": lambda client, name: client.put_function("made", HANDLER, sources=SOURCES),
}
#: The same through foreign doors.
DOORS: dict[str, Callable[[AsyncClient, str], Coroutine[Any, Any, Any]]] = {
    "bash session": bash_session,
    "tool call": tool_call,
    "container": container,
}
CALLS |= DOORS


async def found(client: AsyncClient, kind: str, answer: Any) -> None:
    """Use what was answered, and end it; raises TangramError if it is not there."""
    match kind:
        case "opened" | "waiting":
            await answer.close()
        case "forked":
            await asyncio.gather(*(each.exec("true") for each in answer))
            await asyncio.gather(*(each.close() for each in answer))
            await client.remove_snapshot(answer[0]._snapshot)
        case "snapshot":
            await client.remove_snapshot(answer.snapshot)
        case "session":
            await answer.cancel()
        case "submitted":
            assert (await client.wait(answer.id)).ok


@coroutine
def broken_off(
    call: Coroutine[Any, Any, Any], awaits: int, break_off: Callable[[], object]
) -> Generator[Any, Any, Any]:
    """Do a call, and break it off at its await of this number, if it has so many."""
    answer: object = None
    failure: BaseException | None = None
    for number in count():
        try:
            waits = call.send(answer) if failure is None else call.throw(failure)
        except StopIteration as done:
            return done.value
        if number == awaits:
            break_off()
        answer = failure = None
        try:
            answer = yield waits
        except BaseException as error:  # noqa: BLE001  # it is the call's
            failure = error


async def cancelled(call: Coroutine[Any, Any, Any], awaits: int) -> Any:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    return await broken_off(call, awaits, lambda: loop.call_soon(task.cancel))


def killed(address: str, engine: str, kind: str, name: str, awaits: int) -> None:
    """Make a call in this process, and die at one of its awaits, or when it was answered: then with 1."""

    async def make() -> None:
        SOCKET.set(engine)
        with suppress(TangramError):
            client = AsyncClient(address, token=TOKEN)
            await broken_off(CALLS[kind](client, name), awaits, lambda: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(1)

    asyncio.run(make())


class CancelledClients:
    """Breaks calls off, some at a time; what is drawn of the seed is how long each may take, and their order."""

    def __init__(self, address: str, engine: str, tries: int, stride: int, seed: int) -> None:
        self._stride, self._engine, self._chance = stride, engine, random.Random(seed)
        SOCKET.set(engine)
        self._places = asyncio.Semaphore(AT_ONCE)
        self.address = address
        self.client = AsyncClient(address, token=TOKEN)
        self.tries = self.lost = 0
        self._left = tries
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["bench.report", "bench.serving", "httpx", "tangram.client.aio"])

    async def play(self) -> None:
        """Break each call off in each way at each of its awaits, and begin again, until there were enough."""
        self._held = [await self.client.trajectory(name).open() for name in (LIVING, WRITTEN, TYPED)]
        self._held.append(await self.client.trajectory(FULL, function="large").open())
        rows = [(how, kind) for kind in CALLS for how in (self._cancelled, self._timed_out, self._killed)]
        while self._left > 0:
            self._chance.shuffle(rows)
            await asyncio.gather(*(self._at_each(how, kind) for how, kind in rows))

    async def _at_each(self, how: Callable[[str, str, int], Coroutine[Any, Any, bool]], kind: str) -> None:
        """Break it off at its awaits, up to a bound: what waits for memory has no last one."""
        for awaits in range(0, AWAITS_MAX, self._stride):
            async with self._places:
                if self._left <= 0:
                    return
                self.tries, self._left = self.tries + 1, self._left - 1
                name = f"{kind.replace(' ', '-')}-{self.tries}"
                answered = await how(kind, name, awaits)
                if kind in DOORS:
                    await self.end_named(name)
                if answered:
                    return

    async def _cancelled(self, kind: str, name: str, awaits: int) -> bool:
        call = asyncio.create_task(cancelled(CALLS[kind](self.client, name), awaits))
        return await self._answered(kind, asyncio.wait_for(call, 0.5 if kind == "waiting" else None))

    async def _timed_out(self, kind: str, name: str, awaits: int) -> bool:
        call = CALLS[kind](self.client, name)
        await self._answered(kind, asyncio.wait_for(call, self._chance.uniform(0.0, TIMEOUT_MAX_S)))
        return awaits > 8

    async def _killed(self, kind: str, name: str, awaits: int) -> bool:
        child = self._processes.Process(target=killed, args=(self.address, self._engine, kind, name, awaits))
        child.start()
        await asyncio.to_thread(child.join, 0.5 if kind == "waiting" else None)
        child.kill()
        await asyncio.to_thread(child.join)
        return child.exitcode == 1

    async def _answered(self, kind: str, call: Coroutine[Any, Any, Any]) -> bool:
        try:
            answer = await call
        except (asyncio.CancelledError, TimeoutError):
            return False
        try:
            await found(self.client, kind, answer)
        except TangramError:
            self.lost += 1
        return True

    async def end_named(self, name: str = "") -> None:
        """End by its name what was made through a foreign door; all of it without a name."""
        transport = httpx.AsyncHTTPTransport(uds=self._engine, verify=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://docker", timeout=30.0, verify=False) as door:
            for each in (await door.get("/v1.43/containers/json", params={"all": 1})).json():
                if f"/{name}" in each["Names"] or not name:
                    await door.delete(f"/v1.43/containers/{each['Id']}", params={"force": 1})
        for each in await self.client.trajectories():
            if each.trajectory == name or (not name and each.trajectory.startswith(("bash-session-", "tool-call-"))):
                await self.client.trajectory(each.trajectory).close()

    async def left(self) -> list[str]:
        """Return what is there though nobody knows of it, as long as there is some, for some seconds."""
        until_s = time.monotonic() + GONE_S
        while True:
            left = await self._left_now()
            if not left or time.monotonic() >= until_s:
                return left
            await asyncio.sleep(0.1)

    async def _left_now(self) -> list[str]:
        client, known = self.client, {LIVING, WRITTEN, TYPED, FULL}
        names = [each.trajectory for each in await client.trajectories() if each.trajectory not in known]
        names += [f"snapshot {each.snapshot}" for each in await client.snapshots()]
        names += [f"invocation {each.id}" async for each in client.list(limit=1000) if not each.ended]
        names += [f"waiting {each.id}" for each in await client.queue()]
        files = await client.trajectory(WRITTEN).list()
        names += [each.path for each in files if "uploaded-" not in each.path]
        held = sum(node.held_bytes for node in (await client.resources()).nodes)
        return names + ([] if held == (3 * 16 + 2560) * 2**20 else [f"{held} bytes held"])


async def cancels(report: BenchReport, tries: int, stride: int, seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="cancels-") as root:
        (Path(root) / "tangram.yaml").write_text(CONFIG.replace("ROOT", root))
        async with process(GATEWAY, f"{root}/tangram.yaml", ending=signal.SIGINT) as server:
            address, engine = f"http://127.0.0.1:{server.port}", f"{root}/state/docker.sock"
            crowd = CancelledClients(address, engine, tries, stride, seed)
            await crowd.play()
            await crowd.end_named()
            left = await crowd.left()
            await crowd.client.close()
    report.figure("tries", crowd.tries)
    report.check("left_behind", len(left), limit=0, better="lower")
    report.check("lost_answers", crowd.lost, limit=0, better="lower")
    for each in left[:20]:
        report.note(f"left behind: {each}")


def main() -> int:
    words = parser("cancels", parts=True)
    words.add_argument("--seed", type=int, default=0, help="of the order, and of how long what is timed out may take")
    options = words.parse_args()
    report = BenchReport("cancels")
    report.figure("seed", options.seed)
    chosen = (QUICK_TRIES, QUICK_STRIDE) if options.quick else (TRIES, 1)
    return play(report, options, {"cancels": lambda: cancels(report, *chosen, options.seed)})


if __name__ == "__main__":
    sys.exit(main())
