"""A process's standard streams that pass through nobody, and where they cannot."""

from __future__ import annotations

import asyncio
import math
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from manager.errors import ActionFailed
from runtimes.sandbox import runner as wire
from runtimes.sandbox.channel import Channel
from runtimes.sandbox.conversation import RemoteProcess
from runtimes.sandbox.link import SocketLink
from runtimes.sandbox.protocol import encode, encode_json
from runtimes.sandbox.sandbox import Command
from tests.runtimes.sandbox.box import Box
from tests.runtimes.sandbox.test_channel import hang_up, next_frame

DEADLINE_S = 20.0
#: Tells whether input and output are one socket, then what it reads.
PARROT = (
    "import os, stat; one, other = os.fstat(0), os.fstat(1)\n"
    "os.write(1, b'%d %d' % (stat.S_ISSOCK(one.st_mode), one.st_ino == other.st_ino))\n"
    "while data := os.read(0, 100): os.write(1, data)\n"
    "os.write(1, b'the end')"
)


def descriptors(box: Box) -> int:
    """How many the runner has open."""
    return len(list(Path(f"/proc/{box.process.pid}/fd").iterdir()))


async def said(process: RemoteProcess) -> bytes:
    return b"".join([data async for _, data in process.chunks()])


async def test_input_and_output_are_one_socket_and_nothing_passes_through_the_runner(box: Box) -> None:
    channel = await box.connect()
    async with asyncio.timeout(DEADLINE_S):
        process = await channel.spawn(Command(argv=("python3", "-c", PARROT), timeout_s=math.inf))
        chunks = process.chunks()
        assert await anext(chunks) == ("stdout", b"1 1")
        channel.pause_reading()  # not even this stops it
        await process.write_stdin(b"hallo\n")
        assert await anext(chunks) == ("stdout", b"hallo\n")
        channel.resume_reading()
        await process.close_stdin()
        assert [chunk async for chunk in chunks] == [("stdout", b"the end")]
        assert (await process.wait()).exit_code == 0
    channel.close()


async def test_the_last_words_of_a_process_are_heard_however_slow_the_reader(box: Box) -> None:
    channel = await box.connect()
    async with asyncio.timeout(DEADLINE_S):
        process = await channel.spawn(Command(shell="head -c 3000000 /dev/zero; exit 4", timeout_s=math.inf))
        heard = 0
        async for _, data in process.chunks():
            heard += len(data)
            await asyncio.sleep(0)
        assert (heard, (await process.wait()).exit_code) == (3_000_000, 4)
    channel.close()


async def test_whoever_keeps_the_streams_open_does_not_keep_its_end_from_being_told(box: Box) -> None:
    channel = await box.connect()
    async with asyncio.timeout(DEADLINE_S):
        process = await channel.spawn(Command(shell="sleep 600 & echo last words; exit 3", timeout_s=math.inf))
        assert await said(process) == b"last words\n"
        assert (await process.wait()).exit_code == 3
    channel.close()


async def test_a_program_that_is_not_there_is_told_and_leaves_no_connection(box: Box) -> None:
    channel = await box.connect()
    async with asyncio.timeout(DEADLINE_S):
        before = descriptors(box)
        process = await channel.spawn(Command(argv=("/no/such/program",), timeout_s=math.inf))
        await said(process)
        assert (await process.wait()).exit_code == 127
        with pytest.raises(ActionFailed, match="reads no more"):
            await process.write_stdin(b"x")
        assert descriptors(box) == before
    channel.close()


@pytest.mark.parametrize("token", ["guessed", ""])
async def test_a_stranger_gets_no_streams(box: Box, token: str) -> None:
    channel = await box.connect()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(DEADLINE_S)
        stranger.connect(str(box.directory / "s"))
        stranger.sendall(encode_json(wire.STREAMS, 0, {"token": token, "name": "mine"}))
        with suppress(ConnectionResetError):
            assert stranger.recv(1000) == b""
    channel.close()


async def test_streams_that_no_command_has_taken_go_with_their_gateway(box: Box) -> None:
    channel = await box.connect()
    with socket.socket(socket.AF_UNIX) as unused:
        unused.settimeout(DEADLINE_S)
        unused.connect(str(box.directory / "s"))
        unused.sendall(encode_json(wire.STREAMS, 0, {"token": "secret", "name": "unused"}))
        assert unused.recv(wire.HEADER.size + 2) == encode(wire.READY, 0, b"{}")
        channel.close()
        assert await asyncio.to_thread(unused.recv, 1) == b""


async def test_an_older_runner_passes_everything_on_itself(tmp_path: Path) -> None:
    """It knows no such request and hangs up on it."""

    async def older(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind, _, _ = await next_frame(reader)
        if kind != wire.HELLO:
            await hang_up(writer)
            return
        writer.write(encode_json(wire.READY, 0, {"protocol": wire.PROTOCOL, "known": False}))
        kind, number, request = await next_frame(reader)
        assert kind == wire.RUN and b"streams" not in request
        _, _, data = await next_frame(reader)
        writer.write(encode(wire.STDOUT, number, data[::-1]) + encode(wire.EXIT, number, b'{"code": 0}'))
        await reader.read()
        await hang_up(writer)
        over.set()

    over = asyncio.Event()
    server = await asyncio.start_unix_server(older, tmp_path / "s")
    channel = await Channel.open(SocketLink(tmp_path), {"token": "t"}, within_s=5)
    async with asyncio.timeout(DEADLINE_S):
        process = await channel.spawn(Command(argv=("rev",), timeout_s=math.inf))
        await process.write_stdin(b"abc")
        assert await said(process) == b"cba"
        channel.close()
        await over.wait()
    server.close()
    await server.wait_closed()
