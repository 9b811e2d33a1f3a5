"""Clients that are cancelled, timed out and killed in the midst of each call that makes something on the gateway.

Each call is broken off at its first await, then at its second, and so on to its last; who is killed dies there. Five
seconds later nothing may be left that nobody knows of, and whatever was answered must be there.
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
from itertools import count
from pathlib import Path
from types import coroutine
from typing import Any

from bench.report import BenchReport, parser, play
from bench.serving import GATEWAY, TOKEN, process
from tangram import AsyncClient, TangramError

#: Tries in all, and seconds after the last one in which everything is to be gone.
TRIES, QUICK_TRIES, GONE_S = 2000, 200, 5.0
#: Of the awaits of a call each is broken off at one, in the quick form at every third.
AWAITS_MAX, QUICK_STRIDE = 30, 3
#: What is timed out has at most so many seconds.
TIMEOUT_MAX_S = 0.1
CONFIG = f"""
server: {{state_dir: state, port: 0, grpc_port: 0, token: {TOKEN}}}
sandbox: {{provider: process}}
node: {{memory: 4Gi}}
scheduler: {{memory_reserve: 0}}
functions:
  shell: {{runtime: exec, cost: {{cpu: 1}}, sandbox: {{memory: 16Mi}}}}
  large: {{runtime: exec, cost: {{cpu: 1}}, sandbox: {{memory: 2560Mi}}}}
"""
#: Trajectories that live from the beginning to the end; the second has the memory that others wait for.
LIVING, FULL = "living", "full"
HANDLER = {"runtime": "handler", "handler": "made:handle"}
SOURCES = {"made.py": "def handle(input, context):\n    return {}\n"}


#: What makes something, with a client and a name of its own.
CALLS: dict[str, Callable[[AsyncClient, str], Coroutine[Any, Any, Any]]] = {
    "opened": lambda client, name: client.trajectory(name).open(),
    "waiting": lambda client, name: client.trajectory(name, function="large").open(),
    "forked": lambda client, name: client.trajectory(LIVING).fork([f"{name}-a", f"{name}-b"]),
    "snapshot": lambda client, name: client.trajectory(LIVING).snapshot(),
    "uploaded": lambda client, name: client.trajectory(LIVING).upload(name, os.urandom(300_000)),
    "session": lambda client, name: client.trajectory(LIVING).session("cat"),
    "submitted": lambda client, name: client.submit("shell", {"command": "true"}, key=name),
    "registered": lambda client, name: client.put_function("made", HANDLER, sources=SOURCES),
}


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


def killed(address: str, kind: str, name: str, awaits: int) -> None:
    """Make a call in this process, and die at one of its awaits, or when it was answered: then with 1."""

    async def make() -> None:
        with suppress(TangramError):
            client = AsyncClient(address, token=TOKEN)
            await broken_off(CALLS[kind](client, name), awaits, lambda: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(1)

    asyncio.run(make())


class CancelledClients:
    """Breaks calls off, each in its turn."""

    def __init__(self, address: str, tries: int, stride: int) -> None:
        self._stride = stride
        self.address = address
        self.client = AsyncClient(address, token=TOKEN)
        self.tries = self.lost = 0
        self._left = tries
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["tangram.client.aio", "bench.serving"])

    async def play(self) -> None:
        """Break each call off in each way at each of its awaits, and begin again, until there were enough."""
        self._held = [await self.client.trajectory(LIVING).open()]
        self._held.append(await self.client.trajectory(FULL, function="large").open())
        while self._left > 0:
            for kind in CALLS:
                for how in (self._cancelled, self._timed_out, self._killed):
                    await self._at_each(how, kind)

    async def _at_each(self, how: Callable[[str, str, int], Coroutine[Any, Any, bool]], kind: str) -> None:
        """Break it off at its awaits, up to a bound: what waits for memory has no last one."""
        for awaits in range(0, AWAITS_MAX, self._stride):
            self.tries, self._left = self.tries + 1, self._left - 1
            if self._left < 0 or await how(kind, f"{kind}-{self.tries}", awaits):
                return

    async def _cancelled(self, kind: str, name: str, awaits: int) -> bool:
        call = asyncio.create_task(cancelled(CALLS[kind](self.client, name), awaits))
        return await self._answered(kind, asyncio.wait_for(call, 1.0 if kind == "waiting" else None))

    async def _timed_out(self, kind: str, name: str, awaits: int) -> bool:
        call = CALLS[kind](self.client, name)
        await self._answered(kind, asyncio.wait_for(call, random.uniform(0.0, TIMEOUT_MAX_S)))
        return awaits > 8

    async def _killed(self, kind: str, name: str, awaits: int) -> bool:
        child = self._processes.Process(target=killed, args=(self.address, kind, name, awaits))
        child.start()
        await asyncio.to_thread(child.join, 1.0 if kind == "waiting" else None)
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

    async def left(self) -> list[str]:
        """Return what is there though nobody knows of it, as long as there is some, for some seconds."""
        until_s = time.monotonic() + GONE_S
        while True:
            left = await self._left_now()
            if not left or time.monotonic() >= until_s:
                return left
            await asyncio.sleep(0.1)

    async def _left_now(self) -> list[str]:
        client, known = self.client, {LIVING, FULL}
        names = [each.trajectory for each in await client.trajectories() if each.trajectory not in known]
        names += [f"snapshot {each.snapshot}" for each in await client.snapshots()]
        names += [f"invocation {each.id}" async for each in client.list(limit=1000) if not each.ended]
        names += [f"waiting {each.id}" for each in await client.queue()]
        files = await client.trajectory(LIVING).list()
        names += [each.path for each in files if "uploaded-" not in each.path]
        held = sum(node.held_bytes for node in (await client.resources()).nodes)
        return names + ([] if held == (16 + 2560) * 2**20 else [f"{held} bytes held"])


async def cancels(report: BenchReport, tries: int, stride: int) -> None:
    with tempfile.TemporaryDirectory(prefix="cancels-") as root:
        (Path(root) / "tangram.yaml").write_text(CONFIG.replace("state_dir: state", f"state_dir: {root}/state"))
        async with process(GATEWAY, f"{root}/tangram.yaml", ending=signal.SIGINT) as server:
            crowd = CancelledClients(f"http://127.0.0.1:{server.port}", tries, stride)
            await crowd.play()
            left = await crowd.left()
            await crowd.client.close()
    report.figure("tries", crowd.tries)
    report.check("left_behind", len(left), limit=0, better="lower")
    report.check("lost_answers", crowd.lost, limit=0, better="lower")
    for each in left[:20]:
        report.note(f"left behind: {each}")


def main() -> int:
    options = parser("cancels", parts=True).parse_args()
    report = BenchReport("cancels")
    chosen = (QUICK_TRIES, QUICK_STRIDE) if options.quick else (TRIES, 1)
    return play(report, options, {"cancels": lambda: cancels(report, *chosen)})


if __name__ == "__main__":
    sys.exit(main())
