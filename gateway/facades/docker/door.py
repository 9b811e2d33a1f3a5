"""The Docker Engine API: the routes by which the docker CLI, docker-py and those who use them run commands."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ClassVar

from gateway import wire
from gateway.config.facades import DockerFacade
from gateway.facades.calls import MARGIN_S, ForeignCalls
from gateway.facades.docker.archives import ContainerFiles
from gateway.facades.docker.containers import Container
from gateway.facades.docker.exchange import API_VERSION, API_VERSION_MIN, EngineExchange
from gateway.facades.docker.execs import ContainerExecs
from gateway.facades.docker.images import ContainerImages, filters
from gateway.facades.docker.lifecycle import ContainerLife
from gateway.facades.docker.options import image_names
from gateway.facades.docker.shapes import (
    architecture,
    container_shape,
    info_shape,
    listed_shape,
    shown_version,
    version_shape,
)
from gateway.facades.docker.streams import attach, either, flag, send_logs, version_of
from gateway.services import Services
from manager.errors import Conflict, InvalidInput, NotFound, Unsupported
from runtimes.sandbox.session import SIGNALS

COMPONENT = "docker"
#: Seconds after which docker-py gives up; the docker CLI, and other Go clients, wait for ever.
PYTHON_CLIENT_S, OTHER_CLIENT_S = 60.0, 3600.0
#: Seconds between the words of a stop and its force, unless the client says how many.
STOP_S = 10.0
STOP_MAX_S = 3600.0
#: Filters of a list, and the values of its status: those that no container here has are asked for in vain.
FILTERS = ("id", "name", "label", "status", "ancestor")
STATUSES = ("created", "restarting", "running", "removing", "paused", "exited", "dead")
#: What of another kind is looked for by name, where a client does not know what a name is of.
OTHER_KINDS = frozenset({"networks", "volumes", "plugins", "services", "tasks", "nodes", "secrets", "configs"})
WAITED = ("not-running", "next-exit", "removed")
#: What is known of the engine's API and not done here, and why.
REFUSED = {
    "events": "no events are told: ask for what is to be known",
    "build": "no images are built here: build one with the engine, and pull it",
    "commit": "no image is made of a container: fork its trajectory over the gateway's own API",
    "networks": "networks are the function's: sandbox.network",
    "volumes": "there are no volumes: copy files by docker cp",
    "auth": "logins are the gateway's: sandbox.docker.registries",
    "swarm": "there is no swarm",
    "plugins": "there are no plugins",
    "system": "nothing is to be pruned or counted here",
    "session": "no images are built here",
    "grpc": "no images are built here",
}

Endpoint = Callable[[EngineExchange, "re.Match[str]"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class EngineRoute:
    """One method on one path; its query may have these parameters, and others only if they are empty or false."""

    method: str
    path: str
    endpoint: Endpoint
    query: tuple[str, ...] = ()

    @property
    def pattern(self) -> re.Pattern[str]:
        """What the path looks like; an image's name may have slashes."""
        text = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", self.path)
        return re.compile(text.replace("{*name}", "(?P<name>.+)"))


