"""Which kind of sandbox this machine gets."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import structlog

from manager.errors import InvalidConfig, Unsupported
from manager.function import SandboxSpec, Setting
from runtimes.sandbox.disk import DiskBound, DiskSettings, choose_bound
from runtimes.sandbox.linux import Seccomp
from runtimes.sandbox.process import HostSupport, IdBlocks, IdSettings, NotInstalled, ProcessProvider, end_left
from runtimes.sandbox.runner.runner import DEFAULT_PATH
from runtimes.sandbox.sandbox import CreationGate, Provider, Sandbox
from runtimes.sandbox.snapshots import SNAPSHOTS, SnapshotSettings, SnapshotStore
from runtimes.sandbox.spec import PROMISES, ProviderInfo, RegistryLogin
from runtimes.secrets import Secrets

logger = structlog.get_logger("sandbox")

NameServer = Annotated[
    str, Setting(pattern=r"^([0-9]{1,3}(\.[0-9]{1,3}){3}|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)$", words="an IP address")
]

COMPONENT = "sandbox"
Kind = Literal["container", "process", "plain"]
#: Kinds of sandboxes, the weakest first, and their names for people.
STRENGTHS = ("plain", "process", "container")
WORDS = {"plain": "plain processes", "process": "processes in bubblewrap", "container": "containers"}
REMEDIES = {
    "container": "mend it, or say sandbox.provider: process for processes in bubblewrap, which are weaker",
    "process": (
        "mend it, or use Docker; sandbox.provider: none serves models and APIs only, "
        "plain runs commands without isolation"
    ),
    "plain": "use Docker or bubblewrap",
}
#: The file of the state directory that remembers the kind that it served last.
SERVED = "served"
DOCKER_SOCKET = Path("/var/run/docker.sock")
#: Seconds between two tries at the start.
RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerSettings:
    """The Docker engine of this machine that makes container sandboxes."""

    host: Annotated[
        str,
        Setting(
            "unix:///path; by default DOCKER_HOST or the usual socket", pattern=r"^(unix://.+)?$", words="unix:///path"
        ),
    ] = ""
    #: Most bytes of a handler's directory, which is copied where it cannot be mounted.
    copy_limit_bytes: int = 256 * 2**20
    egress_network: Annotated[
        str,
        Setting(
            "a network of the engine whose own rules say what network: egress reaches, instead of the gateway's; "
            "needed where those cannot be set, as by a gateway in a container"
        ),
    ] = ""
    internal_networks: Annotated[int, Setting("most tasks that have an internal network at a time", ge=1)] = 16
    #: Most images that are pulled at a time; more wait: two fill the disk and the network of a machine.
    pulls: int = 2
    #: Seconds for the longest pull of one image: the largest have tens of GB.
    pull_timeout_s: float = 3600.0
    images_max_bytes: Annotated[
        int,
        Setting(
            "most bytes of images that the gateway has pulled: beyond it those used least recently are removed, never "
            "one of a function or of a living sandbox; 0 removes none",
            key="images_max",
        ),
    ] = 0
    registries: Annotated[
        Mapping[str, RegistryLogin],
        Setting("who pulls, by registry as images name it; docker.io for those that name none"),
    ] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserIds:
    """The ids of users that containers of `user: auto` have, one each."""

    first: Annotated[
        int,
        Setting("the first; 0 takes 1000000, or 10000 where the engine's userns-remap leaves containers 65536", ge=0),
    ] = 0
    count: Annotated[int, Setting("how many, and so most of such sandboxes at once", ge=1)] = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSettings:
    """What the providers are made from."""

    kind: Annotated[
        Literal["auto", "container", "process", "plain", "none"],
        Setting(
            "auto takes containers where Docker is installed, else local processes in bubblewrap (process), and "
            "never another kind when that fails; plain processes are not isolated, and only taken by name; none serves "
            "models and APIs only",
            key="provider",
        ),
    ] = "auto"
    plain_as_root: Annotated[bool, Setting("lets a gateway that is root run plain processes on the machine itself")] = (
        False
    )
    #: Seconds for which an engine or bubblewrap that does not work is tried again at the start.
    start_wait_s: float = 30.0
    #: What ``${secret:NAME}`` of a registry stands for.
    secrets: Secrets | None = field(default=None, compare=False)
    #: Whether less isolation may be served than the state directory has served before.
    weaker: bool = False
    #: Where sockets, records and the process sandboxes' files live; one gateway at a time.
    state_dir: Path = Path("sandboxes")
    #: Stable for the state directory: the label of its sandboxes.
    gateway_id: str = "tangram"
    #: Sandboxes that are started at once: more only wait for the engine or the kernel.
    max_starting: int = 4
    #: Cores on which background processes run between actions; empty means all.
    shared_cores: tuple[int, ...] = ()
    #: Seconds that the engine may take for one request.
    engine_timeout_s: float = 120.0
    engine_silence_s: Annotated[
        float, Setting("a Docker engine that answers nothing for so long is given up until it answers again", gt=0)
    ] = 10.0
    seccomp: Annotated[
        Seccomp,
        Setting(
            "system calls that commands may make: what container engines allow, less io_uring, keyrings, AF_VSOCK and "
            "netfilter; no-ptrace takes debuggers away too; none sets no filter of ours"
        ),
    ] = "default"
    path: Annotated[
        str,
        Setting(
            "PATH of process sandboxes; a directory outside /usr is shown read-only with what lies beside it",
            pattern=r"^/[^:]*(:/[^:]*)*$",
            words="absolute paths with : between them",
        ),
    ] = DEFAULT_PATH
    ids: Annotated[IdSettings, Setting("user ids of process sandboxes")] = field(default_factory=IdSettings)
    name_servers: Annotated[
        tuple[NameServer, ...],
        Setting("addresses of the name servers that sandboxes with egress ask; by default the machine's own"),
    ] = ()
    docker: Annotated[DockerSettings, Setting("the engine")] = field(default_factory=DockerSettings)
    disk_bound: Annotated[DiskSettings, Setting("the bound of what a sandbox writes")] = field(
        default_factory=DiskSettings
    )
    uids: Annotated[UserIds, Setting("ids of the containers' own users")] = UserIds()
    snapshots: Annotated[SnapshotSettings, Setting("bounds of the snapshots of trajectories")] = field(
        default_factory=SnapshotSettings
    )


def make_provider(settings: ProviderSettings) -> Provider:
    """Return the provider that the settings ask for. Blocks for `ProviderSettings.start_wait_s` at most.

    Raises InvalidConfig, or Unsupported with the remedy: what is weaker than was asked for, or than the state directory
    has served before, is never taken instead.
    """
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    if settings.kind == "none":
        return NoSandboxes(settings)
    kind: Kind = "process" if settings.kind == "auto" else settings.kind
    if settings.kind == "auto" and docker_installed(settings.docker.host):
        kind = "container"
    stronger = _stronger_before(settings, kind)
    provider = _patiently(settings, kind, stronger)
    (settings.state_dir / SERVED).write_text(kind, encoding="ascii")
    info = provider.info
    logger.info("sandboxes", kind=info.kind, engine=info.engine, isolation=info.isolation, disk=info.disk)
    for weakening in info.weakenings:
        logger.warning("sandboxes are weaker than they could be", how=weakening)
    return provider


class NoSandboxes:
    """Implements `Provider` for a gateway of models and APIs alone: each sandbox is refused, with the remedy."""

    images = None

    def __init__(self, settings: ProviderSettings) -> None:
        nothing = dict.fromkeys(PROMISES, False)
        self.info = ProviderInfo(kind="none", engine="none", isolation="no sandboxes are made", limits=nothing)
        self.snapshots = SnapshotStore(settings.state_dir / SNAPSHOTS, settings.snapshots, provider=lambda: "none")

    async def check(self, spec: SandboxSpec) -> None:
        raise Unsupported(
            "this gateway makes no sandboxes (sandbox.provider: none); auto takes Docker or bubblewrap",
            component=COMPONENT,
        )

    async def trouble(self) -> str:
        return ""

    async def create(
        self, spec: SandboxSpec, *, name: str, labels: Mapping[str, str], mounts: Mapping[str, str]
    ) -> Sandbox:
        await self.check(spec)
        raise AssertionError("refused above")

    async def adopt(self) -> list[tuple[Sandbox, Mapping[str, str]]]:
        return []

    async def reap(self, living: Collection[str]) -> int:
        return 0

    async def close(self) -> None:
        """Nothing is held."""


def docker_installed(host: str = "") -> bool:
    """Return whether a Docker engine is named, listens, or could be started here."""
    named = host or os.environ.get("DOCKER_HOST", "")
    return bool(named) or DOCKER_SOCKET.exists() or shutil.which("dockerd") is not None


def _stronger_before(settings: ProviderSettings, kind: Kind) -> str:
    """Return the kind that the state directory has served, if this one is weaker and that is allowed.

    Raises InvalidConfig if it is not.
    """
    try:
        served = (settings.state_dir / SERVED).read_text(encoding="ascii")
    except FileNotFoundError:
        return ""
    if served not in STRENGTHS or STRENGTHS.index(kind) >= STRENGTHS.index(served):
        return ""
    if not settings.weaker:
        raise InvalidConfig(
            f"{settings.state_dir} has served {WORDS[served]}, and this start would serve {WORDS[kind]}, which are "
            f"weaker: make {WORDS[served]} work again, or start once with tangram serve --weaker-isolation",
            component=COMPONENT,
        )
    return served


def _patiently(settings: ProviderSettings, kind: Kind, stronger: str) -> Provider:
    """Make the provider, again and again while what it needs is installed but does not work; raises Unsupported."""
    deadline_s = time.monotonic() + settings.start_wait_s
    while True:
        try:
            return _containers(settings) if kind == "container" else _processes(settings, kind, stronger)
        except NotInstalled as error:
            raise Unsupported(f"{error.message}; {REMEDIES[kind]}", component=COMPONENT) from None
        except Unsupported as error:
            if time.monotonic() >= deadline_s:
                waited = f"tried for {settings.start_wait_s:g} s"
                raise Unsupported(f"{error.message} ({waited}); {REMEDIES[kind]}", component=COMPONENT) from None
            logger.warning("no sandboxes yet, trying again", kind=kind, why=error.message)
            time.sleep(min(RETRY_S, max(0.0, deadline_s - time.monotonic())))


def _containers(settings: ProviderSettings) -> Provider:
    from runtimes.sandbox.docker.engine import DockerEngine
    from runtimes.sandbox.docker.images import ImageStore
    from runtimes.sandbox.docker.provider import IMAGES, ContainerProvider

    chosen = settings.docker
    engine = DockerEngine.connect(
        chosen.host,
        timeout_s=settings.engine_timeout_s,
        workers=settings.max_starting + chosen.pulls + 4,
        silence_s=settings.engine_silence_s,
    )
    here = engine.shares(settings.state_dir)
    ended = end_left(settings.state_dir / "sandboxes")
    if ended:
        logger.warning("sandboxes of an earlier gateway were no containers and are ended", count=ended)
    return ContainerProvider(
        engine,
        state_dir=settings.state_dir,
        gateway_id=settings.gateway_id,
        gate=CreationGate(settings.max_starting),
        shared_cores=_shared_cores(settings),
        transport="socket" if here else "attach",
        copy_limit_bytes=chosen.copy_limit_bytes,
        uids=(settings.uids.first, settings.uids.count),
        seccomp=settings.seccomp,
        bound=choose_bound(settings.disk_bound, settings.state_dir) if here else DiskBound(),
        name_servers=settings.name_servers,
        egress_network=chosen.egress_network,
        internal_networks=chosen.internal_networks,
        snapshots=settings.snapshots,
        images=ImageStore(
            engine,
            record=settings.state_dir / IMAGES,
            pulls=chosen.pulls,
            bound_bytes=chosen.images_max_bytes,
            timeout_s=chosen.pull_timeout_s,
            logins=chosen.registries,
            secrets=settings.secrets,
        ),
    )


def _processes(settings: ProviderSettings, kind: Kind, stronger: str) -> Provider:
    plain = kind == "plain"
    if plain and os.geteuid() == 0 and not settings.plain_as_root:
        raise InvalidConfig(
            "sandbox.provider: plain gives commands the host's files and network, and this gateway is root: run it as "
            "another user, or say sandbox.plain_as_root: true as well",
            component=COMPONENT,
        )
    return ProcessProvider(
        state_dir=settings.state_dir,
        gate=CreationGate(settings.max_starting),
        shared_cores=_shared_cores(settings),
        host=HostSupport.discover(IdBlocks(settings.ids), plain=plain),
        seccomp=settings.seccomp,
        path=settings.path,
        bound=choose_bound(settings.disk_bound, settings.state_dir),
        name_servers=settings.name_servers,
        snapshots=settings.snapshots,
        weakenings=(f"{WORDS[stronger]} were served before (--weaker-isolation)",) if stronger else (),
    )


def _shared_cores(settings: ProviderSettings) -> tuple[int, ...]:
    return settings.shared_cores or tuple(sorted(os.sched_getaffinity(0)))
