"""Control groups, system call filters and capabilities of Linux."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Literal

from manager.errors import Unsupported
from manager.function import Capabilities, SandboxSpec

# Control groups, v1 and v2: the cores, the freezer, the memory and the end of everything in one sandbox.
#
# Plain writes of a few bytes, about 20 us each: they are made on the event loop.

#: The controllers that a sandbox is governed by, under v1 each with a tree of its own.
CONTROLLERS = ("cpuset", "cpu", "memory", "freezer", "pids")
PERIOD_US = 100_000
#: The kernel writes more than this if there is no bound.
UNLIMITED_BYTES = 2**60
#: Bounds of the waits for the kernel.
SETTLE_S, STEP_S = 2.0, 0.005
#: Times that processes are moved until none is left behind.
ROUNDS_MAX = 100
#: What the name of a runner's group ends with while it is aside, beside the group that it belongs to.
ASIDE = ".runner"


class CpuWeight(Enum):
    """A sandbox's part of cores that others want too, as cpu.shares (v1) and cpu.weight (v2) count it."""

    #: Its action runs.
    ACTION = (1024, 100)
    #: Files travel between two actions, on cores that are leased to others: somebody waits for it.
    TRANSFER = (512, 50)
    #: What its actions left running: the lowest there is.
    BACKGROUND = (2, 1)

    def __init__(self, shares: int, weight: int) -> None:
        self.shares = shares
        self.weight = weight


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where the controllers are mounted, as this process sees them."""

    version: int
    #: Controller -> mount point (v2: all the same).
    mounts: Mapping[str, Path]
    #: Every mounted hierarchy, those of other controllers included.
    roots: tuple[Path, ...] = ()

    @classmethod
    def discover(cls, mountinfo: str | None = None) -> Hierarchy | None:
        """Return what ``/proc/self/mountinfo`` says, None if no hierarchy is mounted."""
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8") if mountinfo is None else mountinfo
        mounts: dict[str, Path] = {}
        unified: Path | None = None
        roots: list[Path] = []
        for line in text.splitlines():
            left, _, right = line.partition(" - ")
            kind, _, options = right.split(" ", 2)
            if kind not in ("cgroup", "cgroup2"):
                continue
            root = Path(left.split(" ")[4])
            roots.append(root)
            if kind == "cgroup2":
                unified = root
            else:
                for name in options.split(","):
                    if name in CONTROLLERS:
                        mounts.setdefault(name, root)
        if {"cpu", "cpuset", "memory"} <= mounts.keys():
            return cls(1, mounts, tuple(roots))
        return None if unified is None else cls(2, dict.fromkeys(CONTROLLERS, unified), (unified,))

    def of_process(self, pid: int | str) -> Cgroup | None:
        """Return the group that a process is in, None if it cannot be seen or written from here."""
        try:
            group = self.places_of(Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8"))
        except OSError:
            return None
        return group if group.writable else None

    def places_of(self, membership: str) -> Cgroup:
        """Return the group that a ``/proc/PID/cgroup`` text names."""
        places: dict[str, Path] = {}
        for line in membership.splitlines():
            _, names, place = line.split(":", 2)
            for name in CONTROLLERS if names == "" and self.version == 2 else names.split(","):
                if name in self.mounts:
                    places[name] = self.mounts[name] / place.lstrip("/").removesuffix(ASIDE)
        return Cgroup(self.version, places)


class Cgroup:
    """The group of one sandbox. Writes raise OSError if the group is gone."""

    def __init__(self, version: int, places: Mapping[str, Path]) -> None:
        self.version = version
        self.places = places
        self._weight = CpuWeight.ACTION
        #: As last written; None before.
        self._cores: tuple[int, ...] | None = None
        #: Whether `freeze` has led the runner aside, and nothing took it back.
        self._has_led_aside = False

    @property
    def writable(self) -> bool:
        """Whether cores can be granted by a write."""
        files = ("cpuset.cpus", "cpu.max" if self.version == 2 else "cpu.cfs_quota_us")
        return all(
            name in self.places and os.access(self.places[name] / file, os.W_OK)
            for name, file in zip(("cpuset", "cpu"), files, strict=True)
        )

    @property
    def freezable(self) -> bool:
        return "freezer" in self.places and os.access(self.freezer, os.W_OK)

    @property
    def freezer(self) -> Path:
        return self.places["freezer"] / ("cgroup.freeze" if self.version == 2 else "freezer.state")

    def set_cores(self, cores: Sequence[int], weight: CpuWeight = CpuWeight.ACTION) -> None:
        """Exactly these cores, and no more than their time."""
        if self._cores != tuple(cores):
            self._cores = None
            _write(self.places["cpuset"] / "cpuset.cpus", ",".join(map(str, cores)))
            quota_us = len(cores) * PERIOD_US
            if self.version == 2:
                _write(self.places["cpu"] / "cpu.max", f"{quota_us} {PERIOD_US}")
            else:
                _write(self.places["cpu"] / "cpu.cfs_quota_us", str(quota_us))
            self._cores = tuple(cores)
        if weight is not self._weight:
            self.set_weight(weight)

    def set_weight(self, weight: CpuWeight) -> None:
        self._weight = weight
        if self.version == 2:
            _write(self.places["cpu"] / "cpu.weight", str(weight.weight))
        else:
            _write(self.places["cpu"] / "cpu.shares", str(weight.shares))

    def freeze(self, runner: int = 0) -> None:
        """Stop every process but the ``runner`` (0: all of them).

        Under v1 it steps aside, into a group of its own, so that the engine finds what is frozen where it looks for
        it. Under v2 that would take it out of its bounds: there all others go into a group below.
        """
        if self.version == 1 and runner and not self._has_led_aside:
            self._aside.mkdir(exist_ok=True)
            _write(self._aside / "cgroup.procs", str(runner))
            self._has_led_aside = True
        _write(self.freezer, "FROZEN" if self.version == 1 else "1")
        if self.version == 1 or not runner:
            return
        # What is frozen can be moved, and does not fork.
        self._below.mkdir(exist_ok=True)
        for _ in range(ROUNDS_MAX):
            left = set(_pids(self.places["freezer"])) - {runner}
            for pid in left:
                with suppress(ProcessLookupError):
                    _write(self._below / "cgroup.procs", str(pid))
            if not left:
                break
        _write(self._below / "cgroup.freeze", "1")
        _write(self.freezer, "0")

    def thaw(self, runner: int = 0) -> None:
        """Let every process run, and `gather` the ``runner``."""
        _write(self.freezer, "0" if self.version == 2 else "THAWED")
        if self.version == 2 and self._below.is_dir():
            _write(self._below / "cgroup.freeze", "0")
        self.gather(runner)

    def gather(self, runner: int) -> None:
        """Take the ``runner`` back, so that what it starts is frozen with the others. Takes the kernel milliseconds."""
        if self.version == 1 and runner and self._aside.is_dir():
            _write(self.places["freezer"] / "cgroup.procs", str(runner))
            self._has_led_aside = False

    @property
    def _aside(self) -> Path:
        """The group of the runner while all others are frozen (v1)."""
        return self.places["freezer"].with_name(f"{self.places['freezer'].name}{ASIDE}")

    @property
    def _below(self) -> Path:
        """The group of all others (v2)."""
        return self.places["freezer"] / "user"

    def remove_aside(self) -> None:
        """Remove what `freeze` made; what somebody is in stays."""
        for place in (self._aside, self._below) if "freezer" in self.places else ():
            with suppress(OSError):
                place.rmdir()

    def quota_cores(self) -> float:
        """Return the processor time that this group and those above it are allowed, in cores; 0 without a bound."""
        bounds = []
        for place in self._ancestry("cpu"):
            with suppress(OSError, ValueError):
                if self.version == 2:
                    quota, period = _read(place / "cpu.max").split()
                else:
                    quota, period = _read(place / "cpu.cfs_quota_us"), _read(place / "cpu.cfs_period_us")
                if int(quota) > 0:
                    bounds.append(max(1.0, int(quota) / int(period)))
        return min(bounds, default=0.0)

    def memory_limit_bytes(self) -> int:
        """Return the memory that this group and those above it are allowed; 0 without a bound."""
        bounds = []
        for place in self._ancestry("memory"):
            with suppress(OSError, ValueError):
                bounds.append(int(_read(place / ("memory.max" if self.version == 2 else "memory.limit_in_bytes"))))
        return min((bound for bound in bounds if bound < UNLIMITED_BYTES), default=0)

    def _ancestry(self, controller: str) -> Iterator[Path]:
        """Yield the group's directory and those above it, up to the mount point (where the files end)."""
        place = self.places.get(controller)
        while place is not None and (place / "cgroup.procs").exists():
            yield place
            place = place.parent

    def oom_kills(self) -> int:
        """Return how many processes the kernel ended for want of memory so far."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        with suppress(OSError, KeyError):
            for line in _read(self.places["memory"] / name).splitlines():
                word, _, value = line.partition(" ")
                if word == "oom_kill":
                    return int(value)
        return 0

    def forks_refused(self) -> int:
        """Return how many new processes the kernel refused so far because of ``pids.max``."""
        with suppress(OSError, KeyError):
            for line in _read(self.places["pids"] / "pids.events").splitlines():
                word, _, value = line.partition(" ")
                if word == "max":
                    return int(value)
        return 0

    def peak_memory_bytes(self) -> int:
        """Return the most memory it ever used, 0 if the kernel does not keep it."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        with suppress(OSError, KeyError):
            return int(_read(self.places["memory"] / name))
        return 0

    def processes(self) -> list[int]:
        """Return every process in it, in this side's numbers."""
        return [
            *_pids(self.places.get("pids") or self.places["cpu"]),
            *(_pids(self._below) if self.version == 2 else ()),
        ]

    def kill(self) -> None:
        """SIGKILL everything in it, frozen or not, however fast it forks; bounded."""
        with suppress(OSError):
            self.thaw()
        kill_file = self.places["cpu"] / "cgroup.kill"
        deadline_s = time.monotonic() + SETTLE_S
        while (pids := self.processes()) and time.monotonic() < deadline_s:
            if kill_file.exists():
                _write(kill_file, "1")
            for pid in pids:
                with suppress(OSError):
                    os.kill(pid, 9)
            time.sleep(STEP_S)

    def make(self, *, memory_bytes: int, pids: int) -> None:
        """Create it with its bounds; raises OSError if that is not allowed."""
        for place in dict.fromkeys(self.places.values()):
            place.mkdir(exist_ok=True)
        if self.version == 1:
            for file in ("cpuset.cpus", "cpuset.mems"):
                _write(self.places["cpuset"] / file, _read(self.places["cpuset"].parent / file))
            _write(self.places["memory"] / "memory.limit_in_bytes", str(memory_bytes))
            with suppress(OSError):  # absent without swap accounting
                _write(self.places["memory"] / "memory.memsw.limit_in_bytes", str(memory_bytes))
        else:
            _write(self.places["memory"] / "memory.max", str(memory_bytes))
            with suppress(OSError):
                _write(self.places["memory"] / "memory.swap.max", "0")
        if "pids" in self.places:
            _write(self.places["pids"] / "pids.max", str(pids))

    def enter(self, pid: int) -> None:
        """Move a process in, with whatever it starts from then on."""
        for place in dict.fromkeys(self.places.values()):
            _write(place / "cgroup.procs", str(pid))

    def remove(self) -> None:
        """Remove the empty group; one that cannot be removed yet stays for the reaper."""
        self.remove_aside()
        for place in dict.fromkeys(self.places.values()):
            with suppress(OSError):
                place.rmdir()


