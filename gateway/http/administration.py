"""HTTP operations on the gateway itself: functions, configuration, resources, queue, health, metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway import wire
from gateway.http.call import read_query
from gateway.http.messages import read_body, respond
from gateway.http.operation import (
    Operation,
    OperationLink,
    PathParameter,
    ResponseSpec,
    json_answer,
    links,
)
from gateway.operations.lists import list_functions, list_queue
from gateway.operations.state import READY, get_function, get_readiness, get_resources
from gateway.services import Services
from tangram.types import (
    ActivityInfo,
    ConfigDiff,
    ConfigFiles,
    ConfigQuery,
    FunctionInfo,
    FunctionList,
    FunctionQuery,
    FunctionUpload,
    Health,
    JsonObject,
    Name,
    QueuePage,
    QueueQuery,
    ResourcesInfo,
)

TEXT_PLAIN = "text/plain; version=0.0.4; charset=utf-8"


class AdministrationOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def functions(self, request: Request) -> Response:
        return respond(FunctionList(functions=list_functions(self._services)))

    async def function(self, request: Request) -> Response:
        return respond(get_function(self._services, request.path_params["name"]))

    async def put_function(self, request: Request) -> Response:
        """Add or change one function, with the files of a handler; nothing in flight is dropped."""
        name = wire.name(request.path_params["name"], "function")
        asked = read_query(request, FunctionQuery)
        upload = wire.read(wire.loads_object(await read_body(request, self._services)), FunctionUpload, "$")
        return respond(await self._services.put(name, upload, asked.dry_run))

    async def remove_function(self, request: Request) -> Response:
        """Remove a function that was applied: no new invocations, nothing in flight is dropped."""
        name = wire.name(request.path_params["name"], "function")
        return respond(await self._services.remove(name))

    async def put_config(self, request: Request) -> Response:
        """Add and change functions and tasks: new invocations see the new ones, nothing in flight is dropped."""
        asked = read_query(request, ConfigQuery)
        document = await read_body(request, self._services)
        return respond(await self._services.configure(document, asked.dry_run, asked.prune))

    async def resources(self, request: Request) -> Response:
        return respond(get_resources(self._services))

    async def queue(self, request: Request) -> Response:
        """A page of what waits; a cursor stays good when the action that it names has left."""
        return respond(list_queue(self._services, read_query(request, QueueQuery)))

    async def activity(self, request: Request) -> Response:
        return respond(self._services.activity.whole_info())

    async def health(self, request: Request) -> Response:
        """The process lives."""
        return respond(Health(status="ok"))

    async def ready(self, request: Request) -> Response:
        """Whether work is taken now, and if not, why."""
        found = get_readiness(self._services)
        return respond(found, 200 if found.status == READY else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._services.metrics.text(), media_type=TEXT_PLAIN)

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        of_first = links("/functions/0/name", "name", "getFunction", "invoke")
        opening = OperationLink(
            operation="openTrajectory", parameters={}, body={"function": "$response.body#/functions/0/name"}
        )
        return [
            Operation(
                id="listFunctions",
                method="GET",
                path="/v1/functions",
                endpoint=self.functions,
                summary="Registered functions",
                tag="functions",
                answers={200: json_answer("All of them", FunctionList, (*of_first, opening))},
            ),
            Operation(
                id="getFunction",
                method="GET",
                path="/v1/functions/{name}",
                endpoint=self.function,
                summary="One function",
                tag="functions",
                parts=(PathParameter(name="name", about="A registered function", shape=Name),),
                answers={200: json_answer("The function", FunctionInfo)},
                problems=(404, 422),
            ),
            *self._change_rows(),
            Operation(
                id="putConfig",
                method="PUT",
                path="/v1/config",
                endpoint=self.put_config,
                summary="Apply a configuration without dropping anything in flight",
                tag="functions",
                query=ConfigQuery,
                admin=True,
                body={"application/yaml": JsonObject, "application/json": ConfigFiles},
                answers={200: json_answer("The differences", ConfigDiff)},
                problems=(413, 422),
            ),
            *self._scheduler_rows(),
            *self._probe_rows(),
        ]

    def _change_rows(self) -> list[Operation]:
        return [
            Operation(
                id="putFunction",
                method="PUT",
                path="/v1/functions/{name}",
                endpoint=self.put_function,
                summary="Add or change one function, with a handler's files; 409 for one of the server's own files",
                tag="functions",
                query=FunctionQuery,
                admin=True,
                parts=(PathParameter(name="name", about="The function", shape=Name),),
                body={"application/json": FunctionUpload},
                body_required=True,
                answers={200: json_answer("The differences", ConfigDiff)},
                problems=(409, 413, 422),
            ),
            Operation(
                id="removeFunction",
                method="DELETE",
                path="/v1/functions/{name}",
                endpoint=self.remove_function,
                summary="Remove a function that was applied; 409 for one of the server's own files",
                tag="functions",
                admin=True,
                parts=(PathParameter(name="name", about="A registered function", shape=Name),),
                answers={200: json_answer("The differences", ConfigDiff)},
                problems=(404, 409, 422),
            ),
        ]

    def _scheduler_rows(self) -> list[Operation]:
        return [
            Operation(
                id="getResources",
                method="GET",
                path="/v1/resources",
                endpoint=self.resources,
                summary="Pools, what is held of them, and the sandboxes",
                tag="scheduler",
                answers={200: json_answer("The present state", ResourcesInfo)},
            ),
            Operation(
                id="getActivity",
                method="GET",
                path="/v1/activity",
                endpoint=self.activity,
                summary="Rates and times of the last minute, failures of the last 15",
                tag="scheduler",
                answers={200: json_answer("The present state", ActivityInfo)},
            ),
            Operation(
                id="getQueue",
                method="GET",
                path="/v1/queue",
                endpoint=self.queue,
                summary="How many wait, and a page of them in order of service, with what each waits for",
                tag="scheduler",
                query=QueueQuery,
                answers={200: json_answer("A page", QueuePage, links("/next_cursor", "cursor", "getQueue"))},
                problems=(422,),
            ),
        ]

    def _probe_rows(self) -> list[Operation]:
        return [
            Operation(
                id="getHealth",
                method="GET",
                path="/healthz",
                endpoint=self.health,
                summary="Whether the process lives",
                tag="operation",
                answers={200: json_answer("It lives", Health)},
                open=True,
            ),
            Operation(
                id="getReadiness",
                method="GET",
                path="/readyz",
                endpoint=self.ready,
                summary="Whether work is taken now",
                tag="operation",
                answers={200: json_answer("It is", Health), 503: json_answer("It is not, and why", Health)},
                open=True,
            ),
            Operation(
                id="getMetrics",
                method="GET",
                path="/metrics",
                endpoint=self.metrics,
                summary="Metrics in the Prometheus text format",
                tag="operation",
                answers={200: ResponseSpec(about="The exposition", content={"text/plain": str})},
            ),
        ]
