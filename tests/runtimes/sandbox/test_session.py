"""Sessions in real sandboxes of each kind, and what is kept of their output."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from itertools import pairwise

import pytest

from manager.errors import Conflict, InvalidInput
from runtimes.sandbox.command import Command, CommandResult
from runtimes.sandbox.sandbox import Sandbox
from runtimes.sandbox.session import (
    PAGE_PIECES,
    UNDER_WAY_BYTES,
    ByteLog,
    InteractiveSession,
    SessionPiece,
    SessionSettings,
    TerminalSize,
)
from tests.runtimes.sandbox.conftest import RUNNER_ALONE

DEADLINE_S = 30.0
KEEP_BYTES = 64 * 2**10

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


def told(tail: ByteLog, offset: int, most_bytes: int = 4096) -> list[SessionPiece]:
    """All from an offset on, page by page."""
    found: list[SessionPiece] = []
    while pieces := tail.pieces(offset, most_bytes):
        found += pieces
        offset = pieces[-1].offset + len(pieces[-1].data)
    return found


@pytest.mark.parametrize("streams", [("stdout",), ("stdout", "stderr")])
async def test_an_output_of_single_bytes_takes_a_few_times_its_bytes(streams: tuple[str, ...]) -> None:
    session = InteractiveSession(SessionSettings(output_bytes=KEEP_BYTES), None)
    tracemalloc.start()
    try:
        for number in range(2 * KEEP_BYTES):
            session.add_output(streams[number % len(streams)], b"x")
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (session.start, session.end) == (KEEP_BYTES, 2 * KEEP_BYTES)
    assert taken_bytes < 8 * KEEP_BYTES


@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_is_the_end_of_what_was_said_stream_by_stream(seed: int) -> None:
    chance = random.Random(seed)
    tail, said = ByteLog(10_000), []
    for _ in range(100):
        stream, data = chance.choice(("stdout", "stderr")), chance.randbytes(chance.choice((0, 1, 7, 300, 5_000)))
        tail.add(stream, data)
        said += [(stream, byte) for byte in data]
        assert (tail.end, tail.start) == (len(said), max(0, len(said) - 10_000))
    for offset in (0, tail.start, tail.start + 1, tail.end - 7_000, tail.end - 1, tail.end):
        begin = max(offset, tail.start)
        found = told(tail, offset)
        assert [(piece.stream, byte) for piece in found for byte in piece.data] == said[begin:]
        assert not found or found[0].offset == begin
        assert all(one.offset + len(one.data) == after.offset for one, after in pairwise(found))
    assert tail.joined() == bytes(byte for _, byte in said[tail.start :])


def test_a_page_is_bounded_in_bytes_and_in_pieces() -> None:
    tail = ByteLog(KEEP_BYTES)
    for number in range(3 * PAGE_PIECES):
        tail.add(("stdout", "stderr")[number % 2], b"x")
    assert len(tail.pieces(0, KEEP_BYTES)) == PAGE_PIECES
    tail.add("stdout", bytes(50_000))
    assert sum(len(piece.data) for piece in tail.pieces(0, 100)) == 100


def test_what_was_not_heard_is_a_hole_and_the_rest_keeps_its_numbers() -> None:
    tail = ByteLog(100)
    tail.add("stdout", b"before")
    tail.skip(50)
    tail.skip(20)
    tail.add("stdout", b"after")
    assert told(tail, 0) == [SessionPiece(0, "stdout", b"before"), SessionPiece(50, "stdout", b"after")]
    assert (tail.start, tail.end) == (0, 55)
    tail.add("stderr", bytes(60))
    assert tail.start == 50, "of what lies before the hole nothing is kept any more"
    assert told(tail, 0) == [SessionPiece(50, "stdout", b"after"), SessionPiece(55, "stderr", bytes(60))]


def test_what_its_reader_has_not_had_is_kept_beyond_the_bound_and_that_has_a_bound_too() -> None:
    tail = ByteLog(KEEP_BYTES)
    for _ in range(10):
        tail.add("stdout", bytes(KEEP_BYTES), 100)
    assert (tail.start, tail.end) == (100, 10 * KEEP_BYTES)
    tail.forget(5 * KEEP_BYTES)
    assert tail.start == 5 * KEEP_BYTES, "that was read"
    tail.forget()
    assert tail.start == 9 * KEEP_BYTES, "nobody reads"
    for _ in range(2 * UNDER_WAY_BYTES // KEEP_BYTES):
        tail.add("stdout", bytes(KEEP_BYTES), 0)
    assert tail.end - tail.start == KEEP_BYTES + UNDER_WAY_BYTES


async def test_what_was_under_way_when_its_command_was_told_to_wait_is_not_lost_to_a_slow_reader() -> None:
    """A loop that comes late to its sockets finds all in them at once, and its readers' turns come after."""
    session = InteractiveSession(SessionSettings(output_bytes=KEEP_BYTES), None)
    read, pages = 1, session.read(0, 60.0)
    session.add_output("stdout", b"x")
    assert len(await anext(pages)) == 1, "somebody is attached"
    for _ in range(5):
        for number in range(20):
            session.add_output("stdout", bytes([number]) * (KEEP_BYTES // 4))
        while read < session.end:
            for piece in await anext(pages):
                assert piece.offset == read
                read += len(piece.data)
    session.add_output("stdout", bytes(3 * KEEP_BYTES))
    assert 3 * KEEP_BYTES <= session.end - session.start <= 4 * KEEP_BYTES + 1, "but for the page that is being read"
    await pages.aclose()
    assert session.end - session.start == KEEP_BYTES, "nobody reads any more"
