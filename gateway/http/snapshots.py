"""HTTP operations on snapshots of trajectories, and forks that begin with them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway import wire
from gateway.http.messages import read_body, respond
from gateway.http.operation import Operation, PathParameter, ResponseSpec, json_answer, links
from gateway.http.trajectories import TRAJECTORY_ID
from gateway.services import Services
from gateway.snapshots import fork_trajectory, list_snapshots, take_snapshot
from tangram.types import ForkAnswer, ForkRequest, SnapshotId, SnapshotInfo, SnapshotList

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
        body = wire.loads_object(await read_body(request, self._services))
        asked = wire.read(body, ForkRequest, "$")
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
