"""The Docker Engine API: its routes and answers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import platform
import posixpath
import re
import stat
import tarfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib.metadata import version
from types import MappingProxyType
from typing import ClassVar

import msgspec
import orjson
from msgspec import Struct
from msgspec.structs import replace as replaced

from gateway import serialization
from gateway.api import Api, file_conflicts, placed_path
from gateway.config.schema import DockerFacade
from gateway.facades.commands import KILLED, PIDS_FROM
from gateway.facades.docker.containers import (
    PATIENCE_S,
    Container,
    ContainerExec,
    ContainerManager,
    attach,
    attend,
    console_size,
    exec_spec,
    flag,
    image_names,
    media_type,
    send_logs,
    version_of,
)
from gateway.facades.docker.http import API_VERSION, API_VERSION_MIN, DockerExchange
from gateway.facades.facade import MARGIN_S, ForeignCalls, fault_of_end
from gateway.http.messages import while_connected
from gateway.invocations.invocations import InvocationRequest, LiveInvocation
from manager.errors import ActionFailed, CodedError, Conflict, InvalidInput, NotFound, Reason, TooLarge, Unsupported
from manager.function import Background
from runtimes.sandbox.command import Command
from runtimes.sandbox.files import gathered, open_archive, put_archive
from runtimes.sandbox.runner.client import FILE_ERROR
from runtimes.sandbox.sandbox import Sandbox
from runtimes.sandbox.session import SIGNALS
from runtimes.sandbox.spec import ImageKeeper, ImageState, ProviderInfo, require_image_name

CONFIG = MappingProxyType[str, object](
    {
        "Hostname": "", "Domainname": "", "User": "", "AttachStdin": False, "AttachStdout": False,
        "AttachStderr": False, "Tty": False, "OpenStdin": False, "StdinOnce": False, "Env": [], "Cmd": None,
        "Volumes": None, "WorkingDir": "", "Entrypoint": None, "OnBuild": None,
    }
)  # fmt: skip
HOST_CONFIG = MappingProxyType[str, object](
    {
        "Binds": None, "ContainerIDFile": "", "NetworkMode": "default", "PortBindings": None,
        "RestartPolicy": {"Name": "", "MaximumRetryCount": 0}, "AutoRemove": False, "VolumeDriver": "",
        "VolumesFrom": None, "CapAdd": None, "CapDrop": None, "Dns": None, "DnsOptions": None, "DnsSearch": None,
        "ExtraHosts": None, "GroupAdd": None, "Cgroup": "", "Links": None, "OomScoreAdj": 0, "PidMode": "",
        "Privileged": False, "PublishAllPorts": False, "ReadonlyRootfs": False, "SecurityOpt": None, "UTSMode": "",
        "UsernsMode": "", "ConsoleSize": [0, 0], "Isolation": "", "CpuShares": 0, "Memory": 0, "NanoCpus": 0,
        "CgroupParent": "", "BlkioWeight": 0, "BlkioWeightDevice": None, "BlkioDeviceReadBps": None,
        "BlkioDeviceWriteBps": None, "BlkioDeviceReadIOps": None, "BlkioDeviceWriteIOps": None, "CpuPeriod": 0,
        "CpuQuota": 0, "CpuRealtimePeriod": 0, "CpuRealtimeRuntime": 0, "CpusetCpus": "", "CpusetMems": "",
        "Devices": None, "DeviceCgroupRules": None, "DeviceRequests": None, "MemoryReservation": 0, "MemorySwap": 0,
        "MemorySwappiness": None, "OomKillDisable": False, "PidsLimit": None, "Ulimits": None, "CpuCount": 0,
        "CpuPercent": 0, "IOMaximumIOps": 0, "IOMaximumBandwidth": 0,
    }
)  # fmt: skip
#: Sandboxes are in no network of the engine's.
NETWORK_SETTINGS = MappingProxyType[str, object](
    {
        "Bridge": "", "SandboxID": "", "SandboxKey": "", "HairpinMode": False, "LinkLocalIPv6Address": "",
        "LinkLocalIPv6PrefixLen": 0, "Ports": {}, "SecondaryIPAddresses": None, "SecondaryIPv6Addresses": None,
        "EndpointID": "", "Gateway": "", "GlobalIPv6Address": "", "GlobalIPv6PrefixLen": 0, "IPAddress": "",
        "IPPrefixLen": 0, "IPv6Gateway": "", "MacAddress": "", "Networks": {},
    }
)  # fmt: skip


NEVER = "0001-01-01T00:00:00Z"
#: Times of files are what their owner sets: those of the years 1 to 9999 can be written.
EARLIEST_S, LATEST_S = -62_135_596_800.0, 253_402_300_799.0
#: Bits of Go's file modes beside the permissions.
_GO_DIRECTORY, _GO_LINK = 1 << 31, 1 << 27
_GO_SPECIAL = {0o4000: 1 << 23, 0o2000: 1 << 22, 0o1000: 1 << 20}
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def shown_version(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"


def instant(time_s: float) -> str:
    """Return a time of day as the engine writes it; of one that it has no words for, that it is none."""
    if not time_s or not EARLIEST_S < time_s < LATEST_S:
        return NEVER
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def image_id(name: str) -> str:
    """Return the id by which an image is known here: that of its name, as the engine behind has its own."""
    return f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"


def container_state(container: Container) -> dict[str, object]:
    record = container.record
    return {
        "Status": record.status,
        "Running": record.status == "running",
        "Paused": False,
        "Restarting": False,
        "OOMKilled": record.out_of_memory,
        "Dead": False,
        "Pid": 1 if record.status == "running" else 0,
        "ExitCode": record.exit_code,
        "Error": record.error,
        "StartedAt": instant(record.started_s),
        "FinishedAt": instant(record.finished_s),
    }


def container_shape(container: Container) -> dict[str, object]:
    """Return a container as ``docker inspect`` shows it."""
    record = container.record
    return {
        "Id": record.id,
        "Created": instant(record.created_s),
        "Path": record.argv[0] if record.argv else "",
        "Args": list(record.argv[1:]),
        "State": container_state(container),
        "Image": image_id(record.image),
        "Name": f"/{record.name}",
        "RestartCount": 0,
        "Driver": "tangram",
        "Platform": "linux",
        "MountLabel": "",
        "ProcessLabel": "",
        "AppArmorProfile": "",
        "ExecIDs": [each.id for each in container.execs.values() if each.running] or None,
        "HostConfig": {**_over(HOST_CONFIG, record.host_config), "LogConfig": {"Type": "json-file", "Config": {}}},
        "Mounts": [],
        "Config": {
            **_over(CONFIG, record.config),
            "Image": record.image,
            "Labels": record.labels,
            "Tty": record.tty,
        },
        "NetworkSettings": dict(NETWORK_SETTINGS),
    }


def _over(unsaid: Mapping[str, object], fields: Mapping[str, object]) -> dict[str, object]:
    """Return what a client said over what holds where it said nothing."""
    return {**unsaid, **{name: value for name, value in fields.items() if value is not None}}


def listed_shape(container: Container, now_s: float) -> dict[str, object]:
    """Return a container as ``docker ps`` shows it."""
    record = container.record
    return {
        "Id": record.id,
        "Names": [f"/{record.name}"],
        "Image": record.image,
        "ImageID": image_id(record.image),
        "Command": " ".join(record.argv),
        "Created": int(record.created_s),
        "Ports": [],
        "Labels": record.labels,
        "State": record.status,
        "Status": _status(container, now_s),
        "HostConfig": {"NetworkMode": record.host_config.get("NetworkMode") or "default"},
        "NetworkSettings": {"Networks": {}},
        "Mounts": [],
    }


def _status(container: Container, now_s: float) -> str:
    record = container.record
    if record.status == "running":
        return f"Up {max(0, int(now_s - record.started_s))} seconds"
    if record.status == "created":
        return "Created"
    return f"Exited ({record.exit_code}) {max(0, int(now_s - record.finished_s))} seconds ago"


def exec_shape(command: ContainerExec, exit_code: int | None, *, running: bool) -> dict[str, object]:
    """Return a command as ``/exec/{id}/json`` shows it."""
    spec = command.spec
    return {
        "ID": command.id,
        "Running": running,
        "ExitCode": exit_code,
        "ProcessConfig": {
            "tty": spec.tty,
            "entrypoint": spec.argv[0],
            "arguments": list(spec.argv[1:]),
            "privileged": False,
            **({"user": spec.user} if spec.user else {}),
        },
        "OpenStdin": spec.stdin,
        "OpenStdout": spec.stdout,
        "OpenStderr": spec.stderr,
        "CanRemove": False,
        "ContainerID": command.record.id,
        "DetachKeys": "",
        "Pid": command.pid if command.started else 0,
    }


class PathStat(Struct, frozen=True):
    """What a path is: its mode as the kernel has it, and where a link leads."""

    name: str
    size: int
    mode: int
    mtime: float
    link: str = ""


def entry_stat(entry: tarfile.TarInfo, name: str) -> PathStat:
    """Return what an entry of an archive says of its path."""
    kind = stat.S_IFDIR if entry.isdir() else stat.S_IFLNK if entry.issym() else stat.S_IFREG
    return PathStat(name, entry.size, kind | stat.S_IMODE(entry.mode), float(entry.mtime), entry.linkname)


def stat_header(path: PathStat) -> str:
    """Return the header X-Docker-Container-Path-Stat; its mode is written as Go has it."""
    mode = path.mode & 0o777
    for bit, go in _GO_SPECIAL.items():
        mode |= go if path.mode & bit else 0
    mode |= _GO_DIRECTORY if stat.S_ISDIR(path.mode) else _GO_LINK if stat.S_ISLNK(path.mode) else 0
    link = path.link if stat.S_ISLNK(path.mode) else ""
    fields = {"name": path.name, "size": path.size, "mode": mode, "mtime": instant(path.mtime), "linkTarget": link}
    return base64.b64encode(serialization.dumps(fields)).decode()


def version_shape() -> dict[str, object]:
    """Return the engine as ``docker version`` shows it."""
    return {
        "Platform": {"Name": "Tangram"},
        "Components": [],
        "Version": version("tangram-gateway"),
        "ApiVersion": shown_version(API_VERSION),
        "MinAPIVersion": shown_version(API_VERSION_MIN),
        "GitCommit": "",
        "GoVersion": "",
        "Os": "linux",
        "Arch": architecture(),
        "KernelVersion": platform.release(),
        "BuildTime": "",
    }


def architecture() -> str:
    return ARCHITECTURES.get(platform.machine(), platform.machine())


def info_shape(containers: Mapping[str, int], provider: ProviderInfo, images: int, cores: int) -> dict[str, object]:
    """Return the engine as ``docker info`` shows it; ``containers`` counts them by status."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "ID": "tangram",
        "Name": platform.node(),
        "Containers": sum(containers.values()),
        "ContainersRunning": containers.get("running", 0),
        "ContainersPaused": 0,
        "ContainersStopped": containers.get("exited", 0) + containers.get("created", 0),
        "Images": images,
        "Driver": "tangram",
        "DriverStatus": [["Sandboxes", provider.kind], ["Isolation", provider.isolation]],
        "ServerVersion": version("tangram-gateway"),
        "OperatingSystem": "Tangram gateway",
        "OSType": "linux",
        "OSVersion": "",
        "Architecture": platform.machine(),
        "KernelVersion": platform.release(),
        "NCPU": cores,
        "MemTotal": memory_bytes,
        "Labels": [],
        "Warnings": list(provider.weakenings),
        "IndexServerAddress": "",
        "SecurityOptions": [],
        "Plugins": {"Volume": [], "Network": [], "Authorization": None, "Log": []},
        "Swarm": {"LocalNodeState": "inactive"},
        "Debug": False,
        "LoggingDriver": "none",
        "CgroupDriver": "none",
    }


