"""The resident runner: the one process of ours inside a sandbox. Standard library only, one file, Python 3.8 on.

Started once with the sandbox (``python3 -I -S runner.py DIRECTORY [--shed]``) it listens on ``DIRECTORY/s`` and
executes commands for the gateway, so that an action costs a frame and not a ``docker exec``. With ``--attached`` in
place of a directory it speaks over its own standard streams, to which a gateway attaches through the engine. It is
PID 1 of the sandbox's process namespace, or else the subreaper of everything started in it.

A frame is ``length:u32 type:u8 id:u32`` in network order, then ``length`` bytes: JSON for requests and ends, raw bytes
for data. The first connection's HELLO sets the token, before any foreign code can run; later connections must know it.

A command outlives its gateway where it was asked to, for ``unattended_s`` at most: what it says and how it ends is kept
until the next gateway claims it by the name that it was given, or tells that it need not be kept.

Commands run as the sandbox's user, never as the runner: it takes on the user's ids around ``posix_spawn`` (a vfork),
which leaves the child no privilege to return to and makes the runner itself untraceable.
"""

# pathlib and contextlib would cost every sandbox their import.
# ruff: noqa: PTH102, PTH103, PTH108, PTH112, PTH117, PTH118, PTH120, PTH123, PTH208, SIM105
from __future__ import annotations

import errno
import json
import os
import pwd
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

PROTOCOL = 1
HEADER = struct.Struct("!IBI")
FRAME_MAX_BYTES = 4 * 2**20
CHUNK_BYTES = 64 * 2**10
#: Standard input bytes that may be under way to one command before it has taken them.
WINDOW_BYTES = 256 * 2**10

# From the gateway.
HELLO, RUN, STDIN, KILL, READ, WRITE, LIST, SWEEP, CLAIM, KEEP = range(1, 11)
# To the gateway.
READY, STDOUT, STDERR, EXIT, ACK, DONE, ERROR = range(65, 72)

#: Bytes waiting for the gateway at which the commands' pipes are no longer read.
PENDING_MAX_BYTES = 1 * 2**20
TICK_S = 0.01
#: Seconds after SIGKILL at which a process that will not die is reported instead of awaited.
UNKILLABLE_S = 5.0
DRAINS_MAX = 128
#: Ended commands that can still be claimed, and the bytes that they said; of the last one everything.
ENDED_MAX = 16
ENDED_MAX_BYTES = 4 * 2**20
#: Claims of which the next gateway is told that they were begun; where there were more, it is told nothing.
STARTED_MAX = 64
STRANGERS_MAX = 8
#: What a gateway begins with that attaches, and what it wants to hear then.
MARK_BYTES, ANSWER_BYTES = 32, 16
ENTRIES_MAX = 10000
OOM_SCORE = b"500"

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: What the kernel tells of the memory of our own cgroup (v2, v1), where the sandbox has one.
MEMORY_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
MEMORY_PEAKS = ("/sys/fs/cgroup/memory.peak", "/sys/fs/cgroup/memory/memory.max_usage_in_bytes")
#: Where reading and writing is no file access: the kernel's own trees.
KERNEL_TREES = ("/proc", "/sys", "/dev")


_ENCODER = json.JSONEncoder(separators=(",", ":"))


class Refused(Exception):
    """A request that cannot be executed: a code of `manager.errors` and a message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Identity:
    """A user of the sandbox, and the way to become it for a moment."""

    def __init__(self, user: str, workdir: str) -> None:
        try:
            entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
            self.uid, self.gid, self.name, self.home = entry.pw_uid, entry.pw_gid, entry.pw_name, entry.pw_dir
            self.groups = os.getgrouplist(self.name, self.gid)
        except (KeyError, OverflowError):
            if not user.isdigit() or int(user) >= 2**32 - 1:
                raise Refused("invalid_input", f"no user {user!r} in the sandbox") from None
            self.uid = self.gid = int(user)
            self.name, self.home, self.groups = user, workdir, [int(user)]
        if not os.path.isdir(self.home):
            self.home = workdir

    def __enter__(self) -> None:
        if os.getuid() == 0 and self.uid != 0:
            os.setgroups(self.groups)
            os.setresgid(self.gid, self.gid, 0)
            os.setresuid(self.uid, self.uid, 0)

    def __exit__(self, *_: object) -> None:
        if self.uid != 0 and os.getresuid()[2] == 0:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
            os.setgroups([0])


class CommandOutput:
    """What a command has said so far, in order."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.pieces: list[int] = []  # their bytes; of standard error counted below zero

    def add(self, stream: int, data: bytes) -> None:
        self.data += data
        count = len(data) if stream == STDOUT else -len(data)
        if self.pieces and (self.pieces[-1] > 0) == (count > 0):
            self.pieces[-1] += count
        else:
            self.pieces.append(count)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        start = 0
        for count in self.pieces:
            end = start + abs(count)
            for at in range(start, end, CHUNK_BYTES):
                yield STDOUT if count > 0 else STDERR, bytes(self.data[at : min(end, at + CHUNK_BYTES)])
            start = end


