"""HTTP operations on the machines: who they are and how, draining one, and what admits another."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway import wire
from gateway.http.messages import read_body, respond
from gateway.http.operation import Operation, PathParameter, json_answer, links
from gateway.services import Services
from tangram.types import DrainWanted, Name, NodeStatus, NodeStatusList, NodeTicket, TicketWanted


class NodeOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def find(self, request: Request) -> Response:
        return respond(self._services.machines.info())

    async def drain(self, request: Request) -> Response:
        """Nothing new starts there; the machine leaves when it is empty, or when its grace is over."""
        name = wire.name(request.path_params["name"], "node")
        body = await read_body(request, self._services)
        asked = wire.read(wire.loads_object(body), DrainWanted, "$") if body else DrainWanted()
        return respond(self._services.machines.drain(name, asked.why))

    async def issue(self, request: Request) -> Response:
        asked = wire.read(wire.loads_object(await read_body(request, self._services)), TicketWanted, "$")
        return respond(self._services.machines.ticket(asked.name), 201)

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        return [
            Operation(
                id="listNodes",
                method="GET",
                path="/v1/nodes",
                endpoint=self.find,
                summary="The machines that actions run on, and how they are",
                tag="operation",
                answers={200: json_answer("All of them", NodeStatusList, links("/nodes/0/node", "name", "drainNode"))},
            ),
            Operation(
                id="drainNode",
                method="POST",
                path="/v1/nodes/{name}/drain",
                endpoint=self.drain,
                summary="Have a machine take no new work, and leave when it is empty",
                tag="operation",
                admin=True,
                parts=(PathParameter(name="name", about="A machine that has joined", shape=Name),),
                body={"application/json": DrainWanted},
                answers={200: json_answer("How it is now", NodeStatus)},
                problems=(404, 413, 422),
            ),
            Operation(
                id="issueTicket",
                method="POST",
                path="/v1/node-tickets",
                endpoint=self.issue,
                summary="What admits one machine once, soon",
                tag="operation",
                admin=True,
                body={"application/json": TicketWanted},
                body_required=True,
                answers={201: json_answer("The ticket", NodeTicket)},
                problems=(409, 413, 422),
            ),
        ]