COMPONENT = "docker"
#: Seconds between two words on how far a pull is.
PROGRESS_S = 0.5
#: How often that may be said: a pull is bounded by `sandbox.docker`, this only bounds the loop.
PROGRESS_MAX = 200_000


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
    result = {}
    for name, values in serialization.loads_object(text.encode()).items():
        if isinstance(values, dict):
            values = [value for value, wanted in values.items() if wanted is True]
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise InvalidInput(f"filters: {name[:64]!r} must be a list of texts", component=COMPONENT)
        result[name] = values
    return result


async def _send_progress(exchange: DockerExchange, progress: object) -> None:
    await exchange.send(orjson.dumps(progress) + b"\r\n")


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


#: Starts what runs behind, and leaves its exit status in a file when it ends.
LAUNCH = (
    'status=$1; shift; ( "$@" </dev/null >/dev/null 2>&1; printf %s "$?" >"$status.part" && '
    'mv "$status.part" "$status" ) &'
)
STATUS_FILE = "/tmp/.tangram-exec-{}"
STATUS_BYTES = 64
#: Files of commands that are remembered no more, removed at once.
LEFT_MAX = 64
#: Seconds for which the removal of that file may stand in line: whoever asks for the status waits with it.
REMOVE_S = 1.0
#: What the sandbox's user may have written there is not to be believed.
EXIT_STATUS = re.compile(rb"[0-9]{1,3}")
#: A `kill` of a process that only this facade knows, as the SWE-bench harness sends it when a command takes too long.
PID = re.compile(r"[0-9]{1,18}")
KILL = re.compile(r"(?:-s )?-?(?:SIG)?([A-Z0-9]+) ")


