"""Sandboxes of local processes under bubblewrap."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pwd
import resource
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Literal

import structlog

from manager.errors import (
    ActionFailed,
    CapacityExceeded,
    CodedError,
    Conflict,
    InvalidConfig,
    TooLarge,
    Unsupported,
    exhaustion,
)
from manager.function import AUTO, Isolation, Network, SandboxSpec, Setting
from runtimes.sandbox.disk import RUN_BYTES, RUN_FILES, DiskBound, DiskWatch, files_max, is_bounded
from runtimes.sandbox.egress import Egress, EgressGuard
from runtimes.sandbox.linux import (
    Cgroup,
    CpuWeight,
    Hierarchy,
    Seccomp,
    capabilities_of,
    compiled,
    remove_tree,
    require_minimal,
)
from runtimes.sandbox.runner.client import INSIDE, ISOLATED, RUNNER, SocketStream, StreamClient, lost
from runtimes.sandbox.runner.runner import DEFAULT_PATH
from runtimes.sandbox.sandbox import CreationGate, Sandbox, SandboxControl, descendants, to_its_end
from runtimes.sandbox.snapshots import SNAPSHOTS, SnapshotSettings, SnapshotStore, pack, unpack
from runtimes.sandbox.spec import (
    PROMISES,
    SANDBOXES,
    ProviderInfo,
    SandboxRecord,
    hold,
    read_records,
    require_user,
    require_workdir,
)
from tangram.archive import entered, opened_directory, parts_of

COMPONENT = "sandbox.process"
#: In a snapshot's directory.
WORK, TMP = "work.tar", "tmp.tar"


def keep_files(pid: int, directory: Path, spec: SandboxSpec, place: Path, limit_bytes: int) -> int:
    """Write the files of the sandbox of runner ``pid`` to the directory ``place``; return the bytes on the disk.

    Without a file system of its own (plain processes), or where this process may not enter that (it is not root), they
    are its working directory alone. Raises TooLarge, Conflict, OSError, or ActionFailed(environment_lost) if it has
    gone.
    """

    def too_large(size_bytes: int) -> TooLarge:
        message = f"the sandbox's files take {size_bytes} bytes or more; at most {limit_bytes} may be kept"
        return TooLarge(f"{message} (sandbox.snapshots.total_max)", component=COMPONENT)

    size_bytes = 0
    with ExitStack() as opened:
        root = opened.enter_context(_root_of(pid))
        if root < 0:
            trees = {WORK: opened.enter_context(opened_directory(directory / "work"))}
        else:
            trees = {
                name: opened.enter_context(inside(root, path)) for name, path in ((WORK, spec.workdir), (TMP, "/tmp"))
            }
        for name, fd in trees.items():
            left_bytes = limit_bytes - size_bytes
            size_bytes += pack(fd, place / name, base=_base(pid), left_bytes=left_bytes, too_large=too_large)
    return size_bytes


def lay_out_work(files: Path, directory: Path, *, base: int, owners: bool) -> None:
    """Fill the working directory of a sandbox that is being made; raises OSError."""
    with opened_directory(directory / "work") as fd:
        unpack(files / WORK, fd, base=base, owners=owners)


def lay_out_tmp(files: Path, pid: int, *, base: int, owners: bool) -> None:
    """Fill /tmp of a sandbox in which no command has run yet; raises OSError."""
    with _root_of(pid) as root:
        if root >= 0 and (files / TMP).exists():
            with inside(root, "/tmp") as fd:
                unpack(files / TMP, fd, base=base, owners=owners)


@contextmanager
def _root_of(pid: int) -> Iterator[int]:
    """Yield the root directory of a process; -1 if it is this process's own, or may not be entered."""
    with ExitStack() as opened:
        root = -1
        try:
            root = opened.enter_context(opened_directory(f"/proc/{pid}/root"))
        except FileNotFoundError:
            raise lost("the sandbox's first process is gone") from None
        except PermissionError:
            pass
        yield -1 if root < 0 or os.path.samestat(os.fstat(root), Path("/").stat()) else root


def _plain(path: str) -> str:
    """Return an absolute path without detours."""
    return os.path.normpath("/" + path.lstrip("/"))


@contextmanager
def inside(root: int, path: str) -> Iterator[int]:
    """Yield a directory of a sandbox, reached part by part: a link on the way leads elsewhere here than inside.

    Raises Conflict for such a link, and OSError.
    """
    try:
        fd = entered(root, parts_of(_plain(path)[1:]))
    except NotADirectoryError:
        message = f"{path} in the sandbox cannot be reached without following a link: its files cannot be kept"
        raise Conflict(message, component=COMPONENT) from None
    try:
        with opened_directory(".", dir_fd=fd) as opened:
            yield opened
    finally:
        os.close(fd)


def _base(pid: int) -> int:
    """Return the machine's id of user 0 of a process, which is its own where no ids are mapped."""
    first, second, _ = Path(f"/proc/{pid}/uid_map").read_text(encoding="ascii").splitlines()[0].split()
    return int(second) if first == "0" else 0


