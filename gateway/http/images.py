"""HTTP operations on container images: pulled ahead of a run, and what there is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from gateway import wire
from gateway.http.call import read_query, read_wait_s
from gateway.http.messages import read_body, respond
from gateway.http.operation import Operation, json_answer
from gateway.operations.images import list_images, pull_images
from gateway.services import Services
from tangram.types import ImageList, ImagesWanted, WaitQuery


class ImageOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def put(self, request: Request) -> Response:
        """Begin to pull images, and wait for them if that is asked; what became of each stands in the answer."""
        body = wire.loads_object(await read_body(request, self._services))
        wanted = wire.read(body, ImagesWanted, "$").images
        wait_s = read_wait_s(read_query(request, WaitQuery).wait, self._services.bounds.wait_max_s)
        return respond(await pull_images(self._services, wanted, wait_s or 0.0))

    async def get(self, request: Request) -> Response:
        return respond(await list_images(self._services))

    def operations(self) -> list[Operation]:
        """The rows of the table."""
        return [
            Operation(
                id="listImages",
                method="GET",
                path="/v1/images",
                endpoint=self.get,
                summary="Container images, and how far pulls are",
                tag="images",
                answers={200: json_answer("All of them", ImageList)},
                problems=(422,),
            ),
            Operation(
                id="pullImages",
                method="PUT",
                path="/v1/images",
                endpoint=self.put,
                summary="Pull container images ahead of a run",
                tag="images",
                query=WaitQuery,
                body={"application/json": ImagesWanted},
                body_required=True,
                answers={200: json_answer("Those that were asked for", ImageList)},
                problems=(413, 422),
                admin=True,
            ),
        ]