class ContainerExecs:
    """Commands in containers."""

    def __init__(self, api: Api, calls: ForeignCalls, life: ContainerManager) -> None:
        self._api = api
        self._calls = calls
        self._life = life

    def create(self, container: Container, body: Mapping[str, object]) -> ContainerExec:
        """Know a command; raises InvalidInput, Unsupported, Conflict."""
        container.require_running()
        sandbox = self._api.environments.get(container.record.trajectory)
        spec = exec_spec(body, container.record.cwd, None if sandbox is None else sandbox.spec)
        return self._life.exec(container, spec)

    async def start(
        self, exchange: DockerExchange, command: ContainerExec, body: Mapping[str, object], patience_s: float
    ) -> None:
        """Run a command, and answer with its output, or at once if it is to run behind."""
        container = self._life.containers.home(command)
        if command.started:
            message = f"Error: Exec command {command.id} is already running, or has run"
            raise Conflict(message, component=COMPONENT)
        container.require_running()
        unknown = sorted(name for name in body if name not in ("Detach", "Tty", "ConsoleSize"))
        if unknown:
            raise Unsupported(f"{unknown[0][:64]}: is not done by this facade; leave it out", component=COMPONENT)
        rows, columns = console_size(body)
        if rows and columns:
            command.spec = replace(command.spec, rows=rows, columns=columns)
        command.started, command.framed = True, body.get("Tty") is not True
        behind = body.get("Detach") is True
        try:
            if (victim := self._victim(command)) is not None:
                await self._kill(command, victim)
                if not behind:
                    await exchange.upgraded(media_type(exchange, framed=command.framed))
                    return
            elif not behind:
                command.start(self._life.slots, asyncio.get_running_loop().time() + PATIENCE_S)
                await attend(exchange, command, patience_s)
                return
            else:
                await self._launch(command, patience_s)
        except CodedError as error:
            command.settle(None, error)  # if it never began
            raise
        finally:
            self._life.mark_lost(container, command.error)
        await exchange.answer(200)

    async def inspect(self, exchange: DockerExchange, command: ContainerExec) -> None:
        """Answer how a command stands; raises what kept it from having an exit status: none is made up."""
        if command.status_file and not command.ended.is_set():
            await self._look_behind(command)
        if command.error is not None:
            raise command.error
        running = command.running
        await exchange.answer(200, exec_shape(command, None if running else command.exit_code, running=running))

    async def _launch(self, command: ContainerExec, patience_s: float) -> None:
        """Start what runs behind: an action that ends at once, of which a process is left."""
        container, spec = self._life.containers.home(command), command.spec
        sandbox = self._api.environments.get(container.record.trajectory)
        if sandbox is not None and sandbox.spec.background is Background.KILL:
            message = "Detach: the function's processes end with each command (sandbox.background: kill)"
            raise Unsupported(message, component=COMPONENT)
        command.status_file = STATUS_FILE.format(command.id[:32])
        left, container.left_files[:] = container.left_files[:LEFT_MAX], container.left_files[LEFT_MAX:]
        script = f"rm -f -- {' '.join(left)}; {LAUNCH}" if left else LAUNCH  # names of ours, without odd characters
        fields = {**spec.input(), "argv": ["/bin/sh", "-c", script, "sh", command.status_file, *spec.argv]}
        del fields["session"]
        invocation = await self._accepted(container, fields, patience_s)
        await invocation.has_ended(None)
        error = invocation.refusal
        if error is None and (fault := fault_of_end(invocation.record)) is not None:
            reason = invocation.record.reason or Reason.INTERNAL
            error = ActionFailed(reason, fault.message, component=COMPONENT)
        if error is not None:
            raise error

    async def _look_behind(self, command: ContainerExec) -> None:
        """Read the exit status of what runs behind, if it has ended."""
        container = self._life.containers.home(command)
        sandbox = self._api.environments.get(container.record.trajectory)
        if sandbox is None or not container.running:
            command.settle(KILLED)
            return
        try:
            text = await sandbox.read_file(command.status_file, limit_bytes=STATUS_BYTES)
        except NotFound:
            return
        except (InvalidInput, TooLarge):  # the sandbox's user has put something else there
            text = b""
        except CodedError as error:
            self._life.mark_lost(container, error)
            raise
        command.settle(int(text) if EXIT_STATUS.fullmatch(text) else KILLED)
        with suppress(CodedError):  # else its container goes, and the file with it
            await self._accepted(container, {"argv": ["rm", "-f", "--", command.status_file]}, REMOVE_S)

    async def _accepted(self, container: Container, fields: Mapping[str, object], patience_s: float) -> LiveInvocation:
        """Return an action of a container, which goes on though nobody attends; raises CodedError."""
        record = container.record
        call = InvocationRequest(
            function=record.function, input=fields, body=serialization.dumps(fields), task=record.task,
            trajectory=record.trajectory, living=True, detached=True,
        )  # fmt: skip
        return await self._calls.accept(call, asyncio.get_running_loop().time() + patience_s)

    def _victim(self, command: ContainerExec) -> tuple[ContainerExec, str] | None:
        """Return which of our commands a `kill` means, and the signal; None for any other command."""
        words = command.spec.argv
        if words[0] not in ("kill", "/bin/kill", "/usr/bin/kill") or not 2 <= len(words) <= 4:
            return None
        if PID.fullmatch(words[-1]) is None or int(words[-1]) < PIDS_FROM:
            return None
        result = KILL.fullmatch(" ".join(words[1:-1]) + " ")
        name = signal_name("TERM" if len(words) == 2 else result[1] if result is not None else " ".join(words))
        execs = self._life.containers.home(command).execs.values()
        victim = next((each for each in execs if each.pid == int(words[-1]) and each.running), None)
        return (command, name) if victim is None else (victim, name)

    async def _kill(self, command: ContainerExec, victim: tuple[ContainerExec, str]) -> None:
        """Do what `kill` would: its own exit status is 1 where there is no such process any more."""
        whom, name = victim
        if whom is command:
            command.settle(1)
            return
        if whom.session is None:
            await whom.cancel("it was killed")
        else:
            await whom.signal(name)
        command.settle(0)