class Freezer:
    """Stops a sandbox's processes between two actions, all but its runner. Raises OSError if the group is gone."""

    def __init__(self, group: Cgroup | None, runner: int) -> None:
        """``runner`` is the process as this machine knows it, 0 if it does not."""
        self._group = group if group is not None and runner and group.freezable else None
        self._runner = runner
        self._lent = False
        #: Whether there is something to be thawed, and a runner to be taken back; at first that is unknown.
        self._stopped = self._apart = True

    def freeze(self, lend: Callable[[int], bool]) -> bool:
        """Return False if that is not for us, or if the runner could not end itself (and them) any more."""
        group = self._group
        if group is None:
            return False
        if set(group.processes()) - {self._runner}:
            if not (self._lent or self._lend(group, lend)):
                return False
            self._stopped = self._apart = True
            group.freeze(self._runner)
        return True

    def _lend(self, group: Cgroup, lend: Callable[[int], bool]) -> bool:
        """Under v1 what is frozen cannot be killed: lend the runner what thaws it."""
        if group.version == 1:
            fd = os.open(group.freezer, os.O_WRONLY | os.O_CLOEXEC)
            try:
                self._lent = lend(fd)
            finally:
                os.close(fd)
            return self._lent
        return True

    def thaw(self) -> None:
        if self._group is not None and self._stopped:
            self._group.thaw()
            self._stopped = False

    def gather(self) -> None:
        """Let what the runner starts from now on be stopped with the others."""
        if self._group is not None and self._apart:
            self._group.gather(self._runner)
            self._apart = False


