"""HTTP operations on the gateway itself: functions, configuration, resources, queue, tasks, health, metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway import wire
from gateway.http.messages import json_response, read_body
from gateway.http.operation import (
    FLAG,
    Operation,
    OperationLink,
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
from gateway.view import function_json
from manager.engine import QUEUE_PAGE

TEXT_PLAIN = "text/plain; version=0.0.4; charset=utf-8"
ANYTHING = {"type": "object"}


class AdministrationOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def functions(self, request: Request) -> Response:
        return json_response({"functions": [function_json(spec) for spec in self._services.functions.all()]})

    async def function(self, request: Request) -> Response:
        name = wire.name(request.path_params["name"], "function")
        shown = function_json(self._services.functions.get(name))
        return json_response({**shown, "learned": self._services.learned(name)})

    async def put_config(self, request: Request) -> Response:
        """Replace the functions and tasks: new invocations see the new ones, nothing in flight is dropped."""
        dry_run = wire.flag(request.query_params.get("dry_run", "false"), "dry_run")
        document = await read_body(request, self._services)
        return json_response(await self._services.configure(document, dry_run))

    async def resources(self, request: Request) -> Response:
        """Pools and who holds what, in plain words what the sandboxes are, and the model processes."""
        described = {"sandboxes": dict(self._services.sandboxes()), "models": dict(self._services.models())}
        return json_response({**self._services.engine.resources(), **described})

    async def queue(self, request: Request) -> Response:
        """A page of what waits; a cursor stays good when the action that it names has left."""
        params = request.query_params
        limit = wire.whole(params.get("limit", str(QUEUE_PAGE)), "limit", minimum=1, maximum=LIST_LIMIT_MAX)
        return json_response(self._services.engine.queue(limit, params.get("cursor")))

    async def tasks(self, request: Request) -> Response:
        return json_response({"tasks": self._services.engine.tasks()})

    async def health(self, request: Request) -> Response:
        """The process lives."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether work is taken now, and if not, why."""
        why = self._services.unready()
        return json_response({"status": "ready" if why is None else why}, 200 if why is None else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._services.metrics.text(), media_type=TEXT_PLAIN)

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        of_first = links("/functions/0/name", "name", "getFunction", "invoke")
        opening = OperationLink(
            operation="openTrajectory", parameters={}, body={"function": "$response.body#/functions/0/name"}
        )
        reads = [
            ("getResources", "/v1/resources", self.resources, "Pools, what is held of them, and the sandboxes"),
            ("getTasks", "/v1/tasks", self.tasks, "RL tasks: weights, bounds and use"),
        ]
        return [
            Operation(
                id="listFunctions",
                method="GET",
                path="/v1/functions",
                endpoint=self.functions,
                summary="Registered functions",
                tag="functions",
                answers={200: json_answer("All of them", ANYTHING, (*of_first, opening))},
            ),
            Operation(
                id="getFunction",
                method="GET",
                path="/v1/functions/{name}",
                endpoint=self.function,
                summary="One function",
                tag="functions",
                parameters=(path_parameter("name", "A registered function"),),
                answers={200: json_answer("The function", ref("Function"))},
                problems=(404, 422),
            ),
            Operation(
                id="putConfig",
                method="PUT",
                path="/v1/config",
                endpoint=self.put_config,
                summary="Apply a configuration without dropping anything in flight",
                tag="functions",
                parameters=(query("dry_run", "Only tell the differences", FLAG),),
                body={"application/yaml": ANYTHING, "application/json": ANYTHING},
                answers={200: json_answer("The differences", ANYTHING)},
                problems=(413, 422),
            ),
            *(
                Operation(
                    id=name,
                    method="GET",
                    path=path,
                    endpoint=endpoint,
                    summary=summary,
                    tag="scheduler",
                    answers={200: json_answer("The present state", ANYTHING)},
                )
                for name, path, endpoint, summary in reads
            ),
            Operation(
                id="getQueue",
                method="GET",
                path="/v1/queue",
                endpoint=self.queue,
                summary="How many wait, and a page of them in order of service, with what each waits for",
                tag="scheduler",
                parameters=(*page_of("Actions"),),
                answers={200: json_answer("A page", ref("QueuePage"), links("/next_cursor", "cursor", "getQueue"))},
                problems=(422,),
            ),
            *self._probe_rows(),
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
                answers={200: json_answer("It lives", ANYTHING)},
                open=True,
            ),
            Operation(
                id="getReadiness",
                method="GET",
                path="/readyz",
                endpoint=self.ready,
                summary="Whether work is taken now",
                tag="operation",
                answers={200: json_answer("It is", ANYTHING), 503: json_answer("It is not, and why", ANYTHING)},
                open=True,
            ),
            Operation(
                id="getMetrics",
                method="GET",
                path="/metrics",
                endpoint=self.metrics,
                summary="Metrics in the Prometheus text format",
                tag="operation",
                answers={200: ResponseSpec(about="The exposition", content={"text/plain": {"type": "string"}})},
            ),
        ]
