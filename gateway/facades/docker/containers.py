"""Containers of the Docker API, a trajectory each, and their commands."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
import secrets
import struct
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from fnmatch import fnmatchcase
from typing import Any, Literal

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace as replaced
from starlette.requests import ClientDisconnect

from gateway import serialization
from gateway.api import Api, with_choice
from gateway.config.schema import DockerFacade
from gateway.facades.commands import (
    HEARTBEAT_S,
    KILLED,
    PIDS_FROM,
    AttendedCommand,
    CommandSpec,
    KeptCommand,
    Send,
)
from gateway.facades.docker.http import DockerConnection, DockerExchange
from gateway.facades.facade import ForeignCalls
from gateway.http.messages import while_connected
from gateway.store.store import Store
from manager.errors import (
    ActionFailed,
    CapacityExceeded,
    CodedError,
    Conflict,
    InvalidInput,
    NotFound,
    Reason,
    Unsupported,
)
from manager.function import FunctionSpec, SandboxSpec
from runtimes.chores import Chores, end_chores
from runtimes.sandbox.sandbox import Sandbox
from runtimes.sandbox.spec import ABOVE_SYSTEM, SYSTEM
from tangram.types import SandboxChoice, TrajectoryOpening, explained

#: Exit status of a main command of which none is known.
LOST_EXIT = 255

Status = Literal["created", "running", "exited"]


class ContainerRecord(Struct, kw_only=True):
    """What is kept of a container."""

    id: str
    name: str
    trajectory: str
    function: str
    task: str
    #: As it was asked for, and what the client asked beside it, to be told again.
    image: str
    config: dict[str, object]
    host_config: dict[str, object]
    #: What its trajectory chooses; None for nothing.
    sandbox: SandboxChoice | None
    #: Its main command, and where commands begin (empty: the sandbox's working directory).
    argv: tuple[str, ...]
    cwd: str
    labels: dict[str, str]
    #: Whether its main command only keeps it alive, and for how many seconds (0: for ever).
    idles: bool
    idles_s: float
    tty: bool
    reads_stdin: bool
    auto_remove: bool
    created_s: float
    status: Status = "created"
    #: Whether its trajectory was begun.
    opened: bool = False
    #: The snapshot that has its files while it has no sandbox, and with which its next one begins.
    snapshot: str = ""
    started_s: float = 0.0
    finished_s: float = 0.0
    exit_code: int = 0
    #: Why it ended, if that was not its main command's doing.
    error: str = ""
    out_of_memory: bool = False
    #: Whether it is going, with its trajectory: kept until that is gone, for the next gateway to go on with.
    removing: bool = False


COMPONENT = "docker"
#: Frames of what is no terminal: which stream, three zeros, the length.
_HEADER = struct.Struct(">BxxxI")
_NUMBERS = {"stdin": 0, "stdout": 1, "stderr": 2}
#: Bytes of a frame of logs at most, as the engine keeps lines.
LINE_BYTES = 16 * 1024

Write = Callable[[bytes], Awaitable[None]]


def frame(stream: str, data: bytes) -> bytes:
    """Return a piece of output with the header that says whose it is."""
    return _HEADER.pack(_NUMBERS.get(stream, 1), len(data)) + data


class ContainerExec(AttendedCommand):
    """A command that a client has described, and may start once."""

    def __init__(self, api: Api, calls: ForeignCalls, record: ContainerRecord, spec: CommandSpec, pid: int) -> None:
        super().__init__(api, calls, record, spec)
        self.record = record
        self.id = secrets.token_hex(32)
        self.pid = pid
        self.started = False
        #: Whether its output has frames: that is up to its start, whatever its own terminal is.
        self.framed = True
        #: Where its exit status will stand in the sandbox, if it was started to run behind.
        self.status_file = ""

    @property
    def running(self) -> bool:
        """Whether it was started, and is not known to have ended."""
        return self.started and not self.ended.is_set()

    @property
    def under_way(self) -> bool:
        """Whether a client or an action waits for its end."""
        return self.running and not self.status_file


logger = structlog.get_logger("gateway.facades")


#: Begins the names of the documents that hold containers; the id of each follows.
DOCUMENT = "docker_container:"
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,99}")
#: Most containers, those that have ended and were not removed too: each is a document of the store.
CONTAINERS_MAX = 4096
#: Commands of all containers that have ended and can still be asked for.
EXECS_MAX = 4096


class Container:
    """A container with what lives of it in this gateway."""

    def __init__(self, record: ContainerRecord) -> None:
        self.record = record
        self.execs: OrderedDict[str, ContainerExec] = OrderedDict()
        #: Status files of commands that were started to run behind and are remembered no more.
        self.left_files: list[str] = []
        self.main: KeptCommand | None = None
        #: What its next start begins, where somebody is attached to it already.
        self.next_main: KeptCommand | None = None
        #: Held while it is started or ended.
        self.lock = asyncio.Lock()
        self.removed = False
        #: While it is ended only to be started again: it does not go, if it is to go at its end.
        self.restarting = False
        #: How often it has ended, for who waits for the next time.
        self.ends = 0
        #: Ends it when its ``sleep`` would, or lays its files aside once it has ended.
        self.timer: asyncio.TimerHandle | None = None
        #: How many requests read or write its files.
        self.transfers = 0
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
    """All of them, by id and name; `CONTAINERS_MAX` at most."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_id: dict[str, Container] = {}
        self._names: dict[str, Container] = {}
        #: Every command, by id; of the ended the newest.
        self.execs: OrderedDict[str, ContainerExec] = OrderedDict()

    async def load(self) -> None:
        """Take up what an earlier gateway kept."""
        for name in [str(row["name"]) for row in await self._store.read("document_names", (DOCUMENT,))]:
            try:
                kept = await self._store.document(name) or ""
                self._enter(Container(msgspec.json.decode(kept, type=ContainerRecord)))
            except msgspec.MsgspecError as error:  # it stays as it is, and the others are served
                logger.warning("a container's record cannot be read", facade=COMPONENT, record=name, why=str(error))

    def all(self) -> tuple[Container, ...]:
        """Every container, the newest first."""
        return tuple(sorted(self._by_id.values(), key=lambda each: -each.record.created_s))

    def check(self, name: str) -> str:
        """Return a name for a new container (made up if empty); raises InvalidInput, Conflict, CapacityExceeded."""
        if len(self._by_id) >= CONTAINERS_MAX:
            message = f"there are {CONTAINERS_MAX} containers, as many as may be: remove some"
            raise CapacityExceeded(message, component=COMPONENT, retry_after_s=1.0)
        return self.free(name.removeprefix("/") or f"tangram_{secrets.token_hex(6)}")

    def free(self, wanted: str) -> str:
        """Return a name that no container has; raises InvalidInput, Conflict."""
        if NAME.fullmatch(wanted) is None:
            message = f"Invalid container name ({wanted[:64]}), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed, 100 at most"
            raise InvalidInput(message, component=COMPONENT, detail={"path": "name"})
        if (known := self._names.get(wanted)) is not None:
            message = f'Conflict. The container name "/{wanted}" is already in use by container "{known.record.id}". '
            message += "You have to remove (or rename) that container to be able to reuse that name."
            raise Conflict(message, component=COMPONENT)
        return wanted

    async def add(self, record: ContainerRecord) -> Container:
        """Keep a new one, on disk before it is told of; raises StorageUnavailable."""
        container = Container(record)
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
            body = msgspec.json.encode(container.record).decode()
            self._store.save_document(DOCUMENT + container.record.id, body)
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
        self._store.save_document(DOCUMENT + container.record.id, None)
        container.announce()

    def find(self, reference: str) -> Container:
        """Return the container of a name, an id or the beginning of one; raises NotFound, InvalidInput."""
        result = self._by_id.get(reference) or self._names.get(reference.removeprefix("/"))
        if result is not None:
            return result
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
            message = f"{EXECS_MAX} commands are under way: let some end"
            raise CapacityExceeded(message, component=COMPONENT, retry_after_s=1.0)
        self.execs.pop(old.id)
        home = self.home(old)
        home.execs.pop(old.id, None)
        if old.status_file:
            home.left_files.append(old.status_file)

    def find_exec(self, id: str) -> ContainerExec:
        """Return a command by its id; raises NotFound."""
        result = self.execs.get(id)
        if result is None:
            raise NotFound(f"No such exec instance: {id[:128]}", component=COMPONENT)
        return result

    def home(self, command: ContainerExec) -> Container:
        """Return the container of a command that is known."""
        return self._by_id[command.record.id]

    def _enter(self, container: Container) -> None:
        self._by_id[container.record.id] = container
        self._names[container.record.name] = container


