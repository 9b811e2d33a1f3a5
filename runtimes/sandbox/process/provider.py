"""The local process sandbox: for machines without Docker, as isolated as the machine allows.

With bubblewrap: its own process, network, IPC, UTS and mount namespaces, a read-only system, its own ``/tmp`` and
working directory. Without: a directory and a process tree. Memory, process and core bounds need writable cgroups.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from manager.errors import ActionFailed, Unsupported
from manager.function import Isolation, Network, SandboxSpec
from runtimes.sandbox.cgroup import Cgroup, Hierarchy
from runtimes.sandbox.creation_gate import CreationGate
from runtimes.sandbox.disk import DiskWatch
from runtimes.sandbox.record import SandboxRecord, read_records
from runtimes.sandbox.runner.byte_stream import SocketStream
from runtimes.sandbox.runner.protocol import INSIDE, ISOLATED, RUNNER
from runtimes.sandbox.runner.stream_client import StreamClient
from runtimes.sandbox.sandbox import PROMISES, ProviderInfo, Sandbox, require_workdir

logger = structlog.get_logger("sandbox.process")

COMPONENT = "sandbox.process"
START_S = 15.0
FILES_MAX = 4096
#: Host files that programs need and that tell nothing.
ETC = (
    "nsswitch.conf", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime",
    "ssl", "mime.types", "services", "protocols", "python3", "python3.11", "java", "profile", "bash.bashrc",
)  # fmt: skip
#: What the runner alone may do inside; a command has none of it (unless it runs as root there).
CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_CHOWN")


@dataclass(frozen=True, slots=True)
class Means:
    """What this machine lends a process sandbox."""

    bubblewrap: str | None
    root: bool
    #: The group under which each sandbox gets one of its own; None if none can be written.
    cgroup: Cgroup | None

    @classmethod
    def discover(cls) -> Means:
        hierarchy = Hierarchy.discover()
        own = None if hierarchy is None else hierarchy.of_process("self")
        return cls(_working_bubblewrap(), os.geteuid() == 0, own if _can_divide(own) else None)


class ProcessProvider:
    """Makes sandboxes of local processes (`runtimes.sandbox.sandbox.Provider`)."""

    def __init__(
        self, *, state_dir: Path, gate: CreationGate, shared_cores: Sequence[int], means: Means | None = None
    ) -> None:
        self._means = Means.discover() if means is None else means
        self._root = state_dir / "sandboxes"
        self._gate = gate
        self._disk = DiskWatch()
        self._shared_cores = tuple(shared_cores)

    @property
    def info(self) -> ProviderInfo:
        wrapped, grouped = self._means.bubblewrap is not None, self._means.cgroup is not None
        return ProviderInfo(
            kind="process",
            engine="bubblewrap" if wrapped else "plain processes",
            isolation=(
                "own namespaces over a read-only view of the host's system; the kernel is shared, no seccomp filter"
                if wrapped
                else "none but a working directory and a process tree: commands see the host's files and network"
            ),
            limits={
                **dict.fromkeys(PROMISES, False),
                **dict.fromkeys(("filesystem", "network", "processes_hidden"), wrapped),
                **dict.fromkeys(("memory", "pids"), grouped),
                **dict.fromkeys(("cores", "freeze", "disk"), True),
                "users_separate": self._means.root,
            },
        )

    async def check(self, spec: SandboxSpec) -> None:
        if spec.isolation is Isolation.CONTAINER:
            raise Unsupported(
                "the function requires isolation: container, and this gateway has no Docker engine; "
                "start one (scripts/docker-up) or drop the requirement",
                component=COMPONENT,
            )
        if spec.network is Network.INTERNAL or (spec.network is Network.EGRESS and spec.allow):
            raise Unsupported(
                "a process sandbox has no network or the host's: network: internal and allow lists need containers",
                component=COMPONENT,
            )
        if spec.network is Network.EGRESS and self._means.bubblewrap is None:
            return
        require_workdir(spec)

    async def create(
        self, spec: SandboxSpec, *, name: str, labels: Mapping[str, str], mounts: Mapping[str, str]
    ) -> Sandbox:
        await self.check(spec)
        async with self._gate.slot(name):
            return await self._create(spec, name, labels, mounts)

    async def _create(
        self, spec: SandboxSpec, name: str, labels: Mapping[str, str], mounts: Mapping[str, str]
    ) -> Sandbox:
        directory = self._root / name
        group = self._group(name)
        parent = 0
        try:
            await asyncio.to_thread(_lay_out, directory, spec, self._means.root)
            if group is not None:
                group.make(memory_bytes=spec.memory_bytes, pids=spec.pids)
            record = SandboxRecord(name=name, token=secrets.token_hex(16), spec=spec, labels=dict(labels))
            parent = self._start(directory, spec, mounts)
            # A gateway that is killed from here on leaves a process behind: the next one must know of it.
            replace(record, pid=parent, started=_started(parent), ready=False).write(directory)
            client = await self._connect(directory, record, 0)
            if group is not None:
                group.enter(client.peer_pid)
        except BaseException as error:
            await ProcessControl(parent, directory, group, parent).remove()
            if isinstance(error, OSError):
                raise Unsupported(f"a process sandbox cannot be made here: {error}", component=COMPONENT) from None
            raise
        _bound(client.peer_pid, spec, grouped=group is not None)
        record = replace(record, pid=client.peer_pid, started=_started(client.peer_pid))
        record.write(directory)
        return self._sandbox(directory, record, client, group, parent)

    async def adopt(self) -> list[tuple[Sandbox, Mapping[str, str]]]:
        """Return the sandboxes whose runner still answers; remove what is left of the others."""
        adopted: list[tuple[Sandbox, Mapping[str, str]]] = []
        for directory, record in await asyncio.to_thread(read_records, self._root):
            control = self._control_of(directory, record)
            if record is not None and record.ready and control.pid != 0:
                try:
                    await control.thaw()
                    client = await self._connect(directory, record, record.pid)
                except ActionFailed as failure:
                    logger.warning("not adopted", sandbox=record.name, why=failure.message)
                else:
                    adopted.append((self._sandbox(directory, record, client, control.group, 0), record.labels))
                    continue
            await control.remove()
        return adopted

    async def reap(self, living: Collection[str]) -> int:
        with self._gate.watching() as young:
            found = await asyncio.to_thread(read_records, self._root)
            left = [item for item in found if item[0].name not in {*living, *young}]
        for directory, record in left:
            await self._control_of(directory, record).remove()
        return len(left)

    async def remove_snapshot(self, name: str) -> None:
        """Do nothing: there are none."""

    async def close(self) -> None:
        await self._disk.close()

    # --- inside

    def _sandbox(
        self, directory: Path, record: SandboxRecord, client: StreamClient, group: Cgroup | None, parent: int
    ) -> Sandbox:
        sandbox = Sandbox(
            record=record,
            directory=directory,
            client=client,
            control=ProcessControl(client.peer_pid, directory, group, parent),
            shared_cores=self._shared_cores,
        )
        self._disk.add(sandbox, directory / "work", record.spec.disk_bytes)
        return sandbox

    def _control_of(self, directory: Path, record: SandboxRecord | None) -> ProcessControl:
        """Return the control of what an earlier gateway left: of its process only if it is still the same one."""
        pid = record.pid if record is not None and _same_process(record) else 0
        return ProcessControl(pid, directory, self._group(directory.name))

    def _group(self, name: str) -> Cgroup | None:
        own = self._means.cgroup
        if own is None:
            return None
        return Cgroup(own.version, {key: place / f"tangram-{name}" for key, place in own.places.items()})

    async def _connect(self, directory: Path, record: SandboxRecord, pid: int) -> StreamClient:
        base = "" if self._means.bubblewrap is not None else str(directory / "work")
        hello = record.greeting(base=base, env=dict(record.spec.env))
        return await StreamClient.open(SocketStream(directory / "run", peer_pid=pid), hello, within_s=START_S)

    def _start(self, directory: Path, spec: SandboxSpec, mounts: Mapping[str, str]) -> int:
        """Start the process that leads to the runner: bubblewrap, or the runner itself."""
        python = [os.path.realpath(sys.executable), *ISOLATED]
        environment = {"PATH": _search_path(), "LANG": "C.UTF-8"}
        if self._means.bubblewrap is None:
            argv = [*python, str(RUNNER), str(directory / "run"), "--shed"]
        else:
            box = _box(self._means, directory, spec, mounts)
            argv = [self._means.bubblewrap, *box, *python, f"{INSIDE}/runner.py", f"{INSIDE}/run", "--shed"]
        with (directory / "log").open("wb") as log:
            return os.posix_spawn(
                argv[0],
                argv,
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                ],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGINT],
            )


class ProcessControl:
    """How a process sandbox is governed: by its cgroup if it has one, else by signals and affinity of its tree."""

    def __init__(self, pid: int, directory: Path, group: Cgroup | None, parent: int = 0) -> None:
        self.pid = pid
        self._directory = directory
        self.group = group
        self._parent = parent

    async def set_cores(self, cores: Sequence[int], *, background: bool = False) -> None:
        if self.group is not None:
            self.group.set_cores(cores, background=background)
            return
        for pid in [self.pid, *_tree(self.pid)]:
            for thread in _threads(pid):
                with suppress(OSError):
                    os.sched_setaffinity(thread, cores)

    async def freeze(self) -> None:
        if self.group is not None and self.group.freezable:
            self.group.freeze()
        else:
            self._signal(signal.SIGSTOP)

    async def thaw(self) -> None:
        if self.group is not None and self.group.freezable:
            with suppress(OSError):
                self.group.thaw()
        else:
            self._signal(signal.SIGCONT)

    def oom_kills(self) -> int:
        return 0 if self.group is None else self.group.oom_kills()

    def peak_memory_bytes(self) -> int:
        return 0 if self.group is None else self.group.peak_memory_bytes()

    async def cause_of_death(self) -> str:
        return "out_of_memory" if self.oom_kills() > 0 else "its runner was ended"

    async def snapshot(self, name: str) -> str:
        raise Unsupported("a process sandbox has no image to snapshot; containers have", component=COMPONENT)

    async def remove(self) -> None:
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        if self.group is not None:
            self.group.kill()
        if self.pid:
            victims: set[int] = set()
            for _ in range(100):
                victims |= {self.pid, *_tree(self.pid)}
                victims -= {pid for pid in victims if _state(pid) in ("", "Z")}
                if not victims:
                    break
                for pid in victims:
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.005)
            self.pid = 0
        if self._parent:
            with suppress(OSError):
                os.kill(self._parent, signal.SIGKILL)
                os.waitpid(self._parent, 0)
            self._parent = 0
        if self.group is not None:
            self.group.remove()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _signal(self, number: int) -> None:
        for pid in _tree(self.pid):
            with suppress(OSError):
                os.kill(pid, number)


def _box(means: Means, directory: Path, spec: SandboxSpec, mounts: Mapping[str, str]) -> list[str]:
    """Return bubblewrap's options."""
    options = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--as-pid-1", "--new-session"]
    if spec.network is Network.NONE:
        options.append("--unshare-net")
    options += ["--hostname", "sandbox", "--cap-drop", "ALL"]
    if means.root:
        options += [word for name in CAPABILITIES for word in ("--cap-add", name)]
    else:
        options.append("--unshare-user")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        place = Path("/", name)
        if place.is_symlink():
            options += ["--symlink", str(place.readlink()), str(place)]
        elif place.exists():
            options += ["--ro-bind", str(place), str(place)]
    options += ["--ro-bind", "/usr", "/usr"]
    # Before what is bound below it: the gateway's own Python may live in /tmp.
    options += ["--perms", "1777", "--size", str(spec.disk_bytes), "--tmpfs", "/tmp"]
    for parent in _parents([*mounts.values(), spec.workdir, sys.base_prefix, sys.prefix, "/etc/passwd"]):
        options += ["--perms", "0755", "--dir", parent]
    options += ["--perms", "0700", "--dir", INSIDE]
    for name in ETC:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    names = Path("/etc/resolv.conf") if spec.network is not Network.NONE else directory / "resolv.conf"
    options += ["--ro-bind-try", str(names), "/etc/resolv.conf"]
    for prefix in dict.fromkeys((sys.base_prefix, sys.prefix)):
        if not prefix.startswith("/usr"):
            options += ["--ro-bind", prefix, prefix]
    for name in ("passwd", "group", "hosts"):
        options += ["--ro-bind", str(directory / name), f"/etc/{name}"]
    options += ["--proc", "/proc", "--dev", "/dev"]
    options += ["--perms", "1777", "--size", str(spec.shm_bytes), "--tmpfs", "/dev/shm"]
    options += ["--bind", str(directory / "work"), spec.workdir]
    for source, target in mounts.items():
        options += ["--ro-bind", source, target]
    options += ["--ro-bind", str(RUNNER), f"{INSIDE}/runner.py", "--bind", str(directory / "run"), f"{INSIDE}/run"]
    return [*options, "--remount-ro", "/", "--chdir", "/", "--"]


