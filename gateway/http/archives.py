"""HTTP operations on whole trees in sandboxes: a tar in, a tar out, both as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.call import read_query
from gateway.http.messages import body_chunks, respond
from gateway.http.operation import BINARY, Operation, ResponseSpec, json_answer
from gateway.http.trajectories import BYTES, TRAJECTORY_ID, asked_files
from gateway.operations.files import read_archive, write_archive
from gateway.services import Services
from tangram.types import ArchiveReadQuery, ArchiveWriteQuery, FileHeaders, FileWritten

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
