"""Invocations: invoked one by one and in batches, attended, listed, cancelled and sent again; logs and sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from grpclib.server import Stream
from msgspec.structs import replace as replaced

from gateway import wire
from gateway.grpc.calls import ServiceCalls
from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.messages import (
    ended_badly,
    given,
    invocation,
    log_record,
    read_call,
    read_listing,
    read_request,
    seconds,
    tell_replay,
    verdict,
)
from gateway.grpc.pieces import portions
from gateway.grpc.sessions import SessionCall
from gateway.invocations.invocation import InvocationRequest, LiveInvocation
from gateway.invocations.logs import PAGE_RECORDS
from gateway.invocations.record import Mode, Record, cursor_of
from gateway.operations.batches import ReadCall, check_batch, invoke_batch
from gateway.operations.lists import list_invocations
from gateway.services import Services
from gateway.store.store import LogRow
from manager.errors import CodedError
from tangram.types.requests import BatchQuery, PurgeQuery

#: Seconds that a cancel waits for the processes to be gone before it answers.
CANCEL_WAIT_S = 5.0


class InvocationCalls(ServiceCalls):
    """The methods on invocations. A client that cancels its call, or whose deadline passes, leaves its invocation."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._invocations = services.invocations

    async def Invoke(self, stream: Stream[pb.InvokeRequest, pb.Invocation]) -> None:  # noqa: N802
        async with self._answering(stream):
            call = await self._call(stream, Mode.SYNC)
            async with self._attended(call) as started:
                await tell_replay(stream, started, call)
                await self._invocations.wait(started)
            if started.refusal is not None:
                raise started.refusal
            refused = ended_badly(started.record)
            if refused is None:
                await stream.send_message(self._shown(started.record))
            else:
                await stream.send_trailing_metadata(
                    status=refused.status, status_message=refused.message, metadata=_about(started.record)
                )

    async def InvokeStream(self, stream: Stream[pb.InvokeRequest, pb.InvokeEvent]) -> None:  # noqa: N802
        async with self._answering(stream):
            call = await self._call(stream, Mode.STREAM)
            async with self._attended(call) as started:
                record = started.record
                await tell_replay(stream, started, call)
                await stream.send_message(pb.InvokeEvent(accepted=self._shown(record)))
                async for page in self._services.logs.follow(record.seq, 0):
                    for message in _page(page):
                        await stream.send_message(pb.InvokeEvent(log=message))
            await stream.send_message(pb.InvokeEvent(ended=self._shown(record)))

    async def Submit(self, stream: Stream[pb.InvokeRequest, pb.Invocation]) -> None:  # noqa: N802
        async with self._answering(stream):
            call = await self._call(stream, Mode.ASYNC)
            started = await self._invocations.invoke(call)
            await tell_replay(stream, started, call)
            await stream.send_message(self._shown(started.record))

    async def Get(self, stream: Stream[pb.GetRequest, pb.Invocation]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            found = await self._invocations.get(request.id)
            await stream.send_message(self._shown(found.record))

    async def Wait(self, stream: Stream[pb.WaitRequest, pb.Invocation]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            found = await self._invocations.get(request.id)
            limit_s = self._services.bounds.wait_max_s
            await self._invocations.wait(found, min(limit_s, seconds(request.timeout_s, "timeout_s") or limit_s))
            await stream.send_message(self._shown(found.record))

    async def Cancel(self, stream: Stream[pb.CancelRequest, pb.Invocation]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            found = await self._invocations.cancel(request.id)
            await self._invocations.wait(found, CANCEL_WAIT_S)
            await stream.send_message(self._shown(found.record))

    async def TailLogs(self, stream: Stream[pb.TailLogsRequest, pb.LogRecord]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            record = (await self._invocations.get(request.id)).record
            position: int = request.offset
            async for page in self._pages(record.seq, position, request.follow):
                for message in _page(page):
                    await stream.send_message(message)
                position = page[-1].position + 1 if page else position
            await stream.send_message(pb.LogRecord(offset=position, stream="eof", data=record.state.value))
            await stream.send_trailing_metadata(metadata=_times(self._invocations.shown(record)))

    async def ListInvocations(  # noqa: N802
        self, stream: Stream[pb.ListInvocationsRequest, pb.InvocationPage]
    ) -> None:
        async with self._answering(stream):
            request = await read_request(stream)
            asked = read_listing(request)
            while True:
                page = await list_invocations(self._services, asked)
                cursor = cursor_of(page.before)
                shown = (invocation(self._invocations.shown(each), payload=False) for each in page.records)
                for part, is_last in portions(shown):
                    after = cursor if is_last else None
                    await stream.send_message(pb.InvocationPage(invocations=part, next_cursor=after))
                if cursor is None or not request.all:
                    return
                asked = replaced(asked, cursor=cursor)

    async def InvokeBatch(self, stream: Stream[pb.InvokeBatchRequest, pb.BatchVerdict]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            check_batch(self._services, len(request.calls))
            asked = wire.read(given(request, "wait"), BatchQuery)
            limit_s = self._services.bounds.wait_max_s
            timeout_s = min(limit_s, seconds(request.timeout_s, "timeout_s") or limit_s)
            calls = [self._call_or_refusal(each) for each in request.calls]
            verdicts = await invoke_batch(self._services, calls, asked.wait, timeout_s)
            for index, (call, told) in enumerate(zip(calls, verdicts, strict=True)):
                shown = None if isinstance(told, CodedError) else self._invocations.shown(told.record)
                await stream.send_message(verdict(index, told, call, shown))

    async def RedriveDeadLetter(  # noqa: N802
        self, stream: Stream[pb.RedriveDeadLetterRequest, pb.Invocation]
    ) -> None:
        async with self._answering(stream):
            again = await self._services.dead_letters.redrive((await read_request(stream)).id)
            await stream.send_message(self._shown(again.record))

    async def PurgeDeadLetter(  # noqa: N802
        self, stream: Stream[pb.PurgeDeadLetterRequest, pb.PurgeDeadLettersResponse]
    ) -> None:
        async with self._answering(stream):
            await self._services.dead_letters.purge((await read_request(stream)).id)
            await stream.send_message(pb.PurgeDeadLettersResponse(purged=1))

    async def PurgeDeadLetters(  # noqa: N802
        self, stream: Stream[pb.PurgeDeadLettersRequest, pb.PurgeDeadLettersResponse]
    ) -> None:
        async with self._answering(stream):
            request = await read_request(stream)
            asked = wire.read(given(request, "function"), PurgeQuery)
            purged = await self._services.dead_letters.purge_all(asked.function)
            await stream.send_message(pb.PurgeDeadLettersResponse(purged=purged))

    async def Session(self, stream: Stream[pb.SessionRequest, pb.SessionEvent]) -> None:  # noqa: N802
        async with self._answering(stream):
            await SessionCall(self._services, stream).serve()

    def _shown(self, record: Record) -> pb.Invocation:
        return invocation(self._invocations.shown(record))

    async def _call(self, stream: Stream[pb.InvokeRequest, Any], mode: Mode) -> InvocationRequest:
        return self._checked(await read_request(stream), mode)

    def _checked(self, message: pb.InvokeRequest, mode: Mode) -> InvocationRequest:
        call = read_call(message, mode)
        if call.callback_url is not None:
            self._services.callbacks.check(call.callback_url)
        return call

    def _call_or_refusal(self, message: pb.InvokeRequest) -> ReadCall:
        """Return one call of a batch, or why it cannot be read."""
        try:
            return self._checked(message, Mode.ASYNC)
        except CodedError as error:
            return error

    @asynccontextmanager
    async def _attended(self, call: InvocationRequest) -> AsyncIterator[LiveInvocation]:
        """The accepted invocation; leaving the block before its end leaves the invocation."""
        started = await self._invocations.invoke(call)
        try:
            yield started
        finally:
            self._invocations.leave(started)

    async def _pages(self, seq: int, position: int, follow: bool) -> AsyncIterator[list[LogRow]]:
        if follow:
            async for page in self._services.logs.follow(seq, position):
                yield page
            return
        while page := await self._services.logs.read(seq, position, PAGE_RECORDS):
            position = page[-1].position + 1
            yield page


def _page(page: list[LogRow]) -> list[pb.LogRecord]:
    """The page as messages; an empty one is a heartbeat."""
    return [log_record(row) for row in page] if page else [pb.LogRecord(stream="heartbeat")]


def _about(record: Record) -> dict[str, str]:
    """Trailers of an invocation that ended badly."""
    found = {"tangram-code": str(record.reason), "tangram-component": record.component}
    found |= {"tangram-invocation-id": record.id, **_times(record)}
    if record.retry_after_s is not None:
        found["retry-after-s"] = f"{record.retry_after_s:g}"
    return found


def _times(record: Record) -> dict[str, str]:
    """Trailers that say how its time divides, in milliseconds."""
    parts = {"queue": record.queue_s, "overhead": record.overhead_s, "execution": record.execution_s}
    return {f"tangram-{name}-ms": f"{1000 * (part_s or 0.0):.3f}" for name, part_s in parts.items()}
