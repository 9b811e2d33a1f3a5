"""A real runner in the moments in which something is only half there, and one in which something of ours fails."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from manager.errors import ActionFailed, CapacityExceeded, InvalidInput, Reason
from runtimes.sandbox.command import Command, FileContent
from runtimes.sandbox.runner import runner as wire
from runtimes.sandbox.runner.client import StreamClient
from runtimes.sandbox.session import InteractiveSession, SessionSettings, TerminalSize
from tests.runtimes.sandbox.box import Box, running_box
from tests.runtimes.sandbox.runner.test_takeover import heard, until

DEADLINE_S = 60.0
#: Every command has ended before the runner goes on from its start, and few bytes fit on their way to the gateway.
ENDED_AT_ONCE = """
import socket
spawn = runner._spawn
def ended(*given):
    pid = spawn(*given)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid
runner._spawn = ended
begin = runner.GatewayConnection.__init__
def small(self, source, sink, sock=None):
    begin(self, source, sink, sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
runner.GatewayConnection.__init__ = small
"""
#: Something of ours fails, as if a file were not there, while the gateway has a file called ``fault``.
FAULT = """
def failing(owner, name):
    real = getattr(owner, name)
    def fail(self, *given, **more):
        if os.path.exists({place!r}):
            raise FileNotFoundError(2, "No such file or directory")
        return real(self, *given, **more)
    setattr(owner, name, fail)
failing(runner.{owner}, {name!r})
"""


@asynccontextmanager
async def connected(box: Box) -> AsyncIterator[StreamClient]:
    client = await box.connect()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield client
    finally:
        client.close()


async def test_a_command_that_ends_at_once_is_answered_right_though_its_gateway_reads_nothing() -> None:
    with running_box(change=ENDED_AT_ONCE) as box:
        async with connected(box) as client:
            client.pause_reading()
            shells = [f"head -c 60000 /dev/zero; touch done{number}" for number in range(10)]
            running = [asyncio.create_task(client.run(Command(shell=shell))) for shell in shells]
            await until((box.work / "done9").exists)
            client.resume_reading()
            results = await asyncio.gather(*running)
        assert [(each.exit_code, len(each.stdout)) for each in results] == [(0, 60_000)] * 10
        assert box.process.poll() is None


async def run(client: StreamClient) -> None:
    await client.run(Command(shell="echo said; cat", stdin=b"typed"))


async def start_and_kill(client: StreamClient) -> None:
    await client.run(Command(shell="exec sleep 1000", timeout_s=0.0, kill_grace_s=0.0))


async def read(client: StreamClient) -> None:
    await client.read_file("there", limit_bytes=10)


async def write(client: StreamClient) -> None:
    await client.write_file("new", FileContent(b"data"), mode=None)


async def look(client: StreamClient) -> None:
    await client.list_files("")


@pytest.mark.parametrize(
    ("work", "owner", "name"),
    [
        (run, "Launcher", "plumb"),
        (run, "Launcher", "environment_of"),
        (run, "Jobs", "on_input"),
        (run, "Jobs", "on_output"),
        (run, "Jobs", "finish"),
        (run, "Job", "accounts"),
        (start_and_kill, "Jobs", "pursue"),
        (start_and_kill, "ProcessTree", "signal"),
        (start_and_kill, "ProcessTree", "members"),
        (read, "Files", "read"),
        (read, "Download", "abandon"),
        (write, "Files", "write"),
        (write, "Files", "feed"),
        (look, "Files", "list_directory"),
    ],
)
async def test_a_fault_of_the_runner_ends_one_exchange_and_is_told_as_its_own(
    tmp_path: Path, work: Callable[[StreamClient], Awaitable[None]], owner: str, name: str
) -> None:
    fault = tmp_path / "fault"
    with running_box(change=FAULT.format(place=str(fault), owner=owner, name=name)) as box:
        (box.work / "there").write_bytes(b"data")
        async with connected(box) as client:
            begun, shell = asyncio.Event(), "echo other; until [ -e go ]; do sleep 0.01; done"
            other = asyncio.create_task(client.run(Command(shell=shell), lambda *_: begun.set()))
            await begun.wait()
            fault.touch()
            with pytest.raises(ActionFailed, match="runner failed: FileNotFoundError") as caught:
                await work(client)
            fault.unlink()
            assert caught.value.reason is Reason.INTERNAL
            box.open_gate()
            assert (await other).stdout == b"other\n"
            assert (await client.run(Command(shell="echo again"))).stdout == b"again\n"
        assert box.process.poll() is None


# --- whose a process is


async def test_a_server_whose_wrapper_ends_meanwhile_is_not_ended_with_a_later_command(box: Box) -> None:
    wait = "until [ -e go ]; do sleep 0.01; done"
    async with connected(box) as client:
        await client.run(Command(shell=f"({wait}; sleep 1000 & echo $! > server) <&- >/dev/null 2>&1 &"))
        said = asyncio.Event()
        adopted = f'grep -q "PPid:.{box.process.pid}$" /proc/$(cat server)/status 2>/dev/null'
        shell = f"touch go; until {adopted}; do sleep 0.01; done; echo ready; sleep 1000"
        running = asyncio.create_task(client.run(Command(shell=shell), lambda *_: said.set()))
        await said.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert "sleep" in (Path("/proc") / (box.work / "server").read_text().strip() / "status").read_text()
        assert await client.sweep() == 1


async def test_what_hides_where_it_comes_from_is_ended_with_the_command_that_it_was_adopted_from(box: Box) -> None:
    async with connected(box) as client:
        said = asyncio.Event()
        shell = "(env -i sleep 1000 & TANGRAM_ACTION=made-up setsid sleep 1000 &); echo ready; exec sleep 1000"
        running = asyncio.create_task(client.run(Command(shell=shell), lambda *_: said.set()))
        await said.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert await client.sweep() == 0


def test_markers_that_no_process_bears_are_forgotten() -> None:
    workplace = wire.Workplace()
    workplace.config = {"user": str(os.geteuid()), "workdir": "/"}
    tree = wire.ProcessTree(workplace, {})
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, "TANGRAM_ACTION": "0"}) as process:
        for number in range(2 * wire.MARKERS_MAX):
            tree.remember(wire.Job(number, {"marker": str(number), "grace_s": 0.0}, set()))
            assert len(tree.markers) <= wire.MARKERS_MAX
        assert tree.marker_of(process.pid) == b"TANGRAM_ACTION=0"
        process.kill()


# --- terminals


@pytest.mark.parametrize("last", ["exit 3", "echo again > /dev/tty; exit 3"])
async def test_a_command_that_closes_its_terminal_is_not_hung_up_on(box: Box, last: str) -> None:
    session = InteractiveSession(SessionSettings(), TerminalSize())
    shell = f"read x; exec 0<&- 1>&- 2>&-; touch closed; until [ -e go ]; do sleep 0.01; done; {last}"
    async with connected(box) as client:
        running = asyncio.create_task(client.run(Command(shell=shell, session=session, timeout_s=math.inf)))
        await session.write(b"typed\n", end=True)
        await until((box.work / "closed").exists)
        for _ in range(2):
            await client.list_files("")  # by the end of the second it has seen that the terminal is closed
        box.open_gate()
        result = await running
        session.close()
    assert (result.exit_code, result.signal) == (3, None)
    if "again" in last:
        assert b"again" in await heard(session, 0, b"again")


# --- what was never started


async def test_a_command_that_was_refused_is_not_told_as_started(box: Box) -> None:
    async with connected(box) as client:
        with pytest.raises(InvalidInput):
            await client.run(Command(shell="true", cwd="nowhere", claim="a.1/1", detached=True))
        assert (await client.run(Command(argv=("/nowhere",), claim="b.1/1", detached=True))).exit_code == 127
    async with connected(box) as client:
        assert client.started == frozenset({"b.1/1"})


# --- descriptors


@pytest.mark.parametrize("terminal", [False, True])
async def test_a_shortage_of_descriptors_refuses_commands_and_leaves_none_open(box: Box, terminal: bool) -> None:
    def descriptors() -> set[int]:
        return {int(name) for name in os.listdir(f"/proc/{box.process.pid}/fd")}  # noqa: PTH208

    async def attempt() -> None:
        session = InteractiveSession(SessionSettings(), TerminalSize()) if terminal else None
        await client.run(Command(shell="exit 0", stdin=b"" if terminal else b"typed", session=session))

    async with connected(box) as client:
        await attempt()
        bound, before, refused = resource.prlimit(box.process.pid, resource.RLIMIT_NOFILE), descriptors(), 0
        for more in range(wire.RESERVED_DESCRIPTORS + 8):
            resource.prlimit(box.process.pid, resource.RLIMIT_NOFILE, (max(before) + 1 + more, bound[1]))
            with suppress(CapacityExceeded):
                await attempt()
                refused -= 1
            refused += 1
            await until(lambda: descriptors() == before)
        resource.prlimit(box.process.pid, resource.RLIMIT_NOFILE, bound)
        assert wire.RESERVED_DESCRIPTORS <= refused < wire.RESERVED_DESCRIPTORS + 8
        await attempt()
