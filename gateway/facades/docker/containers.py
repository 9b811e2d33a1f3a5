"""Containers: what is kept of each, in the gateway's own record, so that the next gateway finds it again."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections import OrderedDict

import msgspec
import structlog

from gateway.config.facades import DockerFacade
from gateway.facades.docker.commands import ContainerExec, MainCommand
from gateway.facades.docker.records import ContainerRecord
from gateway.store.store import Store
from manager.errors import CapacityExceeded, Conflict, InvalidInput, NotFound

logger = structlog.get_logger("gateway.facades")

COMPONENT = "docker"
#: In the store: how many places were ever taken, and each place's container; an empty text where there is none.
PLACES, PLACE = "docker_containers", "docker_container:{}"
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,99}")
#: Commands of all containers that have ended and can still be asked for.
EXECS_MAX = 4096


class Container:
    """A container with what lives of it in this gateway."""

    def __init__(self, record: ContainerRecord, place: int) -> None:
        self.record = record
        self.place = place
        self.execs: OrderedDict[str, ContainerExec] = OrderedDict()
        #: Status files of commands that were started to run behind and are remembered no more.
        self.left_files: list[str] = []
        self.main: MainCommand | None = None
        #: What its next start begins, where somebody is attached to it already.
        self.next_main: MainCommand | None = None
        #: Held while it is started or ended.
        self.lock = asyncio.Lock()
        self.removed = False
        #: While it is ended only to be started again: it does not go, if it is to go at its end.
        self.restarting = False
        #: How often it has ended, for who waits for the next time.
        self.ends = 0
        self.timer: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def running(self) -> bool:
        return self.record.status == "running"

    def announce(self) -> None:
        """Wake whoever waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        """Return at its next change."""
        await self._changed.wait()

    def require_kept(self) -> None:
        """Raise NotFound for one that is removed, or going."""
        if self.removed or self.record.removing:
            raise NotFound(f"No such container: {self.record.id}", component=COMPONENT)

    def require_running(self) -> None:
        """Raise Conflict unless it runs."""
        if not self.running:
            why = f": {self.record.error}" if self.record.error else ""
            raise Conflict(f"Container {self.record.id} is not running{why}", component=COMPONENT)