TAR = "application/x-tar"
STAT = "X-Docker-Container-Path-Stat"
#: Bytes of an archive's beginning in which its first entry is looked for.
FIRST_BYTES = 2**20
BLOCK_BYTES = tarfile.BLOCKSIZE
#: Headers before the one of an entry that say more of it.
EXTENDING = frozenset({tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK})
#: What tells of a path without following it: python3 of the sandbox, as for archives. Status 65: there is none.
LSTAT = r"""
import json, os, sys
path = sys.argv[1]
try:
    status = os.lstat(path)
    link = os.path.realpath(path) if os.path.islink(path) else ""
except OSError:
    sys.exit(65)
size, mode, mtime = status.st_size, status.st_mode, status.st_mtime
name = os.path.basename(path) or "/"
print(json.dumps({"name": name, "size": size, "mode": mode, "mtime": mtime, "link": link}))
"""
ABSENT, STAT_S, STAT_BYTES = 65, 30.0, 16384


def _path_of(exchange: DockerExchange) -> str:
    path = exchange.query.get("path", "")
    if not path:
        raise InvalidInput("bad parameter: path cannot be empty", component=COMPONENT, detail={"path": "path"})
    return path


def _placed(path: str) -> str:
    """Return where a path leads, absolute: a relative one begins at the root, as the engine's do."""
    return placed_path(path, "/")