def _parents(places: Sequence[str]) -> list[str]:
    """Return the directories above, outermost first: bubblewrap would make them unreadable for all but root."""
    found = {str(parent) for place in places for parent in Path(place).parents}
    return sorted(found - {"/", "/usr", *(f"/usr/{name}" for name in ("local", "bin", "lib"))})


def _lay_out(directory: Path, spec: SandboxSpec, root: bool) -> None:
    """Make the directory: ``work`` is the user's, ``run`` is ours alone; inside are two users, none of the host's."""
    (directory / "run").mkdir(parents=True, mode=0o700)
    work = directory / "work"
    work.mkdir(mode=0o755)
    if root and spec.user.isdigit():
        os.chown(work, int(spec.user), int(spec.user))
    name, number = ("sandbox", spec.user) if spec.user.isdigit() else (spec.user, "1000")
    number = number if root else str(os.geteuid())
    accounts = {"root": "0", name: number} if number != "0" else {"root": "0"}
    lines = [f"{user}:x:{uid}:{uid}::{spec.workdir}:/bin/sh\n" for user, uid in accounts.items()]
    (directory / "passwd").write_text("".join(lines), encoding="ascii")
    (directory / "group").write_text("".join(f"{user}:x:{uid}:\n" for user, uid in accounts.items()), encoding="ascii")
    (directory / "resolv.conf").write_text("# no network\n", encoding="ascii")
    (directory / "hosts").write_text("127.0.0.1 localhost sandbox\n::1 localhost\n", encoding="ascii")
    directory.chmod(0o711)


