"""Files go into sandboxes as they come: no more is held than one piece, and nothing stays of one that breaks off."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from manager.errors import NotFound, TooLarge
from manager.function import SandboxSpec
from runtimes.sandbox.command import PIECE_BYTES, Command, FileContent
from runtimes.sandbox.docker.engine import repeatable
from runtimes.sandbox.sandbox import Provider, Sandbox
from tests.runtimes.sandbox.conftest import RUNNER_ALONE, unique


@RUNNER_ALONE
async def test_each_piece_is_written_before_the_next_is_asked_for(sandbox: Sandbox) -> None:
    await sandbox.run(Command(shell="mkdir in"))
    sizes: list[int] = []

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * PIECE_BYTES
            parts = [file for file in await sandbox.list_files("in") if ".tangram-" in file.path]
            sizes.extend(part.size_bytes for part in parts)

    assert await sandbox.write_file("in/file", pieces()) == 3 * PIECE_BYTES
    assert sizes == [PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES]
    assert [(file.path, file.size_bytes) for file in await sandbox.list_files("in")] == [("in/file", 3 * PIECE_BYTES)]


@RUNNER_ALONE
async def test_of_one_that_breaks_off_nothing_stays(sandbox: Sandbox) -> None:
    await sandbox.run(Command(shell="mkdir in"))

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * PIECE_BYTES
        raise ConnectionError("the client has gone")

    with pytest.raises(ConnectionError):
        await sandbox.write_file("in/file", pieces())
    assert await sandbox.list_files("in") == []


async def test_one_that_is_larger_than_the_disk_is_refused_as_it_comes(provider: Provider, spec: SandboxSpec) -> None:
    small = replace(spec, disk_bytes=16 * 2**20)
    sandbox = await provider.create(small, name=unique("small"), labels={}, mounts={})
    given = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal given
        while given < 2**30:
            given += 2**20
            yield bytes(2**20)

    with pytest.raises(TooLarge):
        await sandbox.write_file("file", pieces())
    assert given <= 17 * 2**20
    with pytest.raises(NotFound):
        await sandbox.read_file("file", limit_bytes=2**30)


async def test_what_an_engine_may_have_to_be_given_again_waits_on_the_disk() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one "
        yield b"two"

    content = FileContent(pieces(), 100)
    async with repeatable(content) as kept:
        for _ in range(2):
            assert b"".join([piece async for piece in kept.pieces()]) == b"one two"
    assert content.size_bytes == 7
