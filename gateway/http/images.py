"""HTTP operations on container images: pulled ahead of a run, and what there is."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from gateway import wire
from gateway.http.call import read_query, read_wait_s
from gateway.http.messages import read_body, respond
from gateway.http.operation import Operation, json_answer
from gateway.services import Services
from manager.errors import Unsupported
from runtimes.sandbox.images import ImageKeeper, ImageState, require_image_name
from tangram.types import ImageInfo, ImageList, ImagesWanted
from tangram.types.requests import WaitQuery


class ImageOperations:
    """The endpoints, and their rows of the table."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def put(self, request: Request) -> Response:
        """Begin to pull images, and wait for them if that is asked; what became of each stands in the answer."""
        body = wire.loads_object(await read_body(request, self._services))
        wanted = wire.read(body, ImagesWanted, "$").images
        wait_s = read_wait_s(read_query(request, WaitQuery).wait, self._services.bounds.wait_max_s)
        keeper = self._keeper()
        for image in wanted:
            require_image_name(image)
        present = {state.image for state in await keeper.states() if state.state == "present"}
        for image in wanted:
            if not {image, f"{image}:latest"} & present:
                keeper.begin(image)
        if wait_s:
            await keeper.settled(wanted, wait_s)
        names = {name for image in wanted for name in (image, f"{image}:latest")}
        states = [state for state in await keeper.states() if state.image in names]
        return respond(_listed(states, keeper))

    async def get(self, request: Request) -> Response:
        """Every image of the engine that has a name, and those that are pulled or could not be."""
        keeper = self._keeper()
        return respond(_listed(await keeper.states(), keeper))

    def _keeper(self) -> ImageKeeper:
        if self._services.images is None:
            kind = self._services.sandboxes().kind
            raise Unsupported(f"this gateway's sandboxes are of kind {kind} and have no images; serve it with Docker")
        return self._services.images

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


def _listed(states: Sequence[ImageState], keeper: ImageKeeper) -> ImageList:
    found = tuple(
        ImageInfo(
            image=each.image,
            state=each.state,
            size_bytes=each.size_bytes,
            done_bytes=each.done_bytes,
            total_bytes=each.total_bytes,
            pulled=each.pulled,
            kept=each.kept,
            used_at=wire.instant(each.used_s) if each.used_s else None,
            problem=each.problem,
        )
        for each in states
    )
    return ImageList(images=found, bound_bytes=keeper.bound_bytes)
