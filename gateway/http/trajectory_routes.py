"""HTTP routes of trajectories: files, snapshots, terminal sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

from msgspec.structs import replace as replaced
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway import serialization
from gateway.http.messages import (
    body_chunks,
    disconnected,
    read_body,
    read_call,
    read_headers,
    read_query,
    record_response,
    respond,
)
from gateway.http.openapi import BINARY, Operation, PathParameter, ResponseSpec, json_answer, links
from gateway.http.routes import INVOCATION_ID
from gateway.http.streaming import NDJSON
from gateway.invocations.invocations import LiveInvocation
from gateway.invocations.record import Mode
from gateway.operations import (
    files_of,
    fitting_path,
    list_files,
    list_trajectories,
    open_session,
    placed_path,
    read_archive,
    read_file,
    session_end,
    session_input,
    session_of,
    write_archive,
    write_file,
)
from gateway.services import Services
from gateway.trajectories import fork_trajectory, list_snapshots, open_trajectory, take_snapshot, trajectory_info
from manager.errors import Conflict, NotFound
from runtimes.sandbox.command import FileStream
from runtimes.sandbox.files import SandboxFiles
from runtimes.sandbox.session import InteractiveSession, TerminalSize
from tangram.types import (
    ArchiveReadQuery,
    ArchiveWriteQuery,
    CallHeaders,
    FileHeaders,
    FileList,
    FileReadAtQuery,
    FileReadQuery,
    FileWriteAtQuery,
    FileWriteQuery,
    FileWritten,
    ForkAnswer,
    ForkRequest,
    Invocation,
    Name,
    OpeningHeaders,
    SandboxPath,
    SessionAttached,
    SessionFed,
    SessionOpening,
    SessionOutput,
    SessionReadQuery,
    SessionRecord,
    SessionSilence,
    SessionSteering,
    SessionTaken,
    SessionWriteQuery,
    SnapshotId,
    SnapshotInfo,
    SnapshotList,
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
        trajectory = serialization.name(request.path_params["id"], "trajectory")
        body = serialization.loads_object(await read_body(request, self._services))
        asked = serialization.read(body, TrajectoryOpening, "$")
        if asked.step is None:
            asked = replaced(asked, step=read_headers(request, OpeningHeaders).step)
        caller = asyncio.create_task(disconnected(request))
        try:
            return respond(await open_trajectory(self._services, trajectory, asked, caller.done))
        finally:
            caller.cancel()

    async def get(self, request: Request) -> Response:
        return respond(trajectory_info(self._services, serialization.name(request.path_params["id"], "trajectory")))

    async def find(self, request: Request) -> Response:
        return respond(list_trajectories(self._services, read_query(request, TrajectoryQuery)))

    async def delete(self, request: Request) -> Response:
        """End it: its actions are cancelled, its sandbox removed, its memory given back."""
        trajectory = serialization.name(request.path_params["id"], "trajectory")
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


TAR = "application/x-tar"
PLACE = "/v1/trajectories/{id}/archive"


class ArchiveResponse(Response):
    """An ASGI response that sends an archive as it is made, and ends its making at its end."""

    media_type = TAR

    def __init__(self, chunks: AsyncIterator[bytes], opening: AsyncExitStack) -> None:
        super().__init__()
        self._chunks = chunks
        self._opening = opening
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._opening:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body"})


class ArchiveOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def put(self, request: Request) -> Response:
        """Unpack a tar below a directory of the sandbox."""
        files, asked = asked_files(self._services, request), read_query(request, ArchiveWriteQuery)
        chunks = body_chunks(request, self._services, self._services.bounds.file_limit_bytes)
        return respond(await write_archive(self._services, files, chunks, asked), 201)

    async def get(self, request: Request) -> Response:
        """Pack a file or a directory of the sandbox into a tar."""
        files, asked = asked_files(self._services, request), read_query(request, ArchiveReadQuery)
        async with AsyncExitStack() as opening:
            chunks = await opening.enter_async_context(read_archive(self._services, files, asked))
            return ArchiveResponse(chunks, opening.pop_all())

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        problems = (404, 409, 410, 413, 422, 502)
        return [
            Operation(
                id="putArchive",
                method="PUT",
                path=PLACE,
                endpoint=self.put,
                summary="Unpack a tar below a directory of the sandbox",
                tag="trajectories",
                parts=(TRAJECTORY_ID,),
                query=ArchiveWriteQuery,
                headers=FileHeaders,
                body={BYTES: BINARY},
                body_required=True,
                answers={201: json_answer("It is unpacked", FileWritten)},
                problems=problems,
            ),
            Operation(
                id="getArchive",
                method="GET",
                path=PLACE,
                endpoint=self.get,
                summary="Pack a file or a directory of the sandbox into a tar",
                tag="trajectories",
                parts=(TRAJECTORY_ID,),
                query=ArchiveReadQuery,
                headers=FileHeaders,
                answers={200: ResponseSpec(about="The tar", content={TAR: BINARY})},
                problems=problems,
            ),
        ]


SNAPSHOT_ID = PathParameter(name="id", about="Id of a snapshot, given when it was taken", shape=SnapshotId)


class SnapshotOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def take(self, request: Request) -> Response:
        """Keep the files of the trajectory's sandbox, in its turn among the trajectory's actions."""
        return respond(await take_snapshot(self._services, request.path_params["id"]), 201)

    async def fork(self, request: Request) -> Response:
        """Open trajectories that begin with the files of this one as they are now."""
        body = serialization.loads_object(await read_body(request, self._services))
        asked = serialization.read(body, ForkRequest, "$")
        return respond(await fork_trajectory(self._services, request.path_params["id"], asked), 201)

    async def find(self, request: Request) -> Response:
        return respond(list_snapshots(self._services))

    async def delete(self, request: Request) -> Response:
        """Remove it from the disk."""
        await self._services.snapshots.remove(request.path_params["id"])
        return Response(status_code=204)

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        place, opened = "/v1/trajectories/{id}", links("/trajectories/0/trajectory", "id", "getTrajectory")
        return [
            Operation(
                id="takeSnapshot",
                method="POST",
                path=f"{place}/snapshots",
                endpoint=self.take,
                summary="Keep the files of a trajectory's sandbox",
                tag="trajectories",
                parts=(TRAJECTORY_ID,),
                answers={201: json_answer("It is kept", SnapshotInfo, links("/snapshot", "id", "removeSnapshot"))},
                problems=(404, 409, 413, 422),
            ),
            Operation(
                id="forkTrajectory",
                method="POST",
                path=f"{place}/fork",
                endpoint=self.fork,
                summary="Open trajectories that begin with the files of another",
                tag="trajectories",
                parts=(TRAJECTORY_ID,),
                body={"application/json": ForkRequest},
                body_required=True,
                answers={201: json_answer("They are ready", ForkAnswer, opened)},
                problems=(404, 409, 413, 422, 429),
            ),
            Operation(
                id="listSnapshots",
                method="GET",
                path="/v1/snapshots",
                endpoint=self.find,
                summary="Snapshots of trajectories, the oldest first",
                tag="trajectories",
                answers={200: json_answer("All of them", SnapshotList)},
            ),
            Operation(
                id="removeSnapshot",
                method="DELETE",
                path="/v1/snapshots/{id}",
                endpoint=self.delete,
                summary="Remove a snapshot",
                tag="trajectories",
                parts=(SNAPSHOT_ID,),
                answers={204: ResponseSpec(about="It is gone")},
                problems=(404, 409),
            ),
        ]


class SessionStream(Response):
    """An ASGI response that lasts as long as the session, or until its caller goes or another attaches."""

    media_type = NDJSON

    def __init__(
        self, invocation: LiveInvocation, session: InteractiveSession | None, offset: int, heartbeat_s: float
    ) -> None:
        super().__init__()
        self._invocation = invocation
        self._session = session
        self._offset = offset
        self._heartbeat_s = heartbeat_s
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self.headers["x-invocation-id"] = invocation.record.id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        sending, watching = loop.create_task(self._send_all(send)), loop.create_task(_gone(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            sending.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)
        error = None if sending.cancelled() else sending.exception()
        if error is not None and not isinstance(error, ClientDisconnect):
            raise error

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if self._session is None or await self._send_output(send, self._session):
            while not await self._invocation.has_ended(self._heartbeat_s):
                await _tell(send, SessionSilence(stream="heartbeat"))
            end = 0 if self._session is None else self._session.end
            await _tell(send, session_end(self._invocation.record, end))
        else:
            await _tell(send, SessionTaken(stream="detached"))
        await send({"type": "http.response.body", "body": b""})

    async def _send_output(self, send: Send, session: InteractiveSession) -> bool:
        """Send what it says; return whether that is all, and not another caller's from now on."""
        while not await session.opened(self._heartbeat_s):
            await _tell(send, SessionSilence(stream="heartbeat"))
        await _tell(send, SessionAttached(stream="attached", offset=session.start, input_offset=session.input_offset))
        async with aclosing(session.read(self._offset, self._heartbeat_s)) as pages:
            async for page in pages:
                for piece in page:
                    await _tell(send, SessionOutput(stream=piece.stream, offset=piece.offset, data=piece.data))
                if not page:
                    await _tell(send, SessionSilence(stream="heartbeat"))
        return session.ended