class ProcessControl(SandboxControl):
    """How a process sandbox is governed: by its cgroup if it has one, else by signals and affinity of its tree."""

    def __init__(
        self,
        pid: int,
        directory: Path,
        group: Cgroup | None,
        children: Sequence[int] = (),
        bound: DiskBound | None = None,
    ) -> None:
        """``children`` are this gateway's own that end with it."""
        super().__init__(group, pid)
        self.pid = pid
        self._directory = directory
        self._children = [child for child in children if child]
        self._bound = bound or DiskBound()

    def processes(self) -> list[int]:
        return super().processes() if self.group is not None else [self.pid, *descendants([self.pid])]

    async def set_cores(self, cores: Sequence[int], weight: CpuWeight = CpuWeight.ACTION) -> None:
        if self.group is not None:
            self.group.set_cores(cores, weight)
            return
        for pid in self.processes():
            for thread in _threads(pid):
                with suppress(OSError):
                    os.sched_setaffinity(thread, cores)

    async def thaw(self) -> None:
        with suppress(OSError):
            self._freezer.thaw()

    async def cause_of_death(self) -> str:
        return "out_of_memory" if self.oom_kills() > 0 else "its runner was ended"

    async def snapshot(self, spec: SandboxSpec, id: str, place: Path, limit_bytes: int) -> int:
        return await to_its_end(partial(keep_files, self.pid, self._directory, spec, place, limit_bytes))

    async def remove(self) -> None:
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """Do what `remove` does. Blocks."""
        if self.group is not None:
            self.group.kill()
        if self.pid:
            _kill_tree(self.pid)
            self.pid = 0
        while self._children:
            child = self._children.pop()
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        if self.group is not None:
            self.group.remove()
        self._bound.release(self._directory / "work")
        with suppress(OSError):
            remove_tree(self._directory)


def group_of(own: Cgroup | None, name: str) -> Cgroup | None:
    """Return the group of a sandbox below the gateway's own."""
    if own is None:
        return None
    return Cgroup(own.version, {key: place / f"tangram-{name}" for key, place in own.places.items()})


def control_of(
    own: Cgroup | None, directory: Path, record: SandboxRecord | None, bound: DiskBound | None = None
) -> ProcessControl:
    """Return the control of what an earlier gateway left: of its process only if it is still the same one.

    A gateway that was killed between the start of a process and its record has left one that its record does not know.
    """
    if record is not None and record.runs():
        pid = record.pid
    else:
        pid = 0 if record is not None and record.pid else _started_for(directory)
    return ProcessControl(pid, directory, group_of(own, directory.name), (), bound)


def process_records(root: Path) -> list[tuple[Path, SandboxRecord | None]]:
    """Return the directories of process sandboxes, and those of which nothing is known, with their records."""
    return [entry for entry in read_records(root) if entry[1] is None or not entry[1].in_container]


def end_left(root: Path) -> int:
    """End what an earlier gateway left of process sandboxes, for one that makes none; return how many. Blocks."""
    hierarchy = Hierarchy.discover()
    own = None if hierarchy is None else hierarchy.of_process("self")
    left = [entry for entry in process_records(root) if entry[1] is not None]
    for directory, record in left:
        control_of(own, directory, record).end()
    return len(left)


def _started_for(directory: Path) -> int:
    """Return the process that leads to the runner of a sandbox: its command names the directory; 0 if there is none."""
    place = f"{directory}/".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if any(place in word for word in words) and any(word.endswith(b"/runner.py") for word in words):
                return int(entry.name)
    return 0


def _kill_tree(pid: int) -> None:
    """Kill a process and all below it. All are stopped first: what one starts meanwhile would be nobody's child."""
    stopped: set[int] = set()
    while fresh := {pid, *descendants([pid])} - stopped:
        for each in fresh:
            with suppress(OSError):
                os.kill(each, signal.SIGSTOP)
        stopped |= fresh
    for _ in range(100):
        for each in stopped:
            with suppress(OSError):
                os.kill(each, signal.SIGKILL)
        stopped = {each for each in stopped if state_of(each) not in ("", "Z")}
        if not stopped:
            return
        time.sleep(0.005)


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


def state_of(pid: int) -> str:
    """Return the kernel's letter for what a process does; empty if there is none."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def started(pid: int) -> int:
    """Return when a process started, in ticks since boot; with its id that is its identity."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


# User ids of process sandboxes: a block of 65536 for each, held by the sandbox itself as long as it lives.
#
# What the kernel counts or keeps for a user (inotify instances, processes, keyrings) is then one sandbox's alone, and
# its root is nobody on the machine. Gateways of one machine share a directory with a file for each block; who has a
# block has a lock on its file. The runner inherits the open file, so that a block outlives its gateway with the
# sandbox, and no end of either has to be seen.

#: Ids of one sandbox: those that images and programs know.
BLOCK = 2**16
#: The machine's, not the state directory's: two gateways must not take the same block.
CLAIMS = Path("/run/tangram-ids")
#: Seconds that the processes of a sandbox that has ended are given to be gone, if no other block is free.
LEAVE_S = 2.0
LEAVE_EVERY_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class IdSettings:
    """The user and group ids that process sandboxes of a gateway that is root are given on the machine."""

    first: Annotated[
        int, Setting("first id, a multiple of 65536; nobody else on the machine may use them", ge=BLOCK, le=2**31)
    ] = 0x7100_0000
    #: Blocks of 65536 ids, and so process sandboxes at once.
    blocks: int = 1024