RAW, MULTIPLEXED = "application/vnd.docker.raw-stream", "application/vnd.docker.multiplexed-stream"
#: Why a command is ended whose client went away.
WENT = "its client went away"


async def attend(exchange: DockerExchange, command: ContainerExec, patience_s: float) -> None:
    """Answer the start of a command: all that it says, to its end; it ends with its client.

    A command that could not begin within ``patience_s`` is a stream that is silent yet. Raises what kept the command
    from beginning, as long as that can still be said.
    """
    loop = asyncio.get_running_loop()
    gone, upgraded = loop.create_task(exchange.peer.gone()), asyncio.Event()
    pipes: list[DockerConnection] = []
    sending = loop.create_task(_send_output(command, upgraded, pipes))
    try:
        opened = loop.create_task(command.opened.wait())
        await asyncio.wait({opened, gone}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if gone.done():
            raise ClientDisconnect()
        if command.error is not None:
            raise command.error
        pipe = await exchange.upgraded(media_type(exchange, framed=command.framed))
        pipes.append(pipe)
        upgraded.set()
        typing = loop.create_task(send_input(command, pipe))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise ClientDisconnect()
            sending.result()
        finally:
            await end_chores(typing)
    except ClientDisconnect:
        await command.cancel(WENT)
        raise
    finally:
        await end_chores(sending, gone)


async def _send_output(command: ContainerExec, upgraded: asyncio.Event, pipes: list[DockerConnection]) -> None:
    """Send what a command says; it waits for a client that is slow. Raises ClientDisconnect."""
    spec = command.spec
    streams = {name for name, wanted in (("stdout", spec.stdout), ("stderr", spec.stderr)) if wanted}
    await command.begun.wait()
    if command.session is not None:
        async for page in command.session.read(0, HEARTBEAT_S):
            await upgraded.wait()
            pieces = [piece for piece in page if piece.stream in streams]
            data = b"".join([frame(piece.stream, piece.data) if command.framed else piece.data for piece in pieces])
            if data:
                await pipes[0].write(data)
    await command.ended.wait()
    await upgraded.wait()
    message = command.end_message or ("" if command.error is None else f"tangram: {command.error.message}\n")
    if message:
        await pipes[0].write(frame("stderr", message.encode()) if command.framed else message.encode())


async def send_input(command: AttendedCommand, pipe: DockerConnection) -> None:
    """Pass on what a client types, and the end of it; a command without input finds its end at once."""
    await command.opened.wait()
    session = command.session
    if session is None:
        return
    with suppress(CodedError):
        while command.spec.stdin:
            data = await pipe.read()
            if not data:
                break
            end = session.input_offset + len(data)
            while session.reads and session.input_offset < end:
                with suppress(CapacityExceeded):  # its node is not reached now: the input waits, until that is lost
                    await session.write(data[len(data) - (end - session.input_offset) :])
    if not command.spec.tty:
        await command.end_input()


async def attach(
    exchange: DockerExchange, main: KeptCommand | None, ended: Callable[[], Coroutine[None, None, None]]
) -> None:
    """Answer an attachment to a main command: its output from now on, and what is typed to it.

    Without ``stream`` that is what is kept of its output, if it asks for ``logs``.
    """
    query = exchange.query
    logs, stream = flag(query.get("logs")), flag(query.get("stream"))
    streams = frozenset(name for name in ("stdout", "stderr") if flag(query.get(name)))
    framed = main is None or not main.spec.tty
    pipe = await exchange.upgraded(media_type(exchange, framed=framed))
    if main is None:  # it says nothing, and ends with its container
        if stream:
            await while_connected(ended(), exchange.peer.gone())
        return
    if not stream:
        if logs:
            await main.show(_framing(pipe.write, streams, framed=framed))
        return
    loop = asyncio.get_running_loop()
    typing = loop.create_task(send_input(main, pipe)) if flag(query.get("stdin")) else None
    try:
        follow = main.follow(_framing(pipe.write, streams, framed=framed), late=not logs)
        await while_connected(follow, exchange.peer.gone())
    finally:
        await end_chores(typing)


async def send_logs(exchange: DockerExchange, main: KeptCommand | None, tail: int | None) -> None:
    """Answer with a main command's output, as far as it is kept; with ``follow`` to its end."""
    query = exchange.query
    streams = frozenset(name for name in ("stdout", "stderr") if flag(query.get(name)))
    if not streams:
        raise InvalidInput("Bad parameters: you must choose at least one stream", component="docker")
    framed = main is None or not main.spec.tty
    async with exchange.streamed(media_type(exchange, framed=framed)):
        if main is None:
            return
        lines = LineFrames(exchange.send, streams)
        send = lines.send if framed else _framing(exchange.send, streams, framed=False)
        if flag(query.get("follow")):
            await while_connected(main.follow(send, tail=tail), exchange.peer.gone())
        else:
            await main.show(send, tail)
        await lines.end()


def _framing(write: Write, streams: frozenset[str], *, framed: bool) -> Send:
    """Return what sends each piece of these streams as it comes."""

    async def send(stream: str, data: bytes) -> None:
        if stream in streams:
            await write(frame(stream, data) if framed else data)

    return send


class LineFrames:
    """Sends output with a frame for each line, as the engine's logs have it; a long line has several."""

    def __init__(self, write: Write, streams: frozenset[str]) -> None:
        self._write = write
        #: By stream, what of a line has come.
        self._begun = dict.fromkeys(sorted(streams), b"")

    async def send(self, stream: str, data: bytes) -> None:
        """Send what is whole of it; raises ClientDisconnect."""
        if stream not in self._begun:
            return
        *lines, rest = (self._begun[stream] + data).split(b"\n")
        cut = len(rest) - len(rest) % LINE_BYTES
        self._begun[stream] = rest[cut:]
        whole = [*(line + b"\n" for line in lines), rest[:cut]]
        parts = [line[at : at + LINE_BYTES] for line in whole for at in range(0, len(line), LINE_BYTES)]
        if parts:
            await self._write(b"".join([frame(stream, part) for part in parts]))

    async def end(self) -> None:
        """Send lines that have no end; raises ClientDisconnect."""
        for stream, rest in self._begun.items():
            if rest:
                await self._write(frame(stream, rest))


def flag(text: str | None) -> bool:
    """Return whether a query says yes, as the engine reads it."""
    return (text or "").strip().lower() not in ("", "0", "no", "false", "none")


def media_type(exchange: DockerExchange, *, framed: bool) -> str:
    """Return how the stream is named: since 1.42 by whether it has frames."""
    return MULTIPLEXED if framed and version_of(exchange.path) >= (1, 42) else RAW


def version_of(path: str) -> tuple[int, int]:
    """Return the version that a path begins with; zeros for none."""
    first = path.lstrip("/").partition("/")[0]
    numbers = first.removeprefix("v").split(".")
    if (
        not first.startswith("v")
        or len(numbers) != 2
        or not all(part.isdecimal() and len(part) < 5 for part in numbers)
    ):
        return 0, 0
    return int(numbers[0]), int(numbers[1])


# What a client asks of a container or a command, read field by field: what is not done here is refused by its name.
#
# A field that is empty (null, "", 0, -1, false, [] or {}) asks for nothing, whatever it is called.

#: Labels by which a container says what the engine's API has no field for.
FUNCTION_LABEL, TASK_LABEL, TTL_LABEL = "tangram.function", "tangram.task", "tangram.idle_ttl"
#: What says how many cores a plain container has: here each command has those of its action.
CORES = frozenset(
    {"NanoCpus", "CpuShares", "CpuPeriod", "CpuQuota", "CpusetCpus", "CpusetMems", "CpuCount", "CpuPercent"}
)
#: Known, and of no effect here: how its output is kept, which init process it has, what a closing terminal sends.
IDLE_HOST = frozenset(
    {"LogConfig", "Init", "ConsoleSize", "MemorySwap", "MemorySwappiness", "OomKillDisable", "CgroupnsMode", "IpcMode",
     "UTSMode", "Isolation", "PublishAllPorts", "ContainerIDFile"}
)  # fmt: skip
IDLE = frozenset({"Hostname", "Domainname", "StopSignal", "StopTimeout", "StdinOnce", "ExposedPorts"})
#: Words of the fields of no effect that would have one.
HARMLESS = {
    "CgroupnsMode": ("", "private", "host"), "IpcMode": ("", "private", "shareable"), "UTSMode": ("",),
    "Isolation": ("", "default"), "PublishAllPorts": (False,), "OomKillDisable": (False,),
}  # fmt: skip
NETWORKS = {"": None, "default": None, "bridge": None, "none": "none", "internal": "internal", "egress": "egress"}
#: Capabilities that may be asked for and are not given, with a warning: the SWE-bench harness asks for it of every
#: container, for the few whose tests start a browser.
UNGIVEN = frozenset({"SYS_ADMIN"})
SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
SHELLS = frozenset({"bash", "sh", "/bin/bash", "/bin/sh", "/usr/bin/bash", "/usr/bin/sh"})
ENV_NAME = re.compile(r"[^=\0]+")
#: A terminal's rows and columns at most.
SIDE_MAX = 1000


def container_record(
    body: Mapping[str, object], function: FunctionSpec, name: str, now_s: float
) -> tuple[ContainerRecord, tuple[str, ...]]:
    """Return the container that a body of ``/containers/create`` asks for, and warnings of what it does not get.

    Raises InvalidInput, Unsupported with the field.
    """
    host = _object(body, "HostConfig")
    _refuse_rest(body, "", _KNOWN | IDLE)
    _refuse_rest(host, "HostConfig.", _KNOWN_HOST | CORES | IDLE_HOST)
    for field, allowed in HARMLESS.items():
        if host.get(field) is not None and host[field] not in allowed:
            raise _unsupported(f"HostConfig.{field}", host[field])
    entrypoint = _words(body, "Entrypoint")
    argv = (*(() if entrypoint == ("",) else entrypoint), *_words(body, "Cmd"))  # '' is how docker turns one off
    reads = _get(body, "AttachStdin", bool, False)
    attached = reads or _get(body, "AttachStdout", bool, False) or _get(body, "AttachStderr", bool, False)
    idles_s = _idle_s(argv, attached=reads)
    if not argv and attached and not _get(body, "OpenStdin", bool, False):
        message = "No command specified: name one, as the image's own CMD and ENTRYPOINT are not known here"
        raise InvalidInput(message, component=COMPONENT, detail={"path": "Cmd"})
    labels: dict[str, str] = _get(body, "Labels", dict[str, str], {})
    trajectory = f"{name}-{secrets.token_hex(6)}"
    record = ContainerRecord(
        id=hashlib.sha256(trajectory.encode()).hexdigest(),
        name=name,
        trajectory=trajectory,
        function=function.name,
        task=serialization.name(labels.get(TASK_LABEL, "default"), f"Labels.{TASK_LABEL}"),
        image=_get(body, "Image", str, ""),
        config={key: value for key, value in body.items() if key != "HostConfig"},
        host_config=host,
        sandbox=_choice(body, host, function, labels),
        argv=argv or (("/bin/sh",) if reads else ()),
        cwd=_get(body, "WorkingDir", str, ""),
        labels=labels,
        idles=idles_s is not None,
        idles_s=idles_s or 0.0,
        tty=_get(body, "Tty", bool, False),
        reads_stdin=reads,
        auto_remove=_get(host, "AutoRemove", bool, False),
        created_s=now_s,
    )
    return record, _capability_warnings(host)


def exec_spec(body: Mapping[str, object], cwd: str, living: SandboxSpec | None) -> CommandSpec:
    """Return what a body of ``/containers/{id}/exec`` asks for; ``cwd`` is the container's own."""
    _refuse_rest(body, "", _KNOWN_EXEC)
    argv = _words(body, "Cmd")
    if not argv:
        raise InvalidInput("No exec command specified", component=COMPONENT, detail={"path": "Cmd"})
    user = _get(body, "User", str, "")
    if living is not None and user == living.user:
        user = ""
    rows, columns = console_size(body)
    return CommandSpec(
        argv=argv,
        cwd=_get(body, "WorkingDir", str, "") or cwd,
        env=_env(body),
        user=_user(user),
        tty=_get(body, "Tty", bool, False),
        stdin=_get(body, "AttachStdin", bool, False),
        stdout=_get(body, "AttachStdout", bool, False),
        stderr=_get(body, "AttachStderr", bool, False),
        rows=rows,
        columns=columns,
    )


def console_size(body: Mapping[str, object]) -> tuple[int, int]:
    """Return rows and columns that are asked for; zeros for none."""
    size = _get(body, "ConsoleSize", list[int] | None, None) or [0, 0]
    if len(size) != 2 or not all(0 <= side <= SIDE_MAX for side in size):
        raise InvalidInput(f"ConsoleSize: must be [rows, columns], each at most {SIDE_MAX}", component=COMPONENT)
    return size[0], size[1]


def image_names(wanted: str) -> tuple[str, ...]:
    """Return the ways in which an image's name is written, as it was asked for first."""
    bare = wanted.removeprefix("docker.io/").removeprefix("library/")
    result: dict[str, None] = {}
    for name in (wanted, bare):
        tagged = ":" in name.rpartition("/")[2] or "@" in name
        result |= dict.fromkeys((name, name.removesuffix(":latest"), name if tagged else f"{name}:latest"))
    return tuple(result)


_KNOWN = frozenset(
    {"Image", "Cmd", "Entrypoint", "Env", "WorkingDir", "User", "Labels", "Tty", "OpenStdin", "AttachStdin",
     "AttachStdout", "AttachStderr", "HostConfig", "NetworkingConfig"}
)  # fmt: skip
_KNOWN_HOST = frozenset({"CapAdd", "AutoRemove", "Memory", "NetworkMode", "RestartPolicy", "PidsLimit", "ShmSize"})
_KNOWN_EXEC = frozenset(
    {"Cmd", "Env", "WorkingDir", "User", "Tty", "AttachStdin", "AttachStdout", "AttachStderr", "Detach", "DetachKeys",
     "ConsoleSize", "Container"}
)  # fmt: skip


def _choice(
    body: Mapping[str, object], host: Mapping[str, object], function: FunctionSpec, labels: Mapping[str, str]
) -> SandboxChoice | None:
    """Return what a trajectory chooses for such a container; None for nothing."""
    spec = function.sandbox or SandboxSpec()
    policy = _object(host, "RestartPolicy").get("Name", "")
    if policy not in ("", "no"):
        raise _unsupported("HostConfig.RestartPolicy", policy)
    for name, most in (("PidsLimit", spec.pids), ("ShmSize", spec.shm_bytes)):
        request = _get(host, name, int | None, None) or 0
        if request > 0 and (request < most if name == "PidsLimit" else request > most):
            message = f"{name}: {request} is not what the function {function.name!r} has ({most})"
            raise InvalidInput(message, component=COMPONENT, detail={"path": f"HostConfig.{name}"})
    _require_plain_network(body)
    user = _user(_get(body, "User", str, ""))
    memory = _get(host, "Memory", int | None, None)
    network = _get(host, "NetworkMode", str | None, None) or ""
    if network not in NETWORKS:
        raise _unsupported("HostConfig.NetworkMode", network)
    fields: dict[str, object] = {
        "image": _image(_get(body, "Image", str, ""), spec),
        "env": dict(_env(body)) or None,
        "workdir": _workdir(_get(body, "WorkingDir", str, "")),
        "user": None if user in ("", spec.user) else user,
        "memory": memory or None,
        "network": NETWORKS[network],
        "idle_ttl": labels.get(TTL_LABEL),
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    try:
        return msgspec.convert(fields, SandboxChoice) if fields else None
    except msgspec.ValidationError as error:
        problem, place = explained(error)
        raise InvalidInput(f"{place.removeprefix('.')}: {problem}", component=COMPONENT) from None


def _capability_warnings(host: Mapping[str, object]) -> tuple[str, ...]:
    """Return a warning for each capability that is asked for and not given; raises Unsupported for others."""
    result = []
    for name in _words(host, "CapAdd"):
        if name.upper().removeprefix("CAP_") not in UNGIVEN:
            raise _unsupported("HostConfig.CapAdd", name, "capabilities are the function's: sandbox.capabilities")
        result.append(f"HostConfig.CapAdd: {name} is not given; capabilities are the function's: sandbox.capabilities")
    return tuple(result)


def _image(wanted: str, spec: SandboxSpec) -> str | None:
    """Return the name by which the function allows an image, or as it was asked for; None for its own."""
    if not wanted:
        raise InvalidInput("Image: no image is named", component=COMPONENT, detail={"path": "Image"})
    names = image_names(wanted)
    if not {*image_names(spec.image)}.isdisjoint(names):
        return None
    return next((name for name in names if any(fnmatchcase(name, pattern) for pattern in spec.images)), wanted)


def _workdir(wanted: str) -> str | None:
    """Return a working directory that the sandbox may make its user's own; one of the system is only gone into."""
    place = wanted.rstrip("/") or "/"
    if not wanted or place in ABOVE_SYSTEM or any(f"{place}/".startswith(f"{each}/") for each in SYSTEM):
        return None
    return place


def _idle_s(argv: tuple[str, ...], *, attached: bool) -> float | None:
    """Return for how many seconds a main command keeps its container alive (0: for ever); None for one that works."""
    match argv:
        case () | ("tail", "-f", "/dev/null") | ("cat",) if not attached:
            return 0.0
        case (shell, *options) if shell in SHELLS and not attached and set(options) <= {"-i", "-l", "-il", "--login"}:
            return 0.0
        case ("sleep" | "/bin/sleep" | "/usr/bin/sleep", "infinity" | "inf"):
            return 0.0
        case ("sleep" | "/bin/sleep" | "/usr/bin/sleep", span) if result := re.fullmatch(
            r"([0-9]{1,15}(?:\.[0-9]{0,15})?)([smhd]?)", span
        ):
            return max(float(result[1]) * SECONDS[result[2]], 0.001)
        case (("sh" | "bash" | "/bin/sh" | "/bin/bash"), "-c", text) if not attached:
            words = tuple(text.removeprefix("exec ").split())
            return None if not words else _idle_s(words, attached=False) if words[0] in ("sleep", "tail") else None
    return None


def _env(body: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    result: list[tuple[str, str]] = []
    for each in _get(body, "Env", list[str] | None, None) or []:
        name, sign, value = each.partition("=")
        if not sign or ENV_NAME.fullmatch(name) is None:
            message = f"Env: {each[:64]!r} is no NAME=value; a name alone, which unsets, is not done here"
            raise InvalidInput(message, component=COMPONENT, detail={"path": "Env"})
        result.append((name, value))
    return tuple(result)


def _user(user: str) -> str:
    if ":" in user:
        raise _unsupported("User", user, "name the user alone, its group is its own")
    return user


def _require_plain_network(body: Mapping[str, object]) -> None:
    """Raise for what only a network of the engine's own has; the default one's empty entry is none."""
    for name, endpoint in _object(_object(body, "NetworkingConfig"), "EndpointsConfig").items():
        if not isinstance(endpoint, dict) or not all(_empty(value) for value in endpoint.values()):
            raise _unsupported(f"NetworkingConfig.EndpointsConfig.{name}", endpoint)


def _refuse_rest(fields: Mapping[str, object], place: str, known: frozenset[str]) -> None:
    for name, value in fields.items():
        if name not in known and not _empty(value):
            raise _unsupported(f"{place}{name}", value)


def _unsupported(place: str, value: object, remedy: str = "leave it out") -> Unsupported:
    message = f"{place}: {str(value)[:128]!r} is not done by this facade; {remedy}"
    return Unsupported(message, component=COMPONENT, detail={"path": place})


def _empty(value: object) -> bool:
    return value in (None, "", 0, False, -1, [], {}, [""])


def _object(fields: Mapping[str, object], name: str) -> dict[str, object]:
    return _get(fields, name, dict[str, object] | None, None) or {}


def _words(body: Mapping[str, object], name: str) -> tuple[str, ...]:
    """Return a command: a list of words, or a text that is one word."""
    value = _get(body, name, str | list[str] | None, None)
    words = [value] if isinstance(value, str) and value else value or []
    if any("\0" in word for word in words):
        raise InvalidInput(f"{name}: holds a NUL", component=COMPONENT, detail={"path": name})
    return tuple(words)


def _get(fields: Mapping[str, object], name: str, kind: Any, default: object) -> Any:
    """Return a field as a type; raises InvalidInput. Null is the default."""
    value = fields.get(name)
    if value is None:
        return default
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, place = explained(error)
        raise InvalidInput(f"{name}{place}: {problem}", component=COMPONENT, detail={"path": name}) from None


#: Seconds between two looks at whether the trajectories of running containers still live.
LOOK_S = 5.0
#: Seconds for which an action may stand in line before its client, that has no bound, is told.
PATIENCE_S = 3600.0
#: Seconds after its end in which a container keeps its sandbox, for who copies files out of it.
REST_S = 1.0
#: Signals that end a container whose main command only keeps it alive.
ENDING_SIGNALS = frozenset({"KILL", "TERM", "INT", "QUIT", "HUP"})


class ContainerManager:
    """Makes, begins, ends and removes containers."""

    def __init__(self, api: Api, calls: ForeignCalls, settings: DockerFacade) -> None:
        self.containers = Containers(api.store)
        self.slots = asyncio.Semaphore(api.sessions.settings.living_max)
        self._api = api
        self._calls = calls
        self._settings = settings
        self._pids = itertools.count(PIDS_FROM)
        self._chores = Chores(
            lambda error: logger.warning("a container's chore failed", facade=COMPONENT, error=str(error))
        )
        self._loading = asyncio.get_running_loop().create_task(self._load())
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def ready(self) -> None:
        """Return when what an earlier gateway kept is taken up; raises StorageUnavailable."""
        await asyncio.shield(self._loading)

    async def close(self) -> None:
        """Stop watching; the containers' trajectories stay or go with the gateway's."""
        await end_chores(self._watching)
        for container in self.containers.all():
            if container.timer is not None:
                container.timer.cancel()
        await end_chores(*self._chores.tasks)
        await asyncio.gather(self._loading, return_exceptions=True)

    # --- making

    async def create(self, body: Mapping[str, object], name: str) -> tuple[Container, tuple[str, ...]]:
        """Keep a new container, and return it with what it asked for and does not get.

        Its trajectory begins when it is started.

        Raises InvalidInput and Unsupported for what the function does not allow, NotFound for an image that is not
        there (its client pulls it then), Conflict for a name.
        """
        name = self.containers.check(name)
        labels = body.get("Labels")
        labels = labels if isinstance(labels, dict) else {}
        function = self.function(str(labels.get(FUNCTION_LABEL) or self._settings.function))
        record, warnings = container_record(body, function, name, self._api.wall())
        if record.sandbox is not None:
            with_choice(function, record.sandbox)
        await self._require_image(record)
        self.containers.check(name)
        return await self.containers.add(record), warnings

    def function(self, name: str) -> FunctionSpec:
        """Return an exec function; raises NotFound, InvalidInput."""
        function = self._api.functions.get(serialization.name(name, "function"))
        if function.runtime != "exec":
            raise InvalidInput(f"{name!r} is no exec function", component=COMPONENT)
        return function

    async def _require_image(self, record: ContainerRecord) -> None:
        """Raise NotFound for an image that must be pulled first, Unsupported where sandboxes have none."""
        image = None if record.sandbox is None else record.sandbox.image
        if image is None:
            return
        if self._api.provider.images is None:
            kind = self._api.provider.info.kind
            message = f"Image: this gateway's sandboxes are of kind {kind}, and have no images but the function's own"
            raise Unsupported(message, component=COMPONENT)
        present = {each.image for each in await self._api.provider.images.states() if each.state == "present"}
        if present.isdisjoint(image_names(image)):
            raise NotFound(f"No such image: {record.image}", component=COMPONENT)

    # --- beginning

    async def open(self, container: Container, timeout_s: float) -> None:
        """Begin its trajectory: its sandbox is made, and waits; raises CapacityExceeded after ``timeout_s``.

        Raises NotFound for one that is removed, also if that happens meanwhile: nothing of it is left.
        """
        record = container.record
        container.require_kept()
        if record.opened:
            if self._api.engine.trajectory(record.trajectory) is None:
                message = f"container {record.id} ended with its trajectory, and its files with it: make a new one"
                raise Conflict(message, component=COMPONENT)
            return
        request = TrajectoryOpening(function=record.function, task=record.task, sandbox=record.sandbox)
        if record.snapshot:
            request = replaced(request, sandbox=None, snapshot=record.snapshot)
        done = False
        try:
            async with asyncio.timeout(timeout_s):
                await self._api.open_trajectory(record.trajectory, request)
                container.require_kept()
                done = True
        except NotFound as error:
            if not record.snapshot:
                raise
            message = f"the files of container {record.id} are gone: {error.message}; make a new one"
            raise Conflict(message, component=COMPONENT) from None
        except TimeoutError:
            message = "the container was not begun in the time that its client waits; start it again"
            raise CapacityExceeded(message, component=COMPONENT, retry_after_s=1.0) from None
        finally:
            if not done:
                self._chores.begin(self._end_trajectory(record.trajectory))
        record.opened = True
        self.containers.save(container)

    async def start(self, container: Container, timeout_s: float) -> bool:
        """Begin it; return whether that is news."""
        async with container.lock:
            if container.running:
                return False
            await self.open(container, timeout_s)
            record = container.record
            record.status, record.started_s = "running", self._api.wall()
            record.exit_code, record.error, record.out_of_memory = 0, "", False
            self.containers.save(container)
            if record.idles:
                self._arm(container)
            else:
                self._begin_main(container)
            await self._api.store.commit()  # who is told that it runs finds it so at the next gateway
            return True

    def _begin_main(self, container: Container) -> None:
        main = container.main = container.next_main or self._main(container)
        container.next_main = None
        main.start(self.slots, asyncio.get_running_loop().time() + PATIENCE_S)
        self._chores.begin(self._attend_main(container, main))

    def main_of(self, container: Container) -> KeptCommand | None:
        """Return its main command, the next where it does not run; None if it only keeps the container alive."""
        if container.record.idles or container.running:
            return container.main
        container.next_main = container.next_main or self._main(container)
        return container.next_main

    def _main(self, container: Container) -> KeptCommand:
        record = container.record
        spec = CommandSpec(argv=record.argv, cwd=record.cwd, tty=record.tty, stdin=record.reads_stdin)
        keep_bytes = self._api.sessions.settings.output_bytes
        return KeptCommand(self._api, self._calls, record, spec, keep_bytes)

    async def _attend_main(self, container: Container, main: KeptCommand) -> None:
        """Keep its output, and end its container with it."""
        if not container.record.reads_stdin:
            self._chores.begin(main.end_input())
        await main.keep_output()
        await main.ended.wait()
        if main is not container.main or not container.running:
            return
        if main.error is not None:
            self._ended(container, KILLED if main.cancelled else LOST_EXIT, main.error.message)
            self.mark_lost(container, main.error)
            return
        container.record.out_of_memory = main.out_of_memory
        self._ended(container, LOST_EXIT if main.exit_code is None else main.exit_code, main.end_message.strip())

    def _arm(self, container: Container) -> None:
        """End it when its ``sleep`` would."""
        record = container.record
        if container.timer is not None:
            container.timer.cancel()
            container.timer = None
        if record.idles_s:
            left_s = max(0.0, record.started_s + record.idles_s - self._api.wall())
            loop = asyncio.get_running_loop()
            container.timer = loop.call_later(left_s, lambda: self._chores.begin(self.end(container, exit_code=0)))

    # --- commands

    def exec(self, container: Container, spec: CommandSpec) -> ContainerExec:
        """Know a command that may be started; raises Conflict unless the container runs."""
        container.require_running()
        self.look(container)
        container.require_running()
        if container.main is not None and not container.main.ended.is_set():
            message = (
                f"the main command of container {container.record.id} runs, and commands of one container run one "
                "after another: let it be kept alive by 'sleep infinity', and begin servers by exec -d"
            )
            raise Conflict(message, component=COMPONENT)
        command = ContainerExec(self._api, self._calls, container.record, spec, next(self._pids))
        self.containers.add_exec(command)
        return command

    def mark_lost(self, container: Container, error: CodedError | None) -> None:
        """End a container whose sandbox is gone: what was in it is lost, and no later command may begin in another."""
        if isinstance(error, ActionFailed) and error.reason in (Reason.ENVIRONMENT_LOST, Reason.NODE_LOST):
            self._ended(container, KILLED, error.message)
            self._chores.begin(self._end_trajectory(container.record.trajectory))

    @asynccontextmanager
    async def sandbox(self, container: Container, timeout_s: float) -> AsyncIterator[Sandbox]:
        """Yield its sandbox, made if it has none; raises NotFound, Conflict, CapacityExceeded."""
        container.transfers += 1
        try:
            async with container.lock:
                await self.open(container, timeout_s)
            trajectory = container.record.trajectory
            result = self._api.environments.get(trajectory)
            if result is None:
                self._api.require_here(trajectory)
                raise NotFound(f"container {container.record.id} has no sandbox any more", component=COMPONENT)
            yield result
        finally:
            container.transfers -= 1
            self._rest_soon(container)

    # --- ending

    async def stop(self, container: Container, grace_s: float) -> bool:
        """End it, its main command with a word before; return whether it ran."""
        async with container.lock:
            if not container.running:
                return False
            main = container.main
            if main is not None and not main.ended.is_set():
                with suppress(CodedError):
                    await main.signal("TERM")
                with suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await main.drained.wait()
        await self.end(container, exit_code=KILLED)
        return True

    async def restart(self, container: Container, grace_s: float, timeout_s: float) -> None:
        """End it if it runs, and begin it again with its files; raises as `start`."""
        container.restarting = True
        try:
            await self.stop(container, grace_s)
        finally:
            container.restarting = False
        await self.start(container, timeout_s)

    async def kill(self, container: Container, name: str) -> None:
        """Signal its main command; raises Conflict, InvalidInput."""
        container.require_running()
        main = container.main
        if name == "KILL" or (main is None and name in ENDING_SIGNALS):
            if main is not None:  # before what waits for its turn to end it: a stop gives it time
                await main.cancel("the container was killed")
            await self.end(container, exit_code=KILLED)
        elif main is not None:
            await main.signal(name)

    async def end(self, container: Container, *, exit_code: int) -> None:
        """End what runs in it; its files stay until it is removed."""
        async with container.lock:
            if not container.running:
                return
            commands = [each for each in container.execs.values() if each.running]
            main = container.main
            living = [] if main is None or main.ended.is_set() else [main]
            await asyncio.gather(*(each.cancel("the container was ended") for each in (*commands, *living)))
            sandbox = self._api.environments.get(container.record.trajectory)
            if sandbox is not None and sandbox.alive:
                with suppress(CodedError):
                    await sandbox.sweep()
            if container.running:
                self._ended(container, main.exit_code or exit_code if living and main else exit_code, "")
                await self._api.store.commit()

    def _rest_soon(self, container: Container) -> None:
        """Let a container that has ended hold no memory in a moment: its files are often fetched, or it is removed."""
        if container.record.status != "exited" or container.removed:
            return
        if container.timer is not None:
            container.timer.cancel()
        loop = asyncio.get_running_loop()
        container.timer = loop.call_later(REST_S, lambda: self._chores.begin(self._rest(container)))

    async def _rest(self, container: Container) -> None:
        """Keep the files of a container that has ended in a snapshot, and end its sandbox, which holds memory."""
        record = container.record
        async with container.lock:
            lives = record.opened and self._api.engine.trajectory(record.trajectory) is not None
            if record.status != "exited" or not lives or record.removing or container.transfers:
                return
            earlier = record.snapshot
            try:
                taken = await self._api.take_snapshot(record.trajectory)
            except CodedError as error:  # it keeps its memory with its files, until it is idle for too long
                logger.warning("an ended container keeps its memory", container=record.name, why=error.message)
                return
            record.snapshot, record.opened = taken.snapshot, False
            self.containers.save(container)
            await self._api.store.commit()
            await self._end_trajectory(record.trajectory)
        await self._forget_snapshot(earlier)
        if container.removed:
            await self._forget_snapshot(taken.snapshot)

    async def _forget_snapshot(self, snapshot: str) -> None:
        if snapshot:
            with suppress(CodedError):  # it is gone already, or something else began with it and needs it yet
                await self._api.remove_snapshot(snapshot)

    async def remove(self, container: Container, *, force: bool) -> None:
        """Remove it with its trajectory; raises Conflict for one that runs, unless it is forced."""
        if container.running and not force:
            message = (
                f"You cannot remove a running container {container.record.id}. Stop the container before attempting "
                "removal or force remove"
            )
            raise Conflict(message, component=COMPONENT)
        if container.timer is not None:
            container.timer.cancel()
        if container.running:
            self._ended(container, KILLED, "", removes=False)
        container.record.removing = True
        self.containers.save(container)
        await self._end_trajectory(container.record.trajectory)
        await self._forget_snapshot(container.record.snapshot)
        self.containers.forget(container)
        if container.next_main is not None:
            container.next_main.forgo()

    def look(self, container: Container) -> None:
        """See whether its trajectory has ended."""
        record = container.record
        if record.status == "running" and self._api.engine.trajectory(record.trajectory) is None:
            message = "its trajectory has ended: it was idle for its idle_ttl, or somebody ended it"
            self._ended(container, KILLED, message)

    def _ended(self, container: Container, exit_code: int, why: str, *, removes: bool = True) -> None:
        record = container.record
        if record.status != "running":
            return
        record.status, record.exit_code, record.error = "exited", exit_code, why
        record.finished_s = self._api.wall()
        container.ends += 1
        if container.timer is not None:
            container.timer.cancel()
        self.containers.save(container)
        if record.auto_remove and removes and not container.restarting:
            self._chores.begin(self.remove(container, force=True))
        elif removes:
            self._rest_soon(container)

    async def _end_trajectory(self, trajectory: str) -> None:
        await self._api.engine.end_trajectory(trajectory)

    # --- chores

    async def _load(self) -> None:
        await self.containers.load()
        for container in self.containers.all():
            if container.record.removing:
                self._chores.begin(self.remove(container, force=True))
            elif container.running and not container.record.idles:
                self._ended(container, LOST_EXIT, "the gateway that ran its main command has ended")
            elif container.running:
                self._arm(container)
            elif container.record.status == "exited" and container.record.auto_remove:
                self._chores.begin(self.remove(container, force=True))
            else:
                self._rest_soon(container)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for container in self.containers.all():
                self.look(container)
