"""The Docker engine: every call to it, in threads, with its failures as typed errors. The only importer of docker."""

from __future__ import annotations

import posixpath
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

import docker
import docker.errors
import docker.types
import structlog

from manager.errors import CapacityExceeded, CodedError, InvalidConfig, InvalidInput, NotFound, TooLarge
from runtimes.sandbox.cgroup import PERIOD_US, CpuWeight
from runtimes.sandbox.docker.archive import ARCHIVE_SLACK_BYTES, pack_file, pack_tree, unpacked_file
from runtimes.sandbox.docker.chunks import STDERR, chunk_decoder
from runtimes.sandbox.docker.client import AWAY, EngineConnection
from runtimes.sandbox.docker.watchdog import EngineWatchdog
from runtimes.sandbox.runner.runner import DEFAULT_PATH

logger = structlog.get_logger("sandbox.engine")

COMPONENT = "sandbox.container"
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
T = TypeVar("T")


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
    #: Filter of system calls (`runtimes.sandbox.seccomp.engine_profile`); empty takes the engine's own.
    seccomp: str = ""
    #: Whether its standard input stays open, for one attached gateway after the other.
    attached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
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
        told = f"its Docker engine does not answer (unix://{self.socket}), so no sandbox can be made: start the engine"
        return f"{told} again (systemctl restart docker); the sandboxes that live there go on"

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
        found = await self.call(self._api.inspect_image, name)
        return (found.get("Config") or {}).get("Labels") or {}

    async def labelled_images(self, *labels: str) -> list[Mapping[str, str]]:
        """Return the labels of every image that has these."""
        found = await self.call(self._api.images, filters={"label": list(labels)})
        return [image.get("Labels") or {} for image in found]

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
        made: Mapping[str, Any] = self._api.create_container(
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
        return made

    async def start(self, container: str) -> Found:
        """Start it; raises NoRunner if its program is not in the image, which is looked for there."""
        try:
            await self.call(self._api.start, container)
        except CodedError as error:
            said = error.message.lower()
            missing = "not found" in said or "no such file" in said  # a mount, a device, the engine's own files ...
            if missing and await self.call(self._lacks_program, container):
                raise NoRunner(error.message, component=COMPONENT) from None
            raise
        return await self.inspect(container)

    def _lacks_program(self, container: str) -> bool:
        """Return whether it is certain that a container has no file of its program's name on its path."""
        made = self._api.inspect_container(container)["Config"]
        program = str((made.get("Entrypoint") or made.get("Cmd"))[0])
        path = next((each[5:] for each in made.get("Env") or () if each.startswith("PATH=")), DEFAULT_PATH)
        for directory in [""] if "/" in program else path.split(":"):
            try:
                stream, _ = self._api.get_archive(container, posixpath.join(directory or "/", program))
            except docker.errors.NotFound:
                continue
            next(stream, b"")  # begun: only then does its end close the connection
            stream.close()
            return False
        return True

    async def inspect(self, container: str) -> Found:
        """Raises NotFound."""
        state = await self.call(self._api.inspect_container, container)
        return Found(
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
        """Return the bytes that a container has written, 0 if it is gone. The engine may take its time."""
        found = await self.call(self._api.containers, all=True, size=True, filters={"id": container})
        return sum(int(item.get("SizeRw", 0)) for item in found)

    async def list(self, label: str) -> list[Found]:
        """Return every container with this label, running or not, in one cheap call."""
        items = await self.call(self._api.containers, all=True, filters={"label": label})
        return [
            Found(id=item["Id"], labels=item.get("Labels") or {}, running=item.get("State") == "running")
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
        made = self._api.exec_create(
            container, list(argv), stdin=bool(stdin), user=user, workdir=cwd or None, environment=dict(env)
        )["Id"]
        wrapped = self._api.exec_start(made, socket=True)
        sock: Any = getattr(wrapped, "_sock", wrapped)  # what the HTTP library hands out differs by its version
        try:
            sock.settimeout(0.2)
            if stdin:
                _feed(sock, stdin)
            return self._follow(made, sock, output, abandoned)
        finally:
            response = getattr(wrapped, "_response", None)  # held there by docker while the socket is used
            for part in (response, wrapped, sock):
                if part is not None:
                    part.close()

    def _follow(
        self, made: str, sock: Any, output: Callable[[str, bytes], None], abandoned: Callable[[], bool]
    ) -> int | None:
        """Read the multiplexed stream until it ends, or until the command has ended and said nothing more."""
        decoder = chunk_decoder()
        while not abandoned():
            try:
                data = sock.recv(CHUNK_BYTES)
            except TimeoutError:
                if self._api.exec_inspect(made)["Running"]:
                    continue
                data = b""
            if not data:
                return int(self._api.exec_inspect(made)["ExitCode"] or 0)
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
