"""The files of one sandbox, for whoever reads and writes them from outside, wherever the sandbox is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from runtimes.sandbox.command import FileSource, FileStat, FileStream
from runtimes.sandbox.files.archives import open_archive, put_archive
from runtimes.sandbox.sandbox import Sandbox


class SandboxFiles(Protocol):
    """Files and trees of a sandbox. Every path is one of it, and every ``user`` one that its function allows."""

    @property
    def workdir(self) -> str:
        """Where relative paths begin."""
        ...

    async def write(self, path: str, data: FileSource, *, mode: int | None = None, user: str = "") -> int:
        """Write a file as it comes; return its bytes. Raises as `Sandbox.write_file`, and what ``data`` raises."""
        ...

    async def list(self, path: str, *, user: str = "") -> list[FileStat]:
        """Return the entries of a directory, sorted by name; raises NotFound, InvalidInput."""
        ...

    def open(self, path: str, *, limit_bytes: int, user: str = "") -> AbstractAsyncContextManager[FileStream]:
        """Read a file piece by piece; raises NotFound, TooLarge, InvalidInput."""
        ...

    async def unpack(self, path: str, chunks: AsyncIterator[bytes], *, limit_bytes: int, user: str = "") -> int:
        """Unpack a tar below a directory; return its bytes. Raises as `put_archive`."""
        ...

    def pack(
        self, path: str, *, limit_bytes: int, user: str = "", base: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Pack a file or directory into a tar; raises as `open_archive`."""
        ...


class LocalFiles:
    """`SandboxFiles` of a sandbox of this machine."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @property
    def workdir(self) -> str:
        return self._sandbox.spec.workdir

    async def write(self, path: str, data: FileSource, *, mode: int | None = None, user: str = "") -> int:
        return await self._sandbox.write_file(path, data, mode=mode, user=user)

    async def list(self, path: str, *, user: str = "") -> list[FileStat]:
        return await self._sandbox.list_files(path, user=user)

    def open(self, path: str, *, limit_bytes: int, user: str = "") -> AbstractAsyncContextManager[FileStream]:
        return self._sandbox.open_file(path, limit_bytes=limit_bytes, user=user)

    async def unpack(self, path: str, chunks: AsyncIterator[bytes], *, limit_bytes: int, user: str = "") -> int:
        return await put_archive(self._sandbox, path, chunks, user=user, limit_bytes=limit_bytes)

    def pack(
        self, path: str, *, limit_bytes: int, user: str = "", base: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return open_archive(self._sandbox, path, user=user, limit_bytes=limit_bytes, base=base)