MNT_DETACH = 2


def take_away(place: Path) -> None:
    """Take away what is mounted at a place, if anything is; a file system ends with its last user."""
    if os.path.ismount(place):
        ctypes.CDLL(None).umount2(os.fsencode(place), MNT_DETACH)


def remove_tree(place: Path) -> None:
    """Remove a directory and what is mounted right below it, however deep it is; raises OSError if anything stays."""
    for below in place.iterdir() if place.is_dir() else ():
        take_away(below)
    try:
        shutil.rmtree(place, ignore_errors=True)
    except RecursionError:  # more directories in each other than the library goes down
        subprocess.run(["rm", "-rf", "--", str(place)], capture_output=True, check=False)
    if place.exists():
        raise OSError(errno.EBUSY, "it cannot be removed whole", str(place))


def parse_cores(text: str) -> Iterator[int]:
    """Yield the cores of the kernel's list format: ``0-3,8,10-11``."""
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            yield from range(int(first), int(last or first) + 1)


def _pids(place: Path) -> list[int]:
    """Return the processes of a group, none if it is gone."""
    with suppress(OSError):
        return [int(word) for word in _read(place / "cgroup.procs").split()]
    return []


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii").strip()


# The system calls that sandboxes may make: one list, for containers as the engine's JSON, for bubblewrap as BPF.
#
# It is what container engines allow by default to a container without capabilities, less what kernels are broken
# through and no task needs: io_uring, kernel keyrings, ``AF_VSOCK`` sockets, netfilter's netlink, setting other
# processes' limits. Programs of another architecture than the machine's (32 bits) are ended: theirs are other numbers,
# and ``socketcall`` hides its arguments.

