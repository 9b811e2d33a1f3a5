"""What a client asks of a container or a command, read field by field: what is not done here is refused by its name.

A field that is empty (null, "", 0, -1, false, [] or {}) asks for nothing, whatever it is called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from gateway.facades.docker.commands import CommandWish
from manager.errors import InvalidInput, Unsupported
from manager.function import FunctionSpec, SandboxSpec
from runtimes.sandbox.spec import ABOVE_SYSTEM, SYSTEM
from tangram.types import SandboxChoice, explained

COMPONENT = "docker"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerWish:
    """What a container is to be."""

    image: str
    argv: tuple[str, ...]
    cwd: str
    labels: dict[str, str]
    sandbox: SandboxChoice | None
    #: Whether its main command only keeps it alive, and for how many seconds (0: for ever).
    idles: bool
    idles_s: float
    tty: bool
    reads_stdin: bool
    auto_remove: bool
    #: What it asked for and does not get, for its client to tell.
    warnings: tuple[str, ...] = ()


def container_wish(body: Mapping[str, object], function: FunctionSpec) -> ContainerWish:
    """Return what a body of ``/containers/create`` asks for; raises InvalidInput, Unsupported with the field."""
    host = _object(body, "HostConfig")
    _refuse_rest(body, "", _KNOWN | IDLE)
    _refuse_rest(host, "HostConfig.", _KNOWN_HOST | CORES | IDLE_HOST)
    for name, allowed in HARMLESS.items():
        if host.get(name) is not None and host[name] not in allowed:
            raise _unsupported(f"HostConfig.{name}", host[name])
    entrypoint = _words(body, "Entrypoint")
    argv = (*(() if entrypoint == ("",) else entrypoint), *_words(body, "Cmd"))  # '' is how docker turns one off
    tty, reads = _get(body, "Tty", bool, False), _get(body, "AttachStdin", bool, False)
    attached = reads or _get(body, "AttachStdout", bool, False) or _get(body, "AttachStderr", bool, False)
    idles_s = _idle_s(argv, attached=reads)
    if not argv and attached and not _get(body, "OpenStdin", bool, False):
        told = "No command specified: name one, as the image's own CMD and ENTRYPOINT are not known here"
        raise InvalidInput(told, component=COMPONENT, detail={"path": "Cmd"})
    labels: dict[str, str] = _get(body, "Labels", dict[str, str], {})
    cwd = _get(body, "WorkingDir", str, "")
    return ContainerWish(
        image=_get(body, "Image", str, ""),
        argv=argv or (("/bin/sh",) if reads else ()),
        cwd=cwd,
        labels=labels,
        sandbox=_choice(body, host, function, labels),
        idles=idles_s is not None,
        idles_s=idles_s or 0.0,
        tty=tty,
        reads_stdin=reads,
        auto_remove=_get(host, "AutoRemove", bool, False),
        warnings=_capability_warnings(host),
    )


def exec_wish(body: Mapping[str, object], cwd: str, living: SandboxSpec | None) -> CommandWish:
    """Return what a body of ``/containers/{id}/exec`` asks for; ``cwd`` is the container's own."""
    _refuse_rest(body, "", _KNOWN_EXEC)
    argv = _words(body, "Cmd")
    if not argv:
        raise InvalidInput("No exec command specified", component=COMPONENT, detail={"path": "Cmd"})
    user = _get(body, "User", str, "")
    if living is not None and user == living.user:
        user = ""
    rows, columns = console_size(body)
    return CommandWish(
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


def image_names(asked: str) -> tuple[str, ...]:
    """Return the ways in which an image's name is written, as it was asked for first."""
    bare = asked.removeprefix("docker.io/").removeprefix("library/")
    found: dict[str, None] = {}
    for name in (asked, bare):
        tagged = ":" in name.rpartition("/")[2] or "@" in name
        found |= dict.fromkeys((name, name.removesuffix(":latest"), name if tagged else f"{name}:latest"))
    return tuple(found)


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
        asked = _get(host, name, int | None, None) or 0
        if asked > 0 and (asked < most if name == "PidsLimit" else asked > most):
            told = f"{name}: {asked} is not what the function {function.name!r} has ({most})"
            raise InvalidInput(told, component=COMPONENT, detail={"path": f"HostConfig.{name}"})
    _require_plain_network(body)
    user = _user(_get(body, "User", str, ""))
    memory = _get(host, "Memory", int | None, None)
    network = _get(host, "NetworkMode", str | None, None) or ""
    if network not in NETWORKS:
        raise _unsupported("HostConfig.NetworkMode", network)
    given: dict[str, object] = {
        "image": _image(_get(body, "Image", str, ""), spec),
        "env": dict(_env(body)) or None,
        "workdir": _workdir(_get(body, "WorkingDir", str, "")),
        "user": None if user in ("", spec.user) else user,
        "memory": memory or None,
        "network": NETWORKS[network],
        "idle_ttl": labels.get(TTL_LABEL),
    }
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.convert(given, SandboxChoice) if given else None
    except msgspec.ValidationError as error:
        said, place = explained(error)
        raise InvalidInput(f"{place.removeprefix('.')}: {said}", component=COMPONENT) from None


def _capability_warnings(host: Mapping[str, object]) -> tuple[str, ...]:
    """Return a warning for each capability that is asked for and not given; raises Unsupported for others."""
    told = []
    for name in _words(host, "CapAdd"):
        if name.upper().removeprefix("CAP_") not in UNGIVEN:
            raise _unsupported("HostConfig.CapAdd", name, "capabilities are the function's: sandbox.capabilities")
        told.append(f"HostConfig.CapAdd: {name} is not given; capabilities are the function's: sandbox.capabilities")
    return tuple(told)


def _image(asked: str, spec: SandboxSpec) -> str | None:
    """Return the name by which the function allows an image, or as it was asked for; None for its own."""
    if not asked:
        raise InvalidInput("Image: no image is named", component=COMPONENT, detail={"path": "Image"})
    names = image_names(asked)
    if not {*image_names(spec.image)}.isdisjoint(names):
        return None
    return next((name for name in names if any(fnmatchcase(name, pattern) for pattern in spec.images)), asked)


def _workdir(asked: str) -> str | None:
    """Return a working directory that the sandbox may make its user's own; one of the system is only gone into."""
    place = asked.rstrip("/") or "/"
    if not asked or place in ABOVE_SYSTEM or any(f"{place}/".startswith(f"{each}/") for each in SYSTEM):
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
        case ("sleep" | "/bin/sleep" | "/usr/bin/sleep", span) if found := re.fullmatch(
            r"([0-9]{1,15}(?:\.[0-9]{0,15})?)([smhd]?)", span
        ):
            return max(float(found[1]) * SECONDS[found[2]], 0.001)
        case (("sh" | "bash" | "/bin/sh" | "/bin/bash"), "-c", text) if not attached:
            words = tuple(text.removeprefix("exec ").split())
            return None if not words else _idle_s(words, attached=False) if words[0] in ("sleep", "tail") else None
    return None


def _env(body: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    for each in _get(body, "Env", list[str] | None, None) or []:
        name, sign, value = each.partition("=")
        if not sign or ENV_NAME.fullmatch(name) is None:
            told = f"Env: {each[:64]!r} is no NAME=value; a name alone, which unsets, is not done here"
            raise InvalidInput(told, component=COMPONENT, detail={"path": "Env"})
        found.append((name, value))
    return tuple(found)


def _user(user: str) -> str:
    if ":" in user:
        raise _unsupported("User", user, "name the user alone, its group is its own")
    return user


def _require_plain_network(body: Mapping[str, object]) -> None:
    """Raise for what only a network of the engine's own has; the default one's empty entry is none."""
    for name, endpoint in _object(_object(body, "NetworkingConfig"), "EndpointsConfig").items():
        if not isinstance(endpoint, dict) or not all(_empty(value) for value in endpoint.values()):
            raise _unsupported(f"NetworkingConfig.EndpointsConfig.{name}", endpoint)


def _refuse_rest(given: Mapping[str, object], place: str, known: frozenset[str]) -> None:
    for name, value in given.items():
        if name not in known and not _empty(value):
            raise _unsupported(f"{place}{name}", value)


def _unsupported(place: str, value: object, remedy: str = "leave it out") -> Unsupported:
    told = f"{place}: {str(value)[:128]!r} is not done by this door; {remedy}"
    return Unsupported(told, component=COMPONENT, detail={"path": place})


def _empty(value: object) -> bool:
    return value in (None, "", 0, False, -1, [], {}, [""])


def _object(given: Mapping[str, object], name: str) -> dict[str, object]:
    return _get(given, name, dict[str, object] | None, None) or {}


def _words(body: Mapping[str, object], name: str) -> tuple[str, ...]:
    """Return a command: a list of words, or a text that is one word."""
    value = _get(body, name, str | list[str] | None, None)
    words = [value] if isinstance(value, str) and value else value or []
    if any("\0" in word for word in words):
        raise InvalidInput(f"{name}: holds a NUL", component=COMPONENT, detail={"path": name})
    return tuple(words)


def _get(given: Mapping[str, object], name: str, kind: Any, default: object) -> Any:
    """Return a field as a type; raises InvalidInput. Null is the default."""
    value = given.get(name)
    if value is None:
        return default
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        said, place = explained(error)
        raise InvalidInput(f"{name}{place}: {said}", component=COMPONENT, detail={"path": name}) from None
