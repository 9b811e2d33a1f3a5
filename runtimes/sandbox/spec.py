"""What a sandbox is to be and what it keeps: image, capabilities, record."""

from __future__ import annotations

import fcntl
import json
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec

from manager.errors import Conflict, InvalidConfig, InvalidInput
from manager.function import AUTO, Network, SandboxSpec, Setting
from runtimes.sandbox.snapshots import REPOSITORY, SnapshotRecord
from tangram.types import SandboxChoice, duration_s, show_size, size_bytes, write_duration

COMPONENT = "sandbox"
#: Directories of the system: neither they nor what lies below them may become a user's own; and those above others.
SYSTEM = (
    "/.tangram", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/sbin", "/sys",
    "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/bin", "/usr/local/lib", "/usr/sbin",
)  # fmt: skip
ABOVE_SYSTEM = ("/", "/home", "/opt", "/run", "/srv", "/tmp", "/usr", "/usr/local", "/var", "/var/lib", "/var/tmp")
#: Of the names and values of an environment together: the kernel bounds what a program is started with.
ENV_MAX_CHARS = 64 * 2**10
#: Functions of which is known how their sandboxes are declared, and changes of each.
DECLARED_MAX, CHANGES_MAX = 4096, 16
#: What begins a reference to a secret.
SECRET = "${secret:"


class OtherSandbox(Conflict):
    """A function, or an opening, wants another sandbox than the one in which its trajectory lives."""

    def __init__(self, message: str) -> None:
        super().__init__(message, component=COMPONENT)


def chosen(spec: SandboxSpec, choice: SandboxChoice) -> SandboxSpec:
    """Return the function's sandbox with what a trajectory chooses; raises InvalidInput with field and remedy."""
    values = {
        "image": _image(spec, choice.image),
        "env": _env(spec, choice),
        "workdir": _workdir(choice.workdir),
        "user": _user(spec, choice.user),
        "memory_bytes": _memory_bytes(spec, choice.memory),
        "idle_ttl_s": _idle_ttl_s(spec, choice.idle_ttl),
        **_network(spec, choice.network),
    }
    values = {name: value for name, value in values.items() if value is not None}
    return replace(spec, **values, chosen=True)  # type: ignore[arg-type]  # fields by name


def forked(spec: SandboxSpec, snapshot: SnapshotRecord, *, images: bool) -> SandboxSpec:
    """Return the function's sandbox as it begins with a snapshot: with image, env, workdir, user, network, memory and
    idle_ttl of the trajectory whose files they were, and the function's own bounds.

    Raises OtherSandbox if the function could not be served in that one, and InvalidInput, with field and remedy, for
    what it does not let a trajectory choose. ``images`` as for `contradiction`.
    """
    kept = snapshot.spec
    spec = spec if spec.image else replace(spec, image=kept.image)
    if why := contradiction(spec, replace(kept, env=spec.env), images=images):
        raise OtherSandbox(f"snapshot {snapshot.id!r} is of another sandbox: {why}")
    request = SandboxChoice(
        env={name: value for name, value in kept.env.items() if spec.env.get(name) != value} or None,
        workdir=None if kept.workdir == spec.workdir else kept.workdir,
        user=kept.user,
        memory=kept.memory_bytes,
        network=_network_named(kept.network),
        idle_ttl=kept.idle_ttl_s,
    )
    return replace(chosen(spec, request), image=kept.image, snapshot=snapshot.id)


def chosen_env(spec: SandboxSpec) -> dict[str, str]:
    """Return of a chosen sandbox's environment what its trajectory may have chosen: the rest is the function's own."""
    own = {name for name, value in spec.env.items() if SECRET in value or not _matches(name, spec.trajectory.env)}
    return {name: value for name, value in spec.env.items() if name not in own}


def _network_named(network: Network) -> Literal["none", "internal", "egress"]:
    return network.value


