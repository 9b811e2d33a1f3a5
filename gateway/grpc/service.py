"""The service ``tangram.v1.Gateway``: what a trainer calls, by the operations and with the errors of HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from grpclib.server import Stream

from gateway import serialization
from gateway.api import Api, ReadCall, bounded_chunks, file_conflicts, placed_path
from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.generated.tangram_grpc import GatewayBase
from gateway.grpc.messages import (
    end_trailers,
    ended_badly,
    given,
    invocation_message,
    log_messages,
    problem_message,
    read_call,
    read_message,
    read_opening,
    read_request,
    seconds,
    time_trailers,
)
from gateway.invocations.invocations import InvocationRequest, LiveInvocation
from gateway.invocations.logs import PAGE_RECORDS
from gateway.invocations.record import Mode, Record
from gateway.store.store import LogRow
from manager.errors import CodedError, InvalidInput
from tangram.types import BatchQuery, FileHeaders, FileReadAtQuery, FileWriteAtQuery

COMPONENT = "grpc"
#: Seconds that a cancel waits for the processes to be gone before it answers.
CANCEL_WAIT_S = 5.0
#: Bytes of a file that one message sends.
FILE_PIECE_BYTES = 256 * 2**10


class GatewayService(GatewayBase):
    """One method for each rpc. A client that cancels its call, or whose deadline passes, leaves its invocation."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._invocations = api.invocations

    # --- invocations

    async def Invoke(self, stream: Stream[pb.InvokeRequest, pb.Invocation]) -> None:  # noqa: N802
        call = self._checked(await read_request(stream), Mode.SYNC)
        async with self._attended(call) as started:
            await _send_replay(stream, started, call)
            await started.has_ended(None)
        if started.refusal is not None:
            raise started.refusal
        refused = ended_badly(started.record)
        if refused is None:
            await stream.send_message(self._shown(started.record))
        else:
            await stream.send_trailing_metadata(
                status=refused.status, status_message=refused.message, metadata=end_trailers(started.record)
            )

    async def InvokeStream(self, stream: Stream[pb.InvokeRequest, pb.InvokeEvent]) -> None:  # noqa: N802
        call = self._checked(await read_request(stream), Mode.STREAM)
        async with self._attended(call) as started:
            record = started.record
            await _send_replay(stream, started, call)
            await stream.send_message(pb.InvokeEvent(accepted=self._shown(record)))
            async for page in self._api.logs.follow(record.seq, 0, record.task):
                for message in log_messages(page):
                    await stream.send_message(pb.InvokeEvent(log=message))
        await stream.send_message(pb.InvokeEvent(ended=self._shown(record)))

    async def Submit(self, stream: Stream[pb.InvokeRequest, pb.Invocation]) -> None:  # noqa: N802
        call = self._checked(await read_request(stream), Mode.ASYNC)
        started = await self._invocations.invoke(call)
        await _send_replay(stream, started, call)
        await stream.send_message(self._shown(started.record))

    async def InvokeBatch(self, stream: Stream[pb.InvokeBatchRequest, pb.BatchVerdict]) -> None:  # noqa: N802
        request = await read_request(stream)
        self._api.check_batch(len(request.calls))
        query = serialization.read(given(request, "wait"), BatchQuery)
        timeout_s = self._wait_s(request.timeout_s)
        calls = [self._call_or_refusal(each) for each in request.calls]
        verdicts = await self._api.invoke_batch(calls, query.wait, timeout_s)
        for index, (call, outcome) in enumerate(zip(calls, verdicts, strict=True)):
            if isinstance(outcome, CodedError):
                verdict = pb.BatchVerdict(index=index, problem=problem_message(outcome))
            else:
                replayed = isinstance(call, InvocationRequest) and outcome.replays(call)
                verdict = pb.BatchVerdict(index=index, invocation=self._shown(outcome.record), replayed=replayed)
            await stream.send_message(verdict)

    async def Get(self, stream: Stream[pb.GetRequest, pb.Invocation]) -> None:  # noqa: N802
        invocation = await self._invocations.get((await read_request(stream)).id)
        await stream.send_message(self._shown(invocation.record))

    async def Wait(self, stream: Stream[pb.WaitRequest, pb.Invocation]) -> None:  # noqa: N802
        request = await read_request(stream)
        invocation = await self._invocations.get(request.id)
        await invocation.has_ended(self._wait_s(request.timeout_s))
        await stream.send_message(self._shown(invocation.record))

    async def Cancel(self, stream: Stream[pb.CancelRequest, pb.Invocation]) -> None:  # noqa: N802
        invocation = await self._invocations.cancel((await read_request(stream)).id)
        await invocation.has_ended(CANCEL_WAIT_S)
        if invocation.refusal is not None and not invocation.record.terminal:
            raise invocation.refusal
        await stream.send_message(self._shown(invocation.record))

    async def TailLogs(self, stream: Stream[pb.TailLogsRequest, pb.LogRecord]) -> None:  # noqa: N802
        request = await read_request(stream)
        record = (await self._invocations.get(request.id)).record
        position: int = request.offset
        async for page in self._pages(record, position, request.follow):
            for message in log_messages(page):
                await stream.send_message(message)
            position = page[-1].position + 1 if page else position
        await stream.send_message(pb.LogRecord(offset=position, stream="eof", data=record.state.value))
        await stream.send_trailing_metadata(metadata=time_trailers(self._invocations.shown(record)))

    def _shown(self, record: Record) -> pb.Invocation:
        return invocation_message(self._invocations.shown(record))

    def _checked(self, message: pb.InvokeRequest, mode: Mode) -> InvocationRequest:
        call = read_call(message, mode)
        if call.callback_url is not None:
            self._api.callbacks.check(call.callback_url)
        return call

    def _call_or_refusal(self, message: pb.InvokeRequest) -> ReadCall:
        """Return one call of a batch, or why it cannot be read."""
        try:
            return self._checked(message, Mode.ASYNC)
        except CodedError as error:
            return error

    def _wait_s(self, asked_s: float) -> float:
        """Return how long is waited for an end; raises InvalidInput."""
        limit_s = self._api.server.wait_max_s
        return min(limit_s, seconds(asked_s, "timeout_s") or limit_s)

    @asynccontextmanager
    async def _attended(self, call: InvocationRequest) -> AsyncIterator[LiveInvocation]:
        """The accepted invocation; leaving the block before its end leaves the invocation."""
        started = await self._invocations.invoke(call)
        try:
            yield started
        finally:
            self._invocations.leave(started)

    async def _pages(self, record: Record, position: int, follow: bool) -> AsyncIterator[list[LogRow]]:
        if follow:
            async for page in self._api.logs.follow(record.seq, position, record.task):
                yield page
            return
        while page := await self._api.logs.read(record.seq, position, PAGE_RECORDS):
            position = page[-1].position + 1
            yield page

    # --- trajectories and their files

    async def OpenTrajectory(self, stream: Stream[pb.OpenTrajectoryRequest, pb.Trajectory]) -> None:  # noqa: N802
        request = await read_request(stream)
        trajectory = await self._api.open_trajectory(request.trajectory, read_opening(request))
        await stream.send_message(
            pb.Trajectory(trajectory=trajectory.trajectory, json=serialization.encode(trajectory))
        )

    async def EndTrajectory(  # noqa: N802
        self, stream: Stream[pb.EndTrajectoryRequest, pb.EndTrajectoryResponse]
    ) -> None:
        name = serialization.name((await read_request(stream)).trajectory, "trajectory")
        await self._api.end_trajectory(name)
        await stream.send_message(pb.EndTrajectoryResponse())

    async def WriteFile(self, stream: Stream[pb.WriteFileRequest, pb.FileWritten]) -> None:  # noqa: N802
        first = await read_request(stream)
        if first.WhichOneof("request") != "target":
            raise InvalidInput("the first message is the target, and this is none", component=COMPONENT)
        target = first.target
        query = serialization.read(given(target, "path", "mode", "user"), FileWriteAtQuery)
        name, headers = _target(target)
        data = bounded_chunks(
            _pieces(stream),
            self._api.server.file_limit_bytes,
            "server.file_limit",
            self._api.server.body_timeout_s,
            COMPONENT,
        )
        written = await self._api.put_file_at(name, query, headers, data)
        await stream.send_message(pb.FileWritten(path=written.path, size_bytes=written.size_bytes))

    async def ReadFile(self, stream: Stream[pb.ReadFileRequest, pb.FilePiece]) -> None:  # noqa: N802
        request = await read_request(stream)
        query = serialization.read(given(request, "path", "user"), FileReadAtQuery)
        files = self._api.files_of(*_target(request))
        path = placed_path(query.path, files.workdir)
        with file_conflicts():
            async with self._api.read_file(files, path, query) as file:
                size_bytes = file.size_bytes
                async for chunk in file.chunks():
                    for start in range(0, len(chunk), FILE_PIECE_BYTES):
                        data = chunk[start : start + FILE_PIECE_BYTES]
                        await stream.send_message(pb.FilePiece(data=data, size_bytes=size_bytes))
                        size_bytes = None
                if size_bytes is not None:  # of an empty one no piece has told it
                    await stream.send_message(pb.FilePiece(size_bytes=size_bytes))


async def _send_replay(stream: Stream[Any, Any], started: LiveInvocation, call: InvocationRequest) -> None:
    """Say at once that a call with a known key ran nothing."""
    if started.replays(call):
        await stream.send_initial_metadata(metadata={"tangram-idempotent-replay": "true"})


def _target(message: pb.FileTarget | pb.ReadFileRequest) -> tuple[str, FileHeaders]:
    """Return the trajectory whose files are meant, and whether it must live."""
    name = serialization.name(message.trajectory, "trajectory")
    return name, FileHeaders(expect="living" if message.living else None)


async def _pieces(stream: Stream[pb.WriteFileRequest, pb.FileWritten]) -> AsyncIterator[bytes]:
    """Yield the pieces of an upload; raises InvalidInput for a message that is none."""
    while (message := await read_message(stream)) is not None:
        if message.WhichOneof("request") != "data":
            raise InvalidInput("after the target every message is data, and this is none", component=COMPONENT)
        yield bytes(message.data)
