"""Files and trees of sandboxes: up and down in pieces, as fast as the other side takes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from grpclib.server import Stream

from gateway import wire
from gateway.errors import TooSlow
from gateway.grpc.calls import ServiceCalls
from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.messages import given, read_message, read_request
from gateway.grpc.pieces import pieces, portions
from gateway.operations.files import (
    as_files_are,
    files_of,
    list_files,
    placed_path,
    read_archive,
    read_file,
    write_archive,
    write_file,
)
from manager.errors import InvalidInput, TooLarge
from tangram.types import FileWritten
from tangram.types.requests import ArchiveReadQuery, ArchiveWriteQuery, FileReadAtQuery, FileWriteAtQuery

Upload = TypeVar("Upload", pb.WriteFileRequest, pb.WriteArchiveRequest)


class FileCalls(ServiceCalls):
    """The methods on files and archives."""

    async def WriteFile(self, stream: Stream[pb.WriteFileRequest, pb.FileWritten]) -> None:  # noqa: N802
        async with self._answering(stream):
            target = _target(await read_request(stream)).target
            asked = wire.read(given(target, "path", "mode", "user"), FileWriteAtQuery)
            files = files_of(self._services, target.trajectory, living=target.living)
            written = await write_file(files, placed_path(asked.path, files.workdir), self._data(stream), asked)
            await stream.send_message(_written(written))

    async def ReadFile(self, stream: Stream[pb.ReadFileRequest, pb.FilePiece]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            asked = wire.read(given(request, "path", "user"), FileReadAtQuery)
            files = files_of(self._services, request.trajectory, living=request.living)
            path = placed_path(asked.path, files.workdir)
            with as_files_are():
                async with read_file(self._services, files, path, asked) as file:
                    size_bytes = file.size_bytes
                    async for data in pieces(file.chunks()):
                        await stream.send_message(pb.FilePiece(data=data, size_bytes=size_bytes))
                        size_bytes = None
                    if size_bytes is not None:  # of an empty one no piece has told it
                        await stream.send_message(pb.FilePiece(size_bytes=size_bytes))

    async def ListFiles(self, stream: Stream[pb.ListFilesRequest, pb.FileList]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            asked = wire.read(given(request, "path", "user"), FileReadAtQuery)
            files = files_of(self._services, request.trajectory, living=request.living)
            listed = await list_files(files, placed_path(asked.path, files.workdir), asked)
            entries = (
                pb.FileEntry(path=each.path, size_bytes=each.size_bytes, directory=each.directory, mode=each.mode)
                for each in listed
            )
            for portion, _ in portions(entries):
                await stream.send_message(pb.FileList(files=portion))

    async def WriteArchive(self, stream: Stream[pb.WriteArchiveRequest, pb.FileWritten]) -> None:  # noqa: N802
        async with self._answering(stream):
            target = _target(await read_request(stream)).target
            asked = wire.read(given(target, "path", "user"), ArchiveWriteQuery)
            files = files_of(self._services, target.trajectory, living=target.living)
            written = await write_archive(self._services, files, self._data(stream), asked)
            await stream.send_message(_written(written))

    async def ReadArchive(self, stream: Stream[pb.ReadArchiveRequest, pb.FilePiece]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            asked = wire.read(given(request, "path", "user", "base"), ArchiveReadQuery)
            files = files_of(self._services, request.trajectory, living=request.living)
            with as_files_are():
                async with read_archive(self._services, files, asked) as chunks:
                    async for data in pieces(chunks):
                        await stream.send_message(pb.FilePiece(data=data))

    async def _data(self, stream: Stream[Upload, pb.FileWritten]) -> AsyncIterator[bytes]:
        """Yield the data as it arrives, to its end, within the bounds of a file that HTTP has.

        Raises TooLarge, TooSlow, and InvalidInput for a message that is no piece.
        """
        bounds = self._services.bounds
        deadline_s, size_bytes = asyncio.get_running_loop().time() + bounds.body_timeout_s, 0
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await read_message(stream)
            except TimeoutError:
                told = f"the data took longer than {bounds.body_timeout_s:g} s to arrive (server.body_timeout)"
                raise TooSlow(told, component="grpc") from None
            if message is None:
                return
            if message.WhichOneof("request") != "data":
                raise InvalidInput("after the target every message is data, and this is none", component="grpc")
            size_bytes += len(message.data)
            if size_bytes > bounds.file_limit_bytes:
                raise TooLarge(
                    f"the data is larger than {bounds.file_limit_bytes} bytes (server.file_limit)", component="grpc"
                )
            if message.data:
                yield message.data


def _target(message: Upload) -> Upload:
    """Return the first message of an upload; raises InvalidInput if it says of nothing where it belongs."""
    if message.WhichOneof("request") != "target":
        raise InvalidInput("the first message is the target, and this is none", component="grpc")
    return message


def _written(told: FileWritten) -> pb.FileWritten:
    return pb.FileWritten(path=told.path, size_bytes=told.size_bytes)
