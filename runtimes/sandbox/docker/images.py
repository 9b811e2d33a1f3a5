"""Images: pulled, made and committed."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker.errors
import docker.utils
import structlog

from manager.errors import CapacityExceeded, CodedError, InvalidConfig, NotFound, Unsupported
from manager.function import BASE_IMAGE, SandboxSpec
from runtimes.chores import end_chores
from runtimes.sandbox.docker.engine import AWAY, GATEWAY, DockerEngine, EngineConnection
from runtimes.sandbox.snapshots import LABEL, REPOSITORY, SnapshotSettings, SnapshotStore
from runtimes.sandbox.spec import ImageState, RegistryLogin, require_image_name
from runtimes.secrets import SECRET, Secrets

COMPONENT = "image"
#: What is built upon where debootstrap cannot be used; the Dockerfile's own default.
SOURCE = "debian:bookworm-slim"
PLACE = Path(__file__).with_name("base")
#: Seconds that a build may take as a whole, and that the engine may be silent.
BUILD_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseImageBuilder:
    """Builds one image on one engine, and tells ``say`` how far it is. Its methods block."""

    api: docker.APIClient
    say: Callable[[str], None]
    #: Makes the tree of a Debian and prints where it lies (base/debootstrap.sh).
    script: Path = PLACE / "debootstrap.sh"

    def present(self, name: str) -> bool:
        """Return whether the engine has the image; raises InvalidConfig for what is no name, Unsupported."""
        require_image_name(name)
        try:
            self.api.inspect_image(name)  # type: ignore[no-untyped-call]
        except docker.errors.ImageNotFound:
            return False
        except AWAY as error:
            raise _refused(error) from None
        return True

    def debootstrap(self, name: str) -> None:
        """Make it from Debian's packages; raises Unsupported where that fails."""
        repository, tag = _parted(name)
        words = ["sh", str(self.script), "--tarball"]
        try:
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=BUILD_S, check=True)
        except (subprocess.SubprocessError, OSError) as error:
            message = f"debootstrap could not make it ({error}): set TANGRAM_DEBIAN_MIRROR, or build with --from IMAGE"
            raise Unsupported(message, component=COMPONENT) from None
        tarball, *changes = done.stdout.splitlines()
        self.say(f"{name}: importing {tarball}")
        try:
            answer = self.api.import_image_from_file(tarball, repository=repository, tag=tag, changes=changes)
        except AWAY as error:
            raise _refused(error) from None
        if "errorDetail" in str(answer) or not self.present(name):
            raise Unsupported(f"the engine did not import {tarball}: {str(answer)[-500:]}", component=COMPONENT)

    def dockerfile(self, name: str, source: str) -> None:
        """Make it from ``source``, an image that the engine has or can pull.

        Raises InvalidConfig with what the engine says where that fails, Unsupported where it does not answer.
        """
        require_image_name(source)
        _parted(name)
        text = io.BytesIO((PLACE / "Dockerfile").read_bytes())
        try:
            events = self.api.build(
                fileobj=text, tag=name, buildargs={"BASE": source}, rm=True, forcerm=True, decode=True, timeout=BUILD_S
            )
            self._follow(name, source, events)
        except AWAY as error:
            raise _refused(error) from None

    def _follow(self, name: str, source: str, events: Iterable[Mapping[str, Any]]) -> None:
        """Tell each step and each tenth of a pull, and raise what the engine ends with."""
        deadline_s, layers = time.monotonic() + BUILD_S, PulledLayers()
        failed = output = ""
        for event in events:
            if "error" in event:
                failed = str(event["error"]).strip()  # the last event; read to the end, the connection is given back
            if time.monotonic() > deadline_s:
                raise InvalidConfig(f"{name} takes longer than {BUILD_S:g} s to build", component=COMPONENT)
            line = str(event.get("stream", "")).strip()
            if line.startswith("Step "):
                self.say(f"{name}: {line.splitlines()[0][:100]}")
            elif line and not line.startswith("--->"):
                output = line[-500:]
            if layers.take(event):
                self.say(f"{name}: {layers.tenths * 10} % of {source}, {layers.total_bytes} bytes")
        if failed:
            message = f"{name} could not be built from {source} ({failed})"
            raise InvalidConfig(f"{message}{': ' if output else ''}{output}", component=COMPONENT)


