"""Container images: pulled ahead of a run, and what there is."""

from __future__ import annotations

from collections.abc import Sequence

from gateway import wire
from gateway.services import Services
from manager.errors import Unsupported
from runtimes.sandbox.spec import ImageKeeper, ImageState, require_image_name
from tangram.types import ImageInfo, ImageList


async def list_images(services: Services) -> ImageList:
    """Return every image of the engine that has a name, and those that are pulled or could not be."""
    keeper = _keeper(services)
    return _listed(await keeper.states(), keeper)


async def pull_images(services: Services, wanted: Sequence[str], wait_s: float) -> ImageList:
    """Begin to pull images, and wait for them so long; what became of each stands in the answer."""
    keeper = _keeper(services)
    for image in wanted:
        require_image_name(image)
    present = {state.image for state in await keeper.states() if state.state == "present"}
    for image in wanted:
        if not {image, f"{image}:latest"} & present:
            keeper.begin(image)
    if wait_s:
        await keeper.settled(wanted, wait_s)
    names = {name for image in wanted for name in (image, f"{image}:latest")}
    return _listed([state for state in await keeper.states() if state.image in names], keeper)


def _keeper(services: Services) -> ImageKeeper:
    if services.images is None:
        kind = services.sandboxes().kind
        raise Unsupported(f"this gateway's sandboxes are of kind {kind} and have no images; serve it with Docker")
    return services.images


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
