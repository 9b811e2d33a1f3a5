"""Sessions in real sandboxes of each kind: a terminal or pipes, typed to and watched."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from manager.errors import Conflict, InvalidInput
from runtimes.sandbox.command import Command, CommandResult
from runtimes.sandbox.sandbox import Sandbox
from runtimes.sandbox.session import InteractiveSession, SessionSettings, TerminalSize
from tests.runtimes.sandbox.conftest import RUNNER_ALONE

DEADLINE_S = 30.0
SMALL = SessionSettings(output_bytes=64 * 2**10)
NUMBERS = itertools.count(1)


class WatchedSession:
    """A session under way, and what it has said so far."""

    def __init__(self, session: InteractiveSession, running: asyncio.Task[CommandResult]) -> None:
        self.session = session
        self.running = running
        self.said = {"stdout": b"", "stderr": b""}
        self._heard = asyncio.Condition()

    async def listen(self) -> None:
        async for page in self.session.read(0, DEADLINE_S):
            async with self._heard:
                for piece in page:
                    self.said[piece.stream] += piece.data
                self._heard.notify_all()

    async def until(self, data: bytes, stream: str = "stdout") -> None:
        """Return when it has said that; fails at the deadline with what it said instead."""
        async with self._heard:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await self._heard.wait_for(lambda: data in self.said[stream])
            except TimeoutError:
                pytest.fail(f"{data!r} is not in {self.said}")

    async def result(self) -> CommandResult:
        async with asyncio.timeout(DEADLINE_S):
            return await self.running


@asynccontextmanager
async def session_of(
    sandbox: Sandbox, shell: str, terminal: TerminalSize | None = None, settings: SessionSettings = SMALL
) -> AsyncIterator[WatchedSession]:
    session = InteractiveSession(settings, terminal)
    claim = f"s.1/{next(NUMBERS)}"
    command = Command(shell=shell, session=session, claim=claim, timeout_s=math.inf, kill_grace_s=0.2)

    async def run() -> CommandResult:
        try:
            return await sandbox.run(command)
        finally:
            session.close()

    running = asyncio.create_task(run())
    yield WatchedSession(session, running)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def attended(watched: WatchedSession) -> AsyncIterator[WatchedSession]:
    listening = asyncio.create_task(watched.listen())
    yield watched
    async with asyncio.timeout(DEADLINE_S):
        await listening


async def test_a_terminal_has_a_size_is_controlled_and_keeps_the_exit_status(sandbox: Sandbox) -> None:
    async with session_of(sandbox, "exec sh", TerminalSize(30, 100)) as watched, attended(watched):
        session = watched.session
        await session.write(b"stty size; test -t 0 && test -t 2 && echo a terminal\n")
        await watched.until(b"30 100\r\n")
        await watched.until(b"a terminal\r\n")
        await session.resize(TerminalSize(40, 120))
        await session.write(b"stty size; sh -c 'echo go''ing; exec sleep 1000'\n")  # in the foreground, as it says so
        await watched.until(b"40 120\r\n")
        await watched.until(b"going\r\n")
        await session.write(b"\x03")  # what ctrl-C types: the foreground is interrupted, and the shell lives on
        await session.write(b"echo st'ill' here; exit 7\n")
        await watched.until(b"still here\r\n")
        assert (await watched.result()).exit_code == 7
    assert watched.said["stderr"] == b""


@pytest.mark.slow
@RUNNER_ALONE
async def test_pipes_keep_the_streams_apart_and_the_input_has_an_end(sandbox: Sandbox) -> None:
    async with session_of(sandbox, "cat; echo done >&2; exit 3") as watched, attended(watched):
        await watched.session.write(b"one\xff\n")
        await watched.until(b"one\xff\n")
        await watched.session.write(b"", end=True)
        assert not watched.session.reads
        assert (await watched.result()).exit_code == 3
    assert watched.said == {"stdout": b"one\xff\n", "stderr": b"done\n"}


@pytest.mark.slow
async def test_a_signal_reaches_the_foreground_of_a_session_without_a_terminal(sandbox: Sandbox) -> None:
    shell = "trap 'echo caught; exit 4' USR1; echo ready; while :; do sleep 0.02; done"
    async with session_of(sandbox, shell) as watched, attended(watched):
        await watched.until(b"ready")
        await watched.session.signal("USR1")
        assert (await watched.result()).exit_code == 4
        with pytest.raises(InvalidInput, match="no signal 'NONE'"):
            await watched.session.signal("NONE")
        with pytest.raises(Conflict, match="no terminal"):
            await watched.session.resize(TerminalSize())
    assert b"caught" in watched.said["stdout"]


@pytest.mark.slow
@RUNNER_ALONE
async def test_a_slow_reader_holds_the_command_back_and_misses_nothing(sandbox: Sandbox) -> None:
    size = 2 * 2**20
    async with session_of(sandbox, f"head -c {size} /dev/zero", settings=SessionSettings()) as watched:
        read = 0
        async with aclosing(watched.session.read(0, DEADLINE_S)) as pages:
            async for page in pages:
                for piece in page:
                    assert piece.offset == read
                    read += len(piece.data)
                    await asyncio.sleep(0)  # so that what is under way arrives before more is taken
        assert read == size
        assert (await watched.result()).exit_code == 0


@pytest.mark.slow
@RUNNER_ALONE
async def test_while_nobody_is_attached_it_goes_on_and_the_oldest_output_is_forgotten(sandbox: Sandbox) -> None:
    size = 4 * SMALL.output_bytes
    async with session_of(sandbox, f"head -c {size} /dev/zero; echo end") as watched:
        assert (await watched.result()).exit_code == 0
        pages = [page async for page in watched.session.read(0, DEADLINE_S)]
    first, last = pages[0][0], pages[-1][-1]
    assert last.data.endswith(b"end\n")
    assert last.offset + len(last.data) == size + len("end\n")
    assert size - SMALL.output_bytes - 2**16 <= first.offset <= size


@pytest.mark.slow
@RUNNER_ALONE
async def test_what_was_typed_is_typed_once_and_nothing_may_be_left_out(sandbox: Sandbox) -> None:
    async with session_of(sandbox, "cat") as watched, attended(watched):
        assert await watched.session.write(b"hello ", 0) == 6
        assert await watched.session.write(b"hello world\n", 0) == 12
        with pytest.raises(Conflict, match="send that first"):
            await watched.session.write(b"late", 20)
        await watched.session.write(b"", 12, end=True)
        await watched.session.write(b"dropped", 12)
        await watched.result()
    assert watched.said["stdout"] == b"hello world\n"


@pytest.mark.slow
@RUNNER_ALONE
async def test_who_attaches_last_is_attached_and_one_that_nobody_attends_ends(sandbox: Sandbox) -> None:
    settings = SessionSettings(unattended_s=0.05)
    async with session_of(sandbox, "echo hello; exec sleep 1000", settings=settings) as watched:
        first = watched.session.read(0, DEADLINE_S)
        assert (await anext(first))[0].data == b"hello\n"
        waiting = asyncio.ensure_future(anext(first, None))
        async with aclosing(watched.session.read(6, DEADLINE_S)) as second:
            listening = asyncio.ensure_future(anext(second, None))
            async with asyncio.timeout(DEADLINE_S):
                assert await waiting is None
            assert not watched.session.ended
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        assert (await watched.result()).signal is not None
        assert watched.session.abandoned
