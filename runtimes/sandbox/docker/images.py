"""Images of an engine: pulled when they are first needed, a few at once, and within a bound of the disk."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import structlog

from manager.errors import CapacityExceeded, CodedError, InvalidConfig, NotFound
from runtimes.api.secrets import SECRET, Secrets
from runtimes.sandbox.docker import base_image
from runtimes.sandbox.docker.engine import DockerEngine
from runtimes.sandbox.images import ImageState, RegistryLogin, require_image_name

logger = structlog.get_logger("sandbox.images")

COMPONENT = "sandbox.images"
#: What a registry or the way to it says that may be otherwise soon.
TEMPORARY = re.compile(
    r"connection refused|no such host|timeout|i/o|\beof\b|toomanyrequests|\b50[234]\b|reset by", re.IGNORECASE
)
RETRY_S = 10.0
#: Failed pulls that are remembered.
FAILED_MAX = 256
HUB = "docker.io"


class ImageStore:
    """`runtimes.sandbox.images.ImageKeeper` over one engine. Only what it has pulled it ever removes."""

    def __init__(
        self,
        engine: DockerEngine,
        *,
        record: Path,
        pulls: int = 2,
        bound_bytes: int = 0,
        timeout_s: float = 3600.0,
        logins: Mapping[str, RegistryLogin] | None = None,
        secrets: Secrets | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``record`` is the file that remembers what was pulled, and when it was used last."""
        self.bound_bytes = bound_bytes
        self._engine = engine
        self._record = record
        self._gate = asyncio.Semaphore(pulls)
        self._timeout_s = timeout_s
        self._logins = dict(logins or {})
        self._secrets = secrets or Secrets()
        self._wall = wall
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._states: dict[str, ImageState] = {}
        #: Images of functions, which are never removed, and how many need one just now.
        self._functions: set[str] = set()
        self._needed: Counter[str] = Counter()
        #: What was pulled: size and time of the last use.
        self._pulled: dict[str, tuple[int, float]] = _read(record)

    def keep(self, image: str) -> None:
        """Never remove an image: a function's."""
        self._functions.add(image)

    @asynccontextmanager
    async def held(self, image: str) -> AsyncIterator[Mapping[str, str]]:
        """Yield the labels of an image, pulled if need be, which is not removed meanwhile; raises as `require`."""
        self._needed[image] += 1
        try:
            labels = await self.require(image)
            if image in self._pulled:
                self._pulled[image] = (self._pulled[image][0], self._wall())
            yield labels
        finally:
            self._needed[image] -= 1

    async def require(self, image: str) -> Mapping[str, str]:
        if not image:
            raise InvalidConfig("sandbox.image is needed for container sandboxes", component=COMPONENT)
        require_image_name(image)
        with suppress(NotFound):
            return _labels(await self._engine.call(self._engine.api.inspect_image, image))
        self.begin(image)
        await asyncio.shield(self._pulls[image])
        return _labels(await self._engine.call(self._engine.api.inspect_image, image))

    def begin(self, image: str) -> None:
        require_image_name(image)
        if image not in self._pulls:
            self._states[image] = ImageState(image=image, state="pulling")
            task = self._pulls[image] = asyncio.create_task(self._pull(image))
            task.add_done_callback(lambda done: self._ended(image, done))

    async def settled(self, images: Sequence[str], within_s: float) -> None:
        under_way = [self._pulls[image] for image in images if image in self._pulls]
        if under_way:
            await asyncio.wait(under_way, timeout=within_s)

    async def states(self) -> list[ImageState]:
        found = dict(self._states)
        for each in await self._engine.call(self._engine.api.images):
            by_digest = [name for name in each.get("RepoDigests") or () if name in self._pulled]
            for name in (*(each.get("RepoTags") or ()), *by_digest):
                if found.get(name) is None or found[name].state != "pulling":
                    found[name] = ImageState(image=name, state="present", size_bytes=int(each.get("Size", 0)))
        for name, state in found.items():
            known = {name, name.removesuffix(":latest")}  # as it was asked for, and as the engine calls it
            asked = next((each for each in known if each in self._pulled), name)
            state.pulled, state.used_s = asked in self._pulled, self._pulled.get(asked, (0, 0.0))[1]
            state.kept = any(each in self._functions or self._needed[each] > 0 for each in known)
        return [found[name] for name in sorted(found)]

    async def close(self) -> None:
        """Give up what is under way, and remember what was used."""
        for task in self._pulls.values():
            task.cancel()
        await asyncio.gather(*self._pulls.values(), return_exceptions=True)
        await asyncio.to_thread(self._note)

    # --- inside

    async def _pull(self, image: str) -> None:
        async with self._gate:
            logger.info("pulling", image=image)
            try:
                await self._engine.call(self._receive, image, self._states[image], self._login(image))
                size_bytes = int((await self._engine.call(self._engine.api.inspect_image, image)).get("Size", 0))
            except CodedError as error:
                raise told_of_pull(image, error) from None
            self._pulled[image] = (size_bytes, self._wall())
            logger.info("pulled", image=image, size_bytes=size_bytes)
            await self._make_room(image)
            await asyncio.to_thread(self._note)

    def _ended(self, image: str, done: asyncio.Task[None]) -> None:
        del self._pulls[image]
        state = self._states.pop(image)
        error = None if done.cancelled() else done.exception()
        if isinstance(error, CodedError):
            logger.warning("not pulled", image=image, why=error.message)
            state.state, state.problem = "failed", error.message
            self._states[image] = state
            failed = [name for name, each in self._states.items() if each.state == "failed"]
            for name in failed[: max(0, len(failed) - FAILED_MAX)]:
                del self._states[name]

    def _login(self, image: str) -> dict[str, str] | None:
        """Return the credentials for an image's registry; None without."""
        first, slash, _ = image.partition("/")
        registry = first if slash and (set(first) & {".", ":"} or first == "localhost") else HUB
        login = self._logins.get(registry)
        if login is None:
            return None
        password = SECRET.sub(lambda found: self._secrets.get(found["name"]), login.password)
        return {"username": login.username, "password": password}

    def _receive(self, image: str, state: ImageState, login: dict[str, str] | None) -> None:
        """Pull in a thread, and tell how far it is."""
        deadline_s, tenth = time.monotonic() + self._timeout_s, 0
        layers: dict[str, tuple[int, int]] = {}
        repository, tag = _parted(image)
        for event in self._engine.api.pull(repository, tag=tag, stream=True, decode=True, auth_config=login):
            if "error" in event:
                raise InvalidConfig(str(event["error"]), component=COMPONENT)
            if time.monotonic() > deadline_s:
                raise InvalidConfig(f"it takes longer than {self._timeout_s:g} s", component=COMPONENT)
            _follow(layers, event)
            state.done_bytes = sum(done for done, _ in layers.values())
            state.total_bytes = sum(total for _, total in layers.values())
            if state.total_bytes and 10 * state.done_bytes // state.total_bytes > tenth:
                tenth = 10 * state.done_bytes // state.total_bytes
                logger.info("pulling", image=image, done_bytes=state.done_bytes, total_bytes=state.total_bytes)

    async def _make_room(self, pulled: str) -> None:
        """Remove what was used least recently until the rest fits; never what a container or a function has."""
        order = sorted(self._pulled, key=lambda image: self._pulled[image][1])
        for image in [each for each in order if each != pulled]:
            if not self.bound_bytes or sum(size for size, _ in self._pulled.values()) <= self.bound_bytes:
                return
            if image in self._functions or self._needed[image] or image in self._pulls:
                continue
            try:
                await self._engine.call(self._engine.api.remove_image, image)
            except NotFound:
                pass  # somebody else has removed it
            except CodedError:
                continue  # a container has it
            logger.info("removed, as it was used least recently", image=image, size_bytes=self._pulled[image][0])
            del self._pulled[image]
        if self.bound_bytes and sum(size for size, _ in self._pulled.values()) > self.bound_bytes:
            logger.warning("images in use take more than their bound", bound_bytes=self.bound_bytes)

    def _note(self) -> None:
        with suppress(OSError):
            part = self._record.with_suffix(".part")
            part.write_text(json.dumps(self._pulled), encoding="utf-8")
            part.replace(self._record)