def contradiction(spec: SandboxSpec, living: SandboxSpec, *, images: bool) -> str:
    """Return in what a function's own settings contradict the sandbox in which its trajectory lives, and the remedy.

    Empty if it may be served there: each setting is its own, or one that it lets a trajectory choose. Amounts (memory,
    disk, processes, times) are the living sandbox's and contradict nothing. ``images``: whether sandboxes have one.
    """
    if images and not _matches(living.image, (spec.image, *spec.images)):
        return _differs("image", spec.image, living.image, f"sandbox.images: [{living.image}]")
    if living.network is not spec.network and living.network not in spec.trajectory.networks:
        remedy = f"sandbox.trajectory.networks: [{living.network}]"
        return _differs("network", spec.network, living.network, remedy)
    if living.network is Network.EGRESS and spec.network is Network.EGRESS and living.allow != spec.allow:
        return _differs("allow", _listed(spec.allow), _listed(living.allow), "the same in both functions")
    if living.user != spec.user and (refused := spec.refuses(living.user)):
        return f"{_differs('user', spec.user, living.user)}: {refused}"
    if living.workdir != spec.workdir and not living.chosen:
        return _differs("workdir", spec.workdir, living.workdir, "the same in both functions")
    for name in ("runtime", "capabilities"):
        if getattr(living, name) != getattr(spec, name):
            return _differs(name, getattr(spec, name), getattr(living, name), "the same in both functions")
    for name, value in spec.env.items():
        if living.env.get(name) != value and not (living.chosen and _matches(name, spec.trajectory.env)):
            return f"sandbox.env: the living sandbox was not given the same {name}; say the same in both functions"
    return ""


def outlives(
    living: SandboxSpec,
    spec: SandboxSpec,
    earlier: Iterable[SandboxSpec] | None,
    filled: Callable[[SandboxSpec], SandboxSpec],
    *,
    images: bool,
) -> bool:
    """Return whether a function may go on in a sandbox that it contradicts, as that is of an earlier configuration.

    That is where it agreed with it as it was declared ``earlier`` (None: under a configuration that is not known), and
    what has changed is image, workdir or env, which a trajectory keeps. What bounds a sandbox (network, user, runtime,
    capabilities) is never that of an earlier configuration. ``filled`` puts a declaration's secrets in.
    """
    kept = replace(spec, image=living.image, workdir=living.workdir, env=living.env)
    if contradiction(kept, living, images=images):
        return False
    for each in earlier or ():
        with suppress(InvalidConfig):  # of a secret that is no more
            if not contradiction(filled(each), living, images=images):
                return True
    return earlier is None


class Declarations:
    """How each function's sandbox is declared, and was before: the last functions, and changes of each, are known."""

    def __init__(self) -> None:
        self._now: dict[str, SandboxSpec] = {}
        #: Until when, in seconds of the wall clock, it was declared otherwise.
        self._before: dict[str, list[tuple[float, SandboxSpec]]] = {}

    def declare(self, function: str, spec: SandboxSpec, now_s: float) -> None:
        """Know how it is declared from now on."""
        known = self._now.pop(function, spec)
        self._now[function] = spec
        if known != spec:
            self._before[function] = [*self._before.get(function, ())[1 - CHANGES_MAX :], (now_s, known)]
        if len(self._now) > DECLARED_MAX:
            eldest = next(iter(self._now))
            del self._now[eldest]
            self._before.pop(eldest, None)

    def since(self, made_s: float, spec: SandboxSpec) -> Iterator[SandboxSpec]:
        """Yield how functions that are declared so have been since then, if otherwise.

        One that was declared so before counts too: a later declaration may be of a configuration that failed.
        """
        for function, now in self._now.items():
            changes = self._before.get(function, ())
            if now == spec or any(before == spec for _, before in changes):
                yield from (before for until_s, before in changes if made_s < until_s)


def difference(requested: SandboxSpec, living: SandboxSpec) -> str:
    """Return in what a sandbox that was chosen is not the one that lives; empty if it is."""
    for name in ("snapshot", "image", "network", "user", "workdir", "memory_bytes", "idle_ttl_s"):
        if getattr(requested, name) != getattr(living, name):
            field = {"memory_bytes": "memory", "idle_ttl_s": "idle_ttl"}.get(name, name)
            return _differs(field, getattr(requested, name), getattr(living, name))
    return "" if requested.env == living.env else "sandbox.env: it lives with other variables"


