"""Containers, commands, images and the engine itself as the engine's clients read them."""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import stat
import tarfile
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from msgspec import Struct

from gateway import wire
from gateway.facades.docker.commands import ContainerExec
from gateway.facades.docker.containers import Container
from gateway.facades.docker.exchange import API_VERSION, API_VERSION_MIN
from gateway.facades.docker.unsaid import CONFIG, HOST_CONFIG, NETWORK_SETTINGS
from runtimes.sandbox.spec import ProviderInfo

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


def _over(unsaid: Mapping[str, object], said: Mapping[str, object]) -> dict[str, object]:
    """Return what a client said over what holds where it said nothing."""
    return {**unsaid, **{name: value for name, value in said.items() if value is not None}}


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
    wish = command.wish
    return {
        "ID": command.id,
        "Running": running,
        "ExitCode": exit_code,
        "ProcessConfig": {
            "tty": wish.tty,
            "entrypoint": wish.argv[0],
            "arguments": list(wish.argv[1:]),
            "privileged": False,
            **({"user": wish.user} if wish.user else {}),
        },
        "OpenStdin": wish.stdin,
        "OpenStdout": wish.stdout,
        "OpenStderr": wish.stderr,
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
    told = {"name": path.name, "size": path.size, "mode": mode, "mtime": instant(path.mtime), "linkTarget": link}
    return base64.b64encode(wire.dumps(told)).decode()


def version_shape() -> dict[str, object]:
    """Return the engine as ``docker version`` shows it."""
    return {
        "Platform": {"Name": "Tangram"},
        "Components": [],
        "Version": _version(),
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
        "ServerVersion": _version(),
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
        "LoggingDriver": "none",
        "CgroupDriver": "none",
    }


def _version() -> str:
    try:
        return version("tangram-gateway")
    except PackageNotFoundError:
        return "0"
