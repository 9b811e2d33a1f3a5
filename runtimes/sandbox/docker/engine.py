"""The Docker engine: client, watchdog, archives, leftovers."""

from __future__ import annotations

import asyncio
import io
import math
import os
import posixpath
import queue
import re
import secrets
import shutil
import signal
import struct
import tarfile
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar, cast

import docker
import docker.errors
import docker.transport
import docker.types
import requests.exceptions
import structlog

from manager.errors import CapacityExceeded, CodedError, InvalidConfig, InvalidInput, NotFound, TooLarge, Unsupported
from runtimes.chores import end_chores
from runtimes.sandbox.command import PIECE_BYTES, FileContent
from runtimes.sandbox.linux import PERIOD_US, Cgroup, CpuWeight, Hierarchy
from runtimes.sandbox.runner.runner import DEFAULT_PATH, FrameDecoder
from runtimes.sandbox.sandbox import Orphan, verdict
from runtimes.sandbox.snapshots import LABEL, SNAPSHOTS
from runtimes.sandbox.spec import SANDBOXES

COMPONENT = "sandbox.container"
DEFAULT_HOST = "unix:///var/run/docker.sock"
#: The scheme under which docker asks requests for a socket on this machine.
SCHEME = "http+docker://"
#: What is raised if an engine is not reached.
AWAY = (requests.exceptions.RequestException, docker.errors.DockerException, OSError)


class OnePool(docker.transport.UnixHTTPAdapter):
    """One pool of connections for all requests.

    docker keeps one for each address asked, and most have an id in them: a new connection for nearly every request,
    and several times as many open ones as threads.
    """

    @classmethod
    def replace(cls, api: docker.APIClient, socket: str, connections: int) -> OnePool:
        """Give ``api`` one pool in place of its own."""
        api.adapters[SCHEME].close()
        pool = cls(socket, api.timeout, pool_connections=1, max_pool_size=connections)
        api.mount(SCHEME, pool)
        return pool

    def drop(self) -> None:
        """Close what is not in use: the engine is away, and will not know these connections when it comes back."""
        self.pools.clear()

    def get_connection(self, url: Any, proxies: Any = None) -> Any:
        return super().get_connection(SCHEME, proxies)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConnection:
    """A client, and the socket that it speaks to. Its methods block."""

    api: docker.APIClient
    pool: OnePool
    socket: str
    info: Mapping[str, Any]

    @classmethod
    def open(cls, host: str, *, timeout_s: float, workers: int) -> EngineConnection:
        """Connect to the engine that ``host`` or else the environment names.

        Raises InvalidConfig if that is none of this machine, Unsupported if none answers.
        """
        socket = socket_of(host or os.environ.get("DOCKER_HOST") or DEFAULT_HOST)
        try:
            api = docker.APIClient(f"unix://{socket}", "auto", timeout=math.ceil(timeout_s), num_pools=workers)
            pool = OnePool.replace(api, socket, workers)
            return cls(api=api, pool=pool, socket=socket, info=api.info())
        except AWAY as error:
            remedy = (
                f"is one at {host}?"
                if host
                else "start it (systemctl restart docker), install one (Debian: apt-get install docker.io), or name "
                "one in DOCKER_HOST"
            )
            raise Unsupported(f"no Docker engine answers ({error}); {remedy}", component=COMPONENT) from None

    def answers(self, within_s: float) -> bool:
        """Return whether it answers a ping now."""
        try:
            self.api.get(f"{self.api.base_url}/_ping", timeout=within_s)
        except AWAY:
            self.pool.drop()
            return False
        return True

    def shares(self, directory: Path) -> bool:
        """Return whether the engine runs on this kernel and sees this directory: then a socket in it joins both.

        Not if the gateway is in a container, or the engine in a virtual machine. It is asked to mount a directory with
        a name that nobody else has into a container of an image that there is not, and complains of the first of the
        two that is wrong.
        """
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if (self.info.get("KernelVersion"), self.info.get("MemTotal")) != (os.uname().release, memory_bytes):
            return False
        nonce = f"tangram-probe-{secrets.token_hex(8)}"
        probe = directory.absolute() / nonce
        probe.mkdir()
        try:
            mount = docker.types.Mount(f"/{nonce}", str(probe), type="bind", read_only=True)
            self.api.create_container(f"{nonce}:none", host_config=self.api.create_host_config(mounts=[mount]))
        except docker.errors.NotFound as error:
            return "image" in str(error.explanation).lower()
        except AWAY:
            return False
        finally:
            probe.rmdir()
        return False

    def close(self) -> None:
        self.api.close()


