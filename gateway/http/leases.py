"""The HTTP operation by which a client says that it lives, for all of its trajectories at once."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway import wire
from gateway.http.messages import read_body, respond
from gateway.http.operation import Operation, json_answer
from gateway.services import Services
from tangram.types import LeaseAnswer, LeaseRequest


class LeaseOperations:
    """The endpoint, and its row of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def renew(self, request: Request) -> Response:
        """Hold the client's trajectories for a while longer."""
        asked = wire.read(wire.loads_object(await read_body(request, self._services)), LeaseRequest, "$")
        return respond(LeaseAnswer(gone=tuple(self._services.leases.renew(asked.trajectories, asked.lease_s))))

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        return [
            Operation(
                id="renewLeases",
                method="POST",
                path="/v1/leases",
                endpoint=self.renew,
                summary="Say that the client of these trajectories lives",
                tag="trajectories",
                body={"application/json": LeaseRequest},
                body_required=True,
                answers={200: json_answer("They are held for so long", LeaseAnswer)},
                problems=(413, 422),
            ),
        ]