def told_of_pull(image: str, error: CodedError) -> CodedError:
    """Return a failed pull as it is told, in the registry's words."""
    message = (
        f"the image {image!r} is not on this machine and cannot be pulled ({error.message}); "
        f"run `docker pull {image}`, or `{base_image.remedy(image)}` for a base image; a registry that asks who "
        "pulls is named in sandbox.docker.registries"
    )
    said = error.message.replace(image, "").replace(_parted(image)[0], "")  # whose own name may have such words
    if isinstance(error, CapacityExceeded) or TEMPORARY.search(said):
        return CapacityExceeded(message, component=COMPONENT, retry_after_s=RETRY_S)
    return InvalidConfig(message, component=COMPONENT)


def _follow(layers: dict[str, tuple[int, int]], event: Mapping[str, Any]) -> None:
    """Take in what is said of one layer."""
    layer, detail = str(event.get("id", "")), event.get("progressDetail") or {}
    if event.get("status") == "Downloading" and "total" in detail:
        layers[layer] = (int(detail.get("current", 0)), int(detail["total"]))
    elif event.get("status") in ("Download complete", "Pull complete") and layer in layers:
        layers[layer] = (layers[layer][1], layers[layer][1])


def _parted(image: str) -> tuple[str, str | None]:
    """Return repository and tag of an image; without tag or digest the engine would pull all of them."""
    if "@" in image:
        repository, _, digest = image.partition("@")
        return repository, digest
    repository, colon, tag = image.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (image, "latest")


def _labels(image: Mapping[str, Any]) -> Mapping[str, str]:
    return (image.get("Config") or {}).get("Labels") or {}


def _read(record: Path) -> dict[str, tuple[int, float]]:
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
        return {str(image): (int(size), float(used_s)) for image, (size, used_s) in known.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