def socket_of(url: str) -> str:
    """Return the path of the socket that an engine's address names; raises InvalidConfig for anything else."""
    scheme, _, path = url.partition("://")
    if scheme != "unix" or not path:
        raise InvalidConfig(
            f"{url!r} is no Docker engine of this machine (unix:///path, in sandbox.docker.host or DOCKER_HOST): "
            "a machine with an engine of its own joins as a node (docs/CLUSTER.md)",
            component=COMPONENT,
        )
    return f"/{path.lstrip('/')}"


# The watchdog of an engine: blocking calls to it in threads, given up if it falls silent.
#
# A request may take its time (a pull, a commit, a creation under load), but a living engine answers a ping meanwhile.
# One that does not is asked nothing more until it answers again: callers are refused at once instead of queueing up.

logger = structlog.get_logger("sandbox.engine")


T = TypeVar("T")


class EngineWatchdog:
    """At most ``threads`` calls at a time, none of which outlasts the engine's answers by more than ``silence_s``."""

    def __init__(self, ping: Callable[[float], bool], *, threads: int, silence_s: float) -> None:
        #: Blocking: whether the engine answers within so many seconds.
        self._ping = ping
        self._step_s = silence_s / 2
        self._threads = DaemonThreads(threads, "docker")
        self._pinging = DaemonThreads(1, "docker-ping")
        self._asking: asyncio.Task[None] | None = None
        self._reviving: asyncio.Task[None] | None = None
        self._silent = False

    @property
    def silent(self) -> bool:
        """Whether it did not answer the last ping."""
        return self._silent

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread; raises what it raises, and CapacityExceeded if the engine is or falls silent.

        Given up or cancelled, work that has begun goes on unseen, and work that waits for a thread is dropped.
        """
        if self._silent:
            raise self._refusal()
        future = asyncio.wrap_future(self._threads.submit(work))
        future.add_done_callback(_retrieved)
        try:
            while not (await asyncio.wait([future], timeout=self._step_s))[0]:
                if not await self._answers() and not future.done():
                    raise self._refusal()
        finally:
            future.cancel()
        return future.result()

    async def look(self) -> bool:
        """Return whether it answers now, which one that refuses connections does not; no call is refused for it."""
        if self._silent:
            return False
        return await asyncio.wrap_future(self._pinging.submit(lambda: self._ping(self._step_s)))

    async def close(self) -> None:
        """Wait for what runs, as long as the engine answers."""
        await end_chores(self._asking, self._reviving)
        patience_s = 0.0 if self._silent else 2 * self._step_s
        for threads in (self._pinging, self._threads):
            await asyncio.to_thread(threads.close, patience_s)

    # --- inside

    def _refusal(self) -> CapacityExceeded:
        message = "the Docker engine does not answer"
        return CapacityExceeded(message, component=COMPONENT, retry_after_s=self._step_s)

    async def _answers(self) -> bool:
        """Return whether it answers; it is asked once for all who wait."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.shield(self._asking)
        return not self._silent

    async def _ask(self) -> None:
        answers = await asyncio.wrap_future(self._pinging.submit(lambda: self._ping(self._step_s)))
        if answers and self._silent:
            logger.info("the engine answers again")
        elif not answers and not self._silent:
            logger.warning("the engine does not answer", within_s=self._step_s)
        self._silent = not answers
        if self._silent and (self._reviving is None or self._reviving.done()):
            self._reviving = asyncio.create_task(self._revive())

    async def _revive(self) -> None:
        while self._silent:
            await asyncio.sleep(self._step_s)
            await self._ask()


