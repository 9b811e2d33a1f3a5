"""The gateway's side of a driver, against children that do what a test wrote."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from manager.clock import Clock, VirtualClock
from runtimes.node.ray.process import RayDriverProcess, RayMessage, RaySettings

DEADLINE_S = 60.0
#: Says that it is connected, answers pings, and says of each command which line it was.
OBEDIENT = """
import json, os, sys
def tell(**message):
    print(json.dumps(message), flush=True)
given = json.loads(sys.stdin.readline())
tell(kind="connected", pid=os.getpid(), version=given["address"])
for line in sys.stdin:
    command = json.loads(line)
    if command["kind"] == "ping":
        tell(kind="pong", looked_ago_s=0.1, why="")
    else:
        tell(kind="refused", node=command["node"], why=line.strip())
"""
AWAY = OBEDIENT.replace('looked_ago_s=0.1, why=""', 'looked_ago_s=43.0, why="TimeoutError: GCS"')
SILENT = """
import json, os, time
print(json.dumps({"kind": "connected", "pid": os.getpid(), "version": "1"}), flush=True)
time.sleep(600)
"""
REFUSED = """
import json, sys
sys.stderr.write("InvalidAuthToken")
print(json.dumps({"kind": "unreachable", "why": "ConnectionError: token"}), flush=True)
"""
GARBLED = "print('hello', flush=True)\nimport time\ntime.sleep(600)\n"
ENVIRONMENT = """
import json, os, sys
told = json.dumps({"kind": "unreachable", "why": " ".join(sorted(os.environ))})
print(told, flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def running(
    program: str, directory: Path, clock: Clock | None = None
) -> AsyncIterator[tuple[RayDriverProcess, list[RayMessage]]]:
    """A driver of this program, and what it has said."""
    driver, said = directory / "driver.py", list[RayMessage]()
    driver.write_text(program)
    settings = RaySettings(address="head:6379", ping_s=0.05, silent_s=60.0)
    process = RayDriverProcess(settings, said.append, driver=driver, clock=clock)
    task = asyncio.create_task(process.run())
    try:
        yield process, said
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            event = asyncio.Event()
            asyncio.get_running_loop().call_later(0.005, event.set)
            await event.wait()


def pids(said: list[RayMessage]) -> list[int]:
    """Of each driver that has connected."""
    return [message.pid for message in said if message.kind == "connected"]


def alive(pid: int) -> bool:
    """Whether there is such a process."""
    return Path(f"/proc/{pid}").exists()


async def test_a_driver_is_configured_and_told_what_to_do(tmp_path: Path) -> None:
    async with running(OBEDIENT, tmp_path) as (process, said):
        await until(lambda: bool(said))
        assert said[0].kind == "connected" and said[0].version == "head:6379"
        process.start_daemon("n1", ["tangram"], {"A": "b"}, "/s")
        process.release("n1")
        await until(lambda: len(said) == 3)
        commands = [msgspec.json.decode(message.why) for message in said if message.kind == "refused"]
        assert [command["kind"] for command in commands] == ["start", "release"]
        assert commands[0]["environment"] == {"A": "b"} and commands[0]["state_dir"] == "/s"
        await until(lambda: process.warning() is None)


async def test_a_driver_that_speaks_nonsense_is_ended_and_said_so(tmp_path: Path) -> None:
    async with running(GARBLED, tmp_path) as (process, _):
        await until(lambda: process.starts == 2)
        assert "nobody understands" in str(process.warning())


async def test_a_cluster_that_does_not_answer_is_a_warning_with_its_age(tmp_path: Path) -> None:
    async with running(AWAY, tmp_path) as (process, _):
        await until(lambda: "TimeoutError: GCS" in str(process.warning()))
        assert "unreachable for 4" in str(process.warning())


async def test_a_refusal_is_told_in_rays_words(tmp_path: Path) -> None:
    async with running(REFUSED, tmp_path) as (process, said):
        await until(lambda: bool(said))
        assert said[0] == RayMessage(kind="unreachable", why="ConnectionError: token")
        assert "ConnectionError: token" in str(process.warning())


async def test_an_interpreter_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    process = RayDriverProcess(RaySettings(python="/nowhere/python"), lambda _: None)
    task = asyncio.create_task(process.run())
    await until(lambda: "cannot be started" in str(process.warning()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_gateways_own_variables_stay_with_it_and_rays_go_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANGRAM_TOKEN", "secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the cluster")
    async with running(ENVIRONMENT, tmp_path) as (_, said):
        await until(lambda: bool(said))
        assert said[0].kind == "unreachable"
        names = said[0].why.split()
        assert "RAY_AUTH_TOKEN" in names and "TANGRAM_TOKEN" not in names


def test_a_reservation_that_waits_says_what_was_asked_and_what_is_free() -> None:
    waiting = RayMessage(kind="waiting", node="abcdef0123456789", cpus=64.0, gpus=0.0, waited_s=30.0, free={"CPU": 2.0})
    assert waiting.reservation() == "Ray node abcdef012345 waits for its reservation since 30 s: 64 CPUs asked, 2 free"
    waiting = RayMessage(kind="waiting", node="n", cpus=0.0, gpus=2.0, waited_s=31.0, free={"CPU": 2.0})
    assert waiting.reservation().endswith("2 GPUs asked, none free")
    waiting = RayMessage(kind="waiting", node="n", cpus=1.0, gpus=0.0, waited_s=31.0, free={})
    assert waiting.reservation().endswith("1 CPUs asked")


@pytest.mark.parametrize("program", [OBEDIENT, SILENT], ids=["killed", "silent"])
async def test_a_driver_that_dies_or_is_silent_is_started_again_and_ends_with_its_gateway(
    tmp_path: Path, program: str
) -> None:
    clock = VirtualClock()
    async with running(program, tmp_path, clock) as (process, said):
        process.release("n1")  # without a driver it is dropped
        await until(lambda: bool(said))
        if program == OBEDIENT:
            os.kill(pids(said)[0], signal.SIGKILL)
        else:
            clock.advance_to(61.0)
        await until(lambda: len(pids(said)) == 2)
        assert process.starts == 2 and len(set(pids(said))) == 2
    assert not any(map(alive, pids(said)))
