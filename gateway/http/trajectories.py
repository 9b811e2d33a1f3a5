"""HTTP operations on trajectories and the files in their sandboxes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway import wire
from gateway.http.call import read_living
from gateway.http.messages import json_response, read_body
from gateway.http.operation import (
    EXPECT,
    FLAG,
    TEXT,
    Operation,
    ResponseSpec,
    json_answer,
    links,
    page_of,
    path_parameter,
    query,
    ref,
)
from gateway.services import Services
from gateway.store.store import LIST_LIMIT_MAX
from manager.engine import TRAJECTORIES_PAGE
from manager.errors import InvalidInput, NotFound
from runtimes.sandbox.command import FileStat
from runtimes.sandbox.sandbox import Sandbox

TRAJECTORY_ID = path_parameter("id", "Name of a trajectory, chosen by its caller")
FILE_PATH = path_parameter("path", "Path in the sandbox, from its root", TEXT)
BYTES = "application/octet-stream"


class TrajectoryOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def put(self, request: Request) -> Response:
        """Make the environment before the first action: memory is held and the sandbox started."""
        trajectory = wire.name(request.path_params["id"], "trajectory")
        body = wire.loads_object(await read_body(request, self._services))
        odd = body.keys() - {"function", "task"}
        if odd:
            raise InvalidInput(f"unknown field {min(odd)!r}", detail={"path": f"$.{min(odd)}"})
        function, task = body.get("function"), body.get("task", "default")
        if not isinstance(function, str) or not isinstance(task, str):
            raise InvalidInput("function must name a registered function", detail={"path": "$.function"})
        spec = self._services.functions.get(function)
        await self._services.engine.open_trajectory(trajectory, wire.name(task, "task"), spec)
        return json_response(self._view(trajectory))

    async def get(self, request: Request) -> Response:
        return json_response(self._view(wire.name(request.path_params["id"], "trajectory")))

    async def find(self, request: Request) -> Response:
        params = request.query_params
        limit = wire.whole(params.get("limit", str(TRAJECTORIES_PAGE)), "limit", minimum=1, maximum=LIST_LIMIT_MAX)
        cursor = wire.name(params["cursor"], "cursor") if "cursor" in params else None
        return json_response(self._services.engine.trajectories(limit, cursor))

    async def delete(self, request: Request) -> Response:
        """End it: its actions are cancelled, its sandbox removed, its memory given back."""
        trajectory = wire.name(request.path_params["id"], "trajectory")
        if not await self._services.engine.end_trajectory(trajectory):
            raise NotFound(f"no trajectory {trajectory!r}")
        return Response(status_code=204)

    async def put_file(self, request: Request) -> Response:
        """Write a file into the sandbox."""
        sandbox = self._sandbox(request)
        path = _path(request)
        data = await read_body(request, self._services, self._services.limits.file_bytes)
        mode = request.query_params.get("mode", "644")
        if not 3 <= len(mode) <= 4 or set(mode) - set("01234567"):
            raise InvalidInput("mode must be three or four octal digits", detail={"path": "mode"})
        await sandbox.write_file(path, data, mode=int(mode, 8))
        return json_response({"path": path, "size_bytes": len(data)}, 201)

    async def get_file(self, request: Request) -> Response:
        """A file's bytes, or with ``list=true`` a directory's entries."""
        sandbox = self._sandbox(request)
        path = _path(request)
        if wire.flag(request.query_params.get("list", "false"), "list"):
            return json_response({"files": [_entry(stat) for stat in await sandbox.list_files(path)]})
        data = await sandbox.read_file(path, limit_bytes=self._services.limits.file_bytes)
        return Response(data, media_type=BYTES)

    def _view(self, trajectory: str) -> dict[str, object]:
        view = self._services.engine.trajectory(trajectory)
        if view is None:
            raise NotFound(f"no trajectory {trajectory!r}")
        return view

    def _sandbox(self, request: Request) -> Sandbox:
        trajectory = wire.name(request.path_params["id"], "trajectory")
        if read_living(request):
            self._services.engine.check_trajectory(trajectory, living=True)
        sandbox = self._services.environments.get(trajectory)
        if sandbox is None:
            raise NotFound(f"trajectory {trajectory!r} has no sandbox: it starts with its first action, or by PUT")
        return sandbox

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        view = ref("Trajectory")
        opened = links("/trajectory", "id", "getTrajectory", "putFile", "getFile", "endTrajectory")
        open_body = {
            "type": "object",
            "required": ["function"],
            "properties": {"function": TEXT, "task": TEXT},
            "additionalProperties": False,
        }
        return [
            Operation(
                id="openTrajectory",
                method="PUT",
                path="/v1/trajectories/{id}",
                endpoint=self.put,
                summary="Make a trajectory's environment before its first action",
                tag="trajectories",
                parameters=(TRAJECTORY_ID,),
                body={"application/json": open_body},
                body_required=True,
                answers={200: json_answer("It is ready", view, opened)},
                problems=(404, 409, 413, 422, 429),
            ),
            Operation(
                id="listTrajectories",
                method="GET",
                path="/v1/trajectories",
                endpoint=self.find,
                summary="Living trajectories, by name",
                tag="trajectories",
                parameters=(*page_of("Trajectories"),),
                problems=(422,),
                answers={
                    200: json_answer(
                        "A page", ref("TrajectoryPage"), links("/trajectories/0/trajectory", "id", "getTrajectory")
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
                parameters=(TRAJECTORY_ID,),
                answers={200: json_answer("The trajectory", view)},
                problems=(404, 422),
            ),
            Operation(
                id="endTrajectory",
                method="DELETE",
                path="/v1/trajectories/{id}",
                endpoint=self.delete,
                summary="End a trajectory, with everything in it",
                tag="trajectories",
                parameters=(TRAJECTORY_ID,),
                answers={204: ResponseSpec(about="It has ended")},
                problems=(404, 422),
            ),
            *self._file_rows(),
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
                parameters=(TRAJECTORY_ID, FILE_PATH, EXPECT, query("mode", "Permission bits in octal")),
                body={BYTES: {"type": "string", "format": "binary"}},
                answers={201: json_answer("It is written", {"type": "object"})},
                problems=(404, 410, 413, 422, 502),
            ),
            Operation(
                id="getFile",
                method="GET",
                path="/v1/trajectories/{id}/files/{path:path}",
                endpoint=self.get_file,
                summary="Read a file from the sandbox, or list a directory",
                tag="trajectories",
                parameters=(TRAJECTORY_ID, FILE_PATH, EXPECT, query("list", "List the directory instead", FLAG)),
                answers={
                    200: ResponseSpec(
                        about="The bytes, or the entries",
                        content={BYTES: {"type": "string", "format": "binary"}, "application/json": {"type": "object"}},
                    )
                },
                problems=(404, 410, 413, 422, 502),
            ),
        ]


def _path(request: Request) -> str:
    """The path in the sandbox, absolute. It is the sandbox that keeps it inside."""
    path: str = request.path_params["path"]
    if "\0" in path or len(path) > 4096:
        raise InvalidInput("the path holds a NUL byte or is longer than 4096 characters", detail={"path": "path"})
    return "/" + path.lstrip("/")


def _entry(stat: FileStat) -> dict[str, object]:
    return {"path": stat.path, "size_bytes": stat.size_bytes, "directory": stat.directory, "mode": f"{stat.mode:o}"}