def _shown(path: str) -> str:
    """Return by which name a path is told: its last, and ``.`` for what a directory holds."""
    return "." if path.endswith("/.") else posixpath.basename(_placed(path)) or "/"


async def _lstat(sandbox: Sandbox, place: str) -> PathStat:
    """Return what a path is; raises NotFound."""
    async with sandbox.transfer(place, user=""):
        process = await sandbox.spawn(Command(argv=("-c", LSTAT, place), python=True, timeout_s=STAT_S))
        try:
            await process.end_input()
            output = await gathered(process, "stdout", STAT_BYTES)
            code = (await process.wait()).exit_code
        finally:
            await process.kill()
    if code == ABSENT:
        raise NotFound(place, component=COMPONENT)
    try:
        return msgspec.json.decode(output, type=PathStat)
    except msgspec.MsgspecError:
        raise InvalidInput(f"{place!r} could not be looked at (status {code})", component=COMPONENT) from None


async def _first(chunks: AsyncIterator[bytes]) -> tuple[bytes, tarfile.TarInfo]:
    """Return the beginning of a tar, and its first entry; raises InvalidInput.

    What the sandbox sends is not to be believed: its user can write to the pipe of the process that packs.
    """
    head, start = b"", 0
    async for chunk in chunks:
        head += chunk
        while len(head) >= start + BLOCK_BYTES:
            entry = _entry(head[start : start + BLOCK_BYTES])
            if entry.type not in EXTENDING:
                return head, entry
            start += BLOCK_BYTES + -(-entry.size // BLOCK_BYTES) * BLOCK_BYTES
        if len(head) > FIRST_BYTES:
            break
    raise InvalidInput("the archive has no first entry", component=COMPONENT)


def _entry(block: bytes) -> tarfile.TarInfo:
    """Return an entry of its header; raises InvalidInput, also for a size below zero, which a header can have."""
    try:
        entry = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.TarError as error:
        raise InvalidInput(f"what the sandbox sent is no archive: {error}", component=COMPONENT) from None
    if entry.size < 0:
        raise InvalidInput("what the sandbox sent is no archive: an entry's size is below zero", component=COMPONENT)
    return entry


def _path_error(error: CodedError, called: str, path: str) -> CodedError:
    """Return what is wrong with a path in the engine's words, as far as it has some; the container as it was called."""
    if isinstance(error, NotFound):
        message = f"Could not find the file {path} in container {called[:128]}"
        return NotFound(message, component=COMPONENT)
    if isinstance(error, Conflict | InvalidInput):
        return InvalidInput(error.message, component=COMPONENT, detail=error.detail)
    return error


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

Endpoint = Callable[[DockerExchange, "re.Match[str]"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class EngineRoute:
    """One method on one path; its query may have these parameters, and others only if they are empty or false."""

    method: str
    path: str
    endpoint: Endpoint
    query: tuple[str, ...] = ()
    #: Whether its endpoint reads the body; that of others is read and left.
    reads_body: bool = False

    @property
    def pattern(self) -> re.Pattern[str]:
        """What the path looks like; an image's name may have slashes."""
        text = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", self.path)
        return re.compile(text.replace("{*name}", "(?P<name>.+)"))


class DockerEngineApi:
    """The Docker Engine API behind its socket."""

    name: ClassVar[str] = "docker"

    def __init__(self, api: Api, calls: ForeignCalls, settings: DockerFacade) -> None:
        self._api = api
        self._settings = settings
        self._life = ContainerManager(api, calls, settings)
        self._execs = ContainerExecs(api, calls, self._life)
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
            EngineRoute("POST", "/containers/create", self.create, ("name", "platform"), reads_body=True),
            EngineRoute(
                "GET", "/containers/json", self.list_containers, ("all", "limit", "filters", "size", "trunc_cmd")
            ),
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
            EngineRoute("POST", f"{container}/exec", self.exec_create, reads_body=True),
            EngineRoute("POST", f"{command}/start", self.exec_start, reads_body=True),
            EngineRoute("POST", f"{command}/resize", self.exec_resize, ("h", "w")),
            EngineRoute("GET", f"{command}/json", self.exec_inspect),
            EngineRoute("HEAD", archive, self.stat, ("path",)),
            EngineRoute("GET", archive, self.archive, ("path",)),
            EngineRoute("PUT", archive, self.unpack, ("path", "noOverwriteDirNonDir", "copyUIDGID"), reads_body=True),
            EngineRoute("GET", "/images/json", self.images, ("all", "filters", "digests", "shared-size", "manifests")),
            EngineRoute("GET", "/images/{*name}/json", self.image, ("manifests",)),
            EngineRoute("POST", "/images/create", self.pull, ("fromImage", "tag", "platform", "fromSrc")),
        )

    async def close(self) -> None:
        """Stop watching the containers, which live on as far as their trajectories do."""
        await self._life.close()

    async def serve(self, exchange: DockerExchange) -> None:
        """Answer one request; raises CodedError, ClientDisconnect."""
        request = version_of(exchange.path)
        path = exchange.path
        if request != (0, 0):
            path = "/" + path.lstrip("/").partition("/")[2]
            if not API_VERSION_MIN <= request <= API_VERSION:
                word = "new. Maximum" if request > API_VERSION else "old. Minimum"
                bound = shown_version(API_VERSION if request > API_VERSION else API_VERSION_MIN)
                message = f"client version {shown_version(request)} is too {word} supported API version is {bound}"
                raise InvalidInput(message, component=COMPONENT)
        for route, pattern in self._routes:
            if route.method == exchange.method and (match := pattern.fullmatch(path)) is not None:
                _check_query(exchange, route)
                if not route.reads_body:
                    async for _ in exchange.chunks(self._api.server.body_limit_bytes):
                        pass
                await self._life.ready()
                await route.endpoint(exchange, match)
                return
        raise self._unknown(exchange.method, path)

    def _unknown(self, method: str, path: str) -> NotFound | Unsupported:
        first, _, name = path.lstrip("/").partition("/")
        if method == "GET" and first in OTHER_KINDS and name:
            return NotFound(f"no such object: {first} {name[:200]}: this facade has none", component=COMPONENT)
        if first in REFUSED:
            return Unsupported(
                f"{method} {path[:200]} is not done by this facade: {REFUSED[first]}", component=COMPONENT
            )
        rows = [f"{row.method} {row.path}" for row in self._table]
        near = get_close_matches(f"{method} {path[:200]}", rows, n=1, cutoff=0.5)
        hint = f"; the nearest is {near[0]}" if near else ""
        message = f"page not found: no such route: {method} {path[:200]}{hint} (docs/CONNECT.md has all)"
        return NotFound(message, component=COMPONENT)

    # --- the engine

    async def ping(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        """Say that it is there, and which versions it speaks."""
        headers = {"Api-Version": shown_version(API_VERSION), "Ostype": "linux", "Docker-Experimental": "false"}
        await exchange.answer_text("OK", {**headers, "Cache-Control": "no-cache, no-store, must-revalidate"})

    async def version(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        await exchange.answer(200, version_shape())

    async def info(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        counts = Counter(str(each.record.status) for each in self._life.containers.all())
        images, cores = len(await self._image_states()), self._api.machines.here.cores
        await exchange.answer(200, info_shape(counts, self._api.provider.info, images, cores))

    # --- containers

    async def create(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        """Keep a new container."""
        platform = exchange.query.get("platform", "")
        if platform and platform.split("/")[:2] != ["linux", architecture()] and platform != "linux":
            raise Unsupported(f"platform: {platform[:64]!r} is not linux/{architecture()}", component=COMPONENT)
        body = await exchange.read_object(self._api.server.body_limit_bytes)
        container, warnings = await self._life.create(body, exchange.query.get("name", ""))
        await exchange.answer(201, {"Id": container.record.id, "Warnings": list(warnings)})

    async def list_containers(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        """Answer with those that run, or with all."""
        wanted = filters(exchange.query.get("filters", ""))
        requested: list[tuple[str, str, tuple[str, ...]]] = [(name, name, FILTERS) for name in wanted]
        requested += [(status, f"status={status}", STATUSES) for status in wanted.get("status", ())]
        for value, shown, known in requested:
            if value not in known:
                message = f"Invalid filter '{shown[:64]}': known here are {', '.join(known)}"
                raise InvalidInput(message, component=COMPONENT)
        limit = _number(exchange, "limit", 0)
        every = flag(exchange.query.get("all")) or "status" in wanted or limit > 0
        result = [each for each in self._seen() if (every or each.running) and _fits(each, wanted)]
        now_s = self._api.wall()
        await exchange.answer(200, [listed_shape(each, now_s) for each in (result[:limit] if limit > 0 else result)])

    async def inspect(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        await exchange.answer(200, container_shape(self._container(match)))

    async def start(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        """Begin it: its sandbox is made, and no core is held."""
        news = await self._life.start(self._container(match), self._client_s(exchange) - MARGIN_S)
        await exchange.answer(204 if news else 304)

    async def stop(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        stopped = await self._life.stop(self._container(match), _grace_s(exchange))
        await exchange.answer(204 if stopped else 304)

    async def restart(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        """End it if it runs, and begin it again: its files stay."""
        container, timeout_s = self._container(match), self._client_s(exchange) - MARGIN_S
        await self._life.restart(container, _grace_s(exchange), timeout_s)
        await exchange.answer(204)

    async def rename(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        """Give it another name; its id, and its trajectory's, stay."""
        self._life.containers.rename(self._container(match), exchange.query.get("name", ""))
        await exchange.answer(204)

    async def kill(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        name = signal_name(exchange.query.get("signal") or "KILL")
        try:
            await self._life.kill(self._container(match), name)
        except (Conflict, NotFound) as error:
            message = f"Cannot kill container: {match['id']}: {error.message}"
            raise type(error)(message, component=COMPONENT) from None
        await exchange.answer(204)

    async def wait(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        """Answer when it has ended, with its exit status; that it waits is said at once."""
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

        async with exchange.streamed("application/json"):
            await exchange.send(b" ")
            await while_connected(due(), exchange.peer.gone())
            await exchange.send(serialization.dumps({"StatusCode": container.record.exit_code, "Error": None}))

    async def attach(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        """Answer with the output of its main command."""
        container = self._container(match)
        ends = container.ends

        async def ended() -> None:
            while not container.removed and container.ends == ends:
                await container.change()

        follows = flag(exchange.query.get("stream"))
        await attach(exchange, self._life.main_of(container) if follows else container.main, ended)

    async def resize(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        main = self._container(match).main
        if main is not None:
            await main.resize(*_size(exchange))
        await exchange.answer(200)

    async def logs(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        """Answer with what is kept of its main command's output."""
        tail = exchange.query.get("tail") or "all"
        lines = -1 if tail == "all" else _number(exchange, "tail", 0)
        await send_logs(exchange, self._container(match).main, None if lines < 0 else lines)

    async def remove(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        await self._life.remove(self._container(match), force=flag(exchange.query.get("force")))
        await exchange.answer(204)

    # --- commands

    async def exec_create(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        body = await exchange.read_object(self._api.server.body_limit_bytes)
        command = self._execs.create(self._container(match), body)
        await exchange.answer(201, {"Id": command.id})

    async def exec_start(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        body = await exchange.read_object(self._api.server.body_limit_bytes)
        patience_s = max(self._client_s(exchange) - MARGIN_S, MARGIN_S)
        await self._execs.start(exchange, self._life.containers.find_exec(match["id"]), body, patience_s)

    async def exec_resize(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        await self._life.containers.find_exec(match["id"]).resize(*_size(exchange))
        await exchange.answer(200)

    async def exec_inspect(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        await self._execs.inspect(exchange, self._life.containers.find_exec(match["id"]))

    # --- files

    async def stat(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        """Answer what a path is."""
        path = _path_of(exchange)
        async with self._life.sandbox(self._container(match), self._client_s(exchange)) as sandbox:
            try:
                result = await _lstat(sandbox, _placed(path))
            except CodedError as error:
                raise _path_error(error, match["id"], path) from None
        await exchange.answer(200, None, {STAT: stat_header(replaced(result, name=_shown(path)))})

    async def archive(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        """Answer with what a path is as a tar; its names begin with the path's own, or with ``.`` for ``path/.``."""
        path = _path_of(exchange)
        async with self._life.sandbox(self._container(match), self._client_s(exchange)) as sandbox:
            await self._pack(exchange, sandbox, match["id"], path)

    async def _pack(self, exchange: DockerExchange, sandbox: Sandbox, called: str, path: str) -> None:
        place, limit_bytes, name = _placed(path), self._api.server.file_limit_bytes, _shown(path)
        packed = open_archive(sandbox, place, limit_bytes=limit_bytes, base=name != ".", follow=False)
        try:
            async with packed as chunks:
                head, entry = await _first(chunks)
                result = entry_stat(entry, name)
                link = posixpath.normpath(posixpath.join(posixpath.dirname(place), result.link)) if result.link else ""
                headers = {STAT: stat_header(replaced(result, size=result.size or len(result.link), link=link))}
                async with exchange.streamed(TAR, headers):
                    await exchange.send(head)
                    async for chunk in chunks:
                        await exchange.send(chunk)
        except CodedError as error:
            raise _path_error(error, called, path) from None

    async def unpack(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        """Unpack a tar into a directory that is there; its entries belong to the sandbox's user."""
        path = _path_of(exchange)
        place, limit_bytes = _placed(path), self._api.server.file_limit_bytes
        async with self._life.sandbox(self._container(match), self._client_s(exchange)) as sandbox:
            await self._require_directory(sandbox, match["id"], path)
            try:
                with file_conflicts():
                    chunks = exchange.chunks(limit_bytes)
                    await put_archive(sandbox, place, chunks, limit_bytes=limit_bytes)
            except CodedError as error:
                raise _path_error(error, match["id"], path) from None
        await exchange.answer(200)

    async def _require_directory(self, sandbox: Sandbox, called: str, path: str) -> None:
        """Raise NotFound or InvalidInput, as the engine does, unless it is one."""
        try:
            await sandbox.list_files(_placed(path))
        except CodedError as error:
            if error.detail is not None and error.detail.get(FILE_ERROR) == "not_a_directory":
                raise InvalidInput("extraction point is not a directory", component=COMPONENT) from None
            raise _path_error(error, called, path) from None

    # --- images

    async def _image_states(self) -> list[ImageState]:
        """Return the images that are here; those of the functions where sandboxes have no others."""
        if self._api.provider.images is not None:
            return [each for each in await self._api.provider.images.states() if each.state == "present"]
        specs = [each.sandbox for each in self._api.functions.all() if each.sandbox is not None]
        return [ImageState(image=name, state="present") for name in sorted({spec.image for spec in specs}) if name]

    async def images(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        """Answer with all of them."""
        wanted = references(exchange.query.get("filters", ""))
        shown = [
            _listed(each)
            for each in await self._image_states()
            if not wanted or any(fnmatchcase(name, pattern) for name in image_names(each.image) for pattern in wanted)
        ]
        await exchange.answer(200, shown)

    async def image(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        """Answer with one; raises NotFound."""
        await exchange.answer(200, _shape(await self._find_image(match["name"])))

    async def _find_image(self, name: str) -> ImageState:
        """Return an image by one of its names, its id or the beginning of it; raises NotFound."""
        names, states = set(image_names(name)), await self._image_states()
        result = next((each for each in states if names & set(image_names(each.image))), None)
        if result is None and len(name) >= 12:
            ids = (name, f"sha256:{name}")
            result = next((each for each in states if image_id(each.image).startswith(ids)), None)
        if result is None:
            raise NotFound(f"No such image: {name[:256]}", component=COMPONENT)
        return result

    async def pull(self, exchange: DockerExchange, match: re.Match[str]) -> None:
        """Pull one, and say how far that is."""
        request = exchange.query.get("fromImage", "")
        if not request or exchange.query.get("fromSrc"):
            message = "fromImage: only images of registries can be had, by name"
            raise InvalidInput(message, component=COMPONENT, detail={"path": "fromImage"})
        tag = exchange.query.get("tag", "")
        named = request
        if tag:
            named = f"{request}@{tag}" if ":" in tag else f"{request}:{tag}"
        elif ":" not in request.rpartition("/")[2] and "@" not in request:
            named = f"{request}:latest"
        require_image_name(named)
        keeper = self._api.image_keeper()
        states = [each for each in await keeper.states() if each.state == "present"]
        here = {name for each in states for name in image_names(each.image)}
        async with exchange.streamed("application/json"):
            if not here.isdisjoint(image_names(named)):
                await _send_progress(exchange, {"status": f"Status: Image is up to date for {named}"})
            else:
                with self._api.waiting("pull", named, ""):
                    await self._pull(exchange, keeper, named, tag or "latest")

    async def _pull(self, exchange: DockerExchange, keeper: ImageKeeper, name: str, tag: str) -> None:
        keeper.begin(name)
        state: ImageState | None = None
        await _send_progress(exchange, {"status": f"Pulling from {name}", "id": tag})
        for _ in range(PROGRESS_MAX):
            await keeper.settled([name], PROGRESS_S)
            state = next((each for each in await keeper.states() if each.image in image_names(name)), None)
            if state is None or state.state != "pulling":
                break
            if state.total_bytes:
                detail = {"current": state.done_bytes, "total": state.total_bytes}
                await _send_progress(exchange, {"status": "Downloading", "progressDetail": detail, "id": tag})
            await asyncio.sleep(0)
        if state is not None and state.state == "present":
            await _send_progress(exchange, {"status": f"Status: Downloaded newer image for {name}"})
            return
        why = "it was not pulled in time" if state is None or state.state == "pulling" else state.problem
        await _send_progress(exchange, {"errorDetail": {"message": why}, "error": why})

    # --- what they are made of

    def _container(self, match: re.Match[str]) -> Container:
        container = self._life.containers.find(match["id"])
        self._life.look(container)
        return container

    def _seen(self) -> tuple[Container, ...]:
        for container in self._life.containers.all():
            self._life.look(container)
        return tuple(each for each in self._life.containers.all() if not each.record.removing)

    def _client_s(self, exchange: DockerExchange) -> float:
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


def _check_query(exchange: DockerExchange, route: EngineRoute) -> None:
    for name, value in exchange.query.items():
        if name not in route.query and flag(value):
            known = ", ".join(route.query) or "none"
            message = f"query parameter {name[:64]!r} is not done by this facade; known here: {known}"
            raise Unsupported(message, component=COMPONENT, detail={"path": name[:64]})


def _number(exchange: DockerExchange, name: str, default: float) -> int:
    text = exchange.query.get(name, "")
    try:
        return int(text) if text else int(default)
    except ValueError:
        raise InvalidInput(f"{name}: {text[:32]!r} is no whole number", component=COMPONENT) from None


def _size(exchange: DockerExchange) -> tuple[int, int]:
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


def _grace_s(exchange: DockerExchange) -> float:
    """Return for how long a stop waits between its word and its force: negative numbers mean for ever."""
    asked_s = _number(exchange, "t", STOP_S)
    return STOP_MAX_S if asked_s < 0 else min(asked_s, STOP_MAX_S)
