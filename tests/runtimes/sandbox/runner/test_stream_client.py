"""The client against runners that are not what they should be, and the decoder against any bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.errors import ActionFailed, Reason
from runtimes.sandbox.command import Command
from runtimes.sandbox.runner import runner as wire
from runtimes.sandbox.runner.client import MARKER, SocketStream, StreamClient, encode_json
from runtimes.sandbox.runner.runner import FrameDecoder, ProtocolError, encode

DEADLINE_S = 60.0
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def speaking(directory: Path, script: Script) -> AsyncIterator[StreamClient]:
    """A client to a runner that answers the greeting properly and then follows its script."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await next_frame(reader)
        writer.write(encode_json(wire.READY, 0, {"protocol": wire.PROTOCOL, "known": False}))
        await script(reader, writer)
        await hang_up(writer)
        over.set()

    over = asyncio.Event()
    server = await asyncio.start_unix_server(serve, directory / "s")
    client = await StreamClient.open(SocketStream(directory), {"token": "t"}, within_s=5)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield client
    finally:
        client.close()
        async with asyncio.timeout(DEADLINE_S):
            await over.wait()
        server.close()
        await server.wait_closed()


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def next_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    length, kind, number = wire.HEADER.unpack(await reader.readexactly(wire.HEADER.size))
    return kind, number, await reader.readexactly(length)


@given(
    frames=st.lists(st.tuples(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=50)), max_size=8),
    cuts=st.lists(st.integers(1, 40), min_size=1),
)
def test_frames_survive_any_cutting(frames: list[tuple[int, int, bytes]], cuts: list[int]) -> None:
    stream = b"".join(encode(*frame) for frame in frames)
    decoder, seen, start, turn = FrameDecoder(), [], 0, 0
    while start < len(stream):
        size = cuts[turn % len(cuts)]
        seen += [(kind, number, data) for (_, kind, number), data in decoder.feed(stream[start : start + size])]
        start, turn = start + size, turn + 1
    assert seen == frames


def test_an_oversized_frame_is_refused_before_it_is_taken_in() -> None:
    with pytest.raises(ProtocolError):
        list(FrameDecoder().feed(wire.HEADER.pack(wire.FRAME_MAX_BYTES + 1, wire.STDOUT, 1)))


async def _nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await next_frame(reader)
    writer.write(b"\xff" * 100)


async def _hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await next_frame(reader)


async def _bad_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    _, number, _ = await next_frame(reader)
    writer.write(encode(wire.EXIT, number, b'{"code": "zero"}'))
    await reader.read()


async def _no_json(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    _, number, _ = await next_frame(reader)
    writer.write(encode(wire.EXIT, number, b"[1]"))
    await reader.read()


async def _unknown_kind(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    _, number, _ = await next_frame(reader)
    writer.write(encode(200, number, b""))
    await reader.read()


@pytest.mark.parametrize("script", [_nonsense, _hang_up, _bad_end, _no_json, _unknown_kind])
async def test_a_runner_that_breaks_the_protocol_is_a_lost_environment(tmp_path: Path, script: Script) -> None:
    async with speaking(tmp_path, script) as client:
        with pytest.raises(ActionFailed) as caught:
            await client.run(Command(argv=("true",)))
        assert caught.value.reason is Reason.ENVIRONMENT_LOST


async def test_a_runner_that_falls_silent_is_given_up_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtimes.sandbox.runner.client.SILENCE_S", 0.05)
    monkeypatch.setattr(wire, "UNKILLABLE_S", 0.05)

    async def whisper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, number, _ = await next_frame(reader)
        writer.write(encode(wire.STDOUT, number, b"begun"))
        await reader.read()

    async with speaking(tmp_path, whisper) as client:
        with pytest.raises(ActionFailed, match="fallen silent") as caught:
            await client.run(Command(shell="x", timeout_s=0.05, kill_grace_s=0.0))
        assert caught.value.reason is Reason.ENVIRONMENT_LOST
        assert caught.value.result == {"stdout": "begun", "stderr": ""}
        assert client.lost.is_set()


async def test_a_cancelled_command_is_killed_before_it_is_let_go(tmp_path: Path) -> None:
    steps: list[str] = []
    begun = asyncio.Event()

    async def obey(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, number, _ = await next_frame(reader)
        begun.set()
        kind, killed, _ = await next_frame(reader)
        assert (kind, killed) == (wire.KILL, number)
        steps.append("killed")
        writer.write(encode_json(wire.EXIT, number, {"code": None, "signal": 9}))
        await reader.read()

    async with speaking(tmp_path, obey) as client:
        running = asyncio.create_task(client.run(Command(shell="x")))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        steps.append("let go")
        assert not client.lost.is_set()
    assert steps == ["killed", "let go"]


async def test_more_output_than_was_allowed_is_not_kept(tmp_path: Path) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, number, _ = await next_frame(reader)
        writer.write(encode(wire.STDOUT, number, b"x" * 100_000) * 20)
        writer.write(encode(wire.EXIT, number, json.dumps({"code": 0}).encode()))
        await reader.read()

    async with speaking(tmp_path, flood) as client:
        result = await client.run(Command(argv=("true",), output_limit_bytes=10))
        assert result.stdout == b"xxxxx" + MARKER % (2_000_000 - 10) + b"xxxxx"


async def test_frames_for_other_conversations_are_nobodys(tmp_path: Path) -> None:
    async def confuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, number, _ = await next_frame(reader)
        for other in (number - 1, number + 1, 0):
            writer.write(encode(wire.STDOUT, other, b"forged") + encode(wire.EXIT, other, b'{"code": 9}'))
        writer.write(encode(wire.EXIT, number, b'{"code": 3}'))
        await reader.read()

    async with speaking(tmp_path, confuse) as client:
        result = await client.run(Command(argv=("true",)))
        assert (result.exit_code, result.stdout) == (3, b"")


async def test_a_listener_that_is_not_the_runner_is_not_spoken_to(tmp_path: Path) -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hang_up(writer)
        over.set()

    over = asyncio.Event()
    server = await asyncio.start_unix_server(never, tmp_path / "s")
    with pytest.raises(ActionFailed, match="another process"):
        await StreamClient.open(SocketStream(tmp_path, peer_pid=1), {"token": "t"}, within_s=5)
    async with asyncio.timeout(DEADLINE_S):
        await over.wait()
    server.close()
    await server.wait_closed()


async def test_a_runner_that_is_not_there_is_told_in_time(tmp_path: Path) -> None:
    with pytest.raises(ActionFailed, match="cannot be reached"):
        await StreamClient.open(SocketStream(tmp_path), {"token": "t"}, within_s=0.05)