def build(name: str, *, source: str, host: str, again: bool, say: Callable[[str], None]) -> bool:
    """Build the image on the engine that ``host`` or the environment names; return whether it was not there yet.

    Without ``source`` by debootstrap where this machine is a Debian whose root we are, else from
    `SOURCE`. ``again`` builds what is there already. Raises InvalidConfig, Unsupported.
    """
    with closing(_opened(host)) as engine:
        builder = BaseImageBuilder(api=engine.api, say=say)
        if builder.present(name) and not again:
            return False
        if not source and _bootstraps():
            builder.debootstrap(name)
        else:
            builder.dockerfile(name, source or SOURCE)
        return True


def lacks(name: str, host: str) -> bool:
    """Return whether there is an engine, and it has not the image."""
    try:
        with closing(_opened(host)) as engine:
            return not BaseImageBuilder(api=engine.api, say=lambda message: None).present(name)
    except Unsupported:
        return False


def remedy(name: str) -> str:
    """Return the command that makes a base image of that name."""
    return "tangram images build" if name == BASE_IMAGE else f"tangram images build --tag {name}"


def _opened(host: str) -> EngineConnection:
    return EngineConnection.open(host, timeout_s=60.0, workers=1)


def _bootstraps() -> bool:
    return os.geteuid() == 0 and Path("/etc/debian_version").exists() and shutil.which("debootstrap") is not None


def _parted(name: str) -> tuple[str, str]:
    """Return repository and tag of an image that is to be made; raises InvalidConfig."""
    require_image_name(name)
    if "@" in name or name.startswith("sha256:"):
        raise InvalidConfig(f"{name!r} is a digest, which no new image can be given: name[:tag]", component=COMPONENT)
    return repository_of(name)


def _refused(error: Exception) -> Unsupported:
    return Unsupported(f"the engine did not build it: {error}", component=COMPONENT)


logger = structlog.get_logger("sandbox.images")

IMAGES_COMPONENT = "sandbox.images"
#: What a registry or the way to it says that may be otherwise soon.
TEMPORARY = re.compile(
    r"connection refused|no such host|timeout|i/o|\beof\b|toomanyrequests|\b50[234]\b|reset by", re.IGNORECASE
)
RETRY_S = 10.0
#: Failed pulls that are remembered.
FAILED_MAX = 256
HUB = "docker.io"


class ImageStore:
    """`runtimes.sandbox.spec.ImageKeeper` over one engine. Only what it has pulled it ever removes."""

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
            raise InvalidConfig("sandbox.image is needed for container sandboxes", component=IMAGES_COMPONENT)
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

    def pulls(self, image: str) -> bool:
        return image in self._pulls

    async def settled(self, images: Sequence[str], within_s: float) -> None:
        under_way = [self._pulls[image] for image in images if image in self._pulls]
        if under_way:
            await asyncio.wait(under_way, timeout=within_s)

    async def states(self) -> list[ImageState]:
        entry = dict(self._states)
        for each in await self._engine.call(self._engine.api.images):
            by_digest = [name for name in each.get("RepoDigests") or () if name in self._pulled]
            # Snapshots are listed by their trajectories, and nothing begins with a layer that has no name.
            tags = [tag for tag in each.get("RepoTags") or () if not tag.startswith((f"{REPOSITORY}:", "<none>"))]
            for name in (*tags, *by_digest):
                if entry.get(name) is None or entry[name].state != "pulling":
                    entry[name] = ImageState(image=name, state="present", size_bytes=int(each.get("Size", 0)))
        for name, state in entry.items():
            known = {name, name.removesuffix(":latest")}  # as it was asked for, and as the engine calls it
            request = next((each for each in known if each in self._pulled), name)
            state.pulled, state.used_s = request in self._pulled, self._pulled.get(request, (0, 0.0))[1]
            state.kept = any(each in self._functions or self._needed[each] > 0 for each in known)
        return [entry[name] for name in sorted(entry)]

    async def close(self) -> None:
        """Give up what is under way, and remember what was used."""
        await end_chores(*self._pulls.values())
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
        password = SECRET.sub(lambda match: self._secrets.get(match["name"]), login.password)
        return {"username": login.username, "password": password}

    def _receive(self, image: str, state: ImageState, login: dict[str, str] | None) -> None:
        """Pull in a thread, and tell how far it is."""
        deadline_s, layers = time.monotonic() + self._timeout_s, PulledLayers()
        repository, tag = repository_of(image)
        for event in self._engine.api.pull(repository, tag=tag, stream=True, decode=True, auth_config=login):
            if "error" in event:
                raise InvalidConfig(str(event["error"]), component=IMAGES_COMPONENT)
            if time.monotonic() > deadline_s:
                raise InvalidConfig(f"it takes longer than {self._timeout_s:g} s", component=IMAGES_COMPONENT)
            more = layers.take(event)
            state.done_bytes, state.total_bytes = layers.done_bytes, layers.total_bytes
            if more:
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
        f"run `docker pull {image}`, or `{remedy(image)}` for a base image; a registry that asks who "
        "pulls is named in sandbox.docker.registries"
    )
    output = error.message.replace(image, "").replace(repository_of(image)[0], "")  # whose own name may have such words
    if isinstance(error, CapacityExceeded) or TEMPORARY.search(output):
        return CapacityExceeded(message, component=IMAGES_COMPONENT, retry_after_s=RETRY_S)
    return InvalidConfig(message, component=IMAGES_COMPONENT)


