"""Files of a sandbox: read, write, list, archives."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import structlog

from manager.errors import ActionFailed, InvalidInput
from manager.function import AUTO
from runtimes.sandbox.command import Command, FileSource, FileStat, FileStream
from runtimes.sandbox.runner.client import RunnerRefusal, SandboxProcess, decode
from runtimes.sandbox.runner.runner import ProtocolError
from runtimes.sandbox.sandbox import Sandbox
from tangram import archive
from tangram.archive import DIRECTORY, REFUSED, Extraction, Reader, opened_directory

logger = structlog.get_logger("sandbox.files")

SOURCE = Path(archive.__file__).read_text(encoding="utf-8")
#: Seconds that one archive may take.
ARCHIVE_S = 600.0
#: Bytes that are kept of what is said of a failure.
SAID_BYTES = 8192


async def put_archive(
    sandbox: Sandbox, path: str, chunks: AsyncIterator[bytes], *, user: str = "", limit_bytes: int
) -> int:
    """Write the entries of a tar (plain, or compressed as Python can read) below a directory, which is made.

    Return the bytes of the tar. No entry leaves the directory, by its name or through a link; all belong to the user.
    Raises NotFound, TooLarge for more than ``limit_bytes`` of files, and InvalidInput, with what is wrong with a file.
    """
    size_bytes = 0
    async with _archiver(sandbox, path, ("put", path, str(limit_bytes)), user) as process:
        try:
            async for chunk in chunks:
                size_bytes += len(chunk)
                await process.write_stdin(chunk)
            await process.end_input()
        except ActionFailed:
            if sandbox.lost.is_set():
                raise
        await _require_success(process, await gathered(process, "stderr", SAID_BYTES))
    await sandbox.note_uploaded_tree(path)
    return size_bytes


async def gathered(process: SandboxProcess, stream: str, limit_bytes: int) -> bytes:
    """Return the beginning of what a process says on one stream, when it has said all."""
    output = b""
    async for name, data in process.chunks():
        if name == stream and len(output) < limit_bytes:
            output += data
    return output[:limit_bytes]


@asynccontextmanager
async def open_archive(
    sandbox: Sandbox, path: str, *, user: str = "", limit_bytes: int, base: bool = False, follow: bool = True
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Yield a file or directory as the chunks of a tar; names begin at the directory, or with ``base`` at its own name.

    A link is followed, or without ``follow`` packed as the link that it is. What is no file, directory or link is left
    out. Raises as `put_archive` before the first chunk is there.
    """
    words = ("get", path, str(limit_bytes), "base" if base else "", "follow" if follow else "")
    async with _archiver(sandbox, path, words, user) as process:
        await process.end_input()
        pieces = process.chunks()
        first, output = b"", b""
        async for stream, data in pieces:
            if stream == "stdout":
                first = data
                break
            output = (output + data)[:SAID_BYTES]
        if not first:
            await _require_success(process, output)

        async def chunks() -> AsyncIterator[bytes]:
            yield first
            async for stream, data in pieces:
                if stream == "stdout":
                    yield data
            if (await process.wait()).exit_code != 0:
                raise InvalidInput(f"{path!r} changed while it was read", component="sandbox")

        yield chunks()


@asynccontextmanager
async def _archiver(sandbox: Sandbox, path: str, words: tuple[str, ...], user: str) -> AsyncIterator[SandboxProcess]:
    """Yield the process that packs or unpacks; its sandbox is not frozen meanwhile, and it is ended with the block."""
    async with sandbox.transfer(path, user=user):
        own = "" if user == AUTO else user
        command = Command(argv=("-c", SOURCE, *words), python=True, user=own, timeout_s=ARCHIVE_S)
        process = await sandbox.spawn(command)
        try:
            yield process
        finally:
            await process.kill()


async def _require_success(process: SandboxProcess, output: bytes) -> None:
    """Raise what the archiver said unless it has come to its end."""
    result = await process.wait()
    if result.exit_code == 0:
        return
    if result.exit_code == REFUSED:
        try:
            raise decode(output[:SAID_BYTES], RunnerRefusal).error()
        except ProtocolError:
            pass
    how = f"status {result.exit_code}" if result.signal is None else f"signal {result.signal}"
    raise InvalidInput(f"the archive broke off ({how})", component="sandbox")


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


class TreeStore:
    """Trees of files by name, within a bound of bytes: beyond it those used least recently go. Its methods block."""

    #: In a tree's directory: its files, and how many bytes they are.
    FILES, SIZE = "files", "size"

    def __init__(self, root: Path, max_bytes: int) -> None:
        """What the process before left half there is removed."""
        self.root, self._max_bytes = root.absolute(), max_bytes
        for left in root.glob(".*"):
            shutil.rmtree(left, ignore_errors=True)

    def files(self, name: str) -> Path:
        return self.root / name / self.FILES

    def new(self) -> Path:
        """Return a new directory for a tree that arrives, to be kept or removed."""
        part = self.root / f".{secrets.token_hex(8)}"
        part.mkdir(mode=0o755, parents=True)
        return part

    def keep(self, part: Path, name: str, size_bytes: int) -> None:
        """Let a tree that has arrived be found by its name."""
        (part / self.SIZE).write_text(str(size_bytes), encoding="ascii")
        part.rename(self.root / name)
        self.use(name)

    def use(self, name: str) -> bool:
        """Make a tree the one used last, by a finer clock than the kernel's own; return whether it is there."""
        now_ns = time.time_ns()
        try:
            os.utime(self.root / name, ns=(now_ns, now_ns))
        except FileNotFoundError:
            return False
        return True

    def make_room(self, size_bytes: int, in_use: Collection[str]) -> bool:
        """Remove what was used least recently and is not in use, until so many bytes have room; whether they have."""
        kept = sorted((each.stat().st_mtime_ns, self._size_of(each), each.name) for each in self.root.glob("[!.]*"))
        total_bytes = size_bytes + sum(size for _, size, _ in kept)
        for _, size, name in kept:
            if total_bytes > self._max_bytes and name not in in_use:
                self.remove(name)
                total_bytes -= size
                logger.info("files were removed to make room", place=str(self.root / name), size_bytes=size)
        return total_bytes <= self._max_bytes

    def remove(self, name: str) -> None:
        """Remove a tree such that no half of it is ever found by its name."""
        away = self.root / f".{secrets.token_hex(8)}"
        (self.root / name).rename(away)
        shutil.rmtree(away, ignore_errors=True)

    def _size_of(self, place: Path) -> int:
        try:
            return int((place / self.SIZE).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0  # it is found damaged when it is asked for


def unpack_tree(packed: Path, site: Path, limit_bytes: int) -> int:
    """Unpack a tar into a new directory, readable for every user and without links, and remove the tar.

    Return the bytes of its files. Raises `tangram.archive.Refused` and OSError.
    """
    site.mkdir(parents=True)
    with packed.open("rb") as file, opened_directory(site) as root:
        with Extraction(root, limit_bytes=limit_bytes, links=False, mode=_readable) as tree:
            tree.all(Reader(file))
        os.fchmod(root, 0o755)
    packed.unlink()
    site.parent.chmod(0o755)
    return limit_bytes - tree.left_bytes


def _readable(mode: int, kind: str) -> int:
    return 0o755 if kind == DIRECTORY or mode & 0o100 else 0o644
