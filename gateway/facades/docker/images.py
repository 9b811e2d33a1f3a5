"""Images as the engine's clients ask for them: told, listed, and pulled by the gateway's own keeper."""

from __future__ import annotations

import asyncio
from fnmatch import fnmatchcase

import orjson

from gateway import wire
from gateway.facades.docker.exchange import ChunkSender, EngineExchange
from gateway.facades.docker.options import image_names
from gateway.facades.docker.shapes import NEVER, architecture, image_id
from gateway.facades.docker.unsaid import CONFIG
from gateway.services import Services
from manager.errors import InvalidInput, NotFound, Unsupported
from runtimes.sandbox.spec import ImageKeeper, ImageState, require_image_name

COMPONENT = "docker"
#: Seconds between two words on how far a pull is.
PROGRESS_S = 0.5
#: How often that may be said: a pull is bounded by `sandbox.docker`, this only bounds the loop.
PROGRESS_MAX = 200_000


class ContainerImages:
    """The endpoints."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def states(self) -> list[ImageState]:
        """Return the images that are here; those of the functions where sandboxes have no others."""
        if self._services.images is not None:
            return [each for each in await self._services.images.states() if each.state == "present"]
        specs = [each.sandbox for each in self._services.functions.all() if each.sandbox is not None]
        return [ImageState(image=name, state="present") for name in sorted({spec.image for spec in specs}) if name]

    async def list(self, exchange: EngineExchange) -> None:
        """Answer with all of them."""
        wanted = references(exchange.query.get("filters", ""))
        shown = [
            _listed(each)
            for each in await self.states()
            if not wanted or any(fnmatchcase(name, pattern) for name in image_names(each.image) for pattern in wanted)
        ]
        await exchange.answer(200, shown)

    async def inspect(self, exchange: EngineExchange, name: str) -> None:
        """Answer with one; raises NotFound."""
        await exchange.answer(200, _shape(await self.find(name)))

    async def find(self, name: str) -> ImageState:
        """Return an image by one of its names, its id or the beginning of it; raises NotFound."""
        names, states = set(image_names(name)), await self.states()
        found = next((each for each in states if names & set(image_names(each.image))), None)
        if found is None and len(name) >= 12:
            ids = (name, f"sha256:{name}")
            found = next((each for each in states if image_id(each.image).startswith(ids)), None)
        if found is None:
            raise NotFound(f"No such image: {name[:256]}", component=COMPONENT)
        return found

    async def pull(self, exchange: EngineExchange) -> None:
        """Pull one, and say how far that is."""
        asked = exchange.query.get("fromImage", "")
        if not asked or exchange.query.get("fromSrc"):
            told = "fromImage: only images of registries can be had, by name"
            raise InvalidInput(told, component=COMPONENT, detail={"path": "fromImage"})
        tag = exchange.query.get("tag", "")
        named = asked
        if tag:
            named = f"{asked}@{tag}" if ":" in tag else f"{asked}:{tag}"
        elif ":" not in asked.rpartition("/")[2] and "@" not in asked:
            named = f"{asked}:latest"
        require_image_name(named)
        keeper = self._services.images
        if keeper is None:
            kind = self._services.sandboxes().kind
            told = f"this gateway's sandboxes are of kind {kind} and have no images; serve it with Docker"
            raise Unsupported(told, component=COMPONENT)
        states = [each for each in await keeper.states() if each.state == "present"]
        here = {name for each in states for name in image_names(each.image)}
        async with exchange.streamed("application/json") as body:
            if not here.isdisjoint(image_names(named)):
                await _say(body, {"status": f"Status: Image is up to date for {named}"})
            else:
                await self._pull(keeper, named, tag or "latest", body)

    async def _pull(self, keeper: ImageKeeper, name: str, tag: str, body: ChunkSender) -> None:
        keeper.begin(name)
        state: ImageState | None = None
        await _say(body, {"status": f"Pulling from {name}", "id": tag})
        for _ in range(PROGRESS_MAX):
            await keeper.settled([name], PROGRESS_S)
            state = next((each for each in await keeper.states() if each.image in image_names(name)), None)
            if state is None or state.state != "pulling":
                break
            if state.total_bytes:
                detail = {"current": state.done_bytes, "total": state.total_bytes}
                await _say(body, {"status": "Downloading", "progressDetail": detail, "id": tag})
            await asyncio.sleep(0)
        if state is not None and state.state == "present":
            await _say(body, {"status": f"Status: Downloaded newer image for {name}"})
            return
        why = "it was not pulled in time" if state is None or state.state == "pulling" else state.problem
        await _say(body, {"errorDetail": {"message": why}, "error": why})


def references(text: str) -> list[str]:
    """Return the patterns of a filter ``reference``; raises InvalidInput for any other."""
    wanted = filters(text)
    unknown = sorted(wanted.keys() - {"reference"})
    if unknown:
        raise InvalidInput(f"filters: {unknown[0][:64]!r} is not known here: reference", component=COMPONENT)
    return wanted.get("reference", [])


def filters(text: str) -> dict[str, list[str]]:
    """Return the filters of a list, each as texts: they come as lists, or as objects of true; raises InvalidInput."""
    if not text:
        return {}
    found = {}
    for name, values in wire.loads_object(text.encode()).items():
        if isinstance(values, dict):
            values = [value for value, wanted in values.items() if wanted is True]
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise InvalidInput(f"filters: {name[:64]!r} must be a list of texts", component=COMPONENT)
        found[name] = values
    return found


async def _say(body: ChunkSender, told: object) -> None:
    await body.send(orjson.dumps(told) + b"\r\n")


def _listed(image: ImageState) -> dict[str, object]:
    digest = "@" in image.image
    return {
        "Id": image_id(image.image),
        "ParentId": "",
        "RepoTags": [] if digest else [image.image],
        "RepoDigests": [image.image] if digest else None,
        "Created": 0,
        "Size": image.size_bytes,
        "SharedSize": -1,
        "VirtualSize": image.size_bytes,
        "Labels": None,
        "Containers": -1,
    }


def _shape(image: ImageState) -> dict[str, object]:
    listed = _listed(image)
    kept = {name: listed[name] for name in ("Id", "RepoTags", "Size", "VirtualSize")}
    return {
        **kept,
        "RepoDigests": listed["RepoDigests"] or [],
        "Parent": "",
        "Comment": "",
        "Created": NEVER,
        "Author": "",
        "Config": {**CONFIG, "Env": None, "Image": "", "Labels": None},
        "Architecture": architecture(),
        "Os": "linux",
        "RootFS": {"Type": "layers", "Layers": []},
        "Metadata": {"LastTagTime": NEVER},
    }
