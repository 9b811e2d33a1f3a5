"""Downloads: larger than their sandbox's memory, given up on the way, and of files that change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manager.errors import InvalidInput
from manager.function import Background, SandboxSpec
from runtimes.sandbox.command import Command, CommandResult
from runtimes.sandbox.sandbox import Provider, Sandbox
from tests.runtimes.sandbox.conftest import RUNNER_ALONE, unique

MIB = 2**20


async def sh(sandbox: Sandbox, text: str) -> CommandResult:
    return await sandbox.run(Command(shell=text))


@pytest.mark.slow
async def test_a_file_larger_than_the_sandbox_memory_comes_out_piece_by_piece(
    provider: Provider, spec: SandboxSpec
) -> None:
    """While a command runs, and while the reader takes its time: neither stops the other."""
    size = 200 * MIB
    small = replace(spec, memory_bytes=128 * MIB, disk_bytes=300 * MIB)
    sandbox = await provider.create(small, name=unique("large"), labels={}, mounts={})
    await sh(sandbox, f"head -c {size - 4} /dev/zero > large; echo end >> large")
    async with sandbox.open_file("large", limit_bytes=size) as file:
        assert file.size_bytes == size
        chunks = file.chunks()
        assert len(await anext(chunks)) <= MIB
        assert (await sh(sandbox, "echo meanwhile")).stdout == b"meanwhile\n"
        await sandbox.quiesce(Background.FREEZE)
        left, last = size, b""
        async for last in chunks:
            left -= len(last)
        assert last.endswith(b"end\n") and left > 0
    result = await sh(sandbox, "echo well")
    assert (result.stdout, result.out_of_memory) == (b"well\n", False)
    await sandbox.close()


@RUNNER_ALONE
async def test_a_download_that_nobody_ends_holds_nothing(sandbox: Sandbox) -> None:
    await sh(sandbox, f"head -c {8 * MIB} /dev/zero > file")
    for _ in range(70):  # more than may be on their way at once
        async with sandbox.open_file("file", limit_bytes=8 * MIB) as file:
            await anext(file.chunks())
    assert len(await sandbox.read_file("file", limit_bytes=8 * MIB)) == 8 * MIB


@RUNNER_ALONE
async def test_a_file_that_becomes_shorter_while_it_is_read_is_no_shorter_file(sandbox: Sandbox) -> None:
    await sh(sandbox, f"head -c {8 * MIB} /dev/zero > file")
    async with sandbox.open_file("file", limit_bytes=8 * MIB) as file:
        chunks = file.chunks()
        await anext(chunks)
        await sh(sandbox, ": > file")
        with pytest.raises(InvalidInput, match="became shorter"):
            async for _ in chunks:
                pass