class Job:
    """One command under way: its pipes, its clocks, and which processes belong to it."""

    def __init__(self, number: int, request: dict[str, Any], bystanders: set[int]) -> None:
        self.number = number  # below zero while no gateway listens
        self.claim: str = request.get("claim", "")
        self.detached: bool = request.get("lasting", False)
        self.output = CommandOutput()
        self.pid = 0
        self.streams: dict[int, int] = {}  # our end of the pipe -> STDOUT or STDERR
        self.stdin = -1
        self.input = bytearray()
        self.input_ended = False
        self.bystanders = bystanders
        self.marker = b"TANGRAM_ACTION=" + str(request["marker"]).encode()
        self.grace_s: float = request["grace_s"]
        self.limit: int | None = request.get("limit")
        self.kept = {STDOUT: 0, STDERR: 0}
        self.truncated = {STDOUT: False, STDERR: False}
        self.started_s = time.monotonic()
        timeout_s = request.get("timeout_s")
        self.deadline_s: float | None = None if timeout_s is None else self.started_s + timeout_s
        self.kill_s: float | None = None  # set while it is being ended
        self.timed_out = False
        self.status: int | None = None
        self.cpu_s = 0.0
        self.peak_kib = 0
        self.ended_s: float | None = None
        self.account = b""  # how it ended

    @property
    def ran_s(self) -> float:
        return (time.monotonic() if self.ended_s is None else self.ended_s) - self.started_s