@dataclass(frozen=True, slots=True)
class IdBlock:
    """The ids from ``base`` on, until all who have the claim open have closed it, and nobody runs as one of them."""

    base: int
    #: The block's file, locked.
    claim: IO[bytes]
    #: A user namespace whose ids from 0 on are these.
    namespace: IO[bytes]

    def close(self) -> None:
        """Close our own; whoever has inherited the claim keeps the block. Idempotent."""
        self.namespace.close()
        self.claim.close()


class IdBlocks:
    """The blocks of a configured range."""

    def __init__(self, settings: IdSettings, directory: Path = CLAIMS) -> None:
        if settings.first % BLOCK:
            raise InvalidConfig(f"sandbox.ids.first must be a multiple of {BLOCK}, not {settings.first}")
        self._settings, self._directory = settings, directory
        self._next = 0

    def claim(self) -> IdBlock:
        """Return a block that no other sandbox of this machine has. Blocks for milliseconds, LEAVE_S at most.

        Raises CapacityExceeded if there is none, OSError if root may not make user namespaces here.
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)
        deadline_s = time.monotonic() + LEAVE_S
        while True:
            block, leaving = self._look()
            if block is not None:
                return block
            if not leaving or time.monotonic() > deadline_s:
                raise CapacityExceeded(
                    f"all {self._settings.blocks} blocks of user ids for process sandboxes are taken: "
                    "end some sandboxes",
                    component=COMPONENT,
                )
            time.sleep(LEAVE_EVERY_S)

    def _look(self) -> tuple[IdBlock | None, bool]:
        """Return a free block, and without one whether there is one that nobody holds and somebody still runs under."""
        leaving = False
        for index in self._order():
            base = self._settings.first + index * BLOCK
            claim = _locked(self._directory / str(base))
            if claim is None:
                continue
            try:
                # The first process of a sandbox closes its files a moment before its others are ended.
                if os.fstat(claim.fileno()).st_size == 0 or not _in_use(base):
                    claim.write(b"claimed")
                    self._next = index + 1
                    return IdBlock(base, claim, _namespace(base)), False
            except OSError:
                claim.close()
                raise
            claim.close()
            leaving = True
        return None, leaving

    def _order(self) -> Iterator[int]:
        for step in range(self._settings.blocks):
            yield (self._next + step) % self._settings.blocks


def _namespace(base: int) -> IO[bytes]:
    """Return a new user namespace; raises OSError, with the reason, where root may not make one.

    It is the block's own first user who makes it: the kernel counts for the maker of a namespace what is in it.
    """
    capability = ("--inh-caps=-all,+sys_admin", "--ambient-caps=-all,+sys_admin")  # where users may make none
    argv = ("setpriv", f"--reuid={base}", f"--regid={base}", "--clear-groups", *capability, "unshare", "--user", "cat")
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as inside:
        assert inside.stdin is not None and inside.stdout is not None and inside.stderr is not None
        with suppress(BrokenPipeError):
            inside.stdin.write(b".")  # what comes back has come through the namespace
        if not inside.stdout.read(1):
            raise OSError(inside.stderr.read().decode(errors="replace").strip() or "unshare ended")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{inside.pid}/{name}").write_text(f"0 {base} {BLOCK}\n", encoding="ascii")
        return Path(f"/proc/{inside.pid}/ns/user").open("rb", buffering=0)


def _locked(path: Path) -> IO[bytes] | None:
    """Return the file, open and locked; None if somebody else has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return os.fdopen(fd, "r+b", buffering=0)


