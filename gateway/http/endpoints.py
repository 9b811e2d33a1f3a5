"""Operations that only HTTP has, or answers in its own way: invocations, streams, files and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Annotated, cast

from msgspec import UNSET, Meta
from msgspec.structs import replace as replaced
from starlette.requests import Request
from starlette.responses import Response

from gateway import serialization
from gateway.api import (
    BINARY,
    BYTES,
    FILE_PROBLEMS,
    JSON,
    READY,
    SESSION_PROBLEMS,
    Api,
    DeadId,
    FilePath,
    FunctionName,
    InvocationId,
    ReadCall,
    ResponseSpec,
    TrajectoryId,
    Verdict,
    json_answer,
    links,
    list_files,
    operation,
    placed_path,
    rooted,
)
from gateway.auth import Role
from gateway.dashboard.stream import WatchView
from gateway.errors import problem
from gateway.http.messages import (
    attend,
    disconnected,
    peer_of,
    read_call,
    read_item,
    record_headers,
    record_response,
    replay_headers,
    respond,
    result_response,
    while_connected,
)
from gateway.http.streaming import (
    EVENTS,
    NDJSON,
    FileResponse,
    LogStream,
    SessionStream,
    WatchStream,
    accepts_events,
)
from gateway.invocations.invocations import InvocationRequest, LiveInvocation
from gateway.invocations.record import Mode, Record
from gateway.store.store import LogRow
from gateway.trajectory_records import NOBODY
from manager.errors import CodedError, InvalidInput
from runtimes.sandbox.files import SandboxFiles
from tangram import types

#: What the caller may do, in the scope of a request that was let in.
ROLE = "tangram.role"
INPUT = Annotated[types.JsonObject, Meta(description="The input, as the function declares it")]
#: Seconds that a cancel waits for the processes to be gone before it answers 202.
CANCEL_WAIT_S = 5.0
TEXT_PLAIN = "text/plain; version=0.0.4; charset=utf-8"
TAR = "application/x-tar"

_ACCEPTED = links("/id", "id", "getInvocation", "getLogs", "cancelInvocation")
_FILE = {200: ResponseSpec(about="The bytes, or the entries", content={BYTES: BINARY, JSON: types.FileList})}


class HttpOperations:
    """The operations; the hottest first, as routes are tried in order."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._invocations = api.invocations

    # --- invocations

    @operation(
        "POST /v1/functions/{name}/invocations",
        "invocations",
        {
            200: ResponseSpec(
                about="It ended; X-Function-Error names the reason when the user's own work failed. "
                "mode=stream: records of the log, then of the result",
                content={JSON: types.Invocation, NDJSON: types.LogRecord, EVENTS: types.LogRecord},
                links=_ACCEPTED,
            ),
            202: json_answer("Accepted, and durable", types.Invocation, _ACCEPTED),
        },
        problems=(404, 409, 410, 429, 502, 504),
        body={JSON: INPUT},
    )
    async def invoke(
        self, request: Request, name: FunctionName, query: types.InvokeQuery, headers: types.CallHeaders, body: bytes
    ) -> Response:
        """Invoke a function.

        In one of the three modes.
        """
        mode, wait_s = Mode(query.mode), None if query.wait is None else self._api.wait_s(query.wait)
        call = read_call(headers, name, body, mode)
        if call.callback_url is not None:
            self._api.callbacks.check(call.callback_url)
        invocation = await self._invocations.invoke(call)
        replayed = invocation.replays(call)
        if mode is Mode.STREAM:
            return self._stream(request, invocation, replayed)
        if mode is Mode.ASYNC:
            await invocation.has_ended(wait_s or 0.0)
            return self._shown(invocation, replayed=replayed)
        if await attend(request, self._api, invocation, wait_s):
            if invocation.refusal is not None:
                raise invocation.refusal
            return result_response(invocation.record, replayed=replayed)
        await self._invocations.detach(invocation)
        return self._shown(invocation, 202, replayed=replayed)

    def _shown(self, invocation: LiveInvocation, status: int | None = None, *, replayed: bool = False) -> Response:
        """Return the record as it stands, by default with 200 if it has ended and 202 if it has not."""
        record = self._invocations.shown(invocation.record)
        return record_response(record, status or (200 if record.terminal else 202), replayed=replayed)

    def _stream(self, request: Request, invocation: LiveInvocation, replayed: bool) -> Response:
        record = invocation.record
        try:
            pages = self._api.logs.follow(record.seq, 0, record.task)
        except CodedError:  # its caller is told that, and attends no longer
            self._invocations.leave(invocation)
            raise

        def last(position: int) -> types.LogResult:
            return types.LogResult(
                stream="result", offset=position, invocation=self._invocations.shown(record).as_wire()
            )

        return LogStream(
            self._api.logs,
            pages,
            events=accepts_events(request.headers.get("accept")),
            position=0,
            about={"X-Invocation-Id": record.id, **replay_headers(replayed)},
            first=types.LogAccepted(
                stream="accepted", invocation=self._invocations.shown(record).as_wire(payload=False)
            ),
            last=last,
            gone=partial(self._invocations.leave, invocation),
        )

    @operation(
        "GET /v1/invocations/{id}",
        "invocations",
        {200: json_answer("The record", types.Invocation, links("/id", "id", "getLogs", "cancelInvocation"))},
        problems=(404,),
    )
    async def get_invocation(self, id: InvocationId, query: types.WaitQuery) -> Response:
        """The record of an invocation, which exists from the moment of acceptance."""
        invocation = await self._invocations.get(id)
        if query.wait is not None:
            await invocation.has_ended(self._api.wait_s(query.wait))
        return self._shown(invocation, 200)

    @operation(
        "GET /v1/invocations/{id}/logs",
        "invocations",
        {
            200: ResponseSpec(
                about="Records, then one of stream eof", content={NDJSON: types.LogRecord, EVENTS: types.LogRecord}
            )
        },
        problems=(404,),
    )
    async def get_logs(
        self, request: Request, id: InvocationId, query: types.LogQuery, headers: types.LogHeaders
    ) -> Response:
        """The log of an invocation: NDJSON, or Server-Sent Events by Accept.

        From ``offset`` on, or after the Last-Event-ID of a reconnecting event source; with ``follow`` to its end.
        """
        record = (await self._invocations.get(id)).record
        position = query.offset
        if position is None:
            position = int(headers.last_event_id) + 1 if headers.last_event_id else 0
        pages = (
            self._api.logs.follow(record.seq, position, record.task) if query.follow else self._pages(record, position)
        )

        def last(position: int) -> types.LogEnd:
            shown = self._invocations.shown(record).as_wire(payload=False)
            return types.LogEnd(
                stream="eof",
                offset=position,
                state=cast(types.State, record.state),
                reason=cast("types.Reason | None", record.reason),
                queue_ms=shown.queue_ms,
                overhead_ms=shown.overhead_ms,
                execution_ms=shown.execution_ms,
            )

        return LogStream(
            self._api.logs,
            pages,
            events=accepts_events(request.headers.get("accept")),
            position=position,
            about=record_headers(self._invocations.shown(record)),
            last=last,
        )

    async def _pages(self, record: Record, position: int) -> AsyncGenerator[list[LogRow], None]:
        while page := await self._api.logs.read(record.seq, position):
            position = page[-1].position + 1
            yield page

    @operation(
        "POST /v1/invocations/{id}/cancel",
        "invocations",
        {200: json_answer("It has ended", types.Invocation), 202: json_answer("It is being stopped", types.Invocation)},
        problems=(404, 409),
    )
    async def cancel_invocation(self, id: InvocationId) -> Response:
        """Cancel an invocation; 409 when it has ended already.

        503 where the gateway ends before that is done: the next one has the invocation, and knows of no cancel.
        """
        invocation = await self._invocations.cancel(id)
        await invocation.has_ended(CANCEL_WAIT_S)
        if invocation.refusal is not None and not invocation.record.terminal:
            raise invocation.refusal
        return self._shown(invocation)

    @operation(
        "POST /v1/invocations:batch",
        "invocations",
        "The verdicts, in the order of the calls",
        body={JSON: types.BatchRequest},
        required=True,
    )
    async def invoke_batch(self, query: types.BatchQuery, body: bytes) -> types.BatchAnswer:
        """Accept many calls with one commit; each has its own verdict."""
        limit_s = self._api.server.wait_max_s
        if query.timeout is not None:
            limit_s = min(limit_s, serialization.duration_s(query.timeout, "timeout"))
        items = serialization.loads_object(body).get("calls")
        if not isinstance(items, list):
            raise InvalidInput("calls must be a list", detail={"path": "$.calls"})
        self._api.check_batch(len(items))
        calls = [_read_call(item, f"$.calls[{index}]") for index, item in enumerate(items)]
        verdicts = await self._api.invoke_batch(calls, query.wait, limit_s)
        return types.BatchAnswer(results=tuple(map(self._verdict, calls, verdicts)))

    def _verdict(self, call: ReadCall, verdict: Verdict) -> types.BatchVerdict:
        if isinstance(verdict, CodedError):
            refusal = problem(verdict)
            return types.BatchVerdict(status=refusal.status, problem=refusal)
        replayed = isinstance(call, InvocationRequest) and verdict.replays(call)
        record = self._invocations.shown(verdict.record)
        return types.BatchVerdict(
            status=200 if record.terminal else 202,
            invocation=record.as_wire(),
            replayed=True if replayed else UNSET,
        )

    @operation(
        "POST /v1/dead-letters/{id}/redrive",
        "dead letters",
        {202: json_answer("Accepted, and durable", types.Invocation, _ACCEPTED)},
        problems=(404, 409, 429),
    )
    async def redrive_dead_letter(self, id: DeadId) -> Response:
        """Send a dead letter again, as an invocation of its own."""
        return self._shown(await self._api.dead_letters.redrive(id), 202)

    # --- trajectories

    @operation(
        "PUT /v1/trajectories/{id}",
        "trajectories",
        "It is ready",
        problems=(404, 409, 429),
        next_ones=links("/trajectory", "id", "getTrajectory", "putFile", "getFile", "endTrajectory"),
    )
    async def open_trajectory(
        self, request: Request, id: TrajectoryId, headers: types.OpeningHeaders, body: types.TrajectoryOpening
    ) -> types.TrajectoryInfo:
        """Make a trajectory's environment before its first action.

        Memory is held and the sandbox started.
        """
        if body.step is None:
            body = replaced(body, step=headers.step)

        async def undo(opened: types.TrajectoryInfo) -> None:
            if not opened.joined:
                await self._api.leases.release([id], body.holder or NOBODY)

        return await while_connected(
            self._api.open_trajectory(id, body, peer_of(request.scope)), disconnected(request.receive), undo
        )

    @operation(
        "POST /v1/trajectories/{id}/snapshots",
        "trajectories",
        "It is kept",
        status=201,
        problems=(404, 409, 413),
        next_ones=links("/snapshot", "id", "removeSnapshot"),
    )
    async def take_snapshot(self, request: Request, id: TrajectoryId, query: types.SnapshotQuery) -> types.SnapshotInfo:
        """Keep the files of a trajectory's sandbox.

        As they are when all that was asked of it before has ended; they stay where the trajectory lives.
        """

        async def undo(taken: types.SnapshotInfo) -> None:
            await self._api.remove_snapshot(taken.snapshot)

        taken = await while_connected(self._api.take_snapshot(id), disconnected(request.receive), undo)
        self._api.expect(query.holder, taken.snapshot, peer_of(request.scope), partial(undo, taken))
        return taken

    @operation(
        "POST /v1/trajectories/{id}/fork",
        "trajectories",
        "They are ready",
        status=201,
        problems=(404, 409, 429),
        next_ones=links("/trajectories/0/trajectory", "id", "getTrajectory"),
    )
    async def fork_trajectory(self, request: Request, id: TrajectoryId, body: types.ForkRequest) -> types.ForkAnswer:
        """Open trajectories that begin with the files of another.

        As they are now: all of them, or none and no snapshot.
        """

        async def undo(forked: types.ForkAnswer) -> None:
            await asyncio.gather(*(self._api.engine.end_trajectory(each.trajectory) for each in forked.trajectories))
            await self._api.remove_snapshot(forked.snapshot.snapshot)

        peer = peer_of(request.scope)
        forked = await while_connected(self._api.fork_trajectory(id, body, peer), disconnected(request.receive), undo)
        self._api.expect(body.holder, forked.snapshot.snapshot, peer, partial(undo, forked))
        return forked

    @operation("GET /v1/trajectories/{id}/files/{path:path}", "trajectories", _FILE, problems=(*FILE_PROBLEMS, 413))
    async def get_file(
        self, id: TrajectoryId, path: FilePath, query: types.FileReadQuery, headers: types.FileHeaders
    ) -> Response | types.FileList:
        """Read a file from the sandbox, or list a directory."""
        return await self._read(self._api.files_of(id, headers), rooted(path), query)

    @operation("GET /v1/trajectories/{id}/files", "trajectories", _FILE, problems=(*FILE_PROBLEMS, 413))
    async def get_file_at(
        self, id: TrajectoryId, query: types.FileReadAtQuery, headers: types.FileHeaders
    ) -> Response | types.FileList:
        """Read a file from the sandbox, or list a directory."""
        files = self._api.files_of(id, headers)
        return await self._read(files, placed_path(query.path, files.workdir), query)

    async def _read(self, files: SandboxFiles, path: str, query: types.FileReadQuery) -> Response | types.FileList:
        if query.list:
            return await list_files(files, path, query)
        async with AsyncExitStack() as opening:
            file = await opening.enter_async_context(self._api.read_file(files, path, query))
            return FileResponse(file.chunks(), opening.pop_all(), size_bytes=file.size_bytes)

    @operation(
        "GET /v1/trajectories/{id}/archive",
        "trajectories",
        {200: ResponseSpec(about="The tar", content={TAR: BINARY})},
        problems=(*FILE_PROBLEMS, 413),
    )
    async def get_archive(
        self, id: TrajectoryId, query: types.ArchiveReadQuery, headers: types.FileHeaders
    ) -> Response:
        """Pack a file or a directory of the sandbox into a tar."""
        async with AsyncExitStack() as opening:
            packing = self._api.read_archive(self._api.files_of(id, headers), query)
            chunks = await opening.enter_async_context(packing)
            return FileResponse(chunks, opening.pop_all(), TAR)

    # --- sessions

    @operation(
        "POST /v1/trajectories/{id}/sessions",
        "sessions",
        {
            201: json_answer(
                "It is accepted",
                types.Invocation,
                links("/id", "id", "attachSession", "writeSession", "steerSession", "cancelInvocation"),
            )
        },
        problems=(404, 409, 410, 429),
    )
    async def open_session(
        self, request: Request, id: TrajectoryId, headers: types.CallHeaders, body: types.SessionOpening
    ) -> Response:
        """Begin a command that somebody types to.

        In the trajectory's sandbox; it goes on without its caller.
        """
        call = read_call(headers, body.function, self._api.session_input(body), Mode.SYNC)
        call = replace(call, trajectory=id, detached=True)
        invocation = await self._api.begin_session(call)
        cancel = partial(self._invocations.cancel, invocation.record.id)
        self._api.expect(body.holder, invocation.record.id, peer_of(request.scope), cancel)
        return self._shown(invocation, 201, replayed=invocation.replays(call))

    @operation(
        "GET /v1/invocations/{id}/session",
        "sessions",
        {200: ResponseSpec(about="One record a line", content={NDJSON: types.SessionRecord})},
        problems=SESSION_PROBLEMS,
    )
    async def attach_session(self, id: InvocationId, query: types.SessionReadQuery) -> Response:
        """A session's output, from a byte on, to its end.

        Whoever was attached is detached.
        """
        invocation = await self._invocations.get(id)
        session = self._api.session_of(invocation)
        return SessionStream(invocation, session, query.offset, self._api.server.heartbeat_s)

    # --- the state

    @operation(
        "GET /readyz",
        "operation",
        {200: json_answer("It is", types.Health), 503: json_answer("It is not, and why", types.Health)},
        open=True,
    )
    async def get_readiness(self) -> Response:
        """Whether work is taken now."""
        health = self._api.readiness()
        return respond(health, 200 if health.status == READY else 503)

    @operation("GET /metrics", "operation", {200: ResponseSpec(about="The exposition", content={"text/plain": str})})
    async def get_metrics(self) -> Response:
        """Metrics in the Prometheus text format."""
        return Response(self._api.metrics.text(), media_type=TEXT_PLAIN)

    @operation(
        "GET /v1/watch",
        "scheduler",
        {200: ResponseSpec(about="hello, state, then ticks", content={EVENTS: str})},
    )
    async def watch(self, request: Request, query: types.WatchQuery) -> Response:
        """What the page shows, as Server-Sent Events of small changes.

        From ``since`` on where that is kept.
        """
        is_admin = request.scope[ROLE] is Role.ADMIN
        self._api.watch.check(is_admin=is_admin)
        packed = "gzip" in request.headers.get("accept-encoding", "")
        view = WatchView(query.bars, packed)
        return WatchStream(self._api.watch.follow(view, query.since, query.history, is_admin), packed)


def _read_call(item: object, path: str) -> ReadCall:
    """Return one call of a batch, or why it cannot be read."""
    try:
        return read_item(item, path)
    except InvalidInput as error:
        return error
