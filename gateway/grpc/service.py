"""The service ``tangram.v1.Gateway``: the same operations as HTTP, the same errors, streams for logs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from traceback import clear_frames
from typing import Any

import structlog
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from gateway import wire
from gateway.functions import function_info
from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.generated.tangram_grpc import GatewayBase
from gateway.grpc.messages import (
    ended_badly,
    invocation,
    log_record,
    read_call,
    read_expectation,
    read_fork,
    read_opening,
    read_request,
    read_step,
    seconds,
    snapshot_message,
    status_error,
    step_message,
    tell_replay,
    trailers,
    trajectory_message,
)
from gateway.grpc.sessions import SessionCall
from gateway.invocations.invocation import InvocationRequest, LiveInvocation
from gateway.invocations.logs import PAGE_RECORDS
from gateway.invocations.record import Mode, Record
from gateway.services import Services
from gateway.snapshots import fork_trajectory, list_snapshots, take_snapshot
from gateway.store.store import LogRow
from gateway.trajectories import open_trajectory
from manager.errors import CodedError, NotFound, exhaustion

#: Seconds that a cancel waits for the processes to be gone before it answers.
CANCEL_WAIT_S = 5.0


class GatewayService(GatewayBase):
    """One method for each rpc. A client that cancels its call, or whose deadline passes, leaves its invocation."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._invocations = services.invocations
        self._log = structlog.get_logger("gateway.grpc")

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

    async def ListFunctions(  # noqa: N802
        self, stream: Stream[pb.ListFunctionsRequest, pb.ListFunctionsResponse]
    ) -> None:
        async with self._answering(stream):
            await read_request(stream)
            known = self._services.functions
            functions = [
                pb.Function(
                    name=spec.name,
                    runtime=spec.runtime,
                    revision=spec.revision,
                    description=spec.description,
                    json=wire.encode(
                        function_info(spec, readiness=known.readiness(spec.name), source=known.source(spec.name))
                    ),
                )
                for spec in known.all()
            ]
            await stream.send_message(pb.ListFunctionsResponse(functions=functions))

    async def ApplyConfig(self, stream: Stream[pb.ApplyConfigRequest, pb.ApplyConfigResponse]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            differences = await self._services.configure(request.document, request.dry_run, request.prune)
            await stream.send_message(pb.ApplyConfigResponse(json=wire.encode(differences)))

    async def OpenTrajectory(self, stream: Stream[pb.OpenTrajectoryRequest, pb.Trajectory]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            info = await open_trajectory(self._services, request.trajectory, read_opening(request))
            await stream.send_message(trajectory_message(info))

    async def EndTrajectory(  # noqa: N802
        self, stream: Stream[pb.EndTrajectoryRequest, pb.EndTrajectoryResponse]
    ) -> None:
        async with self._answering(stream):
            name = wire.name((await read_request(stream)).trajectory, "trajectory")
            if not await self._services.engine.end_trajectory(name):
                raise NotFound(f"no trajectory {name!r}")
            await stream.send_message(pb.EndTrajectoryResponse())

    async def TakeSnapshot(self, stream: Stream[pb.TakeSnapshotRequest, pb.Snapshot]) -> None:  # noqa: N802
        async with self._answering(stream):
            taken = await take_snapshot(self._services, (await read_request(stream)).trajectory)
            await stream.send_message(snapshot_message(taken))

    async def ForkTrajectory(  # noqa: N802
        self, stream: Stream[pb.ForkTrajectoryRequest, pb.ForkTrajectoryResponse]
    ) -> None:
        async with self._answering(stream):
            request = await read_request(stream)
            forked = await fork_trajectory(self._services, request.trajectory, read_fork(request))
            opened = [trajectory_message(each) for each in forked.trajectories]
            taken = snapshot_message(forked.snapshot)
            await stream.send_message(pb.ForkTrajectoryResponse(snapshot=taken, trajectories=opened))

    async def ListSnapshots(  # noqa: N802
        self, stream: Stream[pb.ListSnapshotsRequest, pb.ListSnapshotsResponse]
    ) -> None:
        async with self._answering(stream):
            await read_request(stream)
            found = [snapshot_message(each) for each in list_snapshots(self._services).snapshots]
            await stream.send_message(pb.ListSnapshotsResponse(snapshots=found))

    async def RemoveSnapshot(  # noqa: N802
        self, stream: Stream[pb.RemoveSnapshotRequest, pb.RemoveSnapshotResponse]
    ) -> None:
        async with self._answering(stream):
            await self._services.snapshots.remove((await read_request(stream)).snapshot)
            await stream.send_message(pb.RemoveSnapshotResponse())

    async def TellStep(self, stream: Stream[pb.TellStepRequest, pb.Step]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            meant, told = read_step(request), read_expectation(request)
            step = await self._services.steps.tell(meant.task, meant.step, told.expected)
            await stream.send_message(step_message(step))

    async def ListSteps(self, stream: Stream[pb.ListStepsRequest, pb.ListStepsResponse]) -> None:  # noqa: N802
        async with self._answering(stream):
            task = wire.name((await read_request(stream)).task or "default", "task")
            found = [step_message(each) for each in self._services.steps.of(task)]
            await stream.send_message(pb.ListStepsResponse(steps=found))

    async def Session(self, stream: Stream[pb.SessionRequest, pb.SessionEvent]) -> None:  # noqa: N802
        async with self._answering(stream):
            await SessionCall(self._services, stream).serve()

    def _shown(self, record: Record) -> pb.Invocation:
        return invocation(self._invocations.shown(record))

    async def _call(self, stream: Stream[pb.InvokeRequest, Any], mode: Mode) -> InvocationRequest:
        return read_call(await read_request(stream), mode)

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

    @asynccontextmanager
    async def _answering(self, stream: Stream[Any, Any]) -> AsyncIterator[None]:
        """Turn what fails into a status with its code in the trailers."""
        try:
            yield
        except CodedError as error:
            self._services.metrics.refused("grpc", error.code)
            clear_frames(error.__traceback__)  # as in `gateway.http.app`
            status = status_error(error)
            await stream.send_trailing_metadata(
                status=status.status, status_message=status.message, metadata=trailers(error)
            )
        except (GRPCError, TimeoutError):
            raise
        except Exception as error:
            if short := exhaustion(error, "grpc"):
                raise status_error(short) from error
            self._log.exception("a call failed", error=str(error))
            self._services.metrics.refused("grpc", "internal")
            raise GRPCError(Status.INTERNAL, "internal: a fault of the gateway: its log tells more") from error


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