def _in_use(base: int) -> bool:
    """Return whether a process that can be seen from here lives under one of the ids."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            text = status.read_text(encoding="utf-8", errors="replace")
            uids = text.partition("\nUid:")[2].split()
            if "\nState:\tZ" not in text and any(base <= int(uid) < base + BLOCK for uid in uids[:4]):
                return True
    return False


PROBE_S = 10.0


@dataclass(frozen=True, slots=True)
class HostSupport:
    """What this machine lends a process sandbox."""

    bubblewrap: str | None
    root: bool
    #: The group under which each sandbox gets one of its own; None if none can be written.
    cgroup: Cgroup | None
    #: The blocks of user ids, one for each sandbox's own namespace; None where there can be no such.
    ids: IdBlocks | None = None
    #: Why not.
    no_ids: str = ""

    @classmethod
    def discover(cls, ids: IdBlocks, *, plain: bool = False) -> HostSupport:
        """Return what there is; raises Unsupported, with the reason, if bubblewrap is wanted and does not work now."""
        hierarchy = Hierarchy.discover()
        own = None if hierarchy is None else hierarchy.of_process("self")
        cgroup, root = own if _can_divide(own) else None, os.geteuid() == 0
        if plain:
            return cls(None, root, cgroup)
        bubblewrap = _working_bubblewrap()
        if not root:
            return cls(bubblewrap, root, cgroup, no_ids="the gateway is not root")
        why = _why_no_namespaces(ids)
        return cls(bubblewrap, root, cgroup, None if why else ids, why)


class NotInstalled(Unsupported):
    """What sandboxes are to be made with is not on this machine: trying again is of no use."""


def _working_bubblewrap() -> str:
    """Return bwrap; raises NotInstalled, or Unsupported if it is there but cannot make namespaces now."""
    result = shutil.which("bwrap")
    if result is None:
        raise NotInstalled("bubblewrap is not installed", component=COMPONENT)
    options = ["--unshare-all", "--ro-bind", "/usr", "/usr"] + ([] if os.geteuid() == 0 else ["--unshare-user"])
    for name in ("lib", "lib64"):
        options += ["--ro-bind-try", f"/{name}", f"/{name}"]
    try:
        done = subprocess.run(
            [result, *options, "/usr/bin/true"], capture_output=True, timeout=PROBE_S, check=False, text=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unsupported(f"bubblewrap does not work: {error}", component=COMPONENT) from None
    if done.returncode:
        raise Unsupported(f"bubblewrap does not work: {done.stderr.strip()[-500:]}", component=COMPONENT)
    return result


def _why_no_namespaces(ids: IdBlocks) -> str:
    """Return why sandboxes can have no user namespaces with ids of their own; empty if they can."""
    try:
        ids.claim().close()
    except CapacityExceeded:  # then there are as many that work
        return ""
    except OSError as error:
        return str(error)
    return ""


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


#: What every process sandbox sees of the host.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib")
#: From this id on users are people.
USERS_FROM = 1000
#: Host files that programs need and that tell nothing.
ETC = (
    "nsswitch.conf", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime",
    "ssl", "mime.types", "services", "protocols", "python3", "python3.11", "java", "profile", "bash.bashrc",
)  # fmt: skip


#: Inside, after all else of PATH: ``python``, as agents type it, where a Debian has python3 alone.
PROGRAMS = f"{INSIDE}/bin"


def bubblewrap_options(
    host: HostSupport, directory: Path, spec: SandboxSpec, mounts: Mapping[str, str], path: str
) -> list[str]:
    """Return bubblewrap's options."""
    options = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--as-pid-1", "--new-session"]
    options += ["--unshare-net", "--hostname", "sandbox", "--cap-drop", "ALL"]
    if host.root:
        options += [option for name in capabilities_of(spec) for option in ("--cap-add", f"CAP_{name}")]
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
    shown = shown_places(path)
    for parent in _parents([*mounts.values(), spec.workdir, *shown, "/etc/passwd"]):
        options += ["--perms", "0755", "--dir", parent]
    options += ["--perms", "0700" if host.ids is None else "0711", "--dir", INSIDE]
    for name in ETC:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for prefix in shown:
        options += ["--ro-bind-try", prefix, prefix]
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        options += ["--ro-bind", str(directory / name), f"/etc/{name}"]
    options += ["--proc", "/proc", "--dev", "/dev"]
    if host.root:  # else the kernel lets nobody inside write there
        options += ["--ro-bind", "/proc/sys", "/proc/sys"]
    options += ["--perms", "1777", "--size", str(spec.shm_bytes), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    options += ["--bind", str(directory / "work"), spec.workdir]
    for source, target in mounts.items():
        options += ["--ro-bind", source, target]
    options += ["--ro-bind", str(RUNNER), f"{INSIDE}/runner.py", "--bind", str(directory / "run"), f"{INSIDE}/run"]
    options += ["--perms", "0755", "--dir", PROGRAMS, "--ro-bind", str(directory / "python"), f"{PROGRAMS}/python"]
    return [*options, "--remount-ro", "/", "--chdir", "/", "--"]


def _parents(places: Sequence[str]) -> list[str]:
    """Return the directories above, outermost first: bubblewrap would make them unreadable for all but root."""
    matches = {str(parent) for place in places for parent in Path(place).parents}
    return sorted(matches - {"/", "/usr", *(f"/usr/{name}" for name in ("local", "bin", "lib"))})


def shown_places(path: str) -> list[str]:
    """Return what of the host, beside the system's own, a PATH and the runner's Python show to process sandboxes.

    That is each directory that is named, and where its python3 belongs to an installation, that whole.
    """
    shown = [Path(sys.base_prefix)]
    for directory in filter(None, path.split(":")):
        places = (Path(directory), Path(directory, "python3").resolve().parent)
        others = [each for each in places if not _is_system(each)]
        shown += [each.parent if _is_installation(each.parent) else each for each in others]
    return [str(each) for each in dict.fromkeys(shown) if not _is_system(each)]


def _is_system(place: Path) -> bool:
    return any(map(place.is_relative_to, SYSTEM))


def require_shown(path: str, state_dir: Path) -> None:
    """Raise InvalidConfig if sandboxes would see somebody's home or the gateway's state with a PATH."""
    users = [user for user in pwd.getpwall() if user.pw_uid in (0, os.geteuid()) or user.pw_uid >= USERS_FROM]
    private = [*(Path(user.pw_dir) for user in users), Path("~").expanduser(), state_dir.resolve()]
    for place in shown_places(path):
        for each in private:
            if each.is_relative_to(place):
                raise InvalidConfig(
                    f"sandbox.path: every process sandbox would see {place}, and so {each}; "
                    "name a directory that holds programs only",
                    component=COMPONENT,
                )


def _is_installation(place: Path) -> bool:
    """Return whether a directory is that of a Python with its libraries."""
    return (place / "pyvenv.cfg").exists() or any(place.glob("lib/python3*/os.py"))


# The way out of a process sandbox: slirp4netns, a network stack in user space, on a tap in the sandbox's namespace.
#
# It ends with the sandbox, not with the gateway: the sandbox's processes hold one end of a pipe, and it ends when
# nobody does any more. What it may carry, the rules in the namespace say (`runtimes.sandbox.egress`); its own doors to
# the machine (loopback, the name server) are shut. It keeps no privileges and sees no files but /etc and /run.

UPLINK_COMPONENT = "sandbox.network"
PROGRAM = "slirp4netns"
TUN = Path("/dev/net/tun")
START_S = 10.0
#: Its own addresses: of the block for measurements, which is nobody's network.
CIDR = "198.18.255.0/24"
MTU = "65520"
#: Its bounds, as it works on the machine's account: a connection of the sandbox takes a descriptor and two buffers.
BOUNDS = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_AS: 512 * 2**20}
LOG_TAIL_BYTES = 1000