def _image(spec: SandboxSpec, image: str | None) -> str | None:
    if image is None or image == spec.image:
        return None
    if REPOSITORY in image or not _matches(image, spec.images):
        known = ", ".join(each for each in (spec.image, *spec.images) if each)
        remedy = "list it: sandbox.images" if known else "set sandbox.image, or list it: sandbox.images"
        message = f"{image!r} is not among those that the function allows ({known or 'none'})"
        raise _refused("image", f"{message}; {remedy}")
    return image


def _env(spec: SandboxSpec, request: SandboxChoice) -> dict[str, str] | None:
    if not request.env:
        return None
    for name, value in request.env.items():
        if not _matches(name, spec.trajectory.env):
            known = _listed(spec.trajectory.env)
            raise _refused(f"env.{name}", f"is not among those that the function allows ({known}); "
                           f"list it: sandbox.trajectory.env: [{name}]")  # fmt: skip
        if "\0" in value or SECRET in value:
            raise _refused(f"env.{name}", "must hold no NUL and name no secret: secrets belong in the function's env")
    if sum(len(name) + len(value) for name, value in request.env.items()) > ENV_MAX_CHARS:
        raise _refused("env", f"holds more than {ENV_MAX_CHARS} characters; upload a file")
    return {**spec.env, **request.env}


def _workdir(workdir: str | None) -> str | None:
    if workdir is None:
        return None
    place = posixpath.normpath(workdir)
    place = f"/{place.lstrip('/')}"
    if place in ABOVE_SYSTEM or any(f"{place}/".startswith(f"{each}/") for each in SYSTEM):
        raise _refused("workdir", f"{workdir!r} is a directory of the system, which would become the user's; "
                       "choose one of its own, for example /workspace")  # fmt: skip
    return place


def _user(spec: SandboxSpec, user: str | None) -> str | None:
    if user is None or user == spec.user:
        return None
    if refused := spec.refuses(user):
        raise _refused("user", refused)
    return user


def _memory_bytes(spec: SandboxSpec, memory: str | int | None) -> int | None:
    if memory is None:
        return None
    wanted, most = size_bytes(memory), max(spec.memory_bytes, spec.trajectory.memory_bytes or 0)
    if not 0 < wanted <= most:
        raise _refused("memory", f"{show_size(wanted)} is not within the {show_size(most)} that the function allows; "
                       "raise sandbox.trajectory.memory")  # fmt: skip
    return None if wanted == spec.memory_bytes else wanted


def _idle_ttl_s(spec: SandboxSpec, idle_ttl: str | float | None) -> float | None:
    if idle_ttl is None:
        return None
    wanted_s = float(idle_ttl) if isinstance(idle_ttl, int | float) else duration_s(idle_ttl)
    most_s = max(spec.idle_ttl_s, spec.trajectory.idle_ttl_s or 0.0)
    if not 0 < wanted_s <= most_s:
        message = f"{write_duration(wanted_s)} is not within the {write_duration(most_s)} that the function allows"
        raise _refused("idle_ttl", f"{message}; raise sandbox.trajectory.idle_ttl")
    return None if wanted_s == spec.idle_ttl_s else wanted_s


def _network(spec: SandboxSpec, request: str | None) -> dict[str, object]:
    if request is None or request == spec.network:
        return {}
    network = Network(request)
    if network is not Network.NONE and network not in spec.trajectory.networks:
        raise _refused("network", f"{request} is not what the function allows ({spec.network}); "
                       f"list it: sandbox.trajectory.networks: [{request}]")  # fmt: skip
    return {"network": network, "allow": spec.allow if network is Network.EGRESS else ()}


def _matches(text: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)


def _refused(field: str, message: str) -> InvalidInput:
    path = f"$.sandbox.{field}"
    return InvalidInput(f"{path}: {message}", component=COMPONENT, detail={"path": path})


def _differs(field: str, own: object, living: object, remedy: str = "") -> str:
    message = f"sandbox.{field} is {str(own)!r} here, and {str(living)!r} in the sandbox that lives"
    return f"{message}; to serve there say {remedy}" if remedy else message


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


