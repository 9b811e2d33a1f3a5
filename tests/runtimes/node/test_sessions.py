"""Sessions on a node over links that are cut: nothing lost or doubled, bounded windows, and nothing sent to nobody."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bench.sandbox import DiscardedOutput
from manager.action import Action
from manager.errors import CapacityExceeded
from manager.executor import Call
from manager.function import FunctionSpec
from runtimes.node.daemon import NodeDaemon
from runtimes.node.protocol import KINDS, Inventory, LinkClosed, NodeLink, SessionWritten
from runtimes.node.remote import RemoteNode
from runtimes.sandbox.session import InteractiveSession, SessionPiece, SessionSettings, SessionTable, TerminalSize
from tests.runtimes.node.machine import Machine, MachineRuntimes, daemon_settings
from tests.runtimes.node.memory_stream import pair

STUCK_S = 60.0
GIVEN: Mapping[str, object] = {"argv": ["sh"], "session": {"terminal": True, "rows": 30, "columns": 100}}
#: Frames of such a session without a cut, at least; asserted, so that the test below cuts it all over.
GIVEN_UP_FRAMES_MIN = 7

SMALL = SessionSettings(output_bytes=64 * 2**10)

ACTION = Action(id="a", function="shell")

SAID = next(kind for kind, message in KINDS.items() if message is SessionWritten)


class TypedCommand:
    """The command of a session on the node: what it was typed, and how it was steered."""

    def __init__(self, session: InteractiveSession) -> None:
        self.session = session
        self.typed = b""
        self.input_ended = False
        self.steered: list[Mapping[str, object]] = []
        self.held = False
        #: Once it has taken so much, it reads on only after `reads_on`.
        self.stops_at = 2**40
        self.reads_on = asyncio.Event()

    def require_reached(self) -> None: ...

    async def settle(self) -> None: ...

    def attend(self, *, attended: bool) -> None: ...

    async def input_room(self) -> int:
        await asyncio.sleep(0)
        if len(self.typed) >= self.stops_at:
            await self.reads_on.wait()
        return 100

    async def feed(self, data: bytes) -> None:
        self.session.passed(self.session.input_offset + len(data))
        self.typed += data

    async def end_input(self) -> None:
        self.input_ended = True

    def steer(self, request: Mapping[str, object]) -> None:
        if "held" in request:
            self.held = bool(request["held"])
        else:
            self.steered.append(request)


class RelayedWorld:
    """Both sides of one session, and the link between them."""

    def __init__(self, directory: Path) -> None:
        self.here, there = SessionTable(SMALL), SessionTable(SMALL)
        runtimes = MachineRuntimes.on(Machine())
        runtimes.environments.sessions = there
        self.daemon = NodeDaemon(daemon_settings(directory), runtimes)
        self.served = self.daemon._sessions
        self.served._on_sent = self._note_told
        self.told: list[str] = []
        self.frames: list[int] = []
        self.cut_at: Callable[[int], bool] = lambda frames: False
        self.links: list[NodeLink] = []
        self._running: set[asyncio.Task[str]] = set()
        self.served.begin("a.1/", ACTION, "", GIVEN)
        self.far = there.living("a", None)
        self.command = TypedCommand(self.far)
        self.begin_gateway()

    def begin_gateway(self) -> None:
        """Let a gateway begin that knows of the session."""
        self.here = SessionTable(SMALL)
        self.node = RemoteNode("n1", sessions=self.here)
        call = Call(function=FunctionSpec(name="shell", runtime="exec"), input=GIVEN, log=DiscardedOutput())
        assert self.node.begin_session("a.1/", ACTION, call)
        self.near = self.here.living("a", None)

    def _note_told(self, claim: str) -> None:
        self.told.append(claim)

    async def link(self) -> None:
        """Join them (again)."""
        near, far = pair(self._arrives)
        self.links.append(near)
        self._run(self.daemon.serve(far))
        with suppress(LinkClosed):
            self.node.connect(near, await near.receive(Inventory, STUCK_S))
            self._run(self.node.serve(near))

    def _run(self, serving: Coroutine[Any, Any, str]) -> None:
        task = asyncio.create_task(serving)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def cut(self) -> None:
        self.links[-1].close("cut")

    async def relinked(self) -> None:
        """Join them again whenever they are cut, until cancelled."""
        while True:
            await self.links[-1].wait_closed()
            await asyncio.sleep(0)
            await self.link()

    def end(self) -> None:
        """The command ends, and both sides learn of it as their attempts do."""
        self.far.close()
        self.served.ended("a.1/")

    async def close(self) -> None:
        self.node.end_session("a.1/")
        self.served.forget("a.1/")
        for near in self.links:
            near.close("the end")
        await asyncio.gather(*self._running)
        await self.node.close()
        await self.daemon.close()

    def _arrives(self, kind: int) -> bool:
        self.frames.append(kind)
        return not self.cut_at(len(self.frames))


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[RelayedWorld]:
    made = RelayedWorld(directory)
    await made.daemon.start()
    yield made
    await made.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RelayedWorld]:
    async with opened(tmp_path) as made:
        yield made


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(STUCK_S):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event, and every turn may bring it
            await asyncio.sleep(0)


async def heard(session: InteractiveSession, into: list[SessionPiece]) -> None:
    async for page in session.read(0, STUCK_S):
        into += page


@pytest.mark.parametrize("every", [3, 7, 50])
async def test_nothing_is_lost_or_doubled_however_often_the_link_is_cut(world: RelayedWorld, every: int) -> None:
    chance = random.Random(every)
    lines = [chance.randbytes(chance.choice((1, 50, 9000))) for _ in range(120)]
    world.cut_at = lambda frames: frames > 20 and chance.randrange(every) == 0
    await world.link()
    joining = asyncio.create_task(world.relinked())
    world.far.open(world.command)
    pieces: list[SessionPiece] = []
    hearing = asyncio.create_task(heard(world.near, pieces))

    async def type_all() -> None:
        data = b"".join(lines)
        while world.near.input_offset < len(data):
            begin = world.near.input_offset
            await world.near.write(data[begin : begin + 30_000], begin)

    async def say_all() -> None:
        for number, line in enumerate(lines):
            await until(lambda: not world.command.held)
            world.far.add_output(("stdout", "stderr")[number % 2], line)
            await asyncio.sleep(0)

    async with asyncio.timeout(STUCK_S):
        await asyncio.gather(type_all(), say_all())
    world.end()
    await until(lambda: bool(world.told))
    await until(lambda: world.near.end == world.far.end)
    joining.cancel()
    world.node.end_session("a.1/")
    await hearing
    assert len(world.links) > 1
    assert world.command.typed == b"".join(lines)
    assert b"".join(piece.data for piece in pieces) == b"".join(lines)
    offset = 0
    for piece in pieces:
        assert piece.offset == offset
        offset += len(piece.data)


async def gives_up(world: RelayedWorld, data: bytes) -> None:
    """Type something whose command stops reading in the middle, and go away meanwhile."""
    typing = asyncio.create_task(world.near.write(data))
    await until(lambda: len(world.command.typed) >= world.command.stops_at)
    typing.cancel()
    await asyncio.gather(typing, return_exceptions=True)


async def given_up(world: RelayedWorld, cut_at: int) -> int:
    """Play one whose caller gives up, and another goes on; cut it at a frame; return how many there were."""
    world.cut_at = lambda frames: frames == cut_at
    await world.link()
    joining = asyncio.create_task(world.relinked())
    try:
        world.far.open(world.command)
        world.command.stops_at = 200
        async with asyncio.timeout(STUCK_S):
            await gives_up(world, b"a" * 1000)
            stands = await world.near.write(b"")
            world.command.reads_on.set()
            assert await world.near.write(b"b" * 500) == stands + 500
        assert stands == 200, "what nobody waits for goes no further"
        assert world.command.typed == b"a" * 200 + b"b" * 500
    finally:
        joining.cancel()
    return len(world.frames)


async def test_what_its_caller_gave_up_goes_no_further_and_what_comes_next_is_whole_wherever_it_is_cut(
    tmp_path: Path,
) -> None:
    frames = 0
    for place in count():
        (tmp_path / str(place)).mkdir()
        async with opened(tmp_path / str(place)) as world:
            number = await given_up(world, place)
        frames = frames or number
        assert frames >= GIVEN_UP_FRAMES_MIN
        if place == frames:
            return


async def test_a_slow_commands_caller_is_told_how_far_it_came_and_not_less(
    world: RelayedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.link()
    world.far.open(world.command)
    world.command.stops_at = 200
    typing = asyncio.create_task(world.near.write(b"a" * 1000))
    await until(lambda: len(world.command.typed) == 200)
    monkeypatch.setattr("runtimes.sandbox.session.INPUT_PATIENCE_S", 0.001)
    assert await world.near.write(b"b" * 10) == 0, "its turn has not come"
    typing.cancel()
    assert await world.near.write(b"") == 200
    assert await world.near.write(b"b" * 10) == 200, "the command does not read, and nobody is told that it did"
    world.command.reads_on.set()
    monkeypatch.undo()
    assert await world.near.write(b"c" * 10) == 210
    assert world.command.typed == b"a" * 200 + b"c" * 10


async def test_what_a_gateway_before_was_typing_goes_no_further_once_the_next_is_told_where_it_stands(
    world: RelayedWorld,
) -> None:
    await world.link()
    world.far.open(world.command)
    world.command.stops_at = 200
    typing = asyncio.create_task(world.near.write(b"a" * 1000))
    await until(lambda: len(world.command.typed) == 200)
    world.cut()
    typing.cancel()
    await world.node.close()
    world.begin_gateway()
    after = world.near
    await world.link()
    assert await after.opened(STUCK_S)
    assert after.input_offset == 200
    world.command.reads_on.set()
    assert await after.write(b"b" * 500) == 700
    assert world.command.typed == b"a" * 200 + b"b" * 500


async def test_what_nobody_reads_is_not_sent_and_what_is_kept_of_it_comes_with_the_end(world: RelayedWorld) -> None:
    await world.link()
    world.far.open(world.command)
    await until(lambda: world.near.reads and not world.near.start and SAID not in world.frames and bool(world.frames))
    for _ in range(4 * 2**20 // 10_000):
        world.far.add_output("stdout", bytes(10_000))
        await asyncio.sleep(0)
    assert (SAID in world.frames, world.command.held) == (False, False)
    world.end()
    await until(lambda: bool(world.told) and world.near.end == world.far.end)
    assert world.near.start == world.far.start


async def test_what_was_said_and_is_not_kept_holds_up_no_end(
    world: RelayedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, tries = InteractiveSession.attend, 0

    def counted(session: InteractiveSession, offset: int) -> int:
        nonlocal tries
        tries += 1
        assert tries < 100, "it is read for ever"
        return attend(session, offset)

    monkeypatch.setattr(InteractiveSession, "attend", counted)
    world.far.open(world.command, start=5000)  # a runner tells where it stands, and is gone before it repeats the rest
    world.end()
    await world.link()
    await until(lambda: bool(world.told) or tries >= 100)
    assert world.told == ["a.1/"]


async def test_a_slow_reader_stops_the_command_within_the_window_and_misses_nothing(world: RelayedWorld) -> None:
    await world.link()
    world.far.open(world.command)
    async with aclosing(world.near.read(0, STUCK_S)) as pages:
        beginning = asyncio.ensure_future(anext(pages))
        await until(lambda: world.near.reads and bool(world.frames))
        world.far.add_output("stdout", b"first")
        async with asyncio.timeout(STUCK_S):
            assert b"".join(piece.data for piece in await beginning) == b"first"
        read = said = 5
        while read < 2**20:
            for _ in range(200):
                if not world.command.held:
                    world.far.add_output("stdout", bytes(1000))
                    said += 1000
                await asyncio.sleep(0)
            assert world.command.held, "the reader takes nothing meanwhile"
            assert said - read <= SMALL.output_bytes
            async with asyncio.timeout(STUCK_S):
                for piece in await anext(pages):
                    assert piece.offset == read
                    read += len(piece.data)
    await until(lambda: not world.command.held)


async def test_it_is_steered_once_and_told_what_waited_for_the_link(world: RelayedWorld) -> None:
    await world.link()
    world.far.open(world.command)
    assert await world.near.opened(STUCK_S)
    await world.near.resize(TerminalSize(40, 120))
    await until(lambda: bool(world.command.steered))
    world.cut()
    await until(lambda: not world.node.attached)
    with pytest.raises(CapacityExceeded, match="n1") as refused:
        world.near.require_reached()
    assert refused.value.retry_after_s == 1.0
    await world.near.signal("INT")
    typing = asyncio.create_task(world.near.write(b"typed", 0, end=True))
    await asyncio.sleep(0)
    await world.link()
    assert await typing == 5
    await until(lambda: len(world.command.steered) == 2)
    assert world.command.steered == [{"size": [40, 120]}, {"signal": 2}]
    assert (world.command.typed, world.command.input_ended, world.near.reads) == (b"typed", True, False)
    assert world.far.terminal == (40, 120)


async def test_one_that_nobody_attends_is_ended_by_the_gateways_own_bound(world: RelayedWorld) -> None:
    world.near.settings = SessionSettings(output_bytes=SMALL.output_bytes, unattended_s=0.01)
    await world.link()
    world.far.open(world.command)
    await until(lambda: {"end": 0.0} in world.command.steered)
    assert world.far.abandoned


async def test_a_session_that_the_node_does_not_know_takes_no_input_and_is_over_with_its_attempt(
    world: RelayedWorld,
) -> None:
    await world.link()
    world.far.open(world.command)
    await until(lambda: world.near.reads and bool(world.frames) and world.near._grip is not None)
    world.served.forget("a.1/")
    assert await world.near.write(b"late") == 0
    world.node.end_session("a.1/")
    assert world.near.ended
    assert await world.near.write(b"late") == 0