def missing_uplink() -> str:
    """Return why there can be none; empty if there can."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not installed (Debian: apt-get install {PROGRAM})"
    return "" if TUN.exists() else f"there is no {TUN} (modprobe tun)"


class SlirpUplink:
    """One sandbox's. ``held`` is to be inherited by the sandbox's first process."""

    def __init__(self) -> None:
        self._ends, self.held = os.pipe()
        #: Its process, once started.
        self.pid = 0

    async def start(self, sandbox_pid: int, log: Path) -> None:
        """Start it in the network namespace of a process, and return when packets pass; raises CodedError."""
        ready, ready_end = os.pipe()
        try:
            self.pid = self._spawn(f"/proc/{sandbox_pid}/ns/net", ready_end, log)
            os.close(ready_end)
            ready_end = -1
            for kind, bound in BOUNDS.items():
                resource.prlimit(self.pid, kind, (bound, bound))
            readable, _, _ = await asyncio.to_thread(select.select, [ready], [], [], START_S)
            if readable and os.read(ready, 1):
                return
            output = await asyncio.to_thread(log.read_bytes)
            tail = output[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
            raise CodedError(f"{PROGRAM} does not start: {tail}", component=UPLINK_COMPONENT)
        finally:
            os.close(ready)
            if ready_end >= 0:
                os.close(ready_end)

    def close(self) -> None:
        """Let go of the pipe: from here on its end is that of the sandbox."""
        for end in (self._ends, self.held):
            os.close(end)

    def _spawn(self, namespace: str, ready: int, log: Path) -> int:
        options = ["--configure", f"--mtu={MTU}", f"--cidr={CIDR}", "--disable-host-loopback", "--disable-dns"]
        options += ["--enable-sandbox", "--enable-seccomp", f"--exit-fd={self._ends}", f"--ready-fd={ready}"]
        if _routes_v6():
            options.append("--enable-ipv6")
        program = shutil.which(PROGRAM) or PROGRAM
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            return os.posix_spawn(
                program,
                [program, *options, "--netns-type=path", namespace, "tap0"],
                {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, output, 1),
                    (os.POSIX_SPAWN_DUP2, output, 2),
                    (os.POSIX_SPAWN_DUP2, self._ends, self._ends),  # inherited under its own number
                    (os.POSIX_SPAWN_DUP2, ready, ready),
                ],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGINT],
            )
        finally:
            os.close(output)


def _routes_v6() -> bool:
    """Return whether this machine has a way to the world over IPv6: else programs would try it in vain."""
    with suppress(OSError):
        lines = [line.split() for line in Path("/proc/net/ipv6_route").read_text(encoding="ascii").splitlines()]
        return any(words[1] == "00" and words[9] != "lo" for words in lines)
    return False


# The local process sandbox: for machines without Docker, as isolated as the machine allows.
#
# With bubblewrap: its own process, network, IPC, UTS and mount namespaces, a read-only system, its own ``/tmp`` and
# working directory. Without: a directory and a process tree. Memory, process and core bounds need writable cgroups.

logger = structlog.get_logger("sandbox.process")


RUNNER_START_S = 15.0
FILES_MAX = 4096
#: Where the user of every process sandbox may write; a working directory in there has ancestors that are its own.
WRITABLE = ("/tmp/", "/dev/shm/")
#: The user of a sandbox of `user: auto`, in its own block of ids.
OWN_UID = 1000
#: Where bubblewrap finds the filter of system calls and the user namespace, and what the sandbox holds while it lives:
#: the claim on its ids, and its uplink.
FILTER_FD, NAMESPACE_FD, CLAIM_FD, UPLINK_FD = 3, 4, 5, 6
#: Above which number we keep what is passed to a child.
FDS_ABOVE = 64


class ProcessProvider:
    """Makes sandboxes of local processes (`runtimes.sandbox.sandbox.Provider`)."""

    def __init__(
        self,
        *,
        state_dir: Path,
        gate: CreationGate,
        shared_cores: Sequence[int],
        host: HostSupport,
        seccomp: Seccomp = "default",
        path: str = DEFAULT_PATH,
        weakenings: Sequence[str] = (),
        bound: DiskBound | None = None,
        name_servers: Sequence[str] = (),
        snapshots: SnapshotSettings | None = None,
    ) -> None:
        """``path`` is the PATH of commands. Raises InvalidConfig for one that shows too much.

        Raises Unsupported if a filter is wanted and none can be made.
        """
        self._host = host
        self._path = path
        if host.bubblewrap is not None:
            require_shown(path, state_dir)
        #: In what it is weaker than it could be, besides what it sees itself.
        self._configured_weakenings = tuple(weakenings)
        self._filter = compiled(seccomp) if host.bubblewrap is not None and seccomp != "none" else b""
        self._root = state_dir / SANDBOXES
        self._held = hold(state_dir)
        self._snapshots_root = state_dir / SNAPSHOTS
        self._snapshots = SnapshotStore(
            self._snapshots_root, snapshots or SnapshotSettings(), provider=lambda: self.kind
        )
        self._gate = gate
        self._bound = bound or DiskBound()
        self._guard = EgressGuard(name_servers)
        self._disk = DiskWatch()
        self._shared_cores = tuple(shared_cores)

    @property
    def kind(self) -> Literal["process", "plain"]:
        return "plain" if self._host.bubblewrap is None else "process"

    @property
    def info(self) -> ProviderInfo:
        wrapped, grouped = self._host.bubblewrap is not None, self._host.cgroup is not None
        return ProviderInfo(
            kind=self.kind,
            engine="bubblewrap" if wrapped else "plain processes",
            isolation=(
                "own namespaces over a read-only view of the host's system; the kernel is shared"
                + ("" if self._filter else ", no seccomp filter")
                if wrapped
                else "none but a working directory and a process tree: commands see the host's files and network"
            ),
            limits={
                **dict.fromkeys(PROMISES, False),
                **dict.fromkeys(("filesystem", "network", "processes_hidden"), wrapped),
                "seccomp": bool(self._filter),
                **dict.fromkeys(("memory", "pids"), grouped),
                **dict.fromkeys(("cores", "freeze", "snapshot"), True),
                "disk": wrapped,
                "users_separate": self._host.root,
                **dict.fromkeys(("own_user", "root_separate"), self._host.ids is not None),
                "egress": wrapped and not self._guard.obstacle and not missing_uplink(),
            },
            weakenings=tuple(self._weakenings()),
            disk=self._bound.name,
        )

    def _weakenings(self) -> Iterator[str]:
        yield from self._configured_weakenings
        host = self._host
        if host.bubblewrap is None:
            yield "plain processes: commands see the host's files, processes and network"
        elif not self._filter:
            yield "commands may make any system call (sandbox.seccomp: none)"
        if host.ids is None:
            yield f"all sandboxes share one user of the host{host.no_ids and f' ({host.no_ids})'}"
        if host.cgroup is None:
            yield "memory is bounded by process, and processes are not counted: no control group can be written"

    images = None

    @property
    def snapshots(self) -> SnapshotStore:
        return self._snapshots

    async def check(self, spec: SandboxSpec) -> None:
        require_user(spec)
        if spec.isolation is Isolation.CONTAINER:
            raise Unsupported(
                "the function requires isolation: container, and this gateway has no Docker engine; "
                "start one (Debian: apt-get install docker.io) or drop the requirement",
                component=COMPONENT,
            )
        if spec.runtime:
            raise Unsupported(
                f"sandbox.runtime: {spec.runtime} runs containers, and this gateway has no Docker engine; start one "
                "(Debian: apt-get install docker.io) or drop the key",
                component=COMPONENT,
            )
        self._check_user(spec.user)
        require_minimal(spec, "" if self._host.ids else self._host.no_ids or "plain processes have none")
        await self._check_network(spec)
        require_workdir(spec)
        if self._host.bubblewrap is not None and spec.workdir.startswith("/usr/"):
            message = f"sandbox.workdir: {spec.workdir} lies in /usr, read-only in process sandboxes; choose another"
            raise Unsupported(message, component=COMPONENT)
        if self._host.bubblewrap is not None and not self._host.root and _plain(spec.workdir).startswith(WRITABLE):
            message = (
                f"sandbox.workdir: its own user can put another directory in place of {spec.workdir}, as the gateway "
            )
            raise Unsupported(message + "is not root; choose one outside of /tmp and /dev/shm", component=COMPONENT)

    async def _check_network(self, spec: SandboxSpec) -> None:
        """Raise Unsupported where a network cannot be held to what it promises: egress is never the host's own."""
        if spec.network is Network.INTERNAL:
            raise Unsupported(
                "a process sandbox cannot join others: network: internal needs containers", component=COMPONENT
            )
        await self._guard.check(spec)
        if spec.network is not Network.EGRESS:
            return
        if self._host.bubblewrap is None:
            why = "it is not there without namespaces (Debian: apt-get install bubblewrap)"
        else:
            why = missing_uplink()
        if why:
            raise Unsupported(f"network: egress of a process sandbox: {why}", component=COMPONENT)

    def _check_user(self, user: str) -> None:
        """Raise Unsupported or InvalidConfig if commands cannot be that user, or would be root on the host."""
        if self._host.ids is not None:
            if user.isdigit() and int(user) >= BLOCK:
                raise InvalidConfig(f"sandbox.user must be below {BLOCK} in a process sandbox, not {user}")
        elif self._host.root and user.lstrip("0") in ("", "root"):
            raise Unsupported(
                f"user {user!r} would be root on the host: a process sandbox has a root of its own only where it can "
                f"have a user namespace ({self._host.no_ids or 'plain processes cannot'}); use containers for it",
                component=COMPONENT,
            )

    async def trouble(self) -> str:
        return self._gate.shortage

    async def create(
        self, spec: SandboxSpec, *, name: str, labels: Mapping[str, str], mounts: Mapping[str, str]
    ) -> Sandbox:
        await self.check(spec)
        async with AsyncExitStack() as stack:
            if spec.snapshot:
                await stack.enter_async_context(self._snapshots.held(spec.snapshot))
            await stack.enter_async_context(self._gate.slot(name))
            return await self._create(spec, name, labels, mounts)

    async def _create(
        self, spec: SandboxSpec, name: str, labels: Mapping[str, str], mounts: Mapping[str, str]
    ) -> Sandbox:
        directory, group = self._root / name, group_of(self._host.cgroup, name)
        egress = await self._guard.resolve(spec)
        uplink = None if egress is None else SlirpUplink()
        parent, blocks = 0, list[IdBlock]()
        record = SandboxRecord(
            name=name,
            token=secrets.token_hex(16),
            spec=spec,
            labels=dict(labels),
            uid=OWN_UID if spec.user == AUTO else 0,
            provider=self.kind,
            base="" if self._host.bubblewrap is not None else str(directory / "work"),
        )
        try:
            if (ids := self._host.ids) is not None:
                await to_its_end(lambda: blocks.append(ids.claim()))
            block = blocks[0] if blocks else None
            await to_its_end(partial(_lay_out, directory, record, self._host, block, self._bound, egress))
            if group is not None:
                group.make(memory_bytes=spec.memory_bytes, pids=spec.pids)
            files = self._snapshots_root / spec.snapshot if spec.snapshot else None
            base = 0 if block is None else block.base
            if files is not None:
                await to_its_end(partial(lay_out_work, files, directory, base=base, owners=self._host.root))
            parent = self._start(directory, spec, mounts, block, uplink)
            # A gateway that is killed from here on leaves a process behind: the next one must know of it.
            replace(record, pid=parent, started=started(parent), ready=False).write(directory)
            client = await self._connect(directory, record, 0)
            if group is not None:
                group.enter(client.peer_pid)
            if files is not None:
                await to_its_end(partial(lay_out_tmp, files, client.peer_pid, base=base, owners=self._host.root))
            if self._host.bubblewrap is not None:
                await to_its_end(partial(self._bound.hand_over, directory / "work"))
            if egress is not None and uplink is not None:
                await self._guard.enforce(egress, client.peer_pid)
                await uplink.start(client.peer_pid, directory / "log")
            record = replace(record, pid=client.peer_pid, started=started(client.peer_pid))
            record.write(directory)
        except BaseException as error:
            await ProcessControl(parent, directory, group, _children(parent, uplink), self._bound).remove()
            if short := exhaustion(error, COMPONENT):
                raise short from None
            if isinstance(error, OSError):
                raise Unsupported(f"a process sandbox cannot be made here: {error}", component=COMPONENT) from None
            raise
        finally:
            for claimed in blocks:
                claimed.close()  # its runner has it
            if uplink is not None:
                uplink.close()  # likewise
        return self._sandbox(directory, record, client, group, _children(parent, uplink))

    async def adopt(self) -> list[tuple[Sandbox, Mapping[str, str]]]:
        """Return the sandboxes whose runner still answers; remove what is left of the others, containers aside.

        One that another kind of process sandbox made is not taken over: it would be less than is promised, or its
        paths would mean the host's.
        """
        adopted: list[tuple[Sandbox, Mapping[str, str]]] = []
        for directory, record in await asyncio.to_thread(process_records, self._root):
            control = control_of(self._host.cgroup, directory, record, self._bound)
            if record is not None and record.ready and control.pid != 0 and record.provider == self.kind:
                try:
                    await control.thaw()
                    client = await self._connect(directory, record, record.pid)
                except ActionFailed as failure:
                    logger.warning("not adopted", sandbox=record.name, why=failure.message)
                else:
                    self._bound.adopt(directory / "work")
                    adopted.append((self._sandbox(directory, record, client, control.group), record.labels))
                    continue
            await control.remove()
        return adopted

    async def reap(self, living: Collection[str]) -> int:
        with self._gate.watching() as young:
            entry = await asyncio.to_thread(process_records, self._root)
            left = [item for item in entry if item[0].name not in {*living, *young}]
        for directory, record in left:
            await control_of(self._host.cgroup, directory, record, self._bound).remove()
        await self._snapshots.prune()
        return len(left)

    async def close(self) -> None:
        await self._disk.close()
        self._held.close()

    # --- inside

    def _sandbox(
        self,
        directory: Path,
        record: SandboxRecord,
        client: StreamClient,
        group: Cgroup | None,
        children: Sequence[int] = (),
    ) -> Sandbox:
        control = ProcessControl(client.peer_pid, directory, group, children, self._bound)
        sandbox = Sandbox(
            record=record,
            directory=directory,
            client=client,
            control=control,
            shared_cores=self._shared_cores,
        )
        self._watch_disk(sandbox, directory, control)
        return sandbox

    def _watch_disk(self, sandbox: Sandbox, directory: Path, control: ProcessControl) -> None:
        """Watch what no file system of its own bounds: its work, or no more than the runner's directory."""
        work, run, disk_bytes = directory / "work", directory / "run", sandbox.spec.disk_bytes
        inside = Path(f"/proc/{control.pid}/root{sandbox.spec.workdir}") if self._host.bubblewrap else work
        if self._bound.name != DiskBound.name and is_bounded(inside, disk_bytes):
            self._disk.add(sandbox, (run,), RUN_BYTES, RUN_FILES, control.processes)
        else:
            self._disk.add(sandbox, (work, run), disk_bytes, files_max(disk_bytes), control.processes)

    async def _connect(self, directory: Path, record: SandboxRecord, pid: int) -> StreamClient:
        hello = record.greeting(
            env=dict(record.spec.env),
            bounds=_bounds(record.spec, grouped=self._host.cgroup is not None),
            **({} if self._host.ids is not None else {"root": False}),
        )
        return await StreamClient.open(SocketStream(directory / "run", peer_pid=pid), hello, within_s=RUNNER_START_S)

    def _start(
        self,
        directory: Path,
        spec: SandboxSpec,
        mounts: Mapping[str, str],
        block: IdBlock | None,
        uplink: SlirpUplink | None,
    ) -> int:
        """Start the process that leads to the runner: bubblewrap, or the runner itself."""
        python = [os.path.realpath(sys.executable), *ISOLATED]
        path = self._path if self._host.bubblewrap is None else f"{self._path}:{PROGRAMS}"
        environment = {"PATH": path, "LANG": "C.UTF-8"}
        with ExitStack() as closers:
            log = closers.enter_context((directory / "log").open("wb"))
            passed = {1: log.fileno(), 2: log.fileno()}
            if self._host.bubblewrap is None:
                argv = [*python, str(RUNNER), str(directory / "run"), "--shed"]
            else:
                options = []
                if self._filter:
                    passed[FILTER_FD] = _piped(self._filter, closers)
                    options += ["--seccomp", str(FILTER_FD)]
                if block is not None:
                    passed[NAMESPACE_FD] = _kept(os.dup(block.namespace.fileno()), closers)
                    passed[CLAIM_FD] = _kept(os.dup(block.claim.fileno()), closers)
                    options += ["--userns2", str(NAMESPACE_FD)]
                if uplink is not None:
                    passed[UPLINK_FD] = _kept(os.dup(uplink.held), closers)
                box = bubblewrap_options(self._host, directory, spec, mounts, self._path)
                inside = [f"{INSIDE}/runner.py", f"{INSIDE}/run", "--shed", *(["--root"] if block else [])]
                argv = [self._host.bubblewrap, *options, *box, *python, *inside]
            return os.posix_spawn(
                argv[0],
                argv,
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    *((os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in passed.items()),
                ],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGINT],
            )