async def _tell(send: Send, record: SessionRecord) -> None:
    await send({"type": "http.response.body", "body": serialization.encode(record) + b"\n", "more_body": True})


async def _gone(receive: Receive) -> None:
    """Return when the connection closes."""
    while (await receive())["type"] != "http.disconnect":
        pass


class SessionOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._invocations = services.invocations

    async def open(self, request: Request) -> Response:
        """Begin a command in the trajectory's sandbox that somebody types to; it goes on without its caller."""
        trajectory = serialization.name(request.path_params["id"], "trajectory")
        asked = serialization.read(
            serialization.loads_object(await read_body(request, self._services)), SessionOpening, "$"
        )
        given = session_input(self._services, asked)
        call = read_call(read_headers(request, CallHeaders), asked.function, given, Mode.SYNC)
        call = replace(call, trajectory=trajectory, detached=True)
        invocation = await open_session(self._services, call)
        shown = self._invocations.shown(invocation.record)
        return record_response(shown, 201, replayed=invocation.replays(call))

    async def attach(self, request: Request) -> Response:
        """Send what the session says, from a byte on, to its end; whoever was attached is detached."""
        asked = read_query(request, SessionReadQuery)
        invocation = await self._invocations.get(request.path_params["id"])
        session = session_of(self._services, invocation)
        return SessionStream(invocation, session, asked.offset, self._services.logs.spec.heartbeat_s)

    async def write(self, request: Request) -> Response:
        """Pass on input."""
        asked = read_query(request, SessionWriteQuery)
        session = self._living(await self._invocations.get(request.path_params["id"]))
        body = await read_body(request, self._services)
        position = await session.write(body, asked.offset, end=asked.end)
        return respond(SessionFed(input_offset=position, reads=session.reads))

    async def steer(self, request: Request) -> Response:
        """Resize its terminal, or signal what runs in its foreground."""
        session = self._living(await self._invocations.get(request.path_params["id"]))
        asked = serialization.read(
            serialization.loads_object(await read_body(request, self._services)), SessionSteering, "$"
        )
        session.require_reached()
        if asked.terminal is not None:
            await session.resize(TerminalSize(asked.terminal.rows, asked.terminal.columns))
        if asked.signal is not None:
            await session.signal(asked.signal)
        return Response(status_code=204)

    def _living(self, invocation: LiveInvocation) -> InteractiveSession:
        session = session_of(self._services, invocation)
        if session is None or session.ended:
            raise Conflict("the session has ended", component="http", invocation_id=invocation.record.id)
        return session

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        place, problems = "/v1/invocations/{id}/session", (404, 409, 422)
        return [
            self._opening_row(),
            Operation(
                id="attachSession",
                method="GET",
                path=place,
                endpoint=self.attach,
                summary="A session's output, from a byte on, to its end",
                tag="sessions",
                parts=(INVOCATION_ID,),
                query=SessionReadQuery,
                answers={200: ResponseSpec(about="One record a line", content={NDJSON: SessionRecord})},
                problems=problems,
            ),
            Operation(
                id="writeSession",
                method="POST",
                path=f"{place}/input",
                endpoint=self.write,
                summary="Pass input to a session",
                tag="sessions",
                parts=(INVOCATION_ID,),
                query=SessionWriteQuery,
                body={BYTES: BINARY},
                answers={200: json_answer("How far it came", SessionFed)},
                problems=(*problems, 408, 413),
            ),
            Operation(
                id="steerSession",
                method="POST",
                path=f"{place}/control",
                endpoint=self.steer,
                summary="Resize a session's terminal, or signal what runs in it",
                tag="sessions",
                parts=(INVOCATION_ID,),
                body={"application/json": SessionSteering},
                body_required=True,
                answers={204: ResponseSpec(about="It was told")},
                problems=(*problems, 413),
            ),
        ]

    def _opening_row(self) -> Operation:
        next_ones = ("attachSession", "writeSession", "steerSession", "cancelInvocation")
        return Operation(
            id="openSession",
            method="POST",
            path="/v1/trajectories/{id}/sessions",
            endpoint=self.open,
            summary="Begin a command that somebody types to",
            tag="sessions",
            parts=(TRAJECTORY_ID,),
            headers=CallHeaders,
            body={"application/json": SessionOpening},
            body_required=True,
            answers={201: json_answer("It is accepted", Invocation, links("/id", "id", *next_ones))},
            problems=(404, 409, 410, 413, 422, 429),
        )