class DaemonThreads:
    """Threads for blocking calls. An executor's hold up the end of the program until the last call returns."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Return the future result of ``work``, which is dropped if that is cancelled before a thread is free."""
        future: Future[T] = Future()
        self._waiting.put((future, work))
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._limit:
            thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def close(self, within_s: float) -> None:
        """Drop what waits, and give what runs so many seconds. Blocks."""
        while not self._waiting.empty():
            item = self._waiting.get()
            if item is not None:
                item[0].cancel()
        for _ in self._threads:
            self._waiting.put(None)
        deadline_s = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _serve(self) -> None:
        while (item := self._next()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001  # whoever asked is told
                    future.set_exception(error)

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            self._idle.release()
            return self._waiting.get()


def _retrieved(future: asyncio.Future[T]) -> None:
    """Mark a failure as seen: a caller that gave up does not come back for it."""
    if not future.cancelled():
        future.exception()


#: Bytes that an archive of one file has beside the file.
ARCHIVE_SLACK_BYTES = 2 * tarfile.RECORDSIZE


def pack_file(name: str, file: BinaryIO, archive: BinaryIO, *, mode: int, uid: int) -> None:
    """Write an archive of one file that ``uid`` owns."""
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.uid, entry.gid = file.seek(0, io.SEEK_END), mode, uid, uid
        file.seek(0)
        tar.addfile(entry, file)


def unpacked_file(archive: bytes | bytearray, path: str) -> bytes:
    """Return the one file of an archive; raises InvalidInput, naming ``path``, if it is no regular file."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        member = next(iter(tar), None)
        file = None if member is None or not member.isreg() else tar.extractfile(member)
        if file is None:
            raise InvalidInput(f"{path!r} is no regular file", component=COMPONENT)
        return file.read()


def pack_tree(source: Path, target: str, archive: BinaryIO, limit_bytes: int) -> None:
    """Write a directory as it is, but with nothing writable in it, and without sockets and the like.

    Raises InvalidConfig if its files hold more than ``limit_bytes``.
    """
    left_bytes = limit_bytes

    def entry(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal left_bytes
        left_bytes -= info.size
        if left_bytes < 0:
            message = f"{source} holds more than {limit_bytes} bytes, too many to be copied into a container"
            raise InvalidConfig(message, component=COMPONENT)
        info.mode &= 0o555
        return info if info.isreg() or info.isdir() or info.issym() or info.islnk() else None

    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(source, arcname=target.lstrip("/"), filter=entry)


class SpooledContent(FileContent):
    """A content on disk, whose pieces can be had again."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(b"")
        self._file = file

    async def pieces(self) -> AsyncIterator[bytes]:
        self._file.seek(0)
        while piece := await asyncio.to_thread(self._file.read, PIECE_BYTES):
            yield piece


@asynccontextmanager
async def on_disk(content: FileContent) -> AsyncIterator[BinaryIO]:
    """Yield a file without a name that holds it, at its beginning."""
    with tempfile.TemporaryFile() as created:
        file = cast(BinaryIO, created)
        async for piece in content.pieces():
            await asyncio.to_thread(file.write, piece)
        file.seek(0)
        yield file


@asynccontextmanager
async def repeatable(content: FileContent) -> AsyncIterator[FileContent]:
    """Yield the same content as one whose pieces can be had more than once."""
    if content.repeatable:
        yield content
        return
    async with on_disk(content) as file:
        yield SpooledContent(file)


STDOUT, STDERR = 1, 2
#: Stream, three bytes of nothing, length.
_HEADER = struct.Struct("!BxxxI")
#: Bytes of one chunk above which it is no engine that speaks.
CHUNK_MAX_BYTES = 16 * 2**20


def chunk_decoder() -> FrameDecoder:
    """Return a decoder whose frames are ``((stream, length), data)``."""
    return FrameDecoder(_HEADER, length_at=1, limit=CHUNK_MAX_BYTES)


#: Seconds after which an engine that did not answer may be asked again.
RETRY_S = 5.0
#: Seconds after which an engine that answers not even a ping is given up.
SILENCE_S = 10.0
#: Seconds in which it sees that the first process of a container was ended.
ENDED_S = 10
CHUNK_BYTES = 64 * 2**10
#: Names of environment variables that a change of an image's configuration can say.
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: What takes IPv6 from a network namespace, and where a kernel that has it says so.
NO_IPV6, IPV6 = "net.ipv6.conf.all.disable_ipv6", Path("/proc/sys/net/ipv6")
P = ParamSpec("P")


class NoRunner(CodedError):
    """The image has no python3 that could run the resident runner."""

    code = "unsupported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A container to be made."""

    name: str
    image: str
    argv: tuple[str, ...]
    user: str
    workdir: str
    env: Mapping[str, str]
    labels: Mapping[str, str]
    #: Host path -> (path inside, mode).
    binds: Mapping[str, tuple[str, str]]
    capabilities: tuple[str, ...]
    memory_bytes: int
    pids: int
    shm_bytes: int
    disk_bytes: int
    #: The engine's name of what runs it; empty takes its default.
    runtime: str
    network: str
    hosts: Mapping[str, str]
    #: Has a loopback and nothing else, made without the engine, which would run two programs for it; needs /etc/hosts.
    offline: bool = False
    #: Name servers; empty takes the engine's.
    dns: tuple[str, ...] = ()
    #: Filter of system calls (`runtimes.sandbox.linux.engine_profile`); empty takes the engine's own.
    seccomp: str = ""
    #: Whether its standard input stays open, for one attached gateway after the other.
    attached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerState:
    """A container as the engine lists or inspects it."""

    id: str
    labels: Mapping[str, str]
    running: bool
    #: Its first process as we know it; 0 if it is not running, or its process ids are not to be seen here.
    pid: int = 0
    paused: bool = False
    out_of_memory: bool = False
    exit_code: int = 0
    #: The place of its own layer on the engine's host; empty if the driver does not tell.
    layer: str = ""
    #: Files of the engine's host that it sees in /etc, and may write as root.
    etc: tuple[str, ...] = ()
    #: The engine's name of its network; empty if it is only listed.
    network: str = ""


class DockerEngine:
    """Asynchronous, bounded calls to one engine."""

    def __init__(self, connection: EngineConnection, *, workers: int, silence_s: float) -> None:
        self._connection = connection
        self._api = connection.api
        self._watchdog = EngineWatchdog(connection.answers, threads=workers, silence_s=silence_s)
        info = connection.info
        self.version = str(info.get("ServerVersion", "?"))
        self.cgroup_version = str(info.get("CgroupVersion", "1"))
        self.seccomp = any("seccomp" in option for option in info.get("SecurityOptions") or ())
        #: Whom the engine takes containers' root for, on its own machine; None if that is root (no userns-remap).
        self.remapped = _remapped(info)
        #: What it can run containers with, and what it does if not asked.
        self.runtimes = tuple(sorted(info.get("Runtimes") or ()))
        self.default_runtime = str(info.get("DefaultRuntime") or "runc")

    @classmethod
    def connect(cls, host: str = "", *, timeout_s: float, workers: int, silence_s: float = SILENCE_S) -> DockerEngine:
        """Connect to the engine that ``host`` or else the environment names; as `EngineConnection.open`. Blocks.

        One request may take ``timeout_s``, but is given up after ``silence_s`` in which the engine answers no ping.
        """
        connection = EngineConnection.open(host, timeout_s=silence_s, workers=workers)
        connection.api.timeout = int(timeout_s)
        return cls(connection, workers=workers, silence_s=silence_s)

    @property
    def api(self) -> docker.APIClient:
        """What `call` may be asked to call."""
        return self._api

    @property
    def socket(self) -> str:
        """The path at which it listens."""
        return self._connection.socket

    def shares(self, directory: Path) -> bool:
        """Return whether a socket in this directory joins processes here and in the engine's containers. Blocks."""
        return self._connection.shares(directory)

    def attach_path(self, container: str) -> str:
        """Return the path of the HTTP request that attaches to a container's three streams."""
        return f"/v{self._api.api_version}/containers/{container}/attach?stream=1&stdin=1&stdout=1&stderr=1"

    async def trouble(self) -> str:
        """Return why no container can be made now, and what mends that; empty if the engine answers."""
        if await self._watchdog.look():
            return ""
        message = (
            f"its Docker engine does not answer (unix://{self.socket}), so no sandbox can be made: start the engine"
        )
        return f"{message} again (systemctl restart docker); the sandboxes that live there go on"

    async def close(self) -> None:
        await self._watchdog.close()
        self._connection.close()

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` in one of the engine's threads; raises CodedError."""

        def guarded() -> T:
            try:
                return function(*args, **kwargs)
            except docker.errors.NotFound as error:
                raise NotFound(str(error.explanation), component=COMPONENT) from None
            except docker.errors.APIError as error:
                raise _typed(error) from None
            except AWAY as error:
                self._connection.pool.drop()
                raise CapacityExceeded(
                    f"the Docker engine does not answer: {error}", component=COMPONENT, retry_after_s=RETRY_S
                ) from None

        return await self._watchdog.call(guarded)

    async def require_runtime(self, name: str) -> None:
        """Raise InvalidConfig unless the engine can run containers with it; asks again, as that can be added."""
        if name not in self.runtimes:
            self.runtimes = tuple(sorted((await self.call(self._api.info)).get("Runtimes") or ()))
        if name not in self.runtimes:
            raise InvalidConfig(
                f"sandbox.runtime: the engine has no {name!r}; it has {', '.join(self.runtimes)}. Install it and "
                "register it in the engine's daemon.json (runtimes), or leave the key out",
                component=COMPONENT,
            )

    # --- images

    async def commit(self, container: str, name: str, labels: Mapping[str, str], without: Iterable[str]) -> str:
        """Keep a container's file system as an image; returns its full name.

        What is made of the image does not have the values of the environment variables of ``without``, which may be
        secrets. (Engines before 25 keep them in its ContainerConfig, for whoever may ask the engine.)
        """
        repository, _, tag = name.partition(":")
        changes = [f'LABEL "{key}"="{value}"' for key, value in labels.items()]
        changes += [f'ENV {variable}=""' for variable in without if VARIABLE.fullmatch(variable)]
        await self.call(self._api.commit, container, repository=repository, tag=tag, pause=False, changes=changes)
        return name

    async def image_labels(self, name: str) -> Mapping[str, str]:
        """Return the labels of an image; raises NotFound."""
        entry = await self.call(self._api.inspect_image, name)
        return (entry.get("Config") or {}).get("Labels") or {}

    async def labelled_images(self, *labels: str) -> list[Mapping[str, str]]:
        """Return the labels of every image that has these."""
        entry = await self.call(self._api.images, filters={"label": list(labels)})
        return [image.get("Labels") or {} for image in entry]

    async def remove_image(self, name: str) -> None:
        try:
            await self.call(self._api.remove_image, name, force=True)
        except NotFound:
            return

    # --- containers

    async def create(self, blueprint: Blueprint) -> str:
        """Make a container (not started); returns its id."""
        return str((await self.call(self._create, blueprint))["Id"])

    def _create(self, blueprint: Blueprint) -> Mapping[str, Any]:
        host = self._api.create_host_config(
            binds={source: {"bind": target, "mode": mode} for source, (target, mode) in blueprint.binds.items()},
            cap_drop=["ALL"],
            cap_add=list(blueprint.capabilities),
            security_opt=["no-new-privileges", *([f"seccomp={blueprint.seccomp}"] if blueprint.seccomp else [])],
            mem_limit=blueprint.memory_bytes,
            memswap_limit=blueprint.memory_bytes,
            pids_limit=blueprint.pids,
            shm_size=blueprint.shm_bytes,
            runtime=blueprint.runtime or None,
            network_mode=blueprint.network,
            sysctls={NO_IPV6: "1"} if blueprint.offline and IPV6.exists() else None,  # as the engine does
            extra_hosts=dict(blueprint.hosts) or None,
            dns=list(blueprint.dns) or None,
            log_config=docker.types.LogConfig(type="none"),
            ulimits=[
                docker.types.Ulimit(name="core", soft=0, hard=0),
                docker.types.Ulimit(name="nofile", soft=4096, hard=4096),
                docker.types.Ulimit(name="fsize", soft=blueprint.disk_bytes, hard=blueprint.disk_bytes),
            ],
        )
        created: Mapping[str, Any] = self._api.create_container(
            image=blueprint.image,
            entrypoint=[blueprint.argv[0]],
            command=list(blueprint.argv[1:]),
            name=f"tangram-{blueprint.name}",
            hostname="sandbox",
            user=blueprint.user,
            working_dir=blueprint.workdir,
            network_disabled=blueprint.offline,
            environment=dict(blueprint.env),
            labels=dict(blueprint.labels),
            host_config=host,
            stdin_open=blueprint.attached,
            stop_signal="SIGKILL",  # nothing is to be saved: the machine's end need not wait for it
            detach=True,  # else standard input would end with the first who attaches
        )
        return created

    async def start(self, container: str) -> ContainerState:
        """Start it; raises NoRunner if its program is not in the image, which is looked for there."""
        try:
            await self.call(self._api.start, container)
        except CodedError as error:
            output = error.message.lower()
            missing = "not found" in output or "no such file" in output  # a mount, a device, the engine's own files ...
            if missing and await self.call(self._lacks_program, container):
                raise NoRunner(error.message, component=COMPONENT) from None
            raise
        return await self.inspect(container)

    def _lacks_program(self, container: str) -> bool:
        """Return whether it is certain that a container has no file of its program's name on its path."""
        created = self._api.inspect_container(container)["Config"]
        program = str((created.get("Entrypoint") or created.get("Cmd"))[0])
        path = next((each[5:] for each in created.get("Env") or () if each.startswith("PATH=")), DEFAULT_PATH)
        for directory in [""] if "/" in program else path.split(":"):
            try:
                stream, _ = self._api.get_archive(container, posixpath.join(directory or "/", program))
            except docker.errors.NotFound:
                continue
            next(stream, b"")  # begun: only then does its end close the connection
            stream.close()
            return False
        return True

    async def inspect(self, container: str) -> ContainerState:
        """Raises NotFound."""
        state = await self.call(self._api.inspect_container, container)
        return ContainerState(
            id=state["Id"],
            labels=state["Config"].get("Labels") or {},
            running=bool(state["State"]["Running"]),
            paused=bool(state["State"]["Paused"]),
            pid=known_here(int(state["State"]["Pid"]), state["Id"]),
            out_of_memory=bool(state["State"]["OOMKilled"]),
            exit_code=int(state["State"]["ExitCode"]),
            layer=str(((state.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir") or ""),
            etc=tuple(
                [str(state[name]) for name in ("HostsPath", "HostnamePath", "ResolvConfPath") if state.get(name)]
            ),
            network=str(state["HostConfig"]["NetworkMode"]),
        )

    async def running(self, container: str) -> bool:
        """Return whether it runs; False also if there is no such container any more."""
        try:
            return (await self.inspect(container)).running
        except NotFound:
            return False

    async def layer_bytes(self, container: str) -> int:
        """Return the bytes that a container has written. The engine may take its time.

        Raises NotFound if it is gone, and Unsupported where the engine cannot tell.
        """
        entry = await self.call(self._api.containers, all=True, size=True, filters={"id": container})
        if not entry:
            raise NotFound(f"no container {container[:12]}", component=COMPONENT)
        size_bytes = int(entry[0].get("SizeRw", 0))  # left out where it is 0
        if size_bytes < 0:
            raise Unsupported(f"the engine cannot read the files of container {container[:12]}", component=COMPONENT)
        return size_bytes

    async def list(self, label: str) -> list[ContainerState]:
        """Return every container with this label, running or not, in one cheap call."""
        items = await self.call(self._api.containers, all=True, filters={"label": label})
        return [
            ContainerState(id=item["Id"], labels=item.get("Labels") or {}, running=item.get("State") == "running")
            for item in items
        ]

    async def ended(self, container: str) -> None:
        """Return once the engine has seen its end; raises CodedError if it does not see that for a while."""
        with suppress(NotFound):
            await self.call(self._api.wait, container, timeout=ENDED_S)

    async def remove(self, container: str) -> None:
        """Kill and remove it; idempotent."""
        try:
            await self.call(self._api.remove_container, container, force=True, v=True)
        except NotFound:
            return
        except CodedError as error:
            if "already in progress" not in error.message:
                raise

    async def limit_cores(self, container: str, cores: Sequence[int], weight: CpuWeight) -> None:
        """Grant cores the slow way, for engines whose cgroups cannot be seen."""
        await self.call(
            self._api.update_container,
            container,
            cpuset_cpus=",".join(map(str, cores)),
            cpu_period=PERIOD_US,
            cpu_quota=PERIOD_US * len(cores),
            cpu_shares=weight.shares,
        )

    async def unpause(self, container: str) -> None:
        await self.call(self._api.unpause, container)

    # --- docker exec, for images without a runner

    def execute(
        self,
        container: str,
        argv: Sequence[str],
        *,
        user: str,
        cwd: str,
        env: Mapping[str, str],
        stdin: bytes,
        output: Callable[[str, bytes], None],
        abandoned: Callable[[], bool],
    ) -> int | None:
        """Run to the end in a thread of the caller's; return the exit code, None if abandoned.

        ``output`` gets (``stdout`` | ``stderr``, bytes).
        """
        created = self._api.exec_create(
            container, list(argv), stdin=bool(stdin), user=user, workdir=cwd or None, environment=dict(env)
        )["Id"]
        wrapped = self._api.exec_start(created, socket=True)
        sock: Any = getattr(wrapped, "_sock", wrapped)  # what the HTTP library hands out differs by its version
        try:
            sock.settimeout(0.2)
            if stdin:
                _feed(sock, stdin)
            return self._follow(created, sock, output, abandoned)
        finally:
            response = getattr(wrapped, "_response", None)  # held there by docker while the socket is used
            for part in (response, wrapped, sock):
                if part is not None:
                    part.close()

    def _follow(
        self, exec_id: str, sock: Any, output: Callable[[str, bytes], None], abandoned: Callable[[], bool]
    ) -> int | None:
        """Read the multiplexed stream until it ends, or until the command has ended and said nothing more."""
        decoder = chunk_decoder()
        while not abandoned():
            try:
                data = sock.recv(CHUNK_BYTES)
            except TimeoutError:
                if self._api.exec_inspect(exec_id)["Running"]:
                    continue
                data = b""
            if not data:
                return int(self._api.exec_inspect(exec_id)["ExitCode"] or 0)
            for (stream, _), chunk in decoder.feed(data):
                output("stderr" if stream == STDERR else "stdout", chunk)
        return None

    async def put_file(self, container: str, directory: str, name: str, file: BinaryIO, *, mode: int, uid: int) -> None:
        def copy() -> None:
            with tempfile.TemporaryFile() as archive:
                pack_file(name, file, archive, mode=mode, uid=uid)
                archive.seek(0)
                self._api.put_archive(container, directory, archive)

        await self.call(copy)

    async def put_tree(self, container: str, source: Path, target: str, *, limit_bytes: int) -> None:
        """Copy a directory of this machine in, for reading; raises InvalidConfig if it holds more than the limit."""

        def copy() -> None:
            with tempfile.TemporaryFile() as archive:
                pack_tree(source, target, archive, limit_bytes)
                archive.seek(0)
                self._api.put_archive(container, "/", archive)

        await self.call(copy)

    async def get_file(self, container: str, path: str, *, limit_bytes: int) -> bytes:
        """Raises NotFound, TooLarge, and InvalidInput if it is no regular file."""
        return await self.call(self._get_file, container, path, limit_bytes)

    def _get_file(self, container: str, path: str, limit_bytes: int) -> bytes:
        stream, info = self._api.get_archive(container, path)
        archive = bytearray(next(stream, b""))  # begun: only then does its end close the connection
        with closing(stream):
            if int(info.get("mode", 0)) & 0x8F280000:  # Go's file modes: anything but a regular file
                raise InvalidInput(f"{path!r} is no regular file", component=COMPONENT)
            if int(info.get("size", 0)) > limit_bytes:
                raise TooLarge(f"{path!r} is larger than {limit_bytes} bytes", component=COMPONENT)
            for chunk in stream:
                archive += chunk
                if len(archive) > limit_bytes + ARCHIVE_SLACK_BYTES:
                    raise TooLarge(f"{path!r} is larger than {limit_bytes} bytes", component=COMPONENT)
        return unpacked_file(archive, path)


def _remapped(info: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return user and group id; an engine that remaps has a directory for each pair, and is in it."""
    if not any("userns" in option for option in info.get("SecurityOptions") or ()):
        return None
    user, _, group = str(info.get("DockerRootDir", "")).rpartition("/")[2].partition(".")
    return (int(user), int(group)) if user.isdigit() and group.isdigit() else None


def known_here(pid: int, container: str) -> int:
    """Return ``pid`` if it is the container's here: in a container of our own that number may be anybody's."""
    try:
        membership = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    except OSError:
        return 0
    return pid if container in membership else 0


def _feed(sock: Any, data: bytes) -> None:
    view = memoryview(data)
    sock.settimeout(30)
    try:
        sock.sendall(view)
        sock.shutdown(1)
    except OSError:
        pass  # it reads no more
    sock.settimeout(0.2)


def _typed(error: docker.errors.APIError) -> CodedError:
    message = str(error.explanation or error)
    status = error.response.status_code if error.response is not None else 500
    if status == 400 and "executable" not in message:
        return InvalidInput(message, component=COMPONENT)
    return CodedError(message, component=COMPONENT)


# Leftovers: what an engine that was killed forgets of containers, found by their ids and taken away.
#
# An engine that dies between the making of a container's task and its start (or its end) knows nothing of that task
# when it comes back: it removes the container as one that never ran, and its control groups, the process in them and
# its shim stay for ever (containerd before 1.7). Only what bears the id of a container of ours is touched, and only
# once the engine has said that there is no such container. Which ones to look after is kept in files, for the next
# gateway.

#: An engine that lives needs a moment to take down what it has removed.
GRACE_S = 5.0
#: Containers to be looked after at a time, and how often for each.
WATCHED_MAX, LOOKS_MAX = 4096, 10
SHIM = b"containerd-shim"


class LeftoverCleaner:
    """Looks after containers that were removed. `watch` and `sweep` block and may be called in any thread."""

    def __init__(
        self, hierarchy: Hierarchy | None, directory: Path, *, proc: Path = Path("/proc"), grace_s: float = GRACE_S
    ) -> None:
        """Look after containers that have a file in ``directory``."""
        self._hierarchy = hierarchy
        self._directory = directory
        self._proc = proc
        self._grace_s = grace_s
        #: Where this engine puts a container's groups, below every hierarchy's root: ``{}`` stands for the id.
        self._places: set[str] = set()
        #: Container -> (when it was removed, looks so far).
        self._removed: dict[str, tuple[float, int]] = {}
        if hierarchy is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._removed = {file.name: (time.monotonic(), 0) for file in directory.iterdir()}

    def learn(self, container: str, pid: int) -> None:
        """Learn from a container's first process where its engine puts control groups."""
        with suppress(OSError):
            for line in (self._proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines():
                place = line.split(":", 2)[2].strip("/")
                if container in place:
                    self._places.add(place.replace(container, "{}"))

    def watch(self, container: str) -> None:
        """Look after a container that the engine has removed, or does not know."""
        if self._hierarchy is not None and len(self._removed) < WATCHED_MAX:
            self._removed[container] = time.monotonic(), 0
            with suppress(OSError):  # a full disk: this gateway knows it all the same
                (self._directory / container).touch()

    def sweep(self) -> int:
        """Take away what is left of containers removed a while ago; return how many had left something."""
        now_s = time.monotonic()
        removed = list(self._removed.items())
        due = {container: entry for container, entry in removed if now_s - entry[0] >= self._grace_s}
        if not self._places or not due:
            return 0  # nobody has shown yet where to look, or nothing to look for
        result, shims = 0, self._shims()
        for container, (since_s, looks) in due.items():
            left = list(self._groups(container))
            if left or container in shims:
                result += 1
                logger.warning("the engine forgot a container; what is left of it goes", container=container[:12])
                self._take_away(container, left, shims.get(container, []))
            if (left or container in shims) and looks + 1 < LOOKS_MAX:
                self._removed[container] = since_s, looks + 1
            else:
                del self._removed[container]
                (self._directory / container).unlink(missing_ok=True)
        return result

    def _groups(self, container: str) -> Iterator[Path]:
        """Yield its control groups in every hierarchy."""
        assert self._hierarchy is not None
        for root in self._hierarchy.roots:
            for place in sorted(self._places):
                group = root / place.format(container)
                if group.is_dir():
                    yield group

    def _take_away(self, container: str, groups: list[Path], shims: list[int]) -> None:
        """End the shim first: as long as it lives it may start what it was asked to."""
        for pid in shims:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        assert self._hierarchy is not None
        for place in self._places:
            mounts = {name: root / place.format(container) for name, root in self._hierarchy.mounts.items()}
            held = Cgroup(self._hierarchy.version, {name: at for name, at in mounts.items() if at.is_dir()})
            if held.places.keys() >= {"cpu", "freezer"}:
                with suppress(OSError):  # not ours to write, where the gateway is not root
                    held.kill()
        for group in groups:
            with suppress(OSError):  # somebody in it is not gone yet: at the next look
                group.rmdir()

    def _shims(self) -> dict[str, list[int]]:
        """Return the shims of this machine by container; one may live on without any group."""
        result: dict[str, list[int]] = {}
        for place in self._proc.glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):
                words = (place / "cmdline").read_bytes().split(b"\0")
                if SHIM in words[0].rpartition(b"/")[2]:
                    container = words[words.index(b"-id") + 1].decode("ascii", "replace")
                    result.setdefault(container, []).append(int(place.name))
        return result


#: Labels of all that is ours: the gateway, its sandbox, its state directory, and whose file system that is on.
GATEWAY, NAME, STATE, MACHINE = "tangram.gateway", "tangram.sandbox", "tangram.state", "tangram.machine"
#: The id of its own user; a snapshot's files are of the same.
UID = "tangram.uid"


def machine_id() -> str:
    """Return what two processes have in common that see the same files under the same names."""
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except OSError:
        machine = ""
    return f"{machine or os.uname().nodename}:{Path('/proc/self/ns/mnt').stat().st_ino}"


class EngineOrphans:
    """The containers, networks and snapshots of every gateway that this engine has served."""

    def __init__(self, connection: EngineConnection) -> None:
        self._api = connection.api
        #: What was found, by kind and name: the id.
        self._ids: dict[tuple[str, str], str] = {}
        #: State directories of this machine that labels name, and the sandboxes whose directories are in them.
        self.state_dirs: set[str] = set()
        self.sandboxes: set[str] = set()

    def find(self) -> list[Orphan]:
        wanted = {"label": GATEWAY}
        containers: Sequence[Mapping[str, Any]] = self._api.containers(all=True, filters=wanted)
        networks: Sequence[Mapping[str, Any]] = self._api.networks(filters=wanted)
        images: Sequence[Mapping[str, Any]] = self._api.images(filters={"label": [GATEWAY, LABEL]})
        matches = [self._orphan("container", item["Names"][0].lstrip("/"), item) for item in containers]
        matches += [self._orphan("network", item["Name"], item) for item in networks]
        return matches + [self._orphan("snapshot", item["Labels"][LABEL], item) for item in images]

    def _orphan(self, kind: str, name: str, item: Mapping[str, Any]) -> Orphan:
        labels = item.get("Labels") or {}
        self._ids[kind, name] = str(item["Id"])
        state_dir = str(labels.get(STATE, ""))
        self.sandboxes.add(name if kind == "snapshot" else str(labels.get(NAME, "")))
        if labels.get(MACHINE) == machine_id():
            self.state_dirs.add(state_dir)
            held, why = verdict(state_dir)
        else:
            held, why = True, "its gateway is in a container: nobody here knows whether it lives"
        return Orphan(kind=kind, name=name, state_dir=state_dir, held=held, why=why)

    def remove(self, orphan: Orphan) -> None:
        known = self._ids[orphan.kind, orphan.name]
        try:
            if orphan.kind == "network":
                self._api.remove_network(known)
            elif orphan.kind == "snapshot":
                self._api.remove_image(known, force=True)
            else:
                self._api.remove_container(known, force=True, v=True)
        except docker.errors.NotFound:
            pass
        except AWAY as error:
            raise CodedError(f"{orphan.kind} {orphan.name}: {error}", component=COMPONENT) from None
        if orphan.kind == "snapshot" and orphan.state_dir in self.state_dirs:
            shutil.rmtree(Path(orphan.state_dir, SNAPSHOTS, orphan.name), ignore_errors=True)
        if orphan.kind == "container" and orphan.state_dir in self.state_dirs:
            sandbox = orphan.name.removeprefix("tangram-")
            shutil.rmtree(Path(orphan.state_dir, SANDBOXES, sandbox), ignore_errors=True)