def _bound(pid: int, spec: SandboxSpec, *, grouped: bool) -> None:
    """Bound each file; without cgroups also each process's address space, which is less than a promise."""
    bounds = {resource.RLIMIT_FSIZE: spec.disk_bytes, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: FILES_MAX}
    if not grouped:
        bounds[resource.RLIMIT_AS] = 4 * spec.memory_bytes
    for kind, value in bounds.items():
        with suppress(OSError, ValueError):
            resource.prlimit(pid, kind, (value, value))


def _search_path() -> str:
    """Return the gateway's own environment, whose pytest serves the sandboxes, then the system's programs."""
    return f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _working_bubblewrap() -> str | None:
    """Return bwrap if it is installed and allowed to make namespaces."""
    found = shutil.which("bwrap")
    if found is None:
        return None
    options = ["--unshare-all", "--ro-bind", "/", "/"] + ([] if os.geteuid() == 0 else ["--unshare-user"])
    try:
        done = subprocess.run([found, *options, "true"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found if done.returncode == 0 else None


def _can_divide(group: Cgroup | None) -> bool:
    """Return whether groups with bounds can be made below this one."""
    if group is None:
        return False
    probe = Cgroup(group.version, {key: place / f"tangram-probe-{os.getpid()}" for key, place in group.places.items()})
    try:
        probe.make(memory_bytes=64 * 2**20, pids=16)
        return True
    except OSError:
        return False
    finally:
        probe.remove()


def _tree(pid: int) -> list[int]:
    """Return every descendant of a process."""
    found: list[int] = []
    fresh = [pid] if pid else []
    while fresh:
        children = [child for parent in fresh for child in _children(parent)]
        found += children
        fresh = children
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in _threads(pid):
        with suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii").split())
    return found


def _threads(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ""


def _started(pid: int) -> int:
    """Return when a process started, in ticks since boot; with its id that is its identity."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def _same_process(record: SandboxRecord) -> bool:
    return record.pid > 0 and record.started == _started(record.pid) and _state(record.pid) not in ("", "Z")