class GatewayConnection:
    """A descriptor with frames in and one with frames out, of a socket the same; never blocks."""

    def __init__(self, source: int, sink: int) -> None:
        self.source = source
        self.sink = sink
        self.trusted = False
        self.incoming = bytearray()
        self.pending = bytearray()

    def frames(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """What ``data`` completes; raises ConnectionError when the other side talks nonsense."""
        self.incoming += data
        while len(self.incoming) >= HEADER.size:
            length, kind, number = HEADER.unpack_from(self.incoming)
            if length > FRAME_MAX_BYTES:
                raise ConnectionError("oversized frame")
            end = HEADER.size + length
            if len(self.incoming) < end:
                return
            payload = bytes(self.incoming[HEADER.size : end])
            del self.incoming[:end]
            yield kind, number, payload

    def send(self, kind: int, number: int, payload: bytes) -> None:
        self.pending += HEADER.pack(len(payload), kind, number) + payload
        self.flush()

    def flush(self) -> None:
        try:
            while self.pending:
                del self.pending[: os.write(self.sink, self.pending)]
        except BlockingIOError:
            pass
        except OSError:
            self.pending.clear()  # the reading side reports the loss


class Attachment:
    """Our standard streams, to which one gateway after the other attaches. Between two there is no end of the stream.

    A gateway begins with a mark, which the first one chose and nobody inside knows, and an answer, which is sent back:
    at these two points both sides begin anew, and what was under way to and from the gateway before is dropped.
    """

    def __init__(self) -> None:
        self.mark = b""
        self.heard = bytearray()

    def feed(self, data: bytes) -> tuple[bytes | None, bytes]:
        """The answer that a gateway wants which attached just now, or None; and what belongs to its conversation."""
        self.heard += data
        if not self.mark and len(self.heard) >= MARK_BYTES:
            self.mark = bytes(self.heard[:MARK_BYTES])
        at = self.heard.rfind(self.mark) if self.mark else 0
        end = at + MARK_BYTES + ANSWER_BYTES
        if at < 0:
            del self.heard[: 1 - MARK_BYTES]  # a mark may have begun to arrive
            return None, data
        if len(self.heard) < end:
            return None, b""
        answer, rest = bytes(self.heard[end - ANSWER_BYTES : end]), bytes(self.heard[end:])
        self.heard = bytearray(rest[1 - MARK_BYTES :])
        return answer, rest


class Runner:
    """The loop: one epoll over the gateway, the commands' pipes and the children's ends."""

    def __init__(self, directory: str | None) -> None:
        self.poll = select.epoll()
        self.handlers: dict[int, Callable[[int], None]] = {}
        self.jobs: dict[int, Job] = {}
        self.by_pid: dict[int, Job] = {}
        self.ended: dict[str, Job] = {}  # those that the next gateway may still claim
        self.started: dict[str, None] = {}  # claims, until it is on record what became of them
        self.forgetful = False
        self.drains: dict[int, None] = {}  # output of what outlived its command, read and dropped
        self.uploads: dict[int, Upload] = {}
        self.sweeps: dict[int, float] = {}  # asked for, and when to give up on what will not die
        self.gateway: GatewayConnection | None = None
        self.strangers: list[GatewayConnection] = []
        self.throttled: GatewayConnection | None = None
        self.token = ""
        self.config: dict[str, Any] = {}
        self.identities: dict[str, Identity] = {}
        self.pid = os.getpid()
        self.alone_since_s = self.looked_s = time.monotonic()
        self.sequence = 0  # the gateway's own, over all of its connections
        self.taken: int | None = None  # the last of its numbers under which a command came
        self.shell = "/bin/bash" if os.access("/bin/bash", os.X_OK) else "/bin/sh"
        self.environment = dict(os.environ)
        try:
            self.listing = os.open(f"/proc/self/task/{self.pid}/children", os.O_RDONLY)
        except OSError:
            self.listing = -1
        self.null = os.open("/dev/null", os.O_RDWR)
        self.oom, self.oom_score = _own_oom_score()
        self.memory_kills = _memory_kills()
        self.attachment: Attachment | None = None
        self.attached: GatewayConnection | None = None
        if directory is None:
            self.attach()
        else:
            os.chdir(directory)
            self.listener = _listen()
            os.chdir("/")
            self.watch(self.listener.fileno(), self.on_connect)
        self.wakeup = _children_signal()
        self.watch(self.wakeup, self.on_children)

    # --- the loop

    def watch(self, fd: int, handler: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        self.handlers[fd] = handler
        self.poll.register(fd, events)

    def forget(self, fd: int) -> None:
        if self.handlers.pop(fd, None) is not None:
            self.poll.unregister(fd)

    def serve(self) -> None:
        """Until no gateway has come for ``orphan_s``; the sandbox ends with us."""
        while True:
            for fd, _ in self.poll.poll(self.next_deadline_s()):
                handler = self.handlers.get(fd)
                if handler is not None:
                    handler(fd)
            self.discount_frozen_time()
            self.on_clock()
            if self.alone_s > self.patience_s and not self.claimable():
                return

    @property
    def patience_s(self) -> float:
        patience_s: float = self.config.get("orphan_s", 600.0)
        return patience_s

    @property
    def unattended_s(self) -> float:
        """Seconds without a gateway after which nothing is kept for the next one."""
        unattended_s: float = self.config.get("unattended_s", 0.0)
        return unattended_s

    @property
    def alone_s(self) -> float:
        """Seconds without a gateway. Of one that attached we see no end: only its silence tells."""
        missed = self.gateway is None or self.attachment is not None
        return time.monotonic() - self.alone_since_s if missed else 0.0

    @property
    def rest_s(self) -> float:
        """The longest sleep."""
        silences_s = () if self.attachment is None else (self.patience_s / 4, self.unattended_s / 4)
        return min([60.0, *(silence_s for silence_s in silences_s if silence_s > 0)])

    def discount_frozen_time(self) -> None:
        """While we were frozen no gateway could be heard."""
        now = time.monotonic()
        if self.attachment is not None:
            self.alone_since_s += max(0.0, now - self.looked_s - self.rest_s)
        self.looked_s = now

    def next_deadline_s(self) -> float:
        if self.sweeps or any(job.kill_s is not None for job in self.jobs.values()):
            return TICK_S
        now = time.monotonic()
        due = [job.deadline_s - now for job in self.jobs.values() if job.deadline_s is not None]
        if self.claimable():
            due.append(self.unattended_s - self.alone_s)
        return max(0.0, min([self.rest_s, *due]))

    def on_clock(self) -> None:
        now = time.monotonic()
        for job in list(self.jobs.values()):
            if job.kill_s is not None:
                self.pursue(job, now)
            elif job.deadline_s is not None and now >= job.deadline_s:
                job.timed_out = True
                self.end(job, job.grace_s)
        if self.sweeps:
            self.sweep(now)
        if self.alone_s > self.unattended_s:
            if self.attached is not None and self.attached is self.gateway:
                self.drop(self.attached)
            if self.claimable():
                self.keep("", detached=False)

    # --- the gateway

    def on_connect(self, fd: int) -> None:
        sock, _ = self.listener.accept()
        sock.setblocking(False)
        if len(self.strangers) >= STRANGERS_MAX:
            self.drop(self.strangers[0])
        fd = sock.detach()
        connection = GatewayConnection(fd, fd)
        self.strangers.append(connection)
        self.watch(fd, lambda _: self.on_frames(connection))

    def attach(self) -> None:
        for fd in (0, 1):
            os.set_blocking(fd, False)
        self.attachment = Attachment()
        self.watch(0, self.on_attached)

    def on_attached(self, fd: int) -> None:
        """Bytes of the gateway that is attached, or of the next one, who takes the place of the one before."""
        assert self.attachment is not None
        try:
            data = os.read(fd, 4 * CHUNK_BYTES)
        except BlockingIOError:
            return
        self.alone_since_s = time.monotonic()
        answer, rest = self.attachment.feed(data)
        if self.attached is not None and (answer is not None or not data):
            self.drop(self.attached)
        if answer is not None:
            self.attached = GatewayConnection(0, 1)
            self.strangers.append(self.attached)
            self.attached.pending += answer
            self.attached.flush()
            self.hold_back(self.attached)
        if self.attached is not None and rest:
            self.hear(self.attached, rest)
        if not data:  # the engine has closed it: nobody can attach any more
            self.forget(fd)

    def on_frames(self, connection: GatewayConnection) -> None:
        self.on_writable(connection)
        try:
            data = os.read(connection.source, 4 * CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.hear(connection, data)

    def on_writable(self, connection: GatewayConnection) -> None:
        if self.throttled is connection:
            connection.flush()
            if not connection.pending:
                self.unthrottle(connection)

    def hear(self, connection: GatewayConnection, data: bytes) -> None:
        """Obey what has arrived; nothing is the end."""
        try:
            if not data:
                raise ConnectionError
            for kind, number, payload in connection.frames(data):
                if connection.trusted:
                    self.obey(kind, number, payload)
                else:
                    self.greet(connection, kind, payload)
        except (ConnectionError, ValueError, KeyError, TypeError):
            self.drop(connection)

    def greet(self, connection: GatewayConnection, kind: int, payload: bytes) -> None:
        """Take the first caller's token for the gateway's; a stranger without it is hung up on."""
        if kind != HELLO:
            raise ConnectionError
        hello = json.loads(payload)
        known = self.token != ""
        if known and not _same(hello["token"], self.token):
            raise ConnectionError
        previous, self.token, self.config = self.gateway, hello["token"], hello
        connection.trusted = True
        self.strangers.remove(connection)
        if previous is not None:
            self.drop(previous)
        self.gateway = connection
        if not known:
            self.prepare_workdir()
        if hello.get("sequence", 0) != self.sequence:
            self.sequence, self.taken = hello.get("sequence", 0), None
            self.drop_attached()
        held = {job.claim: [job.ran_s, job.ended_s is None] for job in self.claimable()}
        ready = {"protocol": PROTOCOL, "known": known, "pid": self.pid, "held": held, "taken": self.taken}
        ready["begun"] = None if self.forgetful else list(self.started)
        self.send(READY, 0, _json(ready))

    def prepare_workdir(self) -> None:
        """Make the working directory the user's, before any command runs."""
        identity = self.identity("")
        workdir = self.real(self.config["workdir"])
        if not os.path.isdir(workdir):
            os.makedirs(workdir, 0o755)
            if os.getuid() == 0:
                os.chown(workdir, identity.uid, identity.gid)
        with identity:
            pass  # from here on the kernel calls the runner undumpable: nobody inside can trace or read it

    def drop(self, connection: GatewayConnection) -> None:
        """Hang up; what the gateway had running goes on where it shall outlast it and has all its input."""
        if connection is self.attached:
            self.attached = None
        else:
            self.forget(connection.source)
            os.close(connection.source)
        if connection in self.strangers:
            self.strangers.remove(connection)
        self.unthrottle(connection)
        if connection is self.gateway:
            self.gateway = None
            self.alone_since_s = time.monotonic()
            for job in list(self.jobs.values()):
                self.renumber(job, -job.pid)
                if not self.outlives(job) or (job.stdin >= 0 and not job.input_ended):
                    job.detached, job.claim = False, ""
                    self.end(job, 0.0)
            for upload in self.uploads.values():
                upload.abandon()
            self.uploads.clear()
            self.sweeps.clear()

    def send(self, kind: int, number: int, payload: bytes) -> None:
        gateway = self.gateway
        if gateway is None or number < 0:
            return
        gateway.send(kind, number, payload)
        self.hold_back(gateway)

    def hold_back(self, connection: GatewayConnection) -> None:
        """Wait for a gateway that does not take all of what it is sent."""
        if connection.pending and self.throttled is None:
            if connection.sink == connection.source:
                self.poll.modify(connection.sink, select.EPOLLIN | select.EPOLLOUT)
            else:
                self.watch(connection.sink, lambda _: self.on_writable(connection), select.EPOLLOUT)
            self.throttled = connection
            self.regulate()

    def unthrottle(self, connection: GatewayConnection) -> None:
        if self.throttled is connection:
            self.throttled = None
            if connection.sink != connection.source:
                self.forget(connection.sink)
            elif connection.sink in self.handlers:
                self.poll.modify(connection.sink, select.EPOLLIN)
            self.regulate()

    def regulate(self) -> None:
        """Read the commands' pipes only while the gateway takes what they say."""
        for job in self.jobs.values():
            for fd in job.streams:
                self.poll.modify(fd, 0 if self.throttled is not None else select.EPOLLIN)

    def obey(self, kind: int, number: int, payload: bytes) -> None:
        if kind == STDIN:
            self.feed(number, payload)
            return
        request = json.loads(payload) if payload else {}
        try:
            if kind == RUN:
                self.taken = number
                self.run(number, request)
            elif kind == KILL and number in self.jobs:
                self.jobs[number].detached, self.jobs[number].claim = False, ""
                self.end(self.jobs[number], request["grace_s"])
            elif kind == CLAIM:
                self.claim(number, request["claim"])
            elif kind == KEEP:
                self.keep(request["claim"], detached=request["lasting"])
                if not request["lasting"]:
                    self.started = {claim: None for claim in self.started if not claim.startswith(request["claim"])}
            elif kind == READ:
                self.read(number, request)
            elif kind == WRITE:
                self.uploads[number] = Upload(self, request)
            elif kind == LIST:
                self.send(DONE, number, _json({"entries": self.entries(request["path"])}))
            elif kind == SWEEP:
                self.sweeps[number] = time.monotonic() + UNKILLABLE_S
        except Refused as refusal:
            self.send(ERROR, number, _json({"code": refusal.code, "message": str(refusal)}))
        except OSError as error:
            self.send(ERROR, number, _json({"code": _code_of(error), "message": _sentence(error)}))

    # --- commands

    def children(self) -> set[int]:
        """Direct children: what earlier commands left behind, and the other commands under way."""
        if self.listing >= 0:
            return {int(word) for word in os.pread(self.listing, CHUNK_BYTES, 0).split()}
        return {child for child, (parent, _) in _processes().items() if parent == self.pid}

    def identity(self, user: str) -> Identity:
        user = user or self.config["user"]
        if user not in self.identities:
            self.identities[user] = Identity(user, self.config["workdir"])
        identity = self.identities[user]
        if os.getuid() != 0 and identity.uid != os.getuid() and user != self.config["user"]:
            raise Refused("invalid_input", f"this sandbox cannot run commands as {user!r}")
        return identity

    def run(self, number: int, request: dict[str, Any]) -> None:
        job = Job(number, request, self.children())
        if job.detached:
            self.remember_claim(job.claim)
        identity = self.identity(request["user"])
        environment = {"PATH": DEFAULT_PATH, "HOME": identity.home, "USER": identity.name, "LOGNAME": identity.name}
        environment.update(self.environment)
        environment.update(self.config["env"])
        if identity.uid != 0 and environment.get("HOME") == "/root":
            environment["HOME"] = identity.home
        environment.update(request["env"])
        environment["TANGRAM_ACTION"] = request["marker"]
        argv = request["argv"] or [self.shell, "-c", request["shell"]]
        out, err = os.pipe(), os.pipe()
        source = os.pipe() if request["stdin"] else (self.null, -1)
        try:
            job.pid = self.spawn(identity, request["cwd"], argv, environment, (source[0], out[1], err[1]))
        except BaseException as error:
            for fd in (out[0], err[0], source[1]):
                if fd >= 0:
                    os.close(fd)
            if not isinstance(error, OSError):
                raise
            self.refuse(job, argv[0], error)
            return
        finally:
            os.close(out[1])
            os.close(err[1])
            if source[0] != self.null:
                os.close(source[0])
        self.jobs[number] = self.by_pid[job.pid] = job
        job.streams = {out[0]: STDOUT, err[0]: STDERR}
        for fd in job.streams:
            os.set_blocking(fd, False)
        if source[1] >= 0:
            job.stdin = source[1]
            os.set_blocking(job.stdin, False)
        self.on_children(self.wakeup)  # a short command has often ended before its vfork lets us go on
        for fd in job.streams:
            self.watch(fd, self.output_handler(job), 0 if self.throttled is not None else select.EPOLLIN)

    def spawn(
        self, identity: Identity, cwd: str, argv: list[str], environment: dict[str, str], fds: tuple[int, int, int]
    ) -> int:
        if self.oom >= 0:
            os.pwrite(self.oom, OOM_SCORE, 0)
        try:
            with identity:
                try:
                    os.chdir(self.real(cwd or self.config["workdir"]))
                except OSError as error:
                    raise Refused("invalid_input", f"working directory: {_sentence(error)}") from None
                actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(fds)]
                signals = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores them, and a child would inherit that
                try:
                    program = _which(argv[0], environment.get("PATH", DEFAULT_PATH))
                    return os.posix_spawn(
                        program, argv, environment, file_actions=actions, setsid=True, setsigdef=signals
                    )
                except (ValueError, TypeError, UnicodeError) as error:
                    raise Refused("invalid_input", f"the command cannot be executed: {error}") from None
                except OSError as error:
                    if error.errno == errno.E2BIG:
                        raise Refused("invalid_input", "the argument list is too long") from None
                    raise
        finally:
            os.chdir("/")
            if self.oom >= 0:
                os.pwrite(self.oom, self.oom_score, 0)

    def refuse(self, job: Job, name: str, error: OSError) -> None:
        """A program that cannot be started is a result, with a shell's exit codes."""
        self.say(job, STDERR, f"{name}: {os.strerror(error.errno or 0)}\n".encode())
        self.conclude(job, {"code": 127 if error.errno == errno.ENOENT else 126})

    def feed(self, number: int, data: bytes) -> None:
        """Standard input of a command, or the body of an upload; empty ends it."""
        upload = self.uploads.get(number)
        if upload is not None:
            if upload.feed(number, data):
                del self.uploads[number]
            return
        job = self.jobs.get(number)
        if job is None or job.stdin < 0:
            return
        job.input += data
        job.input_ended = job.input_ended or not data
        self.on_input(job)

    def on_input(self, job: Job) -> None:
        try:
            while job.input:
                taken = os.write(job.stdin, memoryview(job.input)[:CHUNK_BYTES])
                del job.input[:taken]
                self.send(ACK, job.number, HEADER.pack(taken, 0, 0))
        except BlockingIOError:
            if job.stdin not in self.handlers:
                self.watch(job.stdin, lambda _: self.on_input(job), select.EPOLLOUT)
            return
        except OSError:
            job.input.clear()
            job.input_ended = True
            self.send(ACK, job.number, b"")  # it reads no more
        self.forget(job.stdin)
        if job.input_ended:
            os.close(job.stdin)
            job.stdin = -1

    def output_handler(self, job: Job) -> Callable[[int], None]:
        def handle(fd: int) -> None:
            self.on_output(job, fd)

        return handle

    def on_output(self, job: Job, fd: int) -> bool:
        """Pass on one chunk; False at the end of the stream or when there is nothing now."""
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            job.streams.pop(fd, None)
            self.drains.pop(fd, None)
            self.forget(fd)
            os.close(fd)
            return False
        stream = job.streams.get(fd)
        if stream is None:
            return True  # its command has ended: read, so that the writer lives on, and dropped
        if job.limit is not None:
            room = job.limit - job.kept[stream]
            job.truncated[stream] = job.truncated[stream] or len(data) > room
            data = data[:room]
            job.kept[stream] += len(data)
        if data:
            self.say(job, stream, data)
        return True

    def say(self, job: Job, stream: int, data: bytes) -> None:
        if job.claim:
            job.output.add(stream, data)
        self.send(stream, job.number, data)

    # --- commands that outlast their gateway

    def outlives(self, job: Job) -> bool:
        """Whether a command goes on when its connection ends. One over which we are attached to may end any time."""
        return job.detached or (self.attachment is not None and job.claim != "")

    def claimable(self) -> list[Job]:
        return [job for job in [*self.jobs.values(), *self.ended.values()] if self.outlives(job)]

    def drop_attached(self) -> None:
        """Another gateway has attached than the one whose commands go on over any number of its connections."""
        for job in [job for job in self.claimable() if not job.detached]:
            if self.ended.pop(job.claim, None) is None:
                self.end(job, 0.0)
            job.claim = ""

    def claim(self, number: int, claim: str) -> None:
        """Tell from its beginning what a command of an earlier gateway has said, and from now on what it says."""
        for job in self.claimable():
            if job.claim == claim:
                self.renumber(job, number)
                for stream, data in job.output:
                    self.send(stream, number, data)
                if job.account:
                    self.send(EXIT, number, job.account)
                return
        raise Refused("not_found", f"there is no {claim!r} to be claimed")

    def keep(self, prefix: str, *, detached: bool) -> None:
        """Whether what is claimed by names with this prefix outlasts its gateway; if not, and unheard, it is ended."""
        for job in [*self.jobs.values(), *self.ended.values()]:
            if job.claim.startswith(prefix):
                job.detached = detached
                if detached:
                    self.remember_claim(job.claim)
                elif self.ended.pop(job.claim, None) is None and job.number < 0:
                    job.claim = ""
                    self.end(job, job.grace_s if self.gateway is None else 0.0)

    def remember_claim(self, claim: str) -> None:
        """It was begun; of every other detached command it is certain that it was not."""
        self.started[claim] = None
        if len(self.started) > STARTED_MAX:
            del self.started[next(iter(self.started))]
            self.forgetful = True

    def renumber(self, job: Job, number: int) -> None:
        if self.jobs.pop(job.number, None) is not None:
            self.jobs[number] = job
        job.number = number

    # --- ends

    def on_children(self, fd: int) -> None:
        try:
            os.read(fd, 4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            job = self.by_pid.pop(pid, None)
            if job is not None:
                job.status = status
                job.cpu_s = usage.ru_utime + usage.ru_stime
                job.peak_kib = usage.ru_maxrss
                if job.kill_s is None:
                    self.finish(job, survivors=0)

    def end(self, job: Job, grace_s: float) -> None:
        """Begin to end a job's whole tree: SIGTERM, and SIGKILL after the grace."""
        kill_s = time.monotonic() + grace_s
        if job.kill_s is None or kill_s < job.kill_s:
            job.kill_s = kill_s
            if grace_s > 0:
                self.signal(job, signal.SIGTERM)
            self.pursue(job, time.monotonic())

    def pursue(self, job: Job, now: float) -> None:
        """Until nothing of it is left; a process that SIGKILL does not end in time is reported."""
        kill_s = now if job.kill_s is None else job.kill_s
        if now >= kill_s:
            self.signal(job, signal.SIGKILL)
        left = self.members(job)
        if (job.status is not None and not left) or now >= kill_s + UNKILLABLE_S:
            self.finish(job, survivors=len(left))

    def finish(self, job: Job, survivors: int) -> None:
        """Hand over what its pipes still hold and how it ended. Pipes kept open by others are drained from now on."""
        for fd in list(job.streams):
            for _ in range(PENDING_MAX_BYTES // CHUNK_BYTES):
                if not self.on_output(job, fd):
                    break
        for fd in list(job.streams):
            del job.streams[fd]
            self.forget(fd)
            self.watch(fd, self.output_handler(job))
            self.drains[fd] = None
        while len(self.drains) > DRAINS_MAX:
            fd = next(iter(self.drains))
            del self.drains[fd]
            self.forget(fd)
            os.close(fd)
        if job.stdin >= 0:
            self.forget(job.stdin)
            os.close(job.stdin)
        del self.jobs[job.number]
        self.by_pid.pop(job.pid, None)
        self.conclude(job, {**_account(job, survivors), **self.shortage(job)})

    def conclude(self, job: Job, account: dict[str, Any]) -> None:
        """Tell how it ended; it can be claimed until too much else has ended."""
        job.ended_s, job.account = time.monotonic(), _json(account)
        self.send(EXIT, job.number, job.account)
        if self.outlives(job):
            self.ended[job.claim] = job
        while len(self.ended) > ENDED_MAX or (len(self.ended) > 1 and self.ended_bytes() > ENDED_MAX_BYTES):
            del self.ended[next(iter(self.ended))]

    def ended_bytes(self) -> int:
        return sum(len(job.output.data) for job in self.ended.values())

    def shortage(self, job: Job) -> dict[str, Any]:
        """Whether the kernel ended a process of the sandbox for want of memory, if the command did not end well."""
        if not job.status or not self.config.get("own_cgroup") or (kills := _memory_kills()) <= self.memory_kills:
            return {}
        self.memory_kills = kills
        return {"out_of_memory": True, "peak_bytes": max(job.peak_kib * 1024, _memory_peak_bytes())}

    def members(self, job: Job) -> list[int]:
        """Living processes that the job started, by whatever detour: double forks and new sessions included."""
        table = _processes()
        return [
            pid
            for top in [pid for pid, (parent, _) in table.items() if parent == self.pid]
            if top not in job.bystanders and self.owns(job, top)
            for pid in [top, *_descendants(top, table)]
            if table[pid][1] != "Z"
        ]

    def owns(self, job: Job, pid: int) -> bool:
        """Whether a child of ours is the job's: one that we adopted since it began is, unless it names another."""
        owner = self.by_pid.get(pid)
        if owner is not None or len(self.jobs) == 1:
            return owner in (job, None)
        try:
            with self.identity(""), open(f"/proc/{pid}/environ", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            return True
        return not any(other.marker in words for other in self.jobs.values() if other is not job)

    def signal(self, job: Job, number: int) -> None:
        if self.pid == 1 and len(self.jobs) == 1 and not job.bystanders:
            _kill(-1, number)  # atomic: a fork bomb cannot outrun it
            return
        members = self.members(job)
        if number == signal.SIGKILL:
            for pid in members:
                _kill(pid, signal.SIGSTOP)
            members = self.members(job)
        for pid in members:
            _kill(pid, number)

    def sweep(self, now: float) -> None:
        """Kill every process in the sandbox but the runner; answered when the last one is gone, not just told to go."""
        others = _descendants(self.pid, _processes())
        for pid in [-1] if self.pid == 1 and others else others:
            _kill(pid, signal.SIGKILL)
        for number in [number for number, give_up_s in self.sweeps.items() if not others or now >= give_up_s]:
            del self.sweeps[number]
            self.send(DONE, number, _json({"survivors": len(others)}))

    # --- files

    def real(self, path: str) -> str:
        """The path as this process sees it: a sandbox without its own root keeps its files in a directory."""
        workdir: str = self.config["workdir"]
        base: str = self.config.get("base", "")
        full = os.path.normpath(os.path.join(workdir, path))
        if not os.path.isabs(path) and not _within(full, workdir):
            raise Refused("invalid_input", f"{path!r} leaves the sandbox's working directory")
        if not base:
            return full
        if not _within(full, workdir):
            if _within(full, base):
                return full
            raise Refused("invalid_input", f"{path!r} leaves the sandbox")
        return os.path.normpath(base + "/" + os.path.relpath(full, workdir))

    def locate(self, path: str, *, last: bool) -> tuple[int, str]:
        """The directory (an open descriptor) and the name that a path means, links resolved and bounds checked.

        The resolved path is walked again without following links, so that nothing can be slipped in between.
        """
        wanted = self.real(path)
        parent, name = os.path.split(wanted)
        true = os.path.realpath(wanted if last else parent)
        base = self.config.get("base", "")
        if (base and not _within(true, os.path.realpath(base))) or any(_within(true, tree) for tree in KERNEL_TREES):
            raise Refused("invalid_input", f"{path!r} leaves the sandbox")
        if last:
            true, name = os.path.split(true)
        way = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW  # passing through needs no right to read
        fd = os.open("/", way)
        for part in [part for part in true.split("/") if part]:
            try:
                below = os.open(part, way, dir_fd=fd)
            finally:
                os.close(fd)
            fd = below
        return fd, name

    def read(self, number: int, request: dict[str, Any]) -> None:
        with self.identity(""):
            directory, name = self.locate(request["path"], last=True)
            try:
                fd = os.open(name or ".", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
            finally:
                os.close(directory)
        with open(fd, "rb", buffering=0) as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise Refused("invalid_input", f"{request['path']!r} is no regular file")
            left: int = request["limit"]
            while True:
                data = file.read(min(CHUNK_BYTES, left + 1))
                if len(data) > left:
                    raise Refused("too_large", f"{request['path']!r} is larger than {request['limit']} bytes")
                if not data:
                    break
                left -= len(data)
                self.send(STDOUT, number, data)
        self.send(DONE, number, b"{}")

    def entries(self, path: str) -> list[dict[str, Any]]:
        with self.identity(""):
            directory, name = self.locate(path, last=True)
            try:
                fd = os.open(name or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
            finally:
                os.close(directory)
        try:
            names = sorted(os.listdir(fd))
            if len(names) > ENTRIES_MAX:
                raise Refused("too_large", f"{path!r} has {len(names)} entries, more than {ENTRIES_MAX}")
            return [_entry(fd, name) for name in names]
        finally:
            os.close(fd)


class Upload:
    """A file on its way in: written beside its place, and moved there when complete."""

    def __init__(self, runner: Runner, request: dict[str, Any]) -> None:
        self.runner = runner
        self.mode: int = request["mode"]
        with runner.identity(""):
            parent = os.path.dirname(runner.real(request["path"]))
            if not os.path.isdir(parent):
                _make_beneath(runner, request["path"])
            self.directory, self.name = runner.locate(request["path"], last=False)
            self.part = f".tangram-{os.urandom(6).hex()}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            try:
                self.fd = os.open(self.part, flags, 0o600, dir_fd=self.directory)
            except OSError:
                os.close(self.directory)
                raise

    def feed(self, number: int, data: bytes) -> bool:
        """True when it is over, one way or the other."""
        try:
            if data:
                view = memoryview(data)
                while view:
                    view = view[os.write(self.fd, view) :]
                return False
            with self.runner.identity(""):
                os.fchmod(self.fd, self.mode)
                os.replace(self.part, self.name, src_dir_fd=self.directory, dst_dir_fd=self.directory)
        except OSError as error:
            self.abandon()
            self.runner.send(ERROR, number, _json({"code": _code_of(error), "message": _sentence(error)}))
            return True
        os.close(self.fd)
        os.close(self.directory)
        self.runner.send(DONE, number, b"{}")
        return True

    def abandon(self) -> None:
        try:
            with self.runner.identity(""):
                os.unlink(self.part, dir_fd=self.directory)
        except OSError:
            pass
        os.close(self.fd)
        os.close(self.directory)


def _make_beneath(runner: Runner, path: str) -> None:
    """The missing directories of a path, made only where the existing part of it lies in the sandbox."""
    parent = os.path.dirname(runner.real(path))
    missing: list[str] = []
    while not os.path.lexists(parent):
        parent, name = os.path.split(parent)
        missing.append(name)
    base = runner.config.get("base", "")
    if base and not _within(os.path.realpath(parent), os.path.realpath(base)):
        raise Refused("invalid_input", f"{path!r} leaves the sandbox")
    for name in reversed(missing):
        parent = os.path.join(parent, name)
        os.mkdir(parent, 0o755)


def _account(job: Job, survivors: int) -> dict[str, Any]:
    status = job.status or 0
    return {
        "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "timed_out": job.timed_out,
        "truncated": [job.truncated[STDOUT], job.truncated[STDERR]],
        "duration_s": time.monotonic() - job.started_s,
        "cpu_s": job.cpu_s,
        "peak_bytes": job.peak_kib * 1024,
        "survivors": survivors,
    }


def _processes() -> dict[int, tuple[int, str]]:
    """Every visible process: its parent and its state."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            table[int(name)] = (int(fields[1]), fields[0].decode())
    return table


def _descendants(root: int, table: dict[int, tuple[int, str]]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    fresh = children.get(root, [])
    while fresh:
        found += fresh
        fresh = [child for pid in fresh for child in children.get(pid, ())]
    return found


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


def _which(name: str, path: str) -> str:
    if "/" in name:
        return name
    for directory in path.split(":"):
        candidate = os.path.join(directory or ".", name)
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return candidate
    raise FileNotFoundError(errno.ENOENT, "not found", name)


def _entry(directory: int, name: str) -> dict[str, Any]:
    try:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return {"name": os.fsencode(name).decode("utf-8", "replace"), "size": 0, "directory": False, "mode": 0}
    return {
        "name": os.fsencode(name).decode("utf-8", "replace"),
        "size": info.st_size,
        "directory": stat.S_ISDIR(info.st_mode),
        "mode": stat.S_IMODE(info.st_mode),
    }


def _within(path: str, tree: str) -> bool:
    return path == tree or path.startswith(tree.rstrip("/") + "/")


def _same(one: str, other: str) -> bool:
    """Equality in a time that does not tell where the two differ."""
    wanted, given = one.encode(), other.encode()
    difference = len(wanted) ^ len(given)
    for index in range(min(len(wanted), len(given))):
        difference |= wanted[index] ^ given[index]
    return difference == 0


def _code_of(error: OSError) -> str:
    return "not_found" if error.errno in (errno.ENOENT, errno.ENOTDIR) else "invalid_input"


def _sentence(error: OSError) -> str:
    return f"{error.filename or 'file'}: {os.strerror(error.errno or 0)}"


def _json(value: dict[str, Any]) -> bytes:
    return _ENCODER.encode(value).encode()


def _memory_kills() -> int:
    for path in MEMORY_EVENTS:
        try:
            with open(path, "rb") as file:
                words = file.read().split()
            return int(words[words.index(b"oom_kill") + 1])
        except (OSError, ValueError):
            continue
    return 0


def _memory_peak_bytes() -> int:
    for path in MEMORY_PEAKS:
        try:
            with open(path, "rb") as file:
                return int(file.read())
        except (OSError, ValueError):
            continue
    return 0


def _own_oom_score() -> tuple[int, bytes]:
    """The descriptor through which children get a worse score than ours (they are ended first), and ours."""
    try:
        with open("/proc/self/oom_score_adj", "rb") as file:
            score = file.read()
        return (os.open("/proc/self/oom_score_adj", os.O_WRONLY) if int(score) < int(OOM_SCORE) else -1), score
    except OSError:
        return -1, b""


def _listen() -> socket.socket:
    try:
        os.unlink("s")
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("s")
    listener.listen(STRANGERS_MAX)
    listener.setblocking(False)
    return listener


def _children_signal() -> int:
    """A descriptor that becomes readable when a child ends."""
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    os.set_blocking(theirs, False)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return ours


def _shed_privileges() -> None:
    """What a container engine has done already, and bubblewrap or a plain start has not."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(47, 4, 0, 0, 0)  # PR_CAP_AMBIENT_CLEAR_ALL: commands would inherit our capabilities through exec
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: commands of the same user could trace and read us
    if os.getpid() != 1:
        libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: without a namespace of our own, adopt the orphans


def main() -> None:
    os.umask(0o022)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), False)
            except OSError:
                pass
    runner = Runner(None if sys.argv[1] == "--attached" else sys.argv[1])
    if "--shed" in sys.argv:
        _shed_privileges()
    runner.serve()


if __name__ == "__main__":
    main()