class DockerEngineApi:
    """The door behind its socket."""

    name: ClassVar[str] = "docker"

    def __init__(self, services: Services, calls: ForeignCalls, settings: DockerFacade) -> None:
        self._services = services
        self._settings = settings
        self._life = ContainerLife(services, calls, settings)
        self._images = ContainerImages(services)
        self._files = ContainerFiles(services, self._life)
        self._execs = ContainerExecs(services, calls, self._life)
        self._table = self.routes()
        self._routes = [(route, route.pattern) for route in self._table]

    def routes(self) -> tuple[EngineRoute, ...]:
        """Return every route."""
        container, command = "/containers/{id}", "/exec/{id}"
        archive = f"{container}/archive"
        return (
            EngineRoute("GET", "/_ping", self.ping),
            EngineRoute("HEAD", "/_ping", self.ping),
            EngineRoute("GET", "/version", self.version),
            EngineRoute("GET", "/info", self.info),
            EngineRoute("POST", "/containers/create", self.create, ("name", "platform")),
            EngineRoute("GET", "/containers/json", self.list, ("all", "limit", "filters", "size", "trunc_cmd")),
            EngineRoute("GET", f"{container}/json", self.inspect, ("size",)),
            EngineRoute("POST", f"{container}/start", self.start, ("detachKeys",)),
            EngineRoute("POST", f"{container}/stop", self.stop, ("t",)),
            EngineRoute("POST", f"{container}/restart", self.restart, ("t",)),
            EngineRoute("POST", f"{container}/rename", self.rename, ("name",)),
            EngineRoute("POST", f"{container}/kill", self.kill, ("signal",)),
            EngineRoute("POST", f"{container}/wait", self.wait, ("condition",)),
            EngineRoute(
                "POST",
                f"{container}/attach",
                self.attach,
                ("stream", "stdin", "stdout", "stderr", "logs", "detachKeys"),
            ),
            EngineRoute("POST", f"{container}/resize", self.resize, ("h", "w")),
            EngineRoute("GET", f"{container}/logs", self.logs, ("stdout", "stderr", "follow", "tail")),
            EngineRoute("DELETE", container, self.remove, ("force", "v")),
            EngineRoute("POST", f"{container}/exec", self.exec_create),
            EngineRoute("POST", f"{command}/start", self.exec_start),
            EngineRoute("POST", f"{command}/resize", self.exec_resize, ("h", "w")),
            EngineRoute("GET", f"{command}/json", self.exec_inspect),
            EngineRoute("HEAD", archive, self.stat, ("path",)),
            EngineRoute("GET", archive, self.archive, ("path",)),
            EngineRoute("PUT", archive, self.unpack, ("path", "noOverwriteDirNonDir", "copyUIDGID")),
            EngineRoute("GET", "/images/json", self.images, ("all", "filters", "digests", "shared-size", "manifests")),
            EngineRoute("GET", "/images/{*name}/json", self.image, ("manifests",)),
            EngineRoute("POST", "/images/create", self.pull, ("fromImage", "tag", "platform", "fromSrc")),
        )

    async def close(self) -> None:
        """Stop watching the containers, which live on as far as their trajectories do."""
        await self._life.close()

    async def serve(self, exchange: EngineExchange) -> None:
        """Answer one request; raises CodedError, ClientGone."""
        asked = version_of(exchange.path)
        path = exchange.path
        if asked != (0, 0):
            path = "/" + path.lstrip("/").partition("/")[2]
            if not API_VERSION_MIN <= asked <= API_VERSION:
                word = "new. Maximum" if asked > API_VERSION else "old. Minimum"
                bound = shown_version(API_VERSION if asked > API_VERSION else API_VERSION_MIN)
                told = f"client version {shown_version(asked)} is too {word} supported API version is {bound}"
                raise InvalidInput(told, component=COMPONENT)
        for route, pattern in self._routes:
            if route.method == exchange.method and (match := pattern.fullmatch(path)) is not None:
                _check_query(exchange, route)
                await self._life.ready()
                await route.endpoint(exchange, match)
                return
        raise self._unknown(exchange.method, path)

    def _unknown(self, method: str, path: str) -> NotFound | Unsupported:
        first, _, name = path.lstrip("/").partition("/")
        if method == "GET" and first in OTHER_KINDS and name:
            return NotFound(f"no such object: {first} {name[:200]}: this door has none", component=COMPONENT)
        if first in REFUSED:
            return Unsupported(f"{method} {path[:200]} is not done by this door: {REFUSED[first]}", component=COMPONENT)
        rows = [f"{row.method} {row.path}" for row in self._table]
        near = get_close_matches(f"{method} {path[:200]}", rows, n=1, cutoff=0.5)
        hint = f"; the nearest is {near[0]}" if near else ""
        told = f"page not found: no such route: {method} {path[:200]}{hint} (docs/DOORS.md has all)"
        return NotFound(told, component=COMPONENT)

    # --- the engine

    async def ping(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        """Say that it is there, and which versions it speaks."""
        headers = {"Api-Version": shown_version(API_VERSION), "Ostype": "linux", "Docker-Experimental": "false"}
        await exchange.answer_text("OK", {**headers, "Cache-Control": "no-cache, no-store, must-revalidate"})

    async def version(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        await exchange.answer(200, version_shape())

    async def info(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        counts = Counter(str(each.record.status) for each in self._life.containers.all())
        images, cores = len(await self._images.states()), self._services.machines.here.cores
        await exchange.answer(200, info_shape(counts, self._services.sandboxes(), images, cores))

    # --- containers

    async def create(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        """Keep a new container."""
        platform = exchange.query.get("platform", "")
        if platform and platform.split("/")[:2] != ["linux", architecture()] and platform != "linux":
            raise Unsupported(f"platform: {platform[:64]!r} is not linux/{architecture()}", component=COMPONENT)
        body = await exchange.read_object(self._services.bounds.body_limit_bytes)
        container, warnings = await self._life.create(body, exchange.query.get("name", ""))
        await exchange.answer(201, {"Id": container.record.id, "Warnings": list(warnings)})

    async def list(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        """Answer with those that run, or with all."""
        wanted = filters(exchange.query.get("filters", ""))
        asked: list[tuple[str, str, tuple[str, ...]]] = [(name, name, FILTERS) for name in wanted]
        asked += [(status, f"status={status}", STATUSES) for status in wanted.get("status", ())]
        for value, shown, known in asked:
            if value not in known:
                told = f"Invalid filter '{shown[:64]}': known here are {', '.join(known)}"
                raise InvalidInput(told, component=COMPONENT)
        limit = _number(exchange, "limit", 0)
        every = flag(exchange.query.get("all")) or "status" in wanted or limit > 0
        found = [each for each in self._seen() if (every or each.running) and _fits(each, wanted)]
        now_s = self._services.wall()
        await exchange.answer(200, [listed_shape(each, now_s) for each in (found[:limit] if limit > 0 else found)])

    async def inspect(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        await exchange.answer(200, container_shape(self._container(match)))

    async def start(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        """Begin it: its sandbox is made, and no core is held."""
        await _drained(exchange, self._services.bounds.body_limit_bytes)
        news = await self._life.start(self._container(match), self._client_s(exchange) - MARGIN_S)
        await exchange.answer(204 if news else 304)

    async def stop(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        await _drained(exchange, self._services.bounds.body_limit_bytes)
        stopped = await self._life.stop(self._container(match), _grace_s(exchange))
        await exchange.answer(204 if stopped else 304)

    async def restart(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        """End it if it runs, and begin it again: its files stay."""
        await _drained(exchange, self._services.bounds.body_limit_bytes)
        container, timeout_s = self._container(match), self._client_s(exchange) - MARGIN_S
        await self._life.restart(container, _grace_s(exchange), timeout_s)
        await exchange.answer(204)

    async def rename(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        """Give it another name; its id, and its trajectory's, stay."""
        await _drained(exchange, self._services.bounds.body_limit_bytes)
        self._life.containers.rename(self._container(match), exchange.query.get("name", ""))
        await exchange.answer(204)

    async def kill(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        await _drained(exchange, self._services.bounds.body_limit_bytes)
        name = signal_name(exchange.query.get("signal") or "KILL")
        try:
            await self._life.kill(self._container(match), name)
        except (Conflict, NotFound) as error:
            told = f"Cannot kill container: {match['id']}: {error.message}"
            raise type(error)(told, component=COMPONENT) from None
        await exchange.answer(204)

    async def wait(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        """Answer when it has ended, with its exit status; that it waits is said at once."""
        await _drained(exchange, self._services.bounds.body_limit_bytes)
        condition = exchange.query.get("condition") or "not-running"
        if condition not in WAITED:
            raise InvalidInput(f"condition: {condition[:64]!r} is none of {', '.join(WAITED)}", component=COMPONENT)
        container = self._container(match)
        ends = container.ends

        async def due() -> None:
            while not container.removed:
                over = not container.running if condition == "not-running" else container.ends > ends
                if over and condition != "removed":
                    return
                await container.change()

        async with exchange.streamed("application/json") as body:
            await body.send(b" ")
            await either(due(), exchange.peer.gone())
            await body.send(wire.dumps({"StatusCode": container.record.exit_code, "Error": None}))

    async def attach(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        """Answer with the output of its main command."""
        await _drained(exchange, self._services.bounds.body_limit_bytes)
        container = self._container(match)
        ends = container.ends

        async def ended() -> None:
            while not container.removed and container.ends == ends:
                await container.change()

        follows = flag(exchange.query.get("stream"))
        await attach(exchange, self._life.main_of(container) if follows else container.main, ended)

    async def resize(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        await _drained(exchange, self._services.bounds.body_limit_bytes)
        main = self._container(match).main
        if main is not None:
            await main.resize(*_size(exchange))
        await exchange.answer(200)

    async def logs(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        """Answer with what is kept of its main command's output."""
        tail = exchange.query.get("tail") or "all"
        lines = -1 if tail == "all" else _number(exchange, "tail", 0)
        await send_logs(exchange, self._container(match).main, None if lines < 0 else lines)

    async def remove(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        await self._life.remove(self._container(match), force=flag(exchange.query.get("force")))
        await exchange.answer(204)

    # --- commands

    async def exec_create(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        body = await exchange.read_object(self._services.bounds.body_limit_bytes)
        command = self._execs.create(self._container(match), body)
        await exchange.answer(201, {"Id": command.id})

    async def exec_start(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        body = await exchange.read_object(self._services.bounds.body_limit_bytes)
        patience_s = max(self._client_s(exchange) - MARGIN_S, MARGIN_S)
        await self._execs.start(exchange, self._life.containers.find_exec(match["id"]), body, patience_s)

    async def exec_resize(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        await _drained(exchange, self._services.bounds.body_limit_bytes)
        await self._life.containers.find_exec(match["id"]).resize(*_size(exchange))
        await exchange.answer(200)

    async def exec_inspect(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        await self._execs.inspect(exchange, self._life.containers.find_exec(match["id"]))

    # --- files and images

    async def stat(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        await self._files.stat(exchange, self._container(match), match["id"], self._client_s(exchange))

    async def archive(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        await self._files.get(exchange, self._container(match), match["id"], self._client_s(exchange))

    async def unpack(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        await self._files.put(exchange, self._container(match), match["id"], self._client_s(exchange))

    async def images(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        await self._images.list(exchange)

    async def image(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        await self._images.inspect(exchange, match["name"])

    async def pull(self, exchange: EngineExchange, match: re.Match[str]) -> None:
        await _drained(exchange, self._services.bounds.body_limit_bytes)
        await self._images.pull(exchange)

    # --- what they are made of

    def _container(self, match: re.Match[str]) -> Container:
        container = self._life.containers.find(match["id"])
        self._life.look(container)
        return container

    def _seen(self) -> tuple[Container, ...]:
        for container in self._life.containers.all():
            self._life.look(container)
        return tuple(each for each in self._life.containers.all() if not each.record.removing)

    def _client_s(self, exchange: EngineExchange) -> float:
        """Return after which time the client gives up."""
        python = "docker-sdk-python" in exchange.headers.get("user-agent", "")
        return self._settings.client_timeout_s or (PYTHON_CLIENT_S if python else OTHER_CLIENT_S)


def signal_name(text: str) -> str:
    """Return a signal's name as sessions know it, of a name or a number; raises InvalidInput."""
    name = text.strip().upper().removeprefix("SIG")
    by_number = {str(number): each for each, number in SIGNALS.items()}
    name = by_number.get(name, name)
    if name not in SIGNALS:
        raise InvalidInput(f"Invalid signal: {text[:32]}; known: {', '.join(SIGNALS)}", component=COMPONENT)
    return name


def _check_query(exchange: EngineExchange, route: EngineRoute) -> None:
    for name, value in exchange.query.items():
        if name not in route.query and flag(value):
            known = ", ".join(route.query) or "none"
            told = f"query parameter {name[:64]!r} is not done by this door; known here: {known}"
            raise Unsupported(told, component=COMPONENT, detail={"path": name[:64]})


def _number(exchange: EngineExchange, name: str, default: float) -> int:
    text = exchange.query.get(name, "")
    try:
        return int(text) if text else int(default)
    except ValueError:
        raise InvalidInput(f"{name}: {text[:32]!r} is no whole number", component=COMPONENT) from None


def _size(exchange: EngineExchange) -> tuple[int, int]:
    rows, columns = _number(exchange, "h", 24), _number(exchange, "w", 80)
    if not (0 < rows <= 1000 and 0 < columns <= 1000):
        raise InvalidInput("h, w: must be from 1 to 1000", component=COMPONENT)
    return rows, columns


def _fits(container: Container, wanted: dict[str, list[str]]) -> bool:
    """Return whether a container is among those that filters name."""
    record = container.record
    labels = {*record.labels, *(f"{name}={value}" for name, value in record.labels.items())}
    return (
        any(record.id.startswith(each) for each in wanted.get("id", [record.id]))
        and any(_named(record.name, each) for each in wanted.get("name", [record.name]))
        and all(each in labels for each in wanted.get("label", []))
        and record.status in wanted.get("status", [record.status])
        and any({*image_names(each)} & {*image_names(record.image)} for each in wanted.get("ancestor", [record.image]))
    )


def _named(name: str, pattern: str) -> bool:
    """Return whether a name has a piece, at its beginning with ``^``, at its end with ``$``."""
    piece = pattern.removeprefix("^").removesuffix("$").removeprefix("/")
    begins, ends = pattern.startswith("^"), pattern.endswith("$")
    if begins and ends:
        return name == piece
    return name.startswith(piece) if begins else name.endswith(piece) if ends else piece in name


def _grace_s(exchange: EngineExchange) -> float:
    """Return for how long a stop waits between its word and its force: negative numbers mean for ever."""
    asked_s = _number(exchange, "t", STOP_S)
    return STOP_MAX_S if asked_s < 0 else min(asked_s, STOP_MAX_S)


async def _drained(exchange: EngineExchange, limit_bytes: int) -> None:
    """Read a body of which nothing is wanted."""
    async for _ in exchange.chunks(limit_bytes):
        pass