COMPONENT = "sandbox.seccomp"
Seccomp = Literal["default", "no-ptrace", "none"]

EPERM, ENOSYS = 1, 38
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
MASKED_EQ = 7
#: Machine -> the kernel's token of its architecture, and libseccomp's name for it.
MACHINES = {"x86_64": (0xC000003E, "X86_64"), "aarch64": (0xC00000B7, "AARCH64")}
#: The flags of `clone` that make namespaces. A filter cannot see what `clone3` is asked for: it "does not exist".
NAMESPACES = 0x7E020000
WORD, POINTER = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
AF_NETLINK, AF_VSOCK, NETLINK_NETFILTER = 16, 40, 12
#: Address families, and protocols of netlink, that a kernel may know; newer ones are refused.
FAMILIES, NETLINKS = range(46), range(32)
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)

DEBUGGING = ("ptrace", "process_vm_readv", "process_vm_writev")
_ALLOWED = """
    accept accept4 access adjtimex alarm arch_prctl arm_fadvise64_64 arm_sync_file_range bind breakpoint brk cacheflush
    cachestat capget capset chdir chmod chown chown32 clock_adjtime clock_adjtime64 clock_getres clock_getres_time64
    clock_gettime clock_gettime64 clock_nanosleep clock_nanosleep_time64 close close_range connect copy_file_range creat
    dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old
    eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fadvise64_64 fallocate fanotify_mark
    fchdir fchmod fchmodat fchmodat2 fchown fchown32 fchownat fcntl fcntl64 fdatasync fgetxattr flistxattr flock fork
    fremovexattr fsetxattr fstat fstat64 fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 futex futex_requeue
    futex_time64 futex_wait futex_waitv futex_wake futimesat get_robust_list get_thread_area getcpu getcwd getdents
    getdents64 getegid getegid32 geteuid geteuid32 getgid getgid32 getgroups getgroups32 getitimer getpeername getpgid
    getpgrp getpid getppid getpriority getrandom getresgid getresgid32 getresuid getresuid32 getrlimit getrusage getsid
    getsockname getsockopt gettid gettimeofday getuid getuid32 getxattr getxattrat inotify_add_watch inotify_init
    inotify_init1 inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_pgetevents_time64 io_setup
    io_submit ioctl ioprio_get ioprio_set ipc kill landlock_add_rule landlock_create_ruleset landlock_restrict_self
    lchown lchown32 lgetxattr link linkat listen listxattr listxattrat llistxattr _llseek lremovexattr lseek lsetxattr
    lstat lstat64 madvise map_shadow_stack membarrier memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat
    mlock mlock2 mlockall mmap mmap2 modify_ldt mprotect mq_getsetattr mq_notify mq_open mq_timedreceive
    mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync
    munlock munlockall munmap name_to_handle_at nanosleep newfstatat _newselect open openat openat2 pause pidfd_open
    pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll ppoll_time64 prctl pread64 preadv preadv2
    process_mrelease pselect6 pselect6_time64 pwrite64 pwritev pwritev2 read readahead readlink readlinkat
    readv recv recvfrom recvmmsg recvmmsg_time64 recvmsg remap_file_pages removexattr removexattrat rename renameat
    renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
    rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min
    sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64
    sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop
    semtimedop semtimedop_time64 send sendfile sendfile64 sendmmsg sendmsg sendto set_robust_list set_thread_area
    set_tid_address set_tls setfsgid setfsgid32 setfsuid setfsuid32 setgid setgid32 setgroups setgroups32 setitimer
    setpgid setpriority setregid setregid32 setresgid setresgid32 setresuid setresuid32 setreuid setreuid32 setrlimit
    setsid setsockopt setuid setuid32 setxattr setxattrat shmat shmctl shmdt shmget shutdown sigaltstack signalfd
    signalfd4 sigprocmask sigreturn socketpair splice stat stat64 statfs statfs64 statx symlink symlinkat sync
    sync_file_range sync_file_range2 syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun
    timer_gettime timer_gettime64 timer_settime timer_settime64 timerfd_create timerfd_gettime timerfd_gettime64
    timerfd_settime timerfd_settime64 times tkill truncate truncate64 ugetrlimit umask uname unlink unlinkat utime
    utimensat utimensat_time64 utimes vfork vmsplice wait4 waitid waitpid write writev
"""
ALLOWED = tuple(_ALLOWED.split())


