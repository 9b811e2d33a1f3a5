"""The system calls that sandboxes may make: one list, for containers as the engine's JSON, for bubblewrap as BPF.

It is what container engines allow by default to a container without capabilities, less what kernels are broken through
and no task needs: io_uring, kernel keyrings, ``AF_VSOCK`` sockets, netfilter's netlink, setting other processes'
limits. Programs of another architecture than the machine's (32 bits) are ended: theirs are other numbers, and
``socketcall`` hides its arguments.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from manager.errors import Unsupported

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
