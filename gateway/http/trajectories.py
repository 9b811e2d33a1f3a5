"""HTTP operations on trajectories and the files in their sandboxes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

from msgspec.structs import replace as replaced
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import wire
from gateway.http.call import read_headers, read_query
from gateway.http.messages import body_chunks, disconnected, read_body, respond
from gateway.http.operation import (
    BINARY,
    Operation,
    PathParameter,
    ResponseSpec,
    json_answer,
    links,
)
from gateway.operations.files import (
    files_of,
    fitting_path,
    list_files,
    placed_path,
    read_file,
    write_file,
)
from gateway.operations.lists import list_trajectories
from gateway.services import Services
from gateway.trajectories import open_trajectory, trajectory_info
from manager.errors import NotFound
from runtimes.sandbox.command import FileStream
from runtimes.sandbox.files import SandboxFiles
from tangram.types import (
    FileHeaders,
    FileList,
    FileReadAtQuery,
    FileReadQuery,
    FileWriteAtQuery,
    FileWriteQuery,
    FileWritten,
    Name,
    OpeningHeaders,
    SandboxPath,
    TrajectoryInfo,
    TrajectoryOpening,
    TrajectoryPage,
    TrajectoryQuery,
)

TRAJECTORY_ID = PathParameter(name="id", about="Name of a trajectory, chosen by its caller", shape=Name)
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
        caller = asyncio.create_task(disconnected(request))
        try:
            return respond(await open_trajectory(self._services, trajectory, asked, caller.done))
        finally:
            caller.cancel()

    async def get(self, request: Request) -> Response:
        return respond(trajectory_info(self._services, wire.name(request.path_params["id"], "trajectory")))

    async def find(self, request: Request) -> Response:
        return respond(list_trajectories(self._services, read_query(request, TrajectoryQuery)))

    async def delete(self, request: Request) -> Response:
        """End it: its actions are cancelled, its sandbox removed, its memory given back."""
        trajectory = wire.name(request.path_params["id"], "trajectory")
        if not await self._services.engine.end_trajectory(trajectory):
            raise NotFound(f"no trajectory {trajectory!r}")
        return Response(status_code=204)

    async def put_file(self, request: Request) -> Response:
        """Write a file into the sandbox, as it comes."""
        files = asked_files(self._services, request)
        asked = read_query(request, FileWriteQuery if "path" in request.path_params else FileWriteAtQuery)
        chunks = body_chunks(request, self._services, self._services.bounds.file_limit_bytes)
        return respond(await write_file(files, _path(request, asked, files), chunks, asked), 201)

    async def get_file(self, request: Request) -> Response:
        """A file's bytes, or with ``list=true`` a directory's entries."""
        files = asked_files(self._services, request)
        asked = read_query(request, FileReadQuery if "path" in request.path_params else FileReadAtQuery)
        path = _path(request, asked, files)
        if asked.list:
            return respond(FileList(files=await list_files(files, path, asked)))
        async with AsyncExitStack() as opening:
            file = await opening.enter_async_context(read_file(self._services, files, path, asked))
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


def asked_files(services: Services, request: Request) -> SandboxFiles:
    """Return the files of the request's trajectory; raises as `files_of`."""
    living = read_headers(request, FileHeaders).expect == "living"
    return files_of(services, request.path_params["id"], living=living)


def _path(request: Request, asked: FileWriteQuery | FileReadQuery, files: SandboxFiles) -> str:
    """Return the path in the sandbox, absolute."""
    if isinstance(asked, FileWriteAtQuery | FileReadAtQuery):
        return placed_path(asked.path, files.workdir)
    return "/" + fitting_path(request.path_params["path"]).lstrip("/")
