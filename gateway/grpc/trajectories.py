"""Trajectories: opened, listed, held and ended, their snapshots and forks, and the steps that they count for."""

from __future__ import annotations

from grpclib.server import Stream
from msgspec.structs import replace as replaced

from gateway import wire
from gateway.grpc.calls import ServiceCalls
from gateway.grpc.generated import tangram_pb2 as pb
from gateway.grpc.messages import (
    given,
    read_expectation,
    read_fork,
    read_opening,
    read_request,
    read_step,
    snapshot_message,
    step_message,
    trajectory_message,
)
from gateway.grpc.pieces import portions
from gateway.operations.lists import list_tasks, list_trajectories
from gateway.snapshots import fork_trajectory, list_snapshots, take_snapshot
from gateway.trajectories import open_trajectory, trajectory_info
from manager.errors import NotFound
from tangram.types import LeaseRequest
from tangram.types.requests import TrajectoryQuery


class TrajectoryCalls(ServiceCalls):
    """The methods on trajectories, snapshots, tasks and steps."""

    async def OpenTrajectory(self, stream: Stream[pb.OpenTrajectoryRequest, pb.Trajectory]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            info = await open_trajectory(self._services, request.trajectory, read_opening(request))
            await stream.send_message(trajectory_message(info))

    async def GetTrajectory(self, stream: Stream[pb.GetTrajectoryRequest, pb.Trajectory]) -> None:  # noqa: N802
        async with self._answering(stream):
            name = wire.name((await read_request(stream)).trajectory, "trajectory")
            await stream.send_message(trajectory_message(trajectory_info(self._services, name)))

    async def ListTrajectories(  # noqa: N802
        self, stream: Stream[pb.ListTrajectoriesRequest, pb.TrajectoryPage]
    ) -> None:
        async with self._answering(stream):
            request = await read_request(stream)
            asked = wire.read(given(request, "cursor", "limit"), TrajectoryQuery)
            while True:
                page = list_trajectories(self._services, asked)
                for part, is_last in portions(trajectory_message(each) for each in page.trajectories):
                    after = page.next_cursor if is_last else None
                    await stream.send_message(pb.TrajectoryPage(trajectories=part, next_cursor=after))
                if page.next_cursor is None or not request.all:
                    return
                asked = replaced(asked, cursor=page.next_cursor)

    async def EndTrajectory(  # noqa: N802
        self, stream: Stream[pb.EndTrajectoryRequest, pb.EndTrajectoryResponse]
    ) -> None:
        async with self._answering(stream):
            name = wire.name((await read_request(stream)).trajectory, "trajectory")
            if not await self._services.engine.end_trajectory(name):
                raise NotFound(f"no trajectory {name!r}")
            await stream.send_message(pb.EndTrajectoryResponse())

    async def RenewLeases(self, stream: Stream[pb.RenewLeasesRequest, pb.RenewLeasesResponse]) -> None:  # noqa: N802
        async with self._answering(stream):
            request = await read_request(stream)
            told = {"trajectories": list(request.trajectories), **given(request, "lease_s")}
            asked = wire.read(told, LeaseRequest)
            gone = self._services.leases.renew(asked.trajectories, asked.lease_s)
            await stream.send_message(pb.RenewLeasesResponse(gone=gone))

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
            self._services.functions.task(meant.task)
            step = await self._services.steps.tell(meant.task, meant.step, told.expected)
            await stream.send_message(step_message(step))

    async def ListSteps(self, stream: Stream[pb.ListStepsRequest, pb.ListStepsResponse]) -> None:  # noqa: N802
        async with self._answering(stream):
            task = wire.name((await read_request(stream)).task or "default", "task")
            found = [step_message(each) for each in self._services.steps.of(task)]
            await stream.send_message(pb.ListStepsResponse(steps=found))

    async def ListTasks(self, stream: Stream[pb.ListTasksRequest, pb.ListTasksResponse]) -> None:  # noqa: N802
        async with self._answering(stream):
            await read_request(stream)
            found = [pb.Task(task=each.task, json=wire.encode(each)) for each in list_tasks(self._services).tasks]
            await stream.send_message(pb.ListTasksResponse(tasks=found))
