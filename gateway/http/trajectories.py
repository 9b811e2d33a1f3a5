"""HTTP operations on trajectories and the files in their sandboxes."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace

from msgspec import convert
from msgspec.structs import replace as replaced
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import wire
from gateway.http.call import read_headers, read_query
from gateway.http.messages import body_chunks, read_body, respond
from gateway.http.operation import (
    BINARY,
    Operation,
    PathParameter,
    ResponseSpec,
    json_answer,
    links,
)
from gateway.services import Services
from gateway.trajectories import leased, open_trajectory, trajectory_info
from manager.errors import ActionFailed, Conflict, InvalidInput, NotFound, Reason
from runtimes.sandbox.command import FileStat, FileStream
from runtimes.sandbox.files.files import SandboxFiles
from tangram.types import FileEntry, FileList, FileWritten, TrajectoryInfo, TrajectoryOpening, TrajectoryPage
from tangram.types.requests import (
    FileHeaders,
    FileReadAtQuery,
    FileReadQuery,
    FileWriteAtQuery,
    FileWriteQuery,
    OpeningHeaders,
    SandboxPath,
    TrajectoryQuery,
)
from tangram.types.values.scalars import Name

TRAJECTORY_ID = PathParameter(name="id", about="Name of a trajectory, chosen by its caller", shape=Name)
PATH_BYTES_MAX = 4095
FILE_PATH = PathParameter(name="path", about="Path in the sandbox, from its root", shape=SandboxPath)
BYTES = "application/octet-stream"


class FileResponse(Response):
    """An ASGI response that sends a file as it is read, and lets go of it at its end."""

    media_type = BYTES

    def __init__(self, file: FileStream, opening: AsyncExitStack) -> None:
        super().__init__()
        self._file = file
        self._opening = opening
        del self.headers["content-length"]
        if file.size_bytes is not None:
            self.headers["content-length"] = str(file.size_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._opening:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._file.chunks():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body"})


class TrajectoryOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def put(self, request: Request) -> Response:
        """Make the environment before the first action: memory is held and the sandbox started."""
        trajectory = wire.name(request.path_params["id"], "trajectory")
        body = wire.loads_object(await read_body(request, self._services))
        asked = wire.read(body, TrajectoryOpening, "$")
        if asked.step is None:
            asked = replaced(asked, step=read_headers(request, OpeningHeaders).step)
        return respond(await open_trajectory(self._services, trajectory, asked))

    async def get(self, request: Request) -> Response:
        return respond(trajectory_info(self._services, wire.name(request.path_params["id"], "trajectory")))

    async def find(self, request: Request) -> Response:
        asked = read_query(request, TrajectoryQuery)
        page = convert(self._services.engine.trajectories(asked.limit, asked.cursor), TrajectoryPage)
        return respond(replaced(page, trajectories=tuple([leased(self._services, each) for each in page.trajectories])))

    async def delete(self, request: Request) -> Response:
        """End it: its actions are cancelled, its sandbox removed, its memory given back."""
        trajectory = wire.name(request.path_params["id"], "trajectory")
        if not await self._services.engine.end_trajectory(trajectory):
            raise NotFound(f"no trajectory {trajectory!r}")
        return Response(status_code=204)

    async def put_file(self, request: Request) -> Response:
        """Write a file into the sandbox, as it comes."""
        files = files_of(self._services, request)
        asked = read_query(request, FileWriteQuery if "path" in request.path_params else FileWriteAtQuery)
        path = _path(request, asked, files)
        chunks = body_chunks(request, self._services, self._services.bounds.file_limit_bytes)
        mode = None if asked.mode is None else int(asked.mode, 8)
        with as_files_are():
            size_bytes = await files.write(path, chunks, mode=mode, user=asked.user or "")
        return respond(FileWritten(path=path, size_bytes=size_bytes), 201)

    async def get_file(self, request: Request) -> Response:
        """A file's bytes, or with ``list=true`` a directory's entries."""
        files = files_of(self._services, request)
        asked = read_query(request, FileReadQuery if "path" in request.path_params else FileReadAtQuery)
        path = _path(request, asked, files)
        user = asked.user or ""
        with as_files_are():
            if asked.list:
                listed = await files.list(path, user=user)
                return respond(FileList(files=tuple([_entry(stat) for stat in listed])))
            async with AsyncExitStack() as opening:
                limit_bytes = self._services.bounds.file_limit_bytes
                file = await opening.enter_async_context(files.open(path, limit_bytes=limit_bytes, user=user))
                return FileResponse(file, opening.pop_all())

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        opened = links("/trajectory", "id", "getTrajectory", "putFile", "getFile", "endTrajectory")
        return [
            Operation(
                id="openTrajectory",
                method="PUT",
                path="/v1/trajectories/{id}",
                endpoint=self.put,
                summary="Make a trajectory's environment before its first action",
                tag="trajectories",
                parts=(TRAJECTORY_ID,),
                headers=OpeningHeaders,
                body={"application/json": TrajectoryOpening},
                body_required=True,
                answers={200: json_answer("It is ready", TrajectoryInfo, opened)},
                problems=(404, 409, 413, 422, 429),
            ),
            Operation(
                id="listTrajectories",
                method="GET",
                path="/v1/trajectories",
                endpoint=self.find,
                summary="Living trajectories, by name",
                tag="trajectories",
                query=TrajectoryQuery,
                problems=(422,),
                answers={
                    200: json_answer(
                        "A page", TrajectoryPage, links("/trajectories/0/trajectory", "id", "getTrajectory")
                    )
                },
            ),
            Operation(
                id="getTrajectory",
                method="GET",
                path="/v1/trajectories/{id}",
                endpoint=self.get,
                summary="One trajectory",
                tag="trajectories",
                parts=(TRAJECTORY_ID,),
                answers={200: json_answer("The trajectory", TrajectoryInfo)},
                problems=(404, 422),
            ),
            Operation(
                id="endTrajectory",
                method="DELETE",
                path="/v1/trajectories/{id}",
                endpoint=self.delete,
                summary="End a trajectory, with everything in it",
                tag="trajectories",
                parts=(TRAJECTORY_ID,),
                answers={204: ResponseSpec(about="It has ended")},
                problems=(404, 422),
            ),
            *self._file_rows(),
            *self._placed_file_rows(),
        ]

    def _placed_file_rows(self) -> list[Operation]:
        """The same with the path in the query, where a relative one can be told from one that begins at the root."""
        put, get = self._file_rows()
        place = "/v1/trajectories/{id}/files"
        return [
            replace(put, id="putFileAt", path=place, parts=(TRAJECTORY_ID,), query=FileWriteAtQuery),
            replace(get, id="getFileAt", path=place, parts=(TRAJECTORY_ID,), query=FileReadAtQuery),
        ]

    def _file_rows(self) -> list[Operation]:
        return [
            Operation(
                id="putFile",
                method="PUT",
                path="/v1/trajectories/{id}/files/{path:path}",
                endpoint=self.put_file,
                summary="Write a file into the sandbox",
                tag="trajectories",
                parts=(TRAJECTORY_ID, FILE_PATH),
                query=FileWriteQuery,
                headers=FileHeaders,
                body={BYTES: BINARY},
                answers={201: json_answer("It is written", FileWritten)},
                problems=(404, 409, 410, 413, 422, 502),
            ),
            Operation(
                id="getFile",
                method="GET",
                path="/v1/trajectories/{id}/files/{path:path}",
                endpoint=self.get_file,
                summary="Read a file from the sandbox, or list a directory",
                tag="trajectories",
                parts=(TRAJECTORY_ID, FILE_PATH),
                query=FileReadQuery,
                headers=FileHeaders,
                answers={
                    200: ResponseSpec(
                        about="The bytes, or the entries",
                        content={BYTES: BINARY, "application/json": FileList},
                    )
                },
                problems=(404, 409, 410, 413, 422, 502),
            ),
        ]


def files_of(services: Services, request: Request) -> SandboxFiles:
    """Return the files of the request's trajectory, wherever it lives.

    Raises NotFound, TrajectoryHasEnded if it is to live, CapacityExceeded while its node is not reached.
    """
    trajectory = wire.name(request.path_params["id"], "trajectory")
    if read_headers(request, FileHeaders).expect == "living":
        services.engine.check_trajectory(trajectory, living=True)
    found = services.files(trajectory)
    if found is None:
        raise NotFound(f"trajectory {trajectory!r} has no sandbox: it starts with its first action, or by PUT")
    return found


def _path(request: Request, asked: FileWriteQuery | FileReadQuery, files: SandboxFiles) -> str:
    """Return the path in the sandbox, absolute. It is the sandbox that keeps it inside."""
    if isinstance(asked, FileWriteAtQuery | FileReadAtQuery):
        return placed_path(asked.path, files.workdir)
    return "/" + _fitting(request.path_params["path"]).lstrip("/")


def placed_path(path: str, workdir: str) -> str:
    """Return a path of a query, absolute: a relative one begins at the sandbox's working directory."""
    return posixpath.normpath(posixpath.join(workdir, _fitting(path)))


def _fitting(path: str) -> str:
    if "\0" in path or len(path.encode("utf-8", "replace")) > PATH_BYTES_MAX:
        told = f"the path holds a NUL byte or is longer than {PATH_BYTES_MAX} bytes"
        raise InvalidInput(told, component="http", detail={"path": "path"})
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


def _entry(stat: FileStat) -> FileEntry:
    return FileEntry(path=stat.path, size_bytes=stat.size_bytes, directory=stat.directory, mode=f"{stat.mode:o}")
