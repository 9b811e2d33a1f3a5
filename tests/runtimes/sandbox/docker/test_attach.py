"""Attaching: gateways that come and go, cut anywhere, over a stream that neither begins nor ends with them."""

from __future__ import annotations

import asyncio
import os
import struct
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.errors import ActionFailed, Reason
from runtimes.sandbox.command import Command, FileContent
from runtimes.sandbox.docker.attach import SIGN_OF_LIFE, AttachByteStream, AttachClient
from runtimes.sandbox.docker.engine import DockerEngine
from runtimes.sandbox.runner import runner as wire
from runtimes.sandbox.runner.client import RUNNER, StreamClient
from runtimes.sandbox.runner.runner import ANSWER_BYTES, MARK_BYTES, Attachment, Silence

DEADLINE_S = 60.0
HEAD = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
CHUNK = struct.Struct("!BxxxI")
MARK = bytes(range(MARK_BYTES))


class PipeEngine:
    """Carries bytes as a Docker engine does, to and from one runner: to whoever is attached, else into the void."""

    def __init__(self) -> None:
        self.head = HEAD
        self.attached: list[asyncio.StreamWriter] = []
        self.serving: set[asyncio.Task[None]] = set()
        self.heard = bytearray()
        self.arrived = asyncio.Event()
        self.said = asyncio.Event()
        self.alive = True
        #: Whether what gateways say is lost on the way.
        self.deaf = False

    @classmethod
    async def start(cls, socket: Path) -> PipeEngine:
        made = cls()
        made.socket = str(socket)
        made.runner = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(RUNNER), "--attached",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        made.server = await asyncio.start_unix_server(made.accept, socket)
        made.pump = asyncio.create_task(made.carry())
        return made

    socket: str
    runner: asyncio.subprocess.Process
    server: asyncio.Server
    pump: asyncio.Task[None]

    def attach_path(self, container: str) -> str:
        return f"/containers/{container}/attach"

    async def running(self, container: str) -> bool:
        return self.alive

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self.serve(reader, writer))
        self.serving.add(task)
        task.add_done_callback(self.serving.discard)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self.runner.stdin is not None
        request = await reader.readuntil(b"\r\n\r\n")
        assert request.startswith(b"POST /containers/c/attach HTTP/1.1\r\n")
        writer.write(self.head)
        self.attached.append(writer)
        with suppress(ConnectionError):
            while data := await reader.read(7):  # as small as it gets
                self.heard += data
                self.arrived.set()
                if not self.deaf:
                    self.runner.stdin.write(data)
        self.attached.remove(writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    def cut(self) -> None:
        for writer in self.attached:
            writer.transport.abort()

    async def carry(self) -> None:
        assert self.runner.stdout is not None
        while data := await self.runner.stdout.read(5000):
            self.said.set()
            for writer in self.attached:
                writer.write(CHUNK.pack(2, 4) + b"oops" + CHUNK.pack(1, len(data)) + data)
        for writer in self.attached:
            writer.close()

    async def stop(self) -> None:
        with suppress(ProcessLookupError):
            self.runner.kill()
        await self.runner.wait()
        await self.pump
        self.server.close()
        while self.serving:
            self.cut()
            await asyncio.wait(self.serving)
        await self.server.wait_closed()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[PipeEngine]:
    made = await PipeEngine.start(tmp_path / "e")
    async with asyncio.timeout(DEADLINE_S):
        yield made
        await made.stop()


def stream(engine: PipeEngine, *, token: str = "token", life_s: float = 60.0) -> AttachByteStream:
    return AttachByteStream(cast(DockerEngine, engine), "c", token=token, life_s=life_s)


async def attach(
    engine: PipeEngine,
    tmp_path: Path,
    *,
    life_s: float = 60.0,
    orphan_s: float = 600.0,
    unattended_s: float = 600.0,
    first: int | None = None,
    sequence: int = 1,
) -> StreamClient:
    hello = {
        "token": "token", "user": str(os.getuid()), "workdir": str(tmp_path), "env": {},
        "orphan_s": orphan_s, "unattended_s": unattended_s, "sequence": sequence,
    }  # fmt: skip
    return await StreamClient.open(stream(engine, life_s=life_s), hello, within_s=DEADLINE_S, first=first)


async def attach_client(engine: PipeEngine, tmp_path: Path) -> AttachClient:
    async def again(first: int) -> StreamClient:
        return await attach(engine, tmp_path, first=first)

    return await AttachClient(again, lambda: engine.running("c"), detachable=True).attach()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def gone(pid: int) -> None:
    """Wait for the end of a process."""
    ended, fd = asyncio.Event(), os.pidfd_open(pid)
    asyncio.get_running_loop().add_reader(fd, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(fd)
    os.close(fd)


@given(
    before=st.binary(max_size=100),
    partial=st.integers(0, MARK_BYTES - 1),
    rest=st.binary(max_size=100),
    cuts=st.lists(st.integers(1, 60), min_size=1),
)
def test_a_new_gateway_is_noticed_wherever_the_one_before_was_cut(
    before: bytes, partial: int, rest: bytes, cuts: list[int]
) -> None:
    answer = b"A" * ANSWER_BYTES
    stream = MARK + answer + before + MARK[:partial] + MARK + answer + rest
    attachment, kept, begun, start, turn = Attachment(), b"", 0, 0, 0
    while start < len(stream):
        size = cuts[turn % len(cuts)]
        wanted, data = attachment.feed(stream[start : start + size])
        if wanted is not None:
            assert wanted == answer
            begun, kept = begun + 1, b""
        kept += data
        start, turn = start + size, turn + 1
    assert (begun in (1, 2), kept) == (True, rest)


def test_silence_while_it_was_frozen_is_not_the_gateways(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("runtimes.sandbox.runner.runner.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    silence = Silence(attached=True)
    silence.orphan_s, silence.unattended_s = 1800.0, 60.0
    for step_s, lasts_s in ((10.0, 10.0), (3600.0, 25.0), (15.0, 40.0)):  # it looks every 15 s unless it is frozen
        now_s[0] += step_s
        silence.discount_frozen_time()
        assert silence.lasts_s == lasts_s


async def test_a_gateway_that_was_cut_within_a_frame_does_not_disturb_the_next(
    engine: PipeEngine, tmp_path: Path
) -> None:
    first = await attach(engine, tmp_path)
    first._write(wire.HEADER.pack(1000, wire.STDIN, 1) + b"half of it")
    assert first._transport is not None
    first._transport.close()  # after what was written
    second = await attach(engine, tmp_path)
    assert second.greeted.known
    assert (await second.run(Command(shell="echo on"))).stdout == b"on\n"
    second.close()


async def test_without_the_token_nobody_is_answered(engine: PipeEngine, tmp_path: Path) -> None:
    client = await attach(engine, tmp_path)
    with pytest.raises(ActionFailed, match="does not answer"):
        await StreamClient.open(stream(engine, token="guess"), {"token": "guess"}, within_s=0.3)
    client.close()
    assert (await (await attach(engine, tmp_path)).run(Command(shell="echo on"))).stdout == b"on\n"


async def test_a_runner_without_a_sign_of_life_ends(engine: PipeEngine, tmp_path: Path) -> None:
    client = await attach(engine, tmp_path, orphan_s=0.2)
    assert await engine.runner.wait() == 0
    await client.lost.wait()


async def test_signs_of_life_keep_an_idle_runner(engine: PipeEngine, tmp_path: Path) -> None:
    orphan_s, life_s = 1.0, 0.1
    client = await attach(engine, tmp_path, life_s=life_s, orphan_s=orphan_s)
    begun_s = time.monotonic()
    while engine.heard.count(SIGN_OF_LIFE) * life_s < 1.5 * orphan_s:
        engine.arrived.clear()
        await engine.arrived.wait()
    assert time.monotonic() - begun_s > orphan_s
    assert (await client.run(Command(shell="echo on"))).stdout == b"on\n"
    client.close()


class TestLine:
    """Commands over connections that are cut."""

    @pytest.fixture
    async def client(self, engine: PipeEngine, tmp_path: Path) -> AsyncIterator[AttachClient]:
        made = await attach_client(engine, tmp_path)
        yield made
        made.close()

    async def test_a_command_goes_on_and_is_told_once(
        self, engine: PipeEngine, client: AttachClient, tmp_path: Path
    ) -> None:
        shown: list[tuple[str, bytes]] = []
        script = "echo a; while [ ! -e go ]; do sleep 0.01; done; echo b; echo c >&2; exit 7"
        begun = asyncio.Event()

        def on_output(stream: str, data: bytes) -> None:
            shown.append((stream, data))
            begun.set()

        command = Command(shell=script, cwd=str(tmp_path))
        running = asyncio.create_task(client.run(command, on_output))
        await begun.wait()
        for _ in range(3):
            engine.cut()
            assert [entry.path for entry in await client.list_files(str(tmp_path))]  # over the next connection
        engine.cut()
        await client.write_file(str(tmp_path / "go"), FileContent(b""), mode=0o644)
        result = await running
        assert (result.stdout, result.stderr, result.exit_code) == (b"a\nb\n", b"c\n", 7)
        assert b"".join(data for stream, data in shown if stream == "stdout") == b"a\nb\n"
        assert b"".join(data for stream, data in shown if stream == "stderr") == b"c\n"

    async def test_one_that_ended_unheard_is_told_afterwards(
        self, engine: PipeEngine, client: AttachClient, tmp_path: Path
    ) -> None:
        begun = asyncio.Event()
        command = Command(shell="echo begun; while [ ! -e go ]; do sleep 0.01; done", cwd=str(tmp_path))
        running = asyncio.create_task(client.run(command, lambda *_: begun.set()))
        await begun.wait()
        engine.head = b"HTTP/1.1 503 away\r\n\r\n"
        engine.cut()
        engine.said.clear()
        (tmp_path / "go").touch()
        await engine.said.wait()
        engine.head = HEAD
        assert (await running).stdout == b"begun\n"

    async def test_one_that_was_being_given_its_input_is_not_run_twice(
        self, engine: PipeEngine, client: AttachClient, tmp_path: Path
    ) -> None:
        begun = asyncio.Event()
        command = Command(shell="echo begun; sleep 1000", stdin=b"x" * 2**22)
        running = asyncio.create_task(client.run(command, lambda *_: begun.set()))
        await begun.wait()
        engine.cut()
        with pytest.raises(ActionFailed, match="its input") as caught:
            await running
        assert (caught.value.reason, caught.value.result) == (Reason.NODE_LOST, {"stdout": "begun\n", "stderr": ""})
        assert not client.lost.is_set()

    async def test_nothing_runs_on_for_a_gateway_that_is_not_heard_of(self, engine: PipeEngine, tmp_path: Path) -> None:
        client = await attach(engine, tmp_path, orphan_s=600.0, unattended_s=0.3)
        begun = asyncio.Event()
        command = Command(shell="echo begun; exec sleep 1000", claim="a", detached=True)
        running = asyncio.create_task(client.run(command, lambda *_: begun.set()))
        await begun.wait()
        (child,) = children(engine.runner.pid)
        await gone(child)
        client.close()
        await asyncio.gather(running, return_exceptions=True)
        assert (await attach(engine, tmp_path)).resumable == {}

    async def test_an_end_is_told_from_a_cut(self, engine: PipeEngine, client: AttachClient, tmp_path: Path) -> None:
        begun = asyncio.Event()
        running = asyncio.create_task(client.run(Command(shell="echo; sleep 1000"), lambda *_: begun.set()))
        await begun.wait()
        engine.alive = False
        engine.runner.kill()
        with pytest.raises(ActionFailed) as caught:
            await running
        assert caught.value.reason is Reason.ENVIRONMENT_LOST
        assert client.lost.is_set()

    async def test_a_runner_that_breaks_the_protocol_is_not_attached_to_again(
        self, engine: PipeEngine, client: AttachClient, tmp_path: Path
    ) -> None:
        for writer in engine.attached:
            writer.write(CHUNK.pack(1, 5000) + b"\xff" * 5000)
        await client.lost.wait()
        with pytest.raises(ActionFailed) as caught:
            await client.run(Command(argv=("true",)))
        assert caught.value.reason is Reason.ENVIRONMENT_LOST

    async def test_a_runner_that_answers_no_more_is_lost(
        self, engine: PipeEngine, client: AttachClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("runtimes.sandbox.docker.attach.AWAY_S", 0.0)
        engine.head = b"HTTP/1.1 500 no\r\n\r\n"
        engine.cut()
        with pytest.raises(ActionFailed, match="does not attach") as caught:
            await client.read_file("/etc/passwd", limit_bytes=10)
        assert (caught.value.reason, client.lost.is_set()) == (Reason.ENVIRONMENT_LOST, True)


@pytest.mark.parametrize(
    ("head", "alive", "message"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n" + b'{"message":"No such container"}', True, "No such container"),
        (b"HTTP/1.1 101 UPGRADED\r\n\r\n", False, "has ended"),
        (b"\xff" * 20_000, True, "does not attach"),
        (b"HTTP/1.1 101 UPGRADED\r\n\r\n" + CHUNK.pack(1, 2**30), True, "a frame of 1073741824 bytes"),
    ],
)
async def test_what_cannot_be_attached_to_is_a_lost_environment(
    engine: PipeEngine, head: bytes, alive: bool, message: str
) -> None:
    engine.head, engine.alive = head, alive
    with pytest.raises(ActionFailed, match=message) as caught:
        await StreamClient.open(stream(engine), {"token": "token"}, within_s=DEADLINE_S)
    assert caught.value.reason is Reason.ENVIRONMENT_LOST
