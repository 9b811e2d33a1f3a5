"""Both sides of the transfers of files, over a stream in memory, on files that are kept in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from manager.errors import InvalidInput, NotFound, TooLarge
from runtimes.node.daemon import TransferServer
from runtimes.node.protocol import Inventory, LinkSettings, NodeLink
from runtimes.node.remote import RemoteFiles, RemoteNode
from runtimes.sandbox.command import FileContent, FileSource, FileStat, FileStream
from tests.runtimes.node.machine import Machine, daemon_on
from tests.runtimes.node.memory_stream import CALM, pair

#: Seconds after which a test is taken for stuck.
STUCK_S = 60.0
CHUNK_BYTES = 100_000


class MemoryStream:
    """A file that is read in chunks of its own size."""

    def __init__(self, data: bytes, breaks_at: int | None) -> None:
        self._data, self._breaks_at = data, breaks_at

    @property
    def size_bytes(self) -> int | None:
        return len(self._data)

    async def chunks(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._data), CHUNK_BYTES):
            if self._breaks_at is not None and start >= self._breaks_at:
                raise InvalidInput("it became shorter", component="memory")
            yield self._data[start : start + CHUNK_BYTES]

    def close(self) -> None: ...


class MemoryFiles:
    """`SandboxFiles` in memory, which say who asked for what."""

    workdir = "/workspace"

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.asked: list[tuple[str, str, str, int | None]] = []
        #: Bytes of what is being written that have arrived, and how often a write was broken off.
        self.arrived_bytes = 0
        self.broken = 0
        #: While unset, nothing more is taken of what is written.
        self.takes = asyncio.Event()
        self.takes.set()
        self.disk_bytes = 2**30
        self.breaks_at: int | None = None
        self.changed = asyncio.Condition()

    async def write(self, path: str, data: FileSource, *, mode: int | None = None, user: str = "") -> int:
        self.asked.append(("write", path, user, mode))
        kept = bytearray()
        try:
            async for piece in FileContent(data, self.disk_bytes).pieces():
                await self.takes.wait()
                kept += piece
                async with self.changed:
                    self.arrived_bytes = len(kept)
                    self.changed.notify_all()
        except BaseException:
            self.broken += 1
            async with self.changed:
                self.changed.notify_all()
            raise
        self.kept[path] = bytes(kept)
        return len(kept)

    async def list(self, path: str, *, user: str = "") -> list[FileStat]:
        self.asked.append(("list", path, user, None))
        if path not in ("/", "/workspace"):
            raise NotFound(f"no directory {path!r}", component="memory", detail={"file_error": "not_found"})
        return [
            FileStat(path=name, size_bytes=len(data), directory=False, mode=0o644)
            for name, data in sorted(self.kept.items())
        ]

    @asynccontextmanager
    async def open(self, path: str, *, limit_bytes: int, user: str = "") -> AsyncIterator[FileStream]:
        self.asked.append(("read", path, user, None))
        if path not in self.kept:
            raise NotFound(f"no file {path!r}", component="memory", detail={"file_error": "not_found"})
        if len(self.kept[path]) > limit_bytes:
            raise TooLarge(f"{path!r} is larger than {limit_bytes} bytes", component="memory")
        yield MemoryStream(self.kept[path], self.breaks_at)

    async def unpack(self, path: str, chunks: AsyncIterator[bytes], *, limit_bytes: int, user: str = "") -> int:
        self.asked.append(("unpack", path, user, limit_bytes))
        self.kept[path] = b"".join([chunk async for chunk in chunks])
        return len(self.kept[path])

    @asynccontextmanager
    async def pack(
        self, path: str, *, limit_bytes: int, user: str = "", base: bool = False
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        self.asked.append(("pack", path, user, int(base)))
        yield MemoryStream(self.kept[path], None).chunks()


class FilesWorld:
    """A gateway's and a node's side, joined."""

    def __init__(self, directory: Path) -> None:
        self.there = MemoryFiles()
        self.node = RemoteNode("n1")
        self.daemon = daemon_on(Machine(), directory)
        self.daemon._transfers = TransferServer({"t": self.there}.get, self._no_handler)
        #: Kinds of the frames.
        self.frames: list[int] = []
        self.near: NodeLink | None = None
        self._running: list[asyncio.Task[str]] = []

    async def _no_handler(self, digest: str, chunks: AsyncIterator[bytes]) -> int:
        raise AssertionError("no handler is sent")

    @property
    def files(self) -> RemoteFiles:
        return RemoteFiles(self.node, "t", "/workspace")

    async def join(self, settings: LinkSettings = CALM) -> None:
        """Join both sides by a new link."""
        near, far = pair(self._arrives, settings)
        serving = asyncio.create_task(self.daemon.serve(far))
        self.node.connect(near, await near.receive(Inventory, STUCK_S))
        self._running = [asyncio.create_task(self.node.serve(near)), serving]
        self.near = near

    def _arrives(self, kind: int) -> bool:
        self.frames.append(kind)
        return True

    async def cut(self) -> list[str]:
        """Cut the link; return why each side says that it ended."""
        assert self.near is not None
        self.near.close("cut")
        return await self.gone()

    async def gone(self) -> list[str]:
        """Wait until both sides know that there is no link; return why."""
        return list(await asyncio.gather(*self._running))

    async def until_arrived(self, size_bytes: int) -> None:
        """Wait until so much of a file has arrived in the sandbox."""
        async with self.there.changed:
            await self.there.changed.wait_for(lambda: self.there.arrived_bytes >= size_bytes)

    async def until_broken(self) -> None:
        """Wait until a write was broken off in the sandbox."""
        async with self.there.changed:
            await self.there.changed.wait_for(lambda: self.there.broken > 0)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[FilesWorld]:
    """Both sides, joined."""
    made = FilesWorld(tmp_path)
    await made.daemon.start()
    await made.join()
    async with asyncio.timeout(STUCK_S):
        yield made
        await made.node.close()
        await made.daemon.close()