NAME = "record.json"
#: Beside it: the id of its container and the directory that was bounded for it, once there are such.
CONTAINER, BOUNDED = "container", "bounded"
#: Beside it: what a container without a network has for /etc/hosts.
HOSTS = "hosts"
#: In a state directory: the sandboxes' directories.
SANDBOXES = "sandboxes"
#: Label: the task whose sandboxes ``network: internal`` joins.
TASK = "tangram.task"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRecord:
    """One sandbox: the runner's token, and what is needed to find it again."""

    name: str
    token: str
    spec: SandboxSpec
    labels: Mapping[str, str]
    #: The runner's process and its start in ticks since boot (process sandboxes).
    pid: int = 0
    #: Its own user's, where the spec names none.
    uid: int = 0
    started: int = 0
    #: False for a container without python3, which is spoken to through ``docker exec``.
    runner: bool = True
    #: Processes ended for want of memory that some action was told of.
    oom_told: int = 0
    #: False while it is being made: then ``pid`` is what was started, and the next gateway removes it.
    ready: bool = True
    #: The kind of provider that made it (``container``, ``process``, ``plain``), and no other may take it over.
    provider: str
    #: Where its own files lie on the host, if it has no root directory of its own.
    base: str = ""
    #: How its runner is spoken to (`runtimes.sandbox.docker.provider`).
    transport: str = "socket"

    @property
    def in_container(self) -> bool:
        return self.provider == "container"

    def write(self, directory: Path) -> None:
        """Write it so that it survives a crash of the gateway; only the owner can read it, for the token's sake."""
        part = directory / f"{NAME}.part"
        part.touch(0o600)
        part.write_text(json.dumps(msgspec.to_builtins(self)), encoding="utf-8")
        part.replace(directory / NAME)

    @classmethod
    def read(cls, directory: Path) -> SandboxRecord | None:
        """Return the record of a sandbox's directory, None if there is none that is whole."""
        try:
            return msgspec.convert(json.loads((directory / NAME).read_text(encoding="utf-8")), cls)
        except (OSError, ValueError):
            return None

    def runs(self) -> bool:
        """Return whether its process lives, and is still the same one."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return False
        return self.pid > 0 and fields[0] != b"Z" and int(fields[19]) == self.started

    @property
    def user(self) -> str:
        """Return whom its commands run as: a name or an id."""
        return str(self.uid) if self.spec.user == AUTO else self.spec.user

    def greeting(self, **more: object) -> dict[str, object]:
        """Return what its runner is told first."""
        spec = self.spec
        return {
            "token": self.token,
            "user": self.user,
            "own_user": self.uid > 0,
            "root": not spec.refuses("root"),
            "workdir": spec.workdir,
            "base": self.base,
            "env": {},
            "orphan_s": spec.idle_ttl_s,
            "unattended_s": spec.unattended_s,
            **more,
        }


def hold(state_dir: Path) -> ExitStack:
    """Hold a state directory until what is returned is closed, or this process ends; others may hold it, too."""
    state_dir.mkdir(parents=True, exist_ok=True)
    held = ExitStack()
    fd = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY)
    held.callback(os.close, fd)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return held


def is_held(state_dir: Path) -> bool:
    """Return whether a provider of this machine holds the directory, or its gateway that above it."""
    for place in (state_dir, state_dir.parent / "lock"):
        try:
            fd = os.open(place, os.O_RDONLY)
        except PermissionError:
            return True  # another user's, of which we cannot know
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
    return False


def note_container(directory: Path, container: str) -> None:
    """Write down which container it is, so that the next gateway knows what to look for if the engine does not."""
    (directory / CONTAINER).write_text(container, encoding="ascii")


def noted_container(directory: Path) -> str:
    """Return the container that was noted, empty if none was."""
    try:
        return (directory / CONTAINER).read_text(encoding="ascii")
    except OSError:
        return ""


def note_bounded(directory: Path, place: Path) -> None:
    """Write down which directory elsewhere is bounded for it, so that the bound is taken away with it."""
    (directory / BOUNDED).write_text(str(place), encoding="utf-8")


def noted_bounded(directory: Path) -> Path | None:
    """Return the directory that was noted, None if none was."""
    try:
        return Path((directory / BOUNDED).read_text(encoding="utf-8"))
    except OSError:
        return None


def read_records(root: Path) -> list[tuple[Path, SandboxRecord | None]]:
    """Return every sandbox directory below ``root`` with its record."""
    if not root.is_dir():
        return []
    return [(directory, SandboxRecord.read(directory)) for directory in sorted(root.iterdir()) if directory.is_dir()]


PROMISES = (
    "filesystem", "network", "egress", "processes_hidden", "users_separate", "memory", "pids", "cores", "freeze",
    "disk", "image", "seccomp", "snapshot", "own_user", "root_separate",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderInfo:
    """Which kind of sandbox is used, and what it promises, in plain words."""

    kind: Literal["container", "process", "plain", "none"]  #: ``process`` is bubblewrap
    engine: str  #: for example ``docker 28.2 (cgroup v1)`` or ``bubblewrap``
    isolation: str  #: one honest sentence
    #: What containers are run with unless a function says otherwise, and all that it may say (containers).
    runtime: str = ""
    runtimes: tuple[str, ...] = ()
    #: Which of the `PROMISES` are kept.
    limits: Mapping[str, bool] = field(default_factory=dict)
    #: In what it is weaker than it could be, each in plain words; told at the start, by ``/readyz`` and as a resource.
    weakenings: tuple[str, ...] = ()
    #: How what it writes is bounded: ``image`` or ``walk``.
    disk: str = "walk"


def require_workdir(spec: SandboxSpec) -> None:
    """Raise InvalidConfig unless the working directory can be one."""
    if not spec.workdir.startswith("/") or spec.workdir == "/":
        raise InvalidConfig(f"sandbox.workdir must be an absolute directory, not {spec.workdir!r}")


def require_user(spec: SandboxSpec) -> None:
    """Raise InvalidConfig unless its user is one that it may have."""
    if refused := spec.refuses(spec.user):
        raise InvalidConfig(f"sandbox.user: {refused}", component=COMPONENT)


#: What engines take for the name of an image: [registry[:port]/]part[/part ...][:tag][@digest], or an image's id. It
#: becomes a part of a request's path, in which anything else could lead to another route of the engine.
_NAME = re.compile(
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5}(?=/))?"
    r"(?:[._-]+[A-Za-z0-9]+)*(?:/[A-Za-z0-9]+(?:[._-]+[A-Za-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@[A-Za-z0-9+._-]+:[0-9A-Fa-f]{32,})?",
)
NAME_MAX_CHARS = 1024


def require_image_name(image: str) -> None:
    """Raise InvalidConfig unless it is the name of an image, a digest or an id."""
    if len(image) > NAME_MAX_CHARS or _NAME.fullmatch(image) is None:
        raise InvalidConfig(
            f"{image[:200]!r} is no name of an image: [registry[:port]/]name[:tag][@digest]", component="sandbox.images"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryLogin:
    """Who pulls from a registry."""

    username: Annotated[str, Setting("user name")]
    password: Annotated[
        str,
        Setting(
            "password or token; a reference: ${secret:NAME}",
            pattern=r"^\$\{secret:[^}]+\}$",
            words="a reference to a secret, ${secret:NAME}",
        ),
    ]


@dataclass(slots=True, kw_only=True)
class ImageState:
    """One image as it is."""

    image: str
    state: Literal["pulling", "present", "failed"]
    size_bytes: int = 0
    #: Of a pull: what has arrived, and what is known to come.
    done_bytes: int = 0
    total_bytes: int = 0
    #: Whether this gateway has pulled it, and so may remove it.
    pulled: bool = False
    #: Time of day of its last use.
    used_s: float = 0.0
    #: Whether it is kept whatever the bound: a function's, or needed just now.
    kept: bool = False
    #: Why its last pull failed, in the registry's words.
    problem: str = ""


class ImageKeeper(Protocol):
    """Pulls images, and keeps those that it has pulled within a bound."""

    #: Most bytes of the images that were pulled; 0 without a bound.
    bound_bytes: int

    def begin(self, image: str) -> None:
        """Begin to pull an image unless that is under way; `states` tells what becomes of it."""
        ...

    def pulls(self, image: str) -> bool:
        """Return whether an image is being pulled just now."""
        ...

    async def settled(self, images: Sequence[str], within_s: float) -> None:
        """Return when none of these is being pulled any more, or after so many seconds."""
        ...

    async def require(self, image: str) -> object:
        """Return when it is here, pulled if need be; raises InvalidConfig or CapacityExceeded, as the registry says."""
        ...

    async def states(self) -> list[ImageState]:
        """Return every image of the engine that has a name, and those that are pulled or could not be."""
        ...