class Containers:
    """All of them, by id and name; within the bound of the configuration."""

    def __init__(self, store: Store, settings: DockerFacade) -> None:
        self._store = store
        self._max = settings.containers_max
        self._by_id: dict[str, Container] = {}
        self._names: dict[str, Container] = {}
        self._places = 0
        self._free: list[int] = []
        #: Every command, by id; of the ended the newest.
        self.execs: OrderedDict[str, ContainerExec] = OrderedDict()

    async def load(self) -> None:
        """Take up what an earlier gateway kept."""
        self._places = int(await self._store.document(PLACES) or 0)
        for place in range(self._places):
            kept = await self._store.document(PLACE.format(place))
            if not kept:
                self._free.append(place)
                continue
            try:
                self._enter(Container(msgspec.json.decode(kept, type=ContainerRecord), place))
            except msgspec.MsgspecError as error:  # its place stays as it is, and the others are served
                logger.warning("a container's record cannot be read", door=COMPONENT, place=place, why=str(error))

    def all(self) -> tuple[Container, ...]:
        """Every container, the newest first."""
        return tuple(sorted(self._by_id.values(), key=lambda each: -each.record.created_s))

    def check(self, name: str) -> str:
        """Return a name for a new container (made up if empty); raises InvalidInput, Conflict, CapacityExceeded."""
        if len(self._by_id) >= self._max:
            told = f"there are {self._max} containers (server.facades.docker.containers_max): remove some"
            raise CapacityExceeded(told, component=COMPONENT, retry_after_s=1.0)
        return self.free(name.removeprefix("/") or f"tangram_{secrets.token_hex(6)}")

    def free(self, wanted: str) -> str:
        """Return a name that no container has; raises InvalidInput, Conflict."""
        if NAME.fullmatch(wanted) is None:
            told = f"Invalid container name ({wanted[:64]}), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed, 100 at most"
            raise InvalidInput(told, component=COMPONENT, detail={"path": "name"})
        if (known := self._names.get(wanted)) is not None:
            told = f'Conflict. The container name "/{wanted}" is already in use by container "{known.record.id}". '
            told += "You have to remove (or rename) that container to be able to reuse that name."
            raise Conflict(told, component=COMPONENT)
        return wanted

    async def add(self, record: ContainerRecord) -> Container:
        """Keep a new one, on disk before it is told of; raises StorageUnavailable."""
        place = self._free.pop() if self._free else self._places
        if place == self._places:
            self._places += 1
            self._store.save_document(PLACES, str(self._places))
        container = Container(record, place)
        self._enter(container)
        self.save(container)
        try:
            await self._store.commit()
        except BaseException:  # its client knows of none, and will ask for the name again
            self.forget(container)
            raise
        return container

    def save(self, container: Container) -> None:
        """Keep what has changed of it, and tell whoever waits."""
        if not container.removed:
            self._store.save_document(PLACE.format(container.place), msgspec.json.encode(container.record).decode())
        container.announce()

    def rename(self, container: Container, name: str) -> None:
        """Give it another name; raises InvalidInput, Conflict."""
        container.require_kept()
        wanted = self.free(name.removeprefix("/"))
        del self._names[container.record.name]
        container.record.name = wanted
        self._names[wanted] = container
        self.save(container)

    def forget(self, container: Container) -> None:
        """It is removed; idempotent."""
        if container.removed:
            return
        container.removed = True
        self._by_id.pop(container.record.id, None)
        self._names.pop(container.record.name, None)
        for id in container.execs:
            self.execs.pop(id, None)
        self._store.save_document(PLACE.format(container.place), "")
        self._free.append(container.place)
        container.announce()

    def find(self, reference: str) -> Container:
        """Return the container of a name, an id or the beginning of one; raises NotFound, InvalidInput."""
        found = self._by_id.get(reference) or self._names.get(reference.removeprefix("/"))
        if found is not None:
            return found
        fitting = [each for id, each in self._by_id.items() if reference and id.startswith(reference)]
        if len(fitting) > 1:
            raise InvalidInput(f"Multiple IDs found with provided prefix: {reference[:64]}", component=COMPONENT)
        if not fitting:
            raise NotFound(f"No such container: {reference[:128]}", component=COMPONENT)
        return fitting[0]

    def add_exec(self, command: ContainerExec) -> None:
        """Know a command; the oldest that have ended are forgotten."""
        container = self.home(command)
        self.execs[command.id] = command
        container.execs[command.id] = command
        if len(self.execs) <= EXECS_MAX:
            return
        old = next((each for each in self.execs.values() if not each.under_way), None)
        if old is None or old is command:
            self.execs.pop(command.id)
            container.execs.pop(command.id, None)
            told = f"{EXECS_MAX} commands are under way: let some end"
            raise CapacityExceeded(told, component=COMPONENT, retry_after_s=1.0)
        self.execs.pop(old.id)
        home = self.home(old)
        home.execs.pop(old.id, None)
        if old.status_file:
            home.left_files.append(old.status_file)

    def find_exec(self, id: str) -> ContainerExec:
        """Return a command by its id; raises NotFound."""
        found = self.execs.get(id)
        if found is None:
            raise NotFound(f"No such exec instance: {id[:128]}", component=COMPONENT)
        return found

    def home(self, command: ContainerExec) -> Container:
        """Return the container of a command that is known."""
        return self._by_id[command.record.id]

    def _enter(self, container: Container) -> None:
        self._by_id[container.record.id] = container
        self._names[container.record.name] = container


def identity(name: str) -> tuple[str, str]:
    """Return the trajectory of a new container, and the id that follows from it: 64 hexadecimal digits."""
    trajectory = f"{name}-{secrets.token_hex(6)}"
    return trajectory, hashlib.sha256(trajectory.encode()).hexdigest()
