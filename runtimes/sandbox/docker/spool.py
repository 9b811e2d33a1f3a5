"""Files that wait on this machine's disk until an engine has taken them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import BinaryIO, cast

from runtimes.sandbox.command import PIECE_BYTES, FileContent


class SpooledContent(FileContent):
    """A content on disk, whose pieces can be had again."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(b"")
        self._file = file

    async def pieces(self) -> AsyncIterator[bytes]:
        self._file.seek(0)
        while piece := await asyncio.to_thread(self._file.read, PIECE_BYTES):
            yield piece


@asynccontextmanager
async def on_disk(content: FileContent) -> AsyncIterator[BinaryIO]:
    """Yield a file without a name that holds it, at its beginning."""
    with tempfile.TemporaryFile() as made:
        file = cast(BinaryIO, made)
        async for piece in content.pieces():
            await asyncio.to_thread(file.write, piece)
        file.seek(0)
        yield file


@asynccontextmanager
async def repeatable(content: FileContent) -> AsyncIterator[FileContent]:
    """Yield the same content as one whose pieces can be had more than once."""
    if content.repeatable:
        yield content
        return
    async with on_disk(content) as file:
        yield SpooledContent(file)