class PulledLayers:
    """How far the layers of a pull are."""

    def __init__(self) -> None:
        #: By layer, bytes that have come and bytes of all of it.
        self._layers: dict[str, tuple[int, int]] = {}
        self.done_bytes = self.total_bytes = self.tenths = 0

    def take(self, event: Mapping[str, Any]) -> bool:
        """Take in what is said of one layer; return whether another tenth of all has come."""
        layer, detail = str(event.get("id", "")), event.get("progressDetail") or {}
        if event.get("status") == "Downloading" and "total" in detail:
            self._layers[layer] = (int(detail.get("current", 0)), int(detail["total"]))
        elif event.get("status") in ("Download complete", "Pull complete") and layer in self._layers:
            self._layers[layer] = (self._layers[layer][1], self._layers[layer][1])
        else:
            return False
        self.done_bytes, self.total_bytes = (sum(each) for each in zip(*self._layers.values(), strict=True))
        before, self.tenths = self.tenths, max(self.tenths, 10 * self.done_bytes // max(1, self.total_bytes))
        return self.tenths > before


def repository_of(image: str) -> tuple[str, str]:
    """Return repository and tag or digest of an image; without either the engine would pull all of them."""
    repository, tag = docker.utils.parse_repository_tag(image)
    return repository, tag or "latest"


def _labels(image: Mapping[str, Any]) -> Mapping[str, str]:
    return (image.get("Config") or {}).get("Labels") or {}


def _read(record: Path) -> dict[str, tuple[int, float]]:
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
        return {str(image): (int(size), float(used_s)) for image, (size, used_s) in known.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


class ContainerSnapshots(SnapshotStore):
    """The snapshots of one state directory on one engine, whose images have ``label`` as their gateway."""

    def __init__(
        self, engine: DockerEngine, images: ImageStore, root: Path, settings: SnapshotSettings, label: str
    ) -> None:
        super().__init__(
            root,
            settings,
            provider=lambda: "container",
            remove=lambda record: engine.remove_image(record.image),
        )
        self._engine, self._images, self._label = engine, images, label

    @asynccontextmanager
    async def image_of(self, spec: SandboxSpec) -> AsyncIterator[tuple[str, Mapping[str, str]]]:
        """Yield the image that a sandbox begins with and its labels: the spec's, or that of a snapshot.

        It is not removed meanwhile. Raises as `ImageStore.require`, or NotFound if the snapshot has gone.
        """
        if not spec.snapshot:
            async with self._images.held(spec.image) as labels:
                yield spec.image, labels
            return
        async with self.held(spec.snapshot) as record:
            yield record.image, await self._engine.image_labels(record.image)

    async def reap(self) -> None:
        """Remove snapshots that are too old, and images of ours that no snapshot is known to have."""
        await self.prune()
        # What becomes ready only after the engine was asked may not be in its answer yet.
        known, ready = self.ids, {each.id for each in self.all()}
        labels = await self._engine.labelled_images(LABEL, f"{GATEWAY}={self._label}")
        matches = {each[LABEL] for each in labels}
        for id in matches - known - self.ids:
            await self._engine.remove_image(f"{REPOSITORY}:{id}")
        await self.lose(matches, ready)
