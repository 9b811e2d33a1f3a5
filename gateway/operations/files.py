"""Files and trees in sandboxes: what both doors do with them, and how they say that it cannot be done."""

from __future__ import annotations

import posixpath
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from gateway import wire
from gateway.services import Services
from manager.errors import ActionFailed, CodedError, Conflict, InvalidInput, NotFound, Reason, TooLarge
from runtimes.sandbox.command import FileStat, FileStream
from runtimes.sandbox.files import SandboxFiles
from tangram.types import ArchiveReadQuery, ArchiveWriteQuery, FileEntry, FileReadQuery, FileWriteQuery, FileWritten

PATH_BYTES_MAX = 4095


def files_of(services: Services, trajectory: str, *, living: bool) -> SandboxFiles:
    """Return the files of a trajectory, wherever it lives.

    Raises NotFound, TrajectoryHasEnded if it is to live (``living``), CapacityExceeded while its node is not reached.
    """
    name = wire.name(trajectory, "trajectory")
    if living:
        services.engine.check_trajectory(name, living=True)
    found = services.files(name)
    if found is None:
        raise NotFound(f"trajectory {name!r} has no sandbox: it starts with its first action, or when it is opened")
    return found


def placed_path(path: str, workdir: str) -> str:
    """Return a path, absolute: a relative one begins at the sandbox's working directory."""
    return posixpath.normpath(posixpath.join(workdir, fitting_path(path)))


def fitting_path(path: str) -> str:
    """Return a path that a system can take; raises InvalidInput. It is the sandbox that keeps it inside."""
    if "\0" in path or len(path.encode("utf-8", "replace")) > PATH_BYTES_MAX:
        told = f"the path holds a NUL byte or is longer than {PATH_BYTES_MAX} bytes"
        raise InvalidInput(told, component="files", detail={"path": "path"})
    return path


@contextmanager
def as_files_are() -> Iterator[None]:
    """Raise Conflict for what the sandbox refuses, of a path that is one, and for files that are lost with it."""
    try:
        yield
    except InvalidInput as error:
        raise Conflict(error.message, component=error.component, detail=error.detail) from None
    except ActionFailed as error:
        if error.reason is not Reason.ENVIRONMENT_LOST:
            raise
        told = f"{error.message}; actions that expect them end environment_lost, then it begins anew, empty"
        raise Conflict(told, component=error.component, detail=error.detail) from None


class _SentData:
    """What a caller sends: its own fault is told as it is, and not as one of the file."""

    def __init__(self, data: AsyncIterator[bytes]) -> None:
        self._data = data
        self._failure: CodedError | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._data:
                yield chunk
        except CodedError as error:
            self._failure = error
            raise

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Raise what was wrong with the data, whatever became of it on its way."""
        try:
            yield
        except CodedError:
            if self._failure is None:
                raise
            raise self._failure from None


async def write_file(files: SandboxFiles, path: str, data: AsyncIterator[bytes], asked: FileWriteQuery) -> FileWritten:
    """Write a file as it comes; ``data`` keeps its bound."""
    mode, sent = None if asked.mode is None else int(asked.mode, 8), _SentData(data)
    with sent.failing(), as_files_are():
        size_bytes = await files.write(path, sent.chunks(), mode=mode, user=asked.user or "")
    return FileWritten(path=path, size_bytes=size_bytes)


async def list_files(files: SandboxFiles, path: str, asked: FileReadQuery) -> tuple[FileEntry, ...]:
    """Return the entries of a directory, by name."""
    with as_files_are():
        listed = await files.list(path, user=asked.user or "")
    return tuple([_entry(stat) for stat in listed])


@asynccontextmanager
async def read_file(
    services: Services, files: SandboxFiles, path: str, asked: FileReadQuery
) -> AsyncIterator[FileStream]:
    """Open a file that is read piece by piece."""
    opened = files.open(path, limit_bytes=services.bounds.file_limit_bytes, user=asked.user or "")
    async with AsyncExitStack() as opening:
        with as_files_are():
            try:
                file = await opening.enter_async_context(opened)
            except TooLarge as error:
                told = f"{error.message} (server.file_limit)"
                raise TooLarge(told, component=error.component, detail=error.detail) from None
        yield file


async def write_archive(
    services: Services, files: SandboxFiles, data: AsyncIterator[bytes], asked: ArchiveWriteQuery
) -> FileWritten:
    """Unpack a tar below a directory, as it comes."""
    path, limit_bytes = placed_path(asked.path, files.workdir), services.bounds.file_limit_bytes
    sent = _SentData(data)
    with sent.failing(), as_files_are():
        size_bytes = await files.unpack(path, sent.chunks(), user=asked.user or "", limit_bytes=limit_bytes)
    return FileWritten(path=path, size_bytes=size_bytes)


@asynccontextmanager
async def read_archive(
    services: Services, files: SandboxFiles, asked: ArchiveReadQuery
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Pack a file or a directory into a tar, as it is read."""
    path, limit_bytes = placed_path(asked.path, files.workdir), services.bounds.file_limit_bytes
    packing = files.pack(path, user=asked.user or "", limit_bytes=limit_bytes, base=asked.base)
    async with AsyncExitStack() as opening:
        with as_files_are():
            chunks = await opening.enter_async_context(packing)
        yield chunks


def _entry(stat: FileStat) -> FileEntry:
    return FileEntry(path=stat.path, size_bytes=stat.size_bytes, directory=stat.directory, mode=f"{stat.mode:o}")