def _kept(fd: int, closers: ExitStack) -> int:
    """Move a descriptor above those that a child is given; return it, closed by ``closers``."""
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FDS_ABOVE)
    finally:
        os.close(fd)
    closers.callback(os.close, high)
    return high


def _piped(data: bytes, closers: ExitStack) -> int:
    """Return a descriptor from which the data, which is smaller than a pipe, can be read once."""
    source, sink = os.pipe()
    try:
        os.write(sink, data)
    finally:
        os.close(sink)
    return _kept(source, closers)


def _lay_out(
    directory: Path,
    record: SandboxRecord,
    host: HostSupport,
    block: IdBlock | None,
    bound: DiskBound,
    egress: Egress | None,
) -> None:
    """Make the directory: ``work`` is the user's, ``run`` is ours alone; inside are two users, none of the host's.

    Nobody else on the host may enter it, as a file in it may be what a user of the host must not execute.
    """
    spec, user = record.spec, record.user
    mode = 0o711 if host.bubblewrap is None else 0o700
    directory.parent.mkdir(parents=True, exist_ok=True)
    for path in (directory.parent, directory):
        path.mkdir(exist_ok=path != directory)
        path.chmod(mode)
    run, work = directory / "run", directory / "work"
    run.mkdir(mode=0o700)
    work.mkdir(mode=0o755)
    bound.bind(work, spec.disk_bytes)
    name, number = ("sandbox", user) if user.isdigit() else (user, str(OWN_UID))
    if name == "root" or not int(number):
        name, number = "root", "0"
    number = number if host.root else str(os.geteuid())
    if host.root:
        base = 0 if block is None else block.base
        os.chown(work, base + int(number), base + int(number))
        os.chown(run, base, base)
    accounts = {"root": "0", name: number} if number != "0" else {"root": "0"}
    lines = [f"{user}:x:{uid}:{uid}::{spec.workdir}:/bin/sh\n" for user, uid in accounts.items()]
    (directory / "passwd").write_text("".join(lines), encoding="ascii")
    (directory / "group").write_text("".join(f"{user}:x:{uid}:\n" for user, uid in accounts.items()), encoding="ascii")
    servers, hosts = ((), {}) if egress is None else (egress.name_servers, egress.hosts)
    lines = [f"nameserver {server}\n" for server in servers] or ["# no names\n"]
    (directory / "resolv.conf").write_text("".join(lines), encoding="ascii")
    (directory / "python").write_text('#!/bin/sh\nexec python3 "$@"\n', encoding="ascii")
    (directory / "python").chmod(0o755)
    lines = ["127.0.0.1 localhost sandbox\n", "::1 localhost\n"]
    lines += [f"{address} {name}\n" for name, address in hosts.items()]
    (directory / "hosts").write_text("".join(lines), encoding="utf-8")


def _children(parent: int, uplink: SlirpUplink | None) -> tuple[int, ...]:
    return (parent,) if uplink is None else (parent, uplink.pid)


def _bounds(spec: SandboxSpec, *, grouped: bool) -> dict[str, int]:
    """Bound each file; without cgroups also each process's address space, which is less than a promise."""
    bounds = {"RLIMIT_FSIZE": spec.disk_bytes, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": FILES_MAX}
    return bounds if grouped else {**bounds, "RLIMIT_AS": 4 * spec.memory_bytes}