class Argument(ctypes.Structure):
    """One argument of a call whose bits under a mask must have a value (libseccomp's ``scmp_arg_cmp``)."""

    _fields_ = (
        ("index", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("mask", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class CallRule:
    """One system call: allowed, if its arguments are these (index, mask, value), or answered with an error."""

    name: str
    arguments: tuple[tuple[int, int, int], ...] = ()
    error: int = 0


def call_rules(seccomp: Seccomp) -> Iterator[CallRule]:
    """Yield what is allowed; everything else is not permitted.

    The kernel reads 32 bits of a socket's arguments: comparing all 64 would let the same call pass with others set.
    """
    yield from map(CallRule, ALLOWED + (DEBUGGING if seccomp == "default" else ()))
    yield CallRule("clone", ((0, NAMESPACES, 0),))
    yield CallRule("clone3", error=ENOSYS)
    yield from (CallRule("personality", ((0, WORD, value),)) for value in PERSONALITIES)
    # Its own limits, or others' to read: root inside is the runner's user, and would take its descriptors away.
    yield CallRule("prlimit64", ((0, WORD, 0),))
    yield CallRule("prlimit64", ((2, POINTER, 0),))
    for family in FAMILIES:
        if family not in (AF_NETLINK, AF_VSOCK):
            yield CallRule("socket", ((0, WORD, family),))
    for protocol in NETLINKS:
        if protocol != NETLINK_NETFILTER:
            yield CallRule("socket", ((0, WORD, AF_NETLINK), (2, WORD, protocol)))


@cache
def engine_profile(seccomp: Seccomp) -> str:
    """Return the profile as a container engine takes it: ``security_opt: seccomp=...``.

    The engine keeps it with each container, tells it whenever it is asked for one, and hands it to what runs it: what
    is simply allowed is one entry.
    """
    rules = list(call_rules(seccomp))
    always = [rule.name for rule in rules if not rule.arguments and not rule.error]
    calls: list[dict[str, object]] = [{"names": always, "action": "SCMP_ACT_ALLOW", "args": []}]
    calls += [
        {
            "names": [rule.name],
            "action": "SCMP_ACT_ERRNO" if rule.error else "SCMP_ACT_ALLOW",
            **({"errnoRet": rule.error} if rule.error else {}),
            "args": [
                {"index": index, "op": "SCMP_CMP_MASKED_EQ", "value": mask, "valueTwo": value}
                for index, mask, value in rule.arguments
            ],
        }
        for rule in rules
        if rule.arguments or rule.error
    ]
    machines = [{"architecture": f"SCMP_ARCH_{name}", "subArchitectures": []} for _, name in MACHINES.values()]
    profile = {"defaultAction": "SCMP_ACT_ERRNO", "archMap": machines, "syscalls": calls}
    return json.dumps(profile, separators=(",", ":"))


@cache
def compiled(seccomp: Seccomp, machine: str = "") -> bytes:
    """Return the profile as a BPF program for bubblewrap's ``--seccomp``, by default for this machine.

    Raises Unsupported, with the remedy, if there is no libseccomp, or the machine is none of `MACHINES`.
    """
    machine = machine or os.uname().machine
    if machine not in MACHINES:
        raise Unsupported(f"there is no system call filter for {machine}; {_REMEDY}", component=COMPONENT)
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise Unsupported(
            f"no system call filter: {error}; install libseccomp2, or {_REMEDY}", component=COMPONENT
        ) from None
    return _Compiler(library, MACHINES[machine][0]).compile(seccomp)


_REMEDY = "sandbox.seccomp: none does without, and says so"


class _Compiler:
    """libseccomp, as far as we need it."""

    def __init__(self, library: ctypes.CDLL, token: int) -> None:
        self._library, self._token = library, token
        library.seccomp_init.restype = ctypes.c_void_p
        library.seccomp_syscall_resolve_num_arch.restype = ctypes.c_void_p
        self._free = ctypes.CDLL(None).free

    def compile(self, seccomp: Seccomp) -> bytes:
        library = self._library
        context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ERRNO | EPERM)))
        try:
            if self._token != library.seccomp_arch_native() & WORD:
                self._check(library.seccomp_arch_add(context, ctypes.c_uint32(self._token)))
                self._check(library.seccomp_arch_remove(context, ctypes.c_uint32(0)))
            for rule in call_rules(seccomp):
                self._add(context, rule)
            return self._newer_calls_do_not_exist() + self._exported(context)
        finally:
            library.seccomp_release(context)

    def _add(self, context: ctypes.c_void_p, rule: CallRule) -> None:
        number = self._library.seccomp_syscall_resolve_name(rule.name.encode())
        if number == -1:  # too new for this library: see below
            return
        arguments = (Argument * len(rule.arguments))(
            *(Argument(index, MASKED_EQ, mask, value) for index, mask, value in rule.arguments)
        )
        action = ctypes.c_uint32(ERRNO | rule.error if rule.error else ALLOW)
        self._check(self._library.seccomp_rule_add_array(context, action, number, len(arguments), arguments), rule.name)

    def _exported(self, context: ctypes.c_void_p) -> bytes:
        with os.fdopen(os.memfd_create("seccomp"), "rb") as file:
            self._check(self._library.seccomp_export_bpf(context, file.fileno()))
            file.seek(0)
            return file.read()

    def _newer_calls_do_not_exist(self) -> bytes:
        """Return what comes first: calls that are newer than the library's list get ENOSYS, so that programs fall back.

        Numbers are of one architecture only (the rest of the program ends others).
        """
        steps = (
            (0x20, 0, 0, 4),  # load the architecture
            (0x15, 0, 3, self._token),  # another: go on after these
            (0x20, 0, 0, 0),  # load the call's number
            (0x25, 0, 1, self._last_known()),  # not above: go on
            (0x06, 0, 0, ERRNO | ENOSYS),
        )
        return b"".join(struct.pack("=HBBI", *step) for step in steps)

    def _last_known(self) -> int:
        last = 0
        for number in range(1024):
            name = self._library.seccomp_syscall_resolve_num_arch(ctypes.c_uint32(self._token), number)
            if name:
                last = number
                self._free(ctypes.c_void_p(name))
        return last

    def _check(self, status: int, what: str = "the filter") -> None:
        if status < 0:
            raise Unsupported(f"libseccomp refuses {what}: {os.strerror(-status)}", component=COMPONENT)


#: The runner's own capabilities; a command that runs as another user than root has none of them.
MINIMAL = ("CHOWN", "KILL", "SETGID", "SETUID")
#: What container engines give root, less raw sockets and device files.
DEFAULT = (
    *MINIMAL, "AUDIT_WRITE", "DAC_OVERRIDE", "FOWNER", "FSETID", "NET_BIND_SERVICE", "SETFCAP", "SETPCAP", "SYS_CHROOT",
)  # fmt: skip


def capabilities_of(spec: SandboxSpec) -> tuple[str, ...]:
    """Return the capabilities of root in such a sandbox, without their prefix."""
    return MINIMAL if spec.capabilities is Capabilities.MINIMAL else DEFAULT


def require_minimal(spec: SandboxSpec, why: str) -> None:
    """Raise Unsupported for more than a process sandbox can have that has no user namespace; ``why`` it has none."""
    if why and spec.capabilities is not Capabilities.MINIMAL:
        raise Unsupported(
            "sandbox.capabilities: default are those of a root inside, whom a process sandbox has only in a user "
            f"namespace of its own ({why}); use containers for it",
            component="sandbox.process",
        )
