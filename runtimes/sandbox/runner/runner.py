"""The resident runner: the one process of ours inside a sandbox. Standard library only, one file, Python 3.8 on.

Started once with the sandbox (``python3 -I -S runner.py DIRECTORY [--shed]``) it listens on ``DIRECTORY/s`` and
executes commands for the gateway, so that an action costs a frame and not a ``docker exec``. With ``--attached`` in
place of a directory it speaks over its own standard streams, to which a gateway attaches through the engine. It is
PID 1 of the sandbox's process namespace, or else the subreaper of everything started in it.

A frame is ``length:u32 type:u8 id:u32`` in network order, then ``length`` bytes: JSON for requests and ends, raw bytes
for data. The first connection's HELLO sets the token, before any foreign code can run; later connections must know it.

A command outlives its gateway if it was asked to, for ``unattended_s`` at most: its output and its end are kept until
the next gateway claims it by the name that it was given, or says that it need not be kept.

Commands run as the sandbox's user, never as the runner: the child takes on the user's ids before it becomes the
command, and keeps no privilege to return to. The runner's saved ids stay its own, and its real ones but for the moment
in which the first process of a namespace starts a command; it ignores every signal that can be ignored, and the kernel
calls it undumpable: nobody inside can end, trace or read it.
"""

# pathlib, contextlib, typing, and enum, re and collections behind signal, socket, json and array, would cost every
# sandbox their import.
# An exception of any kind ends one exchange, and never the sandbox.
# ruff: noqa: BLE001, PTH101, PTH102, PTH103, PTH104, PTH106, PTH108, PTH112, PTH116, PTH117, PTH118, PTH120, PTH123, PTH208, SIM105
from __future__ import annotations

import errno
import os
import pwd
import select
import stat
import struct
import sys
import time

MYPY = False
if MYPY:
    import signal
    import socket
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any
else:
    try:
        import _signal as signal
        import _socket as socket
    except ImportError:  # another Python than CPython
        import signal
        import socket

PROTOCOL = 1
#: What the name begins with by which a command finds a variable that is hidden from what starts it.
HIDDEN = "TANGRAM_HIDDEN_"
HEADER = struct.Struct("!IBI")
FRAME_MAX_BYTES = 4 * 2**20
CHUNK_BYTES = 64 * 2**10
#: Standard input bytes that may be under way to one command before it has taken them.
WINDOW_BYTES = 256 * 2**10

# From the gateway.
HELLO, RUN, STDIN, KILL, READ, WRITE, LIST, SWEEP, CLAIM, KEEP, REST, LEND, STEER = range(1, 14)
# To the gateway.
READY, STDOUT, STDERR, EXIT, ACK, DONE, ERROR, SIZE, STANDING = range(65, 74)

#: Files that may be on their way to the gateway at once.
DOWNLOADS_MAX = 64
#: Bytes waiting for the gateway at which the commands' pipes are no longer read.
PENDING_MAX_BYTES = 1 * 2**20
TICK_S = 0.01
#: Seconds after which what must rest is stopped again, as a process can arrange to be continued.
REST_S = 1.0
#: Looks without progress after which a command with a stopped process is ended, within its `still_s`.
STILL_LOOKS = 6
#: Looks, one each TICK_S, at whether what was stopped stands still.
LOOKS = 3
#: Times that the end of all processes is asked for at our own end.
ENDS_MAX = 500
#: Seconds after SIGKILL at which a process that will not die is reported instead of awaited.
UNKILLABLE_S = 5.0
ORPHAN_PIPES_MAX = 128
#: Ended commands that can still be claimed, and the bytes of their output; the last one is kept whole.
ENDED_MAX = 16
ENDED_MAX_BYTES = 4 * 2**20
#: Claims that the next gateway is told were started; if there were more, it is told nothing.
STARTED_MAX = 64
UNAUTHENTICATED_MAX = 8
#: What a gateway sends first when it attaches, and what it expects back.
MARK_BYTES, ANSWER_BYTES = 32, 16
#: Room for the descriptors that may come with one message.
LENT_BYTES = 64
DESCRIPTOR_BYTES = struct.calcsize("i")
ENTRIES_MAX = 10000
#: Descriptors below our bound that no request may take: we list processes and hear gateways with them.
RESERVED_DESCRIPTORS = 16
#: Markers of earlier commands from which on those are forgotten that no process bears.
MARKERS_MAX = 1024
#: Faults of our own that are described on standard error; the others are told to who asked alone.
COMPLAINTS_MAX = 20
#: What ends the input on a terminal, as somebody types it.
END_OF_INPUT = b"\x04"
OOM_SCORE = b"500"

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: What the kernel says about the memory of our own cgroup (v2, v1), if the sandbox has one.
MEMORY_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
MEMORY_PEAKS = ("/sys/fs/cgroup/memory.peak", "/sys/fs/cgroup/memory/memory.max_usage_in_bytes")
#: A user id that is nobody's; the runner has it for an instant.
NOBODY = 65534
#: What the runner ignores, and what its commands must not inherit as ignored.
IGNORED = sorted(set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGCONT})
#: The kernel's own trees, in which reading and writing is no file access.
KERNEL_TREES = ("/proc", "/sys", "/dev")


# --- the wire


class ProtocolError(Exception):
    """The other side does not speak the protocol."""


class FrameDecoder:
    """Bytes in, frames out. The gateway decodes with it too, also frames of other formats."""

    def __init__(self, header: struct.Struct = HEADER, *, length_at: int = 0, limit: int = FRAME_MAX_BYTES) -> None:
        """``length_at`` is the place of the payload's length among the header's fields, ``limit`` its bound."""
        self.header = header
        self.length_at = length_at
        self.limit = limit
        self.incoming = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[tuple[Any, ...], bytes]]:
        """Yield the header fields and the payload of each frame that ``data`` completes.

        Raises ProtocolError if a payload exceeds the bound.
        """
        incoming, size = self.incoming, self.header.size
        incoming += data
        start = 0
        try:
            while len(incoming) - start >= size:
                fields = self.header.unpack_from(incoming, start)
                length = fields[self.length_at]
                if length > self.limit:
                    raise ProtocolError(f"a frame of {length} bytes")
                end = start + size + length
                if len(incoming) < end:
                    return
                payload = bytes(incoming[start + size : end])
                start = end
                yield fields, payload
        finally:
            del incoming[:start]


def encode(kind: int, number: int, payload: bytes = b"") -> bytes:
    return HEADER.pack(len(payload), kind, number) + payload


class _Plain:
    """What is asked of Python's reader of JSON: plain values, and of names for no number what Python makes of them."""

    strict, object_hook, object_pairs_hook = True, None, None
    parse_float, parse_int, parse_constant = float, int, float


def _unknown(value: object) -> None:
    raise TypeError(f"{type(value).__name__} is no JSON")


def _json_coders() -> tuple[Callable[[str], Any], Callable[[Any], str]]:
    """Return what reads and writes JSON: the two functions inside Python's own module, without that module."""
    try:
        from _json import encode_basestring_ascii, make_encoder, make_scanner

        scan = make_scanner(_Plain)  # type: ignore[arg-type]  # it takes whatever has these attributes
        write = make_encoder({}, _unknown, encode_basestring_ascii, None, ":", ",", False, False, True)
    except (ImportError, TypeError, AttributeError):  # another Python than those of today
        import json

        return json.loads, json.JSONEncoder(separators=(",", ":")).encode

    def read(text: str) -> Any:
        try:
            value, end = scan(text, 0)
        except StopIteration:
            raise ValueError("no JSON") from None
        if end != len(text):
            raise ValueError("more than one value")
        return value

    return read, lambda value: "".join(write(value, 0))


_read, _write = _json_coders()


def as_json(value: Mapping[str, Any]) -> bytes:
    return _write(value).encode()


def from_json(payload: bytes) -> Any:
    """Return a value, written without spaces around it; raises ValueError or RecursionError."""
    return _read(payload.decode("utf-8", "surrogatepass"))


class RequestDenied(Exception):
    """A request that cannot be executed: a code of `manager.errors`, a message, and what is wrong with a file.

    Every other exception is our own fault, or that of a machine that runs short, and is told as such.
    """

    def __init__(self, code: str, message: str, file_error: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.file_error = file_error


#: What an error of the kernel means of a file that somebody asked for: no such thing, no room of its own, or none of
#: this machine's.
_CODES = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_found",
    errno.ENOSPC: "too_large",
    errno.EDQUOT: "too_large",
    errno.EFBIG: "too_large",
    errno.EMFILE: "capacity_exceeded",
    errno.ENFILE: "capacity_exceeded",
    errno.ENOMEM: "capacity_exceeded",
    errno.EIO: "capacity_exceeded",
}
#: What an error of the kernel means of a file, for programs.
_FILE_ERRORS = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_a_directory",
    errno.EISDIR: "is_a_directory",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.EROFS: "read_only",
}
#: Errors of the kernel that say that this machine runs short.
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC)


def _file_denied(error: OSError) -> RequestDenied:
    """Return what is told of an error with a file that somebody asked for."""
    number = error.errno or 0
    return RequestDenied(_CODES.get(number, "invalid_input"), _sentence(error), _FILE_ERRORS.get(number, ""))


def _sentence(error: OSError) -> str:
    bound = " (sandbox.disk)" if _CODES.get(error.errno or 0) == "too_large" else ""
    return f"{error.filename or 'file'}: {os.strerror(error.errno or 0)}{bound}"


def _is_shortage(error: Exception) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SHORTAGES)


def _refusal(error: Exception) -> bytes:
    """Return the payload of an ERROR frame; what is no RequestDenied is told as ours, and complained about."""
    if isinstance(error, RequestDenied):
        return as_json({"code": error.code, "message": str(error), "file_error": error.file_error})
    if _is_shortage(error):
        return as_json({"code": "capacity_exceeded", "message": f"the sandbox's runner runs short: {error}"})
    _complain(error)
    return as_json({"code": "internal", "message": f"the sandbox's runner failed: {type(error).__name__}: {error}"})


_complaints = 0


def _complain(error: Exception) -> None:
    """Describe a fault of ours on standard error, unless there were many."""
    global _complaints
    _complaints += 1
    if _complaints <= COMPLAINTS_MAX:
        try:
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            pass  # nobody reads it


def _require_spare(*fds: int) -> None:
    """Raise OSError if a descriptor that was opened for a request is one of the last that we may have."""
    bound = os.sysconf("SC_OPEN_MAX")
    if 0 < bound <= max(fds) + RESERVED_DESCRIPTORS:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Poller:
    """One epoll over all descriptors, and the handler of each."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.handlers: dict[int, Callable[[int], None]] = {}

    def watch(self, fd: int, handler: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        """Call the handler, which must not raise, whenever there are such events. Raises OSError, and watches not."""
        self.epoll.register(fd, events)
        self.handlers[fd] = handler

    def change(self, fd: int, events: int) -> None:
        """Wait for other events, if it is watched at all."""
        if fd in self.handlers:
            self.epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        if self.handlers.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def handle(self, within_s: float) -> None:
        """Wait for descriptors to be ready and call their handlers."""
        for fd, _ in self.epoll.poll(within_s):
            handler = self.handlers.get(fd)
            if handler is not None:
                try:
                    handler(fd)
                except Exception as error:  # each ends what it serves itself: the others go on whatever became of it
                    _complain(error)


# --- users and paths


class Identity:
    """A user of the sandbox. As a context manager it has that user's rights to files for a moment."""

    def __init__(self, user: str, workdir: str) -> None:
        try:
            entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
            self.uid, self.gid, self.name, self.home = entry.pw_uid, entry.pw_gid, entry.pw_name, entry.pw_dir
            self.groups = os.getgrouplist(self.name, self.gid)
        except (KeyError, OverflowError):
            if not user.isdigit() or int(user) >= 2**32 - 1:
                raise RequestDenied("invalid_input", f"no user {user!r} in the sandbox") from None
            self.uid = self.gid = int(user)
            self.name, self.home, self.groups = user, workdir, [int(user)]
        if not os.path.isdir(self.home):
            self.home = workdir

    def __enter__(self) -> None:
        if self.foreign:
            try:
                os.setgroups(self.groups)
                os.setegid(self.gid)
                os.seteuid(self.uid)  # the effective id alone: who may signal us goes by the other two
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        if self.foreign:
            os.seteuid(0)
            os.setegid(0)
            os.setgroups([0])

    @property
    def foreign(self) -> bool:
        """Whether it is another user than the runner, who can become it."""
        return os.getuid() == 0 and self.uid != 0

    def become(self) -> None:
        """Take on its ids for good."""
        os.setgroups(self.groups)
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)


class Workplace:
    """The sandbox as the gateway's greeting describes it: its users and its paths."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.identities: dict[str, Identity] = {}
        self.prepared = False

    def identity(self, user: str = "") -> Identity:
        """Return a user, by default the sandbox's own; raises RequestDenied if commands cannot run as that user."""
        user = user or self.config["user"]
        if user not in self.identities:
            self.identities[user] = Identity(user, self.config["workdir"])
        identity = self.identities[user]
        if os.getuid() != 0 and identity.uid != os.getuid() and user != self.config["user"]:
            raise RequestDenied("invalid_input", f"this sandbox cannot run commands as {user!r}")
        if identity.uid == 0 and not self.config.get("root", True):
            raise RequestDenied("invalid_input", f"{user!r} is root, and this sandbox cannot run commands as root")
        return identity

    def prepare_workdir(self) -> None:
        """Make the working directory the user's, before any command runs."""
        own: bool = self.config.get("own_user", False) and os.getuid() == 0
        if own:
            _enroll(self.config["user"], self.config["workdir"])
        identity = self.identity()
        workdir = self.real(self.config["workdir"])
        is_new = not os.path.isdir(workdir)
        if is_new:
            os.makedirs(workdir, 0o755)
        if own or (is_new and os.getuid() == 0):
            os.chown(workdir, identity.uid, identity.gid)
        if os.getuid() == 0:
            try:
                os.seteuid(NOBODY)  # from here on the kernel calls the runner undumpable: nobody can trace or read it
            except OSError:
                pass  # a user namespace without such a user: there it was called so at its start
            os.seteuid(0)
        self.prepared = True

    def real(self, path: str) -> str:
        """Return the path as this process sees it: a sandbox without its own root keeps its files in a directory."""
        workdir: str = self.config["workdir"]
        base: str = self.config.get("base", "")
        full = os.path.normpath(os.path.join(workdir, path))
        if not os.path.isabs(path) and not _within(full, workdir):
            raise RequestDenied("invalid_input", f"{path!r} leaves the sandbox's working directory", "outside")
        if not base:
            return full
        if not _within(full, workdir):
            if _within(full, base):
                return full
            raise RequestDenied("invalid_input", f"{path!r} leaves the sandbox", "outside")
        return os.path.normpath(base + "/" + os.path.relpath(full, workdir))

    def locate(self, path: str, *, last: bool) -> tuple[int, str]:
        """Return the directory (an open descriptor) and the name that a path means; raises RequestDenied out of bounds.

        Links are resolved, those of the ``last`` part only if asked. The resolved path is walked again without
        following links, so that nothing can be slipped in between.
        """
        wanted = self.real(path)
        parent, name = os.path.split(wanted)
        true = os.path.realpath(wanted if last else parent)
        if not self.contains(true) or any(_within(true, tree) for tree in KERNEL_TREES):
            raise RequestDenied("invalid_input", f"{path!r} leaves the sandbox", "outside")
        if last:
            true, name = os.path.split(true)
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW  # passing through needs no right to read
        fd = os.open("/", flags)
        for part in [part for part in true.split("/") if part]:
            try:
                below = os.open(part, flags, dir_fd=fd)
            finally:
                os.close(fd)
            fd = below
        return fd, name

    def make_parents(self, path: str) -> None:
        """Make the missing directories of a path if the existing part of it is in the sandbox; raises RequestDenied."""
        parent = os.path.dirname(self.real(path))
        missing: list[str] = []
        while not os.path.lexists(parent):
            parent, name = os.path.split(parent)
            missing.append(name)
        if missing and not self.contains(os.path.realpath(parent)):
            raise RequestDenied("invalid_input", f"{path!r} leaves the sandbox", "outside")
        for name in reversed(missing):
            parent = os.path.join(parent, name)
            os.mkdir(parent, 0o755)

    def contains(self, true: str) -> bool:
        """Return whether a path without links lies below the directory of a sandbox that has no root of its own."""
        base: str = self.config.get("base", "")
        return not base or _within(true, os.path.realpath(base))


def _enroll(uid: str, home: str) -> None:
    """Give an id that no image can know a name, if the files may be written."""
    for name, line in (("passwd", f"agent:x:{uid}:{uid}::{home}:/bin/sh"), ("group", f"agent:x:{uid}:")):
        try:
            with open(f"/etc/{name}", "r+b") as file:
                known = file.read()
                if b":%s:" % uid.encode() not in known:
                    file.write((b"" if known.endswith(b"\n") or not known else b"\n") + line.encode() + b"\n")
        except OSError:
            pass


def _within(path: str, tree: str) -> bool:
    return path == tree or path.startswith(tree.rstrip("/") + "/")


# --- files


class Files:
    """Reads, listings and uploads, all with the rights of the sandbox's user."""

    def __init__(self, workplace: Workplace, link: GatewayLink) -> None:
        self.workplace = workplace
        self.link = link
        self.send = link.send
        self.uploads: dict[int, Upload] = {}
        self.downloads: dict[int, Download] = {}

    def open_path(self, path: str, flags: int, user: str) -> int:
        """Return a descriptor of the file; raises RequestDenied."""
        with self.workplace.identity(user):
            try:
                directory, name = self.workplace.locate(path, last=True)
                try:
                    fd = os.open(name or ".", flags | os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
                finally:
                    os.close(directory)
            except OSError as error:
                raise _file_denied(error) from None
        try:
            _require_spare(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def read(self, number: int, request: dict[str, Any]) -> None:
        """Begin to send a file, as long as it is now; `pump` goes on with it."""
        path: str = request["path"]
        if len(self.downloads) >= DOWNLOADS_MAX:
            raise RequestDenied("capacity_exceeded", f"{DOWNLOADS_MAX} files are being read at once")
        fd = self.open_path(path, os.O_NONBLOCK, request["user"])
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                kind = "is_a_directory" if stat.S_ISDIR(info.st_mode) else "not_a_file"
                raise RequestDenied("invalid_input", f"{path!r} is no regular file", kind)
            if info.st_size > request["limit"]:
                raise RequestDenied("too_large", f"{path!r} is larger than {request['limit']} bytes")
            download = Download(fd, path, info.st_size, int(request["window"]))
        except BaseException:
            os.close(fd)
            raise
        self.downloads[number] = download
        self.send(SIZE, number, str(info.st_size).encode())

    @property
    def sending(self) -> bool:
        """Whether `pump` has something that it can send now."""
        return self.link.throttled is None and any(each.ready for each in self.downloads.values())

    def pump(self) -> None:
        """Send one chunk of each file that is on its way, while the gateway takes what it is sent."""
        for number, download in list(self.downloads.items()):
            if not self.sending:
                return
            if not download.ready:
                continue
            try:
                data = download.next_chunk()
                if data:
                    self.send(STDOUT, number, data)
                if download.left == 0:
                    self.cancel(number)
                    self.send(DONE, number, b"{}")
            except Exception as error:
                self.fail(number, error)

    def fail(self, number: int, error: Exception) -> None:
        """Give up what is on its way under this number, and say why."""
        self.cancel(number)
        self.send(ERROR, number, _refusal(error))

    def cancel(self, number: int) -> None:
        """Give up what is on its way under this number, if anything is."""
        for transfers in (self.uploads, self.downloads):
            transfer = transfers.pop(number, None)
            if transfer is not None:
                transfer.abandon()

    def list_directory(self, number: int, request: dict[str, Any]) -> None:
        fd = self.open_path(request["path"], os.O_DIRECTORY, request["user"])
        try:
            try:
                names = sorted(os.listdir(fd))
            except OSError as error:
                raise _file_denied(error) from None
            if len(names) > ENTRIES_MAX:
                message = f"{request['path']!r} has {len(names)} entries, more than {ENTRIES_MAX}"
                raise RequestDenied("too_large", message)
            entries = [_entry(fd, name) for name in names]
        finally:
            os.close(fd)
        self.send(DONE, number, as_json({"entries": entries}))

    def write(self, number: int, request: dict[str, Any]) -> None:
        self.uploads[number] = Upload(self.workplace, request)

    def feed(self, number: int, data: bytes) -> bool:
        """Take the next piece of an upload, empty at its end, or how many bytes of a download were taken.

        Return whether there is such a transfer.
        """
        if number in self.downloads:
            self.downloads[number].window += int(data)
            return True
        upload = self.uploads.get(number)
        if upload is None:
            return False
        if data:
            upload.write(data)
            return True
        locked = upload.finish()
        self.cancel(number)
        self.send(DONE, number, as_json({"locked": locked}))
        return True

    def abandon(self) -> None:
        """Give up all that is on its way."""
        for number in [*self.uploads, *self.downloads]:
            self.cancel(number)


class Download:
    """A file on its way out: sent no further ahead than the gateway has room for."""

    def __init__(self, fd: int, path: str, left: int, window: int) -> None:
        self.fd = fd
        self.path = path
        self.left = left
        self.window = window

    @property
    def ready(self) -> bool:
        return self.window > 0 or self.left == 0

    def next_chunk(self) -> bytes:
        """Return the next piece, empty at the end; raises RequestDenied if it cannot be read or became shorter."""
        try:
            data = os.read(self.fd, min(CHUNK_BYTES, self.left, self.window))
        except OSError as error:
            raise _file_denied(error) from None
        if not data and self.left:
            raise RequestDenied("invalid_input", f"{self.path!r} became shorter while it was read")
        self.left -= len(data)
        self.window -= len(data)
        return data

    def abandon(self) -> None:
        os.close(self.fd)


class Upload:
    """A file on its way in: written beside its place, and moved there when complete.

    One that is there keeps its owner and, unless another is asked for, its mode; it must be one that its user may write
    to. What another owns, what has other names or lies where nothing can be made is written in its place.
    """

    def __init__(self, workplace: Workplace, request: dict[str, Any]) -> None:
        """Raises RequestDenied if it cannot be written, and leaves nothing."""
        path: str = request["path"]
        self.workplace = workplace
        self.path = path
        self.mode: int | None = request["mode"]
        self.locked: bool = request["locked"]
        self.identity = workplace.identity(request["user"])
        self.part = ""  # where it is written; empty for one that is written in its place
        self.written = 0
        self.fd = self.directory = -1
        try:
            with self.identity:
                try:
                    workplace.make_parents(path)
                    self.directory, self.name = workplace.locate(path, last=False)
                    self.fd = self.begin()
                except OSError as error:
                    raise _file_denied(error) from None
            _require_spare(self.fd, self.directory)
        except BaseException:
            self.abandon()
            raise

    def begin(self) -> int:
        """Return the descriptor to be written to; raises OSError if the user may not."""
        if not self.locked and self.stays():
            return os.open(self.name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.directory)
        part = f".tangram-{os.urandom(6).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            fd = os.open(part, flags, 0o600, dir_fd=self.directory)
        except OSError as error:
            error.filename = self.path
            raise
        self.part = part
        return fd

    def stays(self) -> bool:
        """Return whether a file that is there must be written in its place to stay what it is; raises OSError."""
        try:
            there = os.stat(self.name, dir_fd=self.directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if stat.S_ISDIR(there.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.path)
        if not stat.S_ISREG(there.st_mode):
            return False
        mode, own = stat.S_IMODE(there.st_mode), self.identity.uid == there.st_uid
        if not os.access(self.name, os.W_OK, dir_fd=self.directory, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self.path)
        if self.mode not in (None, mode) and not own and self.identity.uid != 0:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), self.path)
        self.mode = mode if self.mode is None else self.mode
        room = os.access(".", os.W_OK | os.X_OK, dir_fd=self.directory, effective_ids=True)
        return not own or there.st_gid != self.identity.gid or there.st_nlink > 1 or not room

    def write(self, data: bytes) -> None:
        """Append a piece; raises RequestDenied."""
        view = memoryview(data)
        try:
            while view:
                count = os.write(self.fd, view)
                self.written += count
                view = view[count:]
        except OSError as error:
            raise _file_denied(error) from None

    def finish(self) -> bool:
        """Move it to its place; return whether it is locked. Raises RequestDenied. It is to be abandoned either way."""
        try:
            locked = self.locked and self.lock()
            if locked:
                os.fchown(self.fd, 0, self.identity.gid)
                self.place()
            else:
                with self.identity:
                    self.place()
        except OSError as error:
            raise _file_denied(error) from None
        self.part = ""
        return locked

    def place(self) -> None:
        mode = 0o644 if self.mode is None else self.mode
        if not self.part:
            os.ftruncate(self.fd, self.written)
            if stat.S_IMODE(os.fstat(self.fd).st_mode) != mode:
                os.fchmod(self.fd, mode)
            return
        os.fchmod(self.fd, mode)
        try:
            os.replace(self.part, self.name, src_dir_fd=self.directory, dst_dir_fd=self.directory)
        except IsADirectoryError as error:
            if not self.locked:
                error.filename = self.path
                raise
            os.rename(self.name, self.part + ".old", src_dir_fd=self.directory, dst_dir_fd=self.directory)
            os.replace(self.part, self.name, src_dir_fd=self.directory, dst_dir_fd=self.directory)

    def lock(self) -> bool:
        """Make the directories above it root's, so that the sandbox's user cannot replace or move what root has there.

        That user may still make files in them and remove its own. Return whether that is so.
        """
        identity, top = self.workplace.identity(), os.path.realpath(self.workplace.real("."))
        place = os.path.realpath(f"/proc/self/fd/{self.directory}")
        if not identity.foreign or not _within(place, top):
            return False
        by_name = os.path.relpath(os.path.dirname(self.workplace.real(self.path)), self.workplace.real("."))
        if by_name != os.path.relpath(place, top):
            return False  # a link is on the way, which its user may lead elsewhere
        above = top
        while above != "/":
            above = os.path.dirname(above)
            info = os.stat(above)
            shared = info.st_mode & (stat.S_IWOTH | (stat.S_IWGRP if info.st_gid in identity.groups else 0))
            if info.st_uid == identity.uid or (shared and not info.st_mode & stat.S_ISVTX):
                return False  # its user may move the working directory away
        parts = [part for part in os.path.relpath(place, top).split("/") if part != "."]
        for depth in range(len(parts) + 1):
            path = os.path.join(top, *parts[:depth])
            info = os.lstat(path)
            mode = stat.S_IMODE(info.st_mode) | stat.S_ISVTX
            if info.st_uid != 0:
                os.chown(path, 0, identity.gid)
                mode |= 0o070
            os.chmod(path, mode)
        return True

    def abandon(self) -> None:
        """Leave nothing but a file that is in its place; idempotent."""
        try:
            if self.part:
                with self.identity:
                    os.unlink(self.part, dir_fd=self.directory)
        except OSError:
            pass
        fds, self.fd, self.directory, self.part = (self.fd, self.directory), -1, -1, ""
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def _entry(directory: int, name: str) -> dict[str, Any]:
    entry = {"name": os.fsencode(name).decode("utf-8", "replace"), "size": 0, "directory": False, "mode": 0}
    try:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return entry
    return {**entry, "size": info.st_size, "directory": stat.S_ISDIR(info.st_mode), "mode": stat.S_IMODE(info.st_mode)}


# --- the gateway


class GatewayConnection:
    """A descriptor with frames in and one with frames out, of a socket the same; never blocks."""

    def __init__(self, source: int, sink: int, sock: socket.socket | None = None) -> None:
        self.source = source
        self.sink = sink
        self.sock = sock
        self.lent = -1  # the descriptor that came last with the frames
        self.trusted = False
        self.decoder = FrameDecoder()
        self.pending = bytearray()

    def receive(self) -> bytes:
        """Return what has arrived on a socket, and keep a descriptor that came with it; raises OSError."""
        assert self.sock is not None
        fds: list[int] = []
        data, ancillary, _, _ = self.sock.recvmsg(4 * CHUNK_BYTES, LENT_BYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, fds_sent in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds += memoryview(fds_sent[: len(fds_sent) - len(fds_sent) % DESCRIPTOR_BYTES]).cast("i")
        for fd in fds:
            self.keep_lent(fd)
        return data

    def keep_lent(self, fd: int) -> None:
        if self.lent >= 0:
            os.close(self.lent)
        self.lent = fd

    def close(self) -> None:
        self.keep_lent(-1)
        if self.sock is not None:
            self.sock.close()

    def send(self, data: bytes) -> None:
        self.pending += data
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
        self.received = bytearray()

    def feed(self, data: bytes) -> tuple[bytes | None, bytes]:
        """Return the answer for a gateway that attached just now, or None; and what belongs to its conversation."""
        self.received += data
        if not self.mark and len(self.received) >= MARK_BYTES:
            self.mark = bytes(self.received[:MARK_BYTES])
        at = self.received.rfind(self.mark) if self.mark else 0
        end = at + MARK_BYTES + ANSWER_BYTES
        if at < 0:
            del self.received[: 1 - MARK_BYTES]  # a mark may have begun to arrive
            return None, data
        if len(self.received) < end:
            return None, b""
        answer, rest = bytes(self.received[end - ANSWER_BYTES : end]), bytes(self.received[end:])
        self.received = bytearray(rest[1 - MARK_BYTES :])
        return answer, rest


class Silence:
    """How long no gateway was heard. Of one that attached no end is seen: only its silence tells."""

    def __init__(self, *, attached: bool) -> None:
        self.attached = attached
        self.present = False
        self.orphan_s = 600.0
        self.unattended_s = 0.0
        self.since_s = self.looked_s = time.monotonic()

    @property
    def lasts_s(self) -> float:
        return time.monotonic() - self.since_s if self.attached or not self.present else 0.0

    @property
    def unattended(self) -> bool:
        """Whether it has lasted so long that nothing is kept for the next gateway."""
        return self.lasts_s > self.unattended_s

    @property
    def longest_sleep_s(self) -> float:
        bounds_s = (self.orphan_s / 4, self.unattended_s / 4) if self.attached else ()
        return min([60.0, *(bound_s for bound_s in bounds_s if bound_s > 0)])

    def discount_frozen_time(self) -> None:
        """Leave out the time in which we were frozen and could not hear a gateway."""
        now = time.monotonic()
        if self.attached:
            self.since_s += max(0.0, now - self.looked_s - self.longest_sleep_s)
        self.looked_s = now


class GatewayLink:
    """The gateway: who may give us orders, and what it is sent."""

    def __init__(self, runner: Runner, poller: Poller, directory: str | None) -> None:
        self.runner = runner
        self.poller = poller
        self.gateway: GatewayConnection | None = None
        self.unauthenticated: list[GatewayConnection] = []
        self.throttled: GatewayConnection | None = None
        self.attached: GatewayConnection | None = None
        self.token = ""
        self.silence = Silence(attached=directory is None)
        if directory is None:
            self.attachment = Attachment()
            for fd in (0, 1):
                os.set_blocking(fd, False)
            poller.watch(0, self.on_attached)
            try:
                poller.watch(1, self.on_room, select.EPOLLET)
            except PermissionError:
                pass  # a file, which has always room
        else:
            self.listener = _listen(directory)
            poller.watch(self.listener.fileno(), self.on_connect)

    def on_connect(self, fd: int) -> None:
        try:
            accepted, _ = self.listener._accept()  # type: ignore[attr-defined]  # of both kinds of sockets
        except OSError:
            return  # it has gone again, or there is no descriptor for it now
        sock = socket.socket(fileno=accepted)
        sock.setblocking(False)
        if len(self.unauthenticated) >= UNAUTHENTICATED_MAX:
            self.drop(self.unauthenticated[0])
        connection = GatewayConnection(sock.fileno(), sock.fileno(), sock)
        try:
            self.poller.watch(sock.fileno(), lambda _: self.on_frames(connection))
        except OSError:
            connection.close()  # it comes again
            return
        self.unauthenticated.append(connection)

    def on_attached(self, fd: int) -> None:
        """Read from the gateway that is attached, or from the next one, which takes the place of the one before."""
        try:
            data = os.read(fd, 4 * CHUNK_BYTES)
        except BlockingIOError:
            return
        self.silence.since_s = time.monotonic()
        answer, rest = self.attachment.feed(data)
        if self.attached is not None and (answer is not None or not data):
            self.drop(self.attached)
        if answer is not None:
            self.attached = GatewayConnection(0, 1)
            self.unauthenticated.append(self.attached)
            self.attached.send(answer)
            self.hold_back(self.attached)
        if self.attached is not None and rest:
            self.obey_frames(self.attached, rest)
        if not data:  # the engine has closed it: nobody can attach any more
            self.poller.forget(fd)

    def on_frames(self, connection: GatewayConnection) -> None:
        self.on_writable(connection)
        try:
            data = connection.receive()
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.obey_frames(connection, data)

    def on_room(self, fd: int) -> None:
        if self.attached is not None:
            self.on_writable(self.attached)

    def on_writable(self, connection: GatewayConnection) -> None:
        if self.throttled is connection:
            connection.flush()
            if not connection.pending:
                self.unthrottle(connection)

    def obey_frames(self, connection: GatewayConnection, data: bytes) -> None:
        """Obey what has arrived; no data is the end."""
        try:
            if not data:
                raise ProtocolError("it hung up")
            for (_, kind, number), payload in connection.decoder.feed(data):
                if connection.trusted and kind == LEND:
                    self.runner.jobs.tree.take_freezer(connection.lent)
                    connection.lent = -1
                elif connection.trusted:
                    self.runner.obey(kind, number, payload)
                else:
                    self.greet(connection, kind, payload)
        except Exception as error:  # root inside may have come, with anything that JSON can say
            if connection.trusted and not isinstance(error, ProtocolError):
                _complain(error)
            self.drop(connection)

    def greet(self, connection: GatewayConnection, kind: int, payload: bytes) -> None:
        """Take the first caller's token for the gateway's; hang up on everybody who does not know it."""
        if kind != HELLO:
            raise ProtocolError("no greeting")
        hello = from_json(payload)
        known = self.token != ""
        if known and not _same(hello["token"], self.token):
            raise ProtocolError("not the gateway")
        previous, self.token = self.gateway, hello["token"]
        self.silence.orphan_s = hello.get("orphan_s", 600.0)
        self.silence.unattended_s = hello.get("unattended_s", 0.0)
        self.runner.workplace.config = hello
        connection.trusted = True
        self.unauthenticated.remove(connection)
        if previous is not None:
            self.drop(previous)
        self.gateway, self.silence.present = connection, True
        self.runner.on_hello(hello, known=known)

    def drop(self, connection: GatewayConnection) -> None:
        """Hang up; what the gateway had running goes on if it is detached and has all its input."""
        if connection is self.attached:
            self.attached = None
        else:
            self.poller.forget(connection.source)
            connection.close()
        if connection in self.unauthenticated:
            self.unauthenticated.remove(connection)
        self.unthrottle(connection)
        if connection is self.gateway:
            self.gateway, self.silence.present = None, False
            self.silence.since_s = time.monotonic()
            self.runner.on_gateway_lost()

    def drop_silent(self) -> None:
        """Hang up on a gateway that attached and is not heard any more."""
        if self.attached is not None and self.attached is self.gateway:
            self.drop(self.attached)

    def send(self, kind: int, number: int, payload: bytes) -> None:
        """Send a frame, unless its number says that no gateway listens for it."""
        gateway = self.gateway
        if gateway is not None and number >= 0:
            gateway.send(encode(kind, number, payload))
            self.hold_back(gateway)

    def hold_back(self, connection: GatewayConnection) -> None:
        """Wait for a gateway that does not take all of what it is sent."""
        if connection.pending and self.throttled is None:
            self.throttled = connection
            self.await_room(connection)
            self.runner.jobs.regulate()

    def unthrottle(self, connection: GatewayConnection) -> None:
        if self.throttled is connection:
            self.throttled = None
            self.await_room(connection)
            self.runner.jobs.regulate()

    def await_room(self, connection: GatewayConnection) -> None:
        """Watch for a connection's room if it is throttled. What is watched already can always be watched for more."""
        room = select.EPOLLOUT if self.throttled is connection else 0
        if connection.sink == connection.source:
            self.poller.change(connection.sink, select.EPOLLIN | room)
        else:
            self.poller.change(connection.sink, room or select.EPOLLET)  # one that hung up is told once


def _listen(directory: str) -> socket.socket:
    os.chdir(directory)  # a socket's path may have 107 bytes, a directory's may have more
    try:
        os.unlink("s")
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("s")
    listener.listen(UNAUTHENTICATED_MAX)
    listener.setblocking(False)
    os.chdir("/")
    return listener


def _same(one: str, other: str) -> bool:
    """Compare in a time that does not tell where the two differ."""
    first, second = one.encode(), other.encode()
    difference = len(first) ^ len(second)
    for index in range(min(len(first), len(second))):
        difference |= first[index] ^ second[index]
    return difference == 0


# --- commands


class CommandOutput:
    """What a command has said so far, in order."""

    def __init__(self) -> None:
        self.start = 0  # bytes before the first that is kept
        self.data = bytearray()
        self.pieces: list[int] = []  # their bytes; of standard error counted below zero

    def add(self, stream: int, data: bytes) -> None:
        self.data += data
        count = len(data) if stream == STDOUT else -len(data)
        if self.pieces and (self.pieces[-1] > 0) == (count > 0):
            self.pieces[-1] += count
        else:
            self.pieces.append(count)

    def trim(self, most: int) -> None:
        """Forget what is oldest, but for so many bytes."""
        extra = max(0, len(self.data) - most)
        del self.data[:extra]
        self.start += extra
        while extra:
            count = self.pieces[0]
            forgotten = min(abs(count), extra)
            extra -= forgotten
            self.pieces[0] = count - forgotten if count > 0 else count + forgotten
            if not self.pieces[0]:
                del self.pieces[0]

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
        self.tail: int = request.get("tail", 0)
        self.kept = {STDOUT: 0, STDERR: 0}
        self.tails = {STDOUT: bytearray(), STDERR: bytearray()}  # the last of what is beyond the limit
        self.dropped = {STDOUT: 0, STDERR: 0}
        self.started_s = time.monotonic()
        timeout_s = request.get("timeout_s")
        self.deadline_s: float | None = None if timeout_s is None else self.started_s + timeout_s
        self.kill_s: float | None = None  # set while it is being ended
        self.timed_out = False
        #: Seconds without a sign of progress after which it is ended if one of its processes is stopped.
        self.still_s: float | None = None if request.get("session") else request.get("still_s")
        self.look_s = float("inf") if self.still_s is None else self.started_s + self.still_s / STILL_LOOKS
        self.progress: list[Any] = []
        self.looks = 0  # at the same progress
        self.stopped = False  # whether it was ended for that
        self.killed = False  # whether a gateway asked for its end: the next one is to know why it ended
        self.status: int | None = None  # set when its first process was reaped
        self.cpu_s = 0.0
        self.peak_kib = 0
        self.ended_s: float | None = None
        self.account = b""  # how it ended
        self.fault = b""  # what is told of it in place of how it ended, if we failed
        session: dict[str, Any] = request.get("session") or {}
        self.session = bool(session)  # somebody types, and may come again: under the next gateway too
        self.session_bytes: int = session.get("keep", 0)
        self.terminal: list[int] | None = session.get("terminal")  # its rows and columns
        self.hung_up = False  # whether nobody has its terminal open
        self.held = False  # whether the gateway wants no more of its output for now
        self.fed = 0  # bytes of input that came

    @property
    def ran_s(self) -> float:
        return (time.monotonic() if self.ended_s is None else self.ended_s) - self.started_s

    def let_end(self) -> None:
        """Make it one that ends with its gateway and that nobody can claim."""
        self.detached, self.claim = False, ""

    def cut(self, stream: int, data: bytes) -> bytes:
        """Return what of its next output is within its bound."""
        if self.limit is not None:
            room, tail = self.limit - self.kept[stream], self.tails[stream]
            tail += data[room:]
            if len(tail) > 2 * self.tail:
                self.drop(stream)
            data = data[:room]
            self.kept[stream] += len(data)
        return data

    def drop(self, stream: int) -> None:
        """Drop what is beyond its bound but for the tail."""
        tail = self.tails[stream]
        count = max(0, len(tail) - self.tail)
        self.dropped[stream] += count
        del tail[:count]

    def accounts(self, survivors: int) -> dict[str, Any]:
        """Return how it ended, as the gateway is told."""
        status = self.status or 0
        return {
            "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
            "timed_out": self.timed_out,
            "stopped": self.stopped,
            "killed": self.killed,
            "truncated": [self.dropped[STDOUT] > 0, self.dropped[STDERR] > 0],
            "dropped": [self.dropped[STDOUT], self.dropped[STDERR]],
            "duration_s": time.monotonic() - self.started_s,
            "cpu_s": self.cpu_s,
            "peak_bytes": self.peak_kib * 1024,
            "survivors": survivors,
        }


class NotStarted(Exception):
    """A program that cannot be started: a result with a shell's exit code, and a message for standard error."""

    def __init__(self, name: str, error: OSError) -> None:
        super().__init__(f"{name}: {os.strerror(error.errno or 0)}\n")
        self.code = 127 if error.errno == errno.ENOENT else 126


class Launcher:
    """Starts commands as their users, with a worse score for the kernel's memory killer than ours."""

    def __init__(self, workplace: Workplace, *, own_kernel: bool) -> None:
        self.workplace = workplace
        self.lends_ids = os.getpid() == 1 and not own_kernel  # see `_spawn_as`
        self.shell = "/bin/bash" if os.access("/bin/bash", os.X_OK) else "/bin/sh"
        self.environment = dict(os.environ)
        self.null = os.open("/dev/null", os.O_RDWR)
        self.oom, self.oom_score = _own_oom_score()

    def plumb(self, job: Job, *, with_input: bool) -> list[int]:
        """Open a command's pipes or terminal, with our ends in the job; return its own ends, to be closed.

        Raises OSError if descriptors are short: then all are closed.
        """
        opened: list[int] = []
        try:
            if job.terminal is not None:
                opened += os.openpty()
                opened.append(os.dup(opened[0]))
                _resize_terminal(opened[0], job.terminal)
                streams, job.stdin, theirs = {opened[0]: STDOUT}, opened[2], [opened[1]]
            else:
                for _ in range(3 if with_input else 2):
                    opened += os.pipe()
                streams = {opened[0]: STDOUT, opened[2]: STDERR}
                theirs = [opened[1], opened[3]]
                if with_input:
                    job.stdin = opened[5]
                    theirs.append(opened[4])
            _require_spare(*opened)
            for fd in opened:
                if fd not in theirs:
                    os.set_blocking(fd, False)
        except BaseException:
            job.stdin = -1
            for fd in opened:
                os.close(fd)
            raise
        job.streams = streams
        return theirs

    def launch(self, job: Job, request: dict[str, Any], theirs: list[int]) -> int:
        """Start a command on its ends of what `plumb` opened; return its process.

        Raises RequestDenied if there can be no such command, NotStarted if its program cannot be started, and OSError.
        """
        argv: list[str] = request["argv"] or [self.shell, "-c", request["shell"]]
        if request["python"]:
            argv = [sys.executable, "-I", "-S", *argv]
        identity = self.workplace.identity(request["user"])
        environment = self.environment_of(identity, request)
        for name in request.get("hide", ()):
            if name in environment:
                environment[HIDDEN + name] = environment.pop(name)
        if job.terminal is not None:
            if identity.foreign:
                os.fchown(theirs[0], identity.uid, -1)
            environment.setdefault("TERM", "xterm")
            fds = (theirs[0], theirs[0], theirs[0])
        else:
            out, err, source = [*theirs, self.null][:3]
            fds = (source, out, out if request["merge"] else err)
        return self.spawn(identity, request["cwd"], argv, environment, fds, terminal=job.terminal is not None)

    def environment_of(self, identity: Identity, request: dict[str, Any]) -> dict[str, str]:
        environment = {"PATH": DEFAULT_PATH, "HOME": identity.home, "USER": identity.name, "LOGNAME": identity.name}
        environment.update(self.environment)
        environment.update(self.workplace.config["env"])
        if identity.uid != 0 and environment.get("HOME") == "/root":
            environment["HOME"] = identity.home
        environment.update(request["env"])
        environment["TANGRAM_ACTION"] = request["marker"]
        return environment

    def spawn(
        self,
        identity: Identity,
        cwd: str,
        argv: list[str],
        environment: dict[str, str],
        fds: tuple[int, int, int],
        *,
        terminal: bool = False,
    ) -> int:
        try:
            if self.oom >= 0:
                os.pwrite(self.oom, OOM_SCORE, 0)
            with identity:
                try:
                    os.chdir(self.workplace.real(cwd or self.workplace.config["workdir"]))
                except OSError as error:
                    kind = _FILE_ERRORS.get(error.errno or 0, "")
                    raise RequestDenied("invalid_input", f"working directory: {_sentence(error)}", kind) from None
                try:
                    program = _which(argv[0], environment.get("PATH", DEFAULT_PATH))
                    if terminal or (identity.foreign and not self.lends_ids):
                        return _fork(identity, program, argv, environment, fds, terminal=terminal)
                    if identity.foreign:
                        return _spawn_as(identity, program, argv, environment, fds)
                    return _spawn(program, argv, environment, fds)
                except (ValueError, TypeError, UnicodeError) as error:
                    raise RequestDenied("invalid_input", f"the command cannot be executed: {error}") from None
                except OSError as error:
                    if error.errno == errno.E2BIG:
                        raise RequestDenied("invalid_input", "the argument list is too long") from None
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        raise
                    raise NotStarted(argv[0], error) from None
        finally:
            os.chdir("/")
            if self.oom >= 0:
                try:
                    os.pwrite(self.oom, self.oom_score, 0)
                except OSError as error:
                    _complain(error)  # the program has been started all the same


class ProcessTree:
    """The processes below the runner: which of them belong to a job, and how they are ended."""

    def __init__(self, workplace: Workplace, jobs: dict[int, Job]) -> None:
        self.workplace = workplace
        self.jobs = jobs
        self.pid = os.getpid()
        self.sweeps: dict[int, float] = {}  # asked for, and when to give up on what will not die
        self.clears: int | None = None  # whether a sweep takes shared memory as well (`clear_shared`)
        self.swept: set[int] = set()  # what they have ended so far
        self.freezer = -1  # the gateway's, of the cgroup that holds all but us: what is in it cannot even be ended
        self.rest_s: float | None = None  # when all must be stopped again, None if they may run
        self.stopped: set[int] = set()  # those that had stopped of themselves
        self.latest: Job | None = None  # the one that was begun last
        self.markers: set[bytes] = set()  # of the commands whose processes may live
        self.markers_most = MARKERS_MAX
        try:
            self.listing = os.open(f"/proc/self/task/{self.pid}/children", os.O_RDONLY)
        except OSError:
            self.listing = -1

    def children(self) -> set[int]:
        """Return direct children: what earlier commands left behind, and the other commands under way."""
        if self.listing >= 0:
            return {int(word) for word in os.pread(self.listing, CHUNK_BYTES, 0).split()}
        return {child for child, (parent, _) in _processes().items() if parent == self.pid}

    def job_of(self, pid: int) -> Job | None:
        """Return the job whose first process this is, unless that was reaped."""
        return next((job for job in self.jobs.values() if job.pid == pid and job.status is None), None)

    def members(self, job: Job) -> list[int]:
        """Return the living processes that a job started, also through double forks and in new sessions."""
        table = _processes()
        return [
            pid
            for top in [pid for pid, (parent, _) in table.items() if parent == self.pid]
            if top not in job.bystanders and self.owns(job, top)
            for pid in [top, *_descendants(top, table)]
            if table[pid][1] != "Z"
        ]

    def owns(self, job: Job, pid: int) -> bool:
        """Return whether a child of ours is the job's: its marker tells, and without one that it was adopted since."""
        owner = self.job_of(pid)
        if owner is not None:
            return owner is job
        return self.marker_of(pid) in (job.marker, b"")

    def marker_of(self, pid: int) -> bytes:
        """Return the marker of the command that a process comes from; empty if it bears none that we gave."""
        try:
            uid = os.stat(f"/proc/{pid}").st_uid
            users = [user for user in self.workplace.identities.values() if user.uid == uid]
            with (users or [self.workplace.identity()])[0], open(f"/proc/{pid}/environ", "rb") as file:
                words = file.read().split(b"\0")
        except (RequestDenied, OSError):
            return b""
        return next((word for word in words if word in self.markers), b"")

    def remember(self, job: Job) -> None:
        """Know a command's marker from now on. Of many, those that no process bears are forgotten."""
        if len(self.markers) >= self.markers_most:
            self.markers = {self.marker_of(pid) for pid in _processes()} - {b""}
            self.markers.update(job.marker for job in self.jobs.values())
            self.markers_most = max(MARKERS_MAX, 2 * len(self.markers))
        self.markers.add(job.marker)
        self.latest = job

    def signal(self, job: Job, number: int) -> None:
        # What was begun since may have left processes of its own.
        if self.pid == 1 and len(self.jobs) == 1 and not job.bystanders and self.latest is job:
            _kill(-1, number)  # atomic: a fork bomb cannot outrun it
            return
        members = self.members(job)
        if number == signal.SIGKILL:
            for pid in members:
                _kill(pid, signal.SIGSTOP)
            members = self.members(job)
        for pid in members:
            _kill(pid, number)

    def take_freezer(self, fd: int) -> None:
        if self.freezer >= 0:
            os.close(self.freezer)
        self.freezer = fd

    def rest(self, now: float) -> None:
        """Stop every process but the runner, and again from time to time."""
        table = _processes()
        others = _descendants(self.pid, table)
        if self.rest_s is None:
            self.stopped = {pid for pid in others if table[pid][1] == "T"}
        for pid in [-1] if self.pid == 1 and others else others:
            _kill(pid, signal.SIGSTOP)
        self.rest_s = now + REST_S if others else float("inf")

    def hold_still(self) -> None:
        """End what does not stand still though it was stopped: it would change files while they are copied."""
        for look in range(LOOKS):
            time.sleep(TICK_S)
            table = _processes()
            for pid in _descendants(self.pid, table):
                if table[pid][1] in "RS":
                    _kill(pid, signal.SIGKILL if look else signal.SIGSTOP)

    def resume(self) -> None:
        """Let those run that were stopped by `rest`."""
        self.rest_s = None
        for pid in _descendants(self.pid, _processes()):
            if pid not in self.stopped:
                _kill(pid, signal.SIGCONT)

    def end_all(self) -> None:
        """Thaw and kill every process but the runner, which is about to end."""
        if self.freezer >= 0:
            try:
                os.write(self.freezer, b"THAWED")
            except OSError:
                pass  # the group is gone
        for _ in range(ENDS_MAX):
            if not self.sweep(0.0)[1]:
                break
            time.sleep(TICK_S)

    def sweep(self, now: float) -> tuple[list[int], int]:
        """Kill every process but the runner; return the sweeps that are over, and how many processes live on.

        A sweep is over when the last process is gone, not just told to go.
        """
        table = _processes()
        others = _descendants(self.pid, table)
        self.swept.update(pid for pid in others if table[pid][1] != "Z")
        for pid in [-1] if self.pid == 1 and others else others:
            _kill(pid, signal.SIGKILL)
        return [number for number, give_up_s in self.sweeps.items() if not others or now >= give_up_s], len(others)


def clear_shared(limit_bytes: int) -> None:
    """Remove what processes that are gone have left in memory, for a runner that is the first of its namespaces.

    Those are the files of /dev/shm and System V's objects; and the files of a /tmp of its own, if there are more than
    ``limit_bytes``.
    """
    left: list[tuple[int, Callable[[Any], object], Any]] = []
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        remove: dict[str, Callable[[int], object]] = {  # by IPC_RMID
            "shm": lambda id: libc.shmctl(id, 0, None),
            "msg": lambda id: libc.msgctl(id, 0, None),
            "sem": lambda id: libc.semctl(id, 0, 0, None),
        }
        for kind, take in remove.items():
            with open(f"/proc/sysvipc/{kind}") as file:
                names, *rows = (line.split() for line in file)
            left += [(int(row[names.index("uid")]), take, int(row[1])) for row in rows]
    except (ImportError, OSError, AttributeError):
        pass  # a kernel or a Python without them
    full = os.statvfs("/tmp") if os.path.isdir("/tmp") else None
    own = full is not None and os.stat("/tmp").st_dev != os.stat("/").st_dev
    large = full is not None and own and (full.f_blocks - full.f_bfree) * full.f_frsize > limit_bytes
    for place in ("/dev/shm", "/tmp") if large else ("/dev/shm",):
        for entry in os.scandir(place) if os.path.isdir(place) else ():
            tree = entry.is_dir(follow_symlinks=False)
            removal: Callable[[str], object] = _remove_tree if tree else os.unlink
            left.append((entry.stat(follow_symlinks=False).st_uid, removal, entry.path))
    for uid, remover, what in left:
        try:
            os.seteuid(uid)
            remover(what)
        except OSError:
            pass  # it stays, and so does its memory
        finally:
            os.seteuid(os.getuid())


def _remove_tree(path: str) -> None:
    """Remove a directory, however deep: what lies in it comes up beside it first. Raises OSError."""
    places = [path]
    while places:
        place = places.pop()
        os.chmod(place, 0o700)
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    places.append(f"{path}.{os.urandom(6).hex()}")
                    os.chmod(entry.path, 0o700)
                    os.rename(entry.path, places[-1])
                else:
                    os.unlink(entry.path)
        os.rmdir(place)


class Claims:
    """What the next gateway can claim, and which commands it is told were started."""

    def __init__(self) -> None:
        self.ended: dict[str, Job] = {}
        self.started: dict[str, None] = {}  # claims, until it is on record what became of them
        self.forgetful = False

    def remember_claim(self, claim: str) -> None:
        """Remember that it was started; of every other detached command it is certain that it was not."""
        self.started[claim] = None
        if len(self.started) > STARTED_MAX:
            del self.started[next(iter(self.started))]
            self.forgetful = True

    def forget_claims(self, prefix: str) -> None:
        for claim in [claim for claim in self.started if claim.startswith(prefix)]:
            del self.started[claim]

    def add_ended(self, job: Job) -> None:
        """Keep an ended command until too much else has ended."""
        self.ended[job.claim] = job
        while len(self.ended) > ENDED_MAX or (len(self.ended) > 1 and self.ended_bytes() > ENDED_MAX_BYTES):
            del self.ended[next(iter(self.ended))]

    def ended_bytes(self) -> int:
        return sum(len(job.output.data) for job in self.ended.values())

    def started_claims(self) -> list[str] | None:
        return None if self.forgetful else list(self.started)


class Jobs:
    """The commands: started, fed, listened to and ended."""

    def __init__(self, poller: Poller, workplace: Workplace, link: GatewayLink, *, own_kernel: bool) -> None:
        self.poller = poller
        self.workplace = workplace
        self.link = link
        self.running: dict[int, Job] = {}
        self.claims = Claims()
        self.launcher = Launcher(workplace, own_kernel=own_kernel)
        self.tree = ProcessTree(workplace, self.running)
        self.orphan_pipes: dict[int, None] = {}  # output of what outlived its command, read and dropped
        self.memory_kills = _kernel_number(MEMORY_EVENTS, b"oom_kill")
        self.wakeup = _children_signal()
        poller.watch(self.wakeup, self.on_children)

    # --- the clock

    def next_deadline_s(self, now: float) -> float:
        """Return when something is due, infinity if nothing is."""
        if self.tree.sweeps or any(job.kill_s is not None for job in self.running.values()):
            return now + TICK_S
        due_s = [job.deadline_s for job in self.running.values() if job.deadline_s is not None]
        due_s += [job.look_s for job in self.running.values()]
        return min([*due_s, float("inf") if self.tree.rest_s is None else self.tree.rest_s])

    def on_clock(self, now: float) -> None:
        for job in list(self.running.values()):
            if job.kill_s is not None:
                try:
                    self.pursue(job, now)
                except Exception as error:
                    self.fail(job, error)
            elif job.deadline_s is not None and now >= job.deadline_s:
                job.timed_out = True
                self.end(job, job.grace_s)
            elif now >= job.look_s:
                try:
                    self.look_for_progress(job, now)
                except Exception as error:
                    self.fail(job, error)
        if self.tree.rest_s is not None and now >= self.tree.rest_s:
            self.tree.rest(now)
        if self.tree.sweeps:
            over, survivors = self.tree.sweep(now)
            if over and self.tree.clears is not None and self.tree.pid == 1:
                try:
                    clear_shared(self.tree.clears)
                except Exception:  # noqa: S110
                    pass  # whatever was left there, it stays, and so does its memory
                self.tree.clears = None
            for number in over:
                del self.tree.sweeps[number]
                self.link.send(DONE, number, as_json({"survivors": survivors, "swept": len(self.tree.swept)}))
            if not self.tree.sweeps:
                self.tree.swept.clear()

    # --- start, input and output

    def run(self, number: int, request: dict[str, Any]) -> None:
        """Start a command. It is one of those under way once it is watched and has a process, and not before.

        Raises RequestDenied or OSError if nothing was started; then nothing of it is left.
        """
        if self.tree.rest_s is not None:
            self.tree.resume()
        job = Job(number, request, self.tree.children())
        self.tree.remember(job)
        theirs = self.launcher.plumb(job, with_input=request["stdin"])
        try:
            for fd in job.streams:
                self.poller.watch(fd, self.output_handler(job), self.output_events(job))
            job.pid = self.launcher.launch(job, request, theirs)
        except NotStarted as failure:
            self.unplug(job)
            self.begun(job)
            self.say(job, STDERR, str(failure).encode())
            self.conclude(job, {"code": failure.code})
            return
        except BaseException:
            self.unplug(job)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        self.begun(job)
        self.running[number] = job
        self.on_children(self.wakeup)  # a short command has often ended before its vfork lets us go on

    def begun(self, job: Job) -> None:
        """Remember that a command was started, or could not be because of its program."""
        if job.detached:
            self.claims.remember_claim(job.claim)

    def unplug(self, job: Job) -> None:
        """Close our ends of a command's pipes."""
        fds, job.streams, job.stdin = [*job.streams, job.stdin], {}, -1
        for fd in fds:
            if fd >= 0:
                self.poller.forget(fd)
                os.close(fd)

    def feed(self, number: int, data: bytes) -> None:
        """Pass on standard input; empty ends it."""
        job = self.running.get(number)
        if job is not None and job.stdin >= 0:
            job.input += data
            job.fed += len(data)
            if not data and job.terminal is not None:
                job.input += END_OF_INPUT
            job.input_ended = job.input_ended or not data
            self.on_input(job)

    def on_input(self, job: Job) -> None:
        try:
            while job.input:
                taken = os.write(job.stdin, memoryview(job.input)[:CHUNK_BYTES])
                del job.input[:taken]
                self.link.send(ACK, job.number, HEADER.pack(taken, 0, 0))
        except BlockingIOError:
            if job.stdin not in self.poller.handlers:
                # A terminal that hung up is never rid of that event: it is told once.
                events = select.EPOLLOUT | (0 if job.terminal is None else select.EPOLLET)
                self.poller.watch(job.stdin, self.input_handler(job), events)
            return
        except OSError:
            job.input.clear()
            job.input_ended = True
            self.link.send(ACK, job.number, b"")  # it reads no more
        self.poller.forget(job.stdin)
        if job.input_ended:
            fd, job.stdin = job.stdin, -1
            os.close(fd)

    def input_handler(self, job: Job) -> Callable[[int], None]:
        def handle(fd: int) -> None:
            try:
                self.on_input(job)
            except Exception as error:
                self.fail(job, error)

        return handle

    def output_handler(self, job: Job) -> Callable[[int], None]:
        def handle(fd: int) -> None:
            try:
                self.on_output(job, fd)
            except Exception as error:
                if job.ended_s is not None:
                    self.poller.forget(fd)
                self.fail(job, error)

        return handle

    def on_output(self, job: Job, fd: int) -> bool:
        """Pass on one chunk; return False at the end of the stream or if there is nothing now."""
        stream = job.streams.get(fd)
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data and stream is not None and job.terminal is not None and job.status is None:
            # Nobody has its terminal open, but may again: our end goes with the command, which it would be hung up on.
            if not job.hung_up:
                job.hung_up = True
                self.poller.change(fd, self.output_events(job))
            return False
        if not data:
            job.streams.pop(fd, None)
            self.orphan_pipes.pop(fd, None)
            self.poller.forget(fd)
            os.close(fd)
            return False
        if job.hung_up:
            job.hung_up = False
            self.poller.change(fd, self.output_events(job))
        if stream is not None:  # else its command has ended: read, so that the writer lives on, and dropped
            data = job.cut(stream, data)
            if data:
                self.say(job, stream, data)
        return True

    def say(self, job: Job, stream: int, data: bytes) -> None:
        if job.claim:
            job.output.add(stream, data)
            if job.session:
                job.output.trim(job.session_bytes)
        self.link.send(stream, job.number, data)

    def output_events(self, job: Job) -> int:
        events = 0 if self.link.throttled is not None or job.held else select.EPOLLIN
        return events | select.EPOLLET if job.hung_up else events

    def regulate(self) -> None:
        """Read the commands' pipes only while the gateway takes what they say."""
        for job in self.running.values():
            for fd in job.streams:
                self.poller.change(fd, self.output_events(job))

    def steer(self, number: int, request: dict[str, Any]) -> None:
        """Do to a session what is asked: hold its output back, resize its terminal, signal or end what runs in it."""
        job = self.running.get(number)
        if job is None or not job.session:
            return
        if "held" in request:
            job.held = request["held"]
            self.regulate()
        if "size" in request and job.terminal is not None:
            for fd in job.streams:
                try:
                    _resize_terminal(fd, request["size"])
                except (OSError, struct.error):
                    pass  # it stays as large as it was
        if "signal" in request:
            self.signal_foreground(job, request["signal"])
        if "end" in request:
            self.kill(number, request["end"])

    def signal_foreground(self, job: Job, number: int) -> None:
        """Signal what a person at its terminal would interrupt; without one, the command and its pipeline."""
        group = job.pid
        try:
            for fd in job.streams if job.terminal is not None else ():
                group = os.tcgetpgrp(fd)
            if group > 1:
                os.killpg(group, number)
        except OSError:
            pass  # it has ended just now

    def rest(self, number: int, *, resting: bool, still: bool) -> None:
        """Stop every process, and end what is not ``still`` then, or let them run again."""
        if resting:
            self.tree.rest(time.monotonic())
            if still:
                self.tree.hold_still()
        elif self.tree.rest_s is not None:
            self.tree.resume()
        self.link.send(DONE, number, b"{}")

    # --- commands that outlive their gateway

    def outlives(self, job: Job) -> bool:
        """Return whether a command goes on if its connection ends. One to which we are attached may end any time."""
        return job.detached or (self.link.silence.attached and job.claim != "")

    def claimable(self) -> list[Job]:
        return [job for job in [*self.running.values(), *self.claims.ended.values()] if self.outlives(job)]

    def drop_attached(self) -> None:
        """Give up what is not detached: another gateway has attached than the one that it was run for."""
        for job in [job for job in self.claimable() if not job.detached]:
            if self.claims.ended.pop(job.claim, None) is None:
                self.end(job, 0.0)
            job.claim = ""

    def claim(self, number: int, claim: str) -> None:
        """Repeat all output of an earlier gateway's command, then what follows; raises RequestDenied if it is gone."""
        for job in self.claimable():
            if job.claim == claim:
                self.renumber(job, number)
                if job.session:
                    standing = {"start": job.output.start, "input": job.fed, "waiting": len(job.input)}
                    self.link.send(STANDING, number, as_json(standing))
                for stream, data in job.output:
                    self.link.send(stream, number, data)
                if job.ended_s is not None:
                    self.tell_end(job)
                return
        raise RequestDenied("not_found", f"there is no {claim!r} to be claimed")

    def keep(self, prefix: str, *, detached: bool) -> None:
        """Say whether commands with such claims outlive their gateway; if not, and unheard, they are ended."""
        for job in [*self.running.values(), *self.claims.ended.values()]:
            if job.claim.startswith(prefix):
                job.detached = detached
                if detached:
                    self.claims.remember_claim(job.claim)
                elif self.claims.ended.pop(job.claim, None) is None and job.number < 0:
                    job.claim = ""
                    self.end(job, job.grace_s if self.link.gateway is None else 0.0)

    def renumber(self, job: Job, number: int) -> None:
        if self.running.pop(job.number, None) is not None:
            self.running[number] = job
        job.number = number

    def on_gateway_lost(self) -> None:
        for job in list(self.running.values()):
            self.renumber(job, -job.pid)
            job.held = False
            if not self.outlives(job) or (job.stdin >= 0 and not job.input_ended and not job.session):
                job.let_end()
                self.end(job, 0.0)
        self.regulate()
        self.tree.sweeps.clear()

    # --- ends

    def on_children(self, fd: int) -> None:
        """Reap every child that has ended."""
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
            job = self.tree.job_of(pid)
            if job is not None:
                job.status = status
                job.cpu_s = usage.ru_utime + usage.ru_stime
                job.peak_kib = usage.ru_maxrss
                if job.kill_s is None:
                    try:
                        self.finish(job, survivors=0)
                    except Exception as error:
                        self.fail(job, error)

    def fail(self, job: Job, error: Exception) -> None:
        """End a command because of an exception of ours, and tell that instead of its end; nothing else ends by it.

        A machine that runs short for a moment keeps what is being ended waiting, and no more.
        """
        if job.ended_s is not None or (job.kill_s is not None and _is_shortage(error)):
            return
        if job.fault:
            self.give_up(job)
        else:
            job.fault = _refusal(error)
            self.end(job, 0.0)

    def give_up(self, job: Job) -> None:
        """Let go of a command that could not even be ended; its process is killed, and who asked is told."""
        self.running.pop(job.number, None)
        if job.status is None:
            _kill(job.pid, signal.SIGKILL)
        try:
            self.unplug(job)
        except OSError as error:
            _complain(error)
        self.conclude(job, {})

    def kill(self, number: int, grace_s: float) -> None:
        job = self.running.get(number)
        if job is not None:
            job.killed = True
            self.end(job, grace_s)

    def look_for_progress(self, job: Job, now: float) -> None:
        """End a job of which a process is stopped, and none works or says anything: nobody is left to continue it."""
        job.look_s = now + (job.still_s or 0.0) / STILL_LOOKS
        table, members = _processes(), self.tree.members(job)
        if not any(table.get(pid, (0, ""))[1] == "T" for pid in members):
            job.progress = []
            return
        progress = [sorted(members), sum(map(_ticks, members)), *job.kept.values(), *job.dropped.values(), job.fed]
        job.looks = job.looks + 1 if progress == job.progress else 0
        job.progress = progress
        if job.looks == STILL_LOOKS:
            job.timed_out = job.stopped = True
            self.end(job, 0.0)

    def end(self, job: Job, grace_s: float) -> None:
        """Begin to end a job's whole tree: SIGTERM, and SIGKILL after the grace."""
        kill_s = time.monotonic() + grace_s
        if job.kill_s is None or kill_s < job.kill_s:
            job.kill_s = kill_s
            try:
                if grace_s > 0:
                    self.tree.signal(job, signal.SIGTERM)
                self.pursue(job, time.monotonic())
            except Exception as error:
                self.fail(job, error)

    def pursue(self, job: Job, now: float) -> None:
        """Go on until nothing of it is left; a process that SIGKILL does not end in time is reported."""
        kill_s = now if job.kill_s is None else job.kill_s
        if now >= kill_s:
            self.tree.signal(job, signal.SIGKILL)
        left = self.tree.members(job)
        if (job.status is not None and not left) or now >= kill_s + UNKILLABLE_S:
            self.finish(job, survivors=len(left))

    def finish(self, job: Job, survivors: int) -> None:
        """Hand over what its pipes still hold and how it ended. Pipes that others keep open are drained from now on."""
        for fd in list(job.streams):
            for _ in range(PENDING_MAX_BYTES // CHUNK_BYTES):
                if not self.on_output(job, fd):
                    break
        for fd in list(job.streams):
            del job.streams[fd]
            self.orphan_pipes[fd] = None
            self.poller.change(fd, select.EPOLLIN)
        while len(self.orphan_pipes) > ORPHAN_PIPES_MAX:
            fd = next(iter(self.orphan_pipes))
            del self.orphan_pipes[fd]
            self.poller.forget(fd)
            os.close(fd)
        self.unplug(job)
        for stream, tail in job.tails.items():
            job.drop(stream)
            for at in range(0, len(tail), CHUNK_BYTES):
                self.say(job, stream, bytes(tail[at : at + CHUNK_BYTES]))
        account = {**job.accounts(survivors), **self.shortage(job)}
        del self.running[job.number]
        self.conclude(job, account)

    def conclude(self, job: Job, account: dict[str, Any]) -> None:
        """Tell how it ended, and keep it if it can be claimed."""
        job.ended_s, job.account = time.monotonic(), as_json(account)
        self.tell_end(job)
        if self.outlives(job):
            self.claims.add_ended(job)

    def tell_end(self, job: Job) -> None:
        self.link.send(ERROR if job.fault else EXIT, job.number, job.fault or job.account)

    def shortage(self, job: Job) -> dict[str, Any]:
        """Say if a command failed and the kernel ended a process of the sandbox for want of memory."""
        if not job.status or not self.workplace.config.get("own_cgroup"):
            return {}
        kills = _kernel_number(MEMORY_EVENTS, b"oom_kill")
        if kills <= self.memory_kills:
            return {}
        self.memory_kills = kills
        return {"out_of_memory": True, "peak_bytes": max(job.peak_kib * 1024, _kernel_number(MEMORY_PEAKS))}


def _spawn(program: str, argv: list[str], environment: dict[str, str], fds: tuple[int, int, int]) -> int:
    """Start a program with the ids that we have; raises what ``execve`` raises."""
    actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(fds)]
    return os.posix_spawn(program, argv, environment, file_actions=actions, setsid=True, setsigdef=IGNORED)


def _spawn_as(
    identity: Identity, program: str, argv: list[str], environment: dict[str, str], fds: tuple[int, int, int]
) -> int:
    """Start a program as another user, whose rights to files we have already; raises what ``execve`` raises.

    A fork of our own pages takes three times as long. Here our real ids are the user's for a moment as well, and the
    saved ones lead us back. The program has no way back: as it starts, the kernel makes its saved ids equal the
    effective ones and takes all capabilities. Processes of that user could signal us meanwhile, so this is for the
    first process of a namespace alone: the kernel keeps from it what it ignores, and SIGKILL and SIGSTOP too, if they
    come from inside. To be traced and read it stays undumpable.
    """
    try:
        os.setresgid(identity.gid, identity.gid, 0)
        os.setresuid(identity.uid, identity.uid, 0)
        return _spawn(program, argv, environment, fds)
    finally:
        os.setresuid(0, identity.uid, 0)
        os.setresgid(0, identity.gid, 0)


def _fork(
    identity: Identity,
    program: str,
    argv: list[str],
    environment: dict[str, str],
    fds: tuple[int, int, int],
    *,
    terminal: bool = False,
) -> int:
    """Start a program as another user or on a terminal; raises what ``execve`` raises. Only the child's ids change."""
    source, sink = os.pipe()  # closed by the program's start
    try:
        pid = os.fork()
        if pid == 0:
            _become_command(identity, program, argv, environment, fds, sink, terminal=terminal)
        os.close(sink)
        sink = -1
        failure = os.read(source, 4096)
    finally:
        os.close(source)
        if sink >= 0:
            os.close(sink)
    if failure:
        os.waitpid(pid, 0)
        code, _, text = failure.decode("utf-8", "replace").partition(" ")
        raise OSError(int(code), os.strerror(int(code))) if int(code) else ValueError(text)
    return pid


def _become_command(
    identity: Identity,
    program: str,
    argv: list[str],
    environment: dict[str, str],
    fds: tuple[int, int, int],
    sink: int,
    *,
    terminal: bool,
) -> None:
    """Be the forked child: end as the program, or tell why it could not be started. Never returns."""
    try:
        os.setsid()
        if identity.foreign:
            os.seteuid(0)
            identity.become()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        if terminal:
            _control_terminal(0)
        signal.set_wakeup_fd(-1)
        for number in [*IGNORED, signal.SIGCHLD]:
            signal.signal(number, signal.SIG_DFL)
        os.execve(program, argv, environment)
    except (OSError, ValueError, TypeError) as error:
        code = (error.errno or errno.EIO) if isinstance(error, OSError) else 0
        os.write(sink, f"{code} {error}".encode("utf-8", "replace")[:4096])
    finally:
        os._exit(127)


def _resize_terminal(fd: int, size: list[int]) -> None:
    """Say how many rows and columns a terminal has; its foreground is told by the kernel."""
    import fcntl
    import termios

    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


def _control_terminal(fd: int) -> None:
    """Make a terminal that of our session, of which we are the first process."""
    import fcntl
    import termios

    fcntl.ioctl(fd, termios.TIOCSCTTY, 0)


def _processes() -> dict[int, tuple[int, str]]:
    """Return every visible process with its parent and its state."""
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


def _ticks(pid: int) -> int:
    """Return the processor time of a process, in ticks of the kernel; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _descendants(root: int, table: dict[int, tuple[int, str]]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        children.setdefault(parent, []).append(pid)
    descendants: list[int] = []
    fresh = children.get(root, [])
    while fresh:
        descendants += fresh
        fresh = [child for pid in fresh for child in children.get(pid, ())]
    return descendants


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


def _kernel_number(paths: tuple[str, str], name: bytes = b"") -> int:
    """Return the number (after a name) in the first of the files that there is, 0 if there is none."""
    for path in paths:
        try:
            with open(path, "rb") as file:
                words = file.read().split()
            return int(words[words.index(name) + 1 if name else 0])
        except (OSError, ValueError, IndexError):
            continue
    return 0


def _own_oom_score() -> tuple[int, bytes]:
    """Return the descriptor by which children get a worse score than ours (they are ended first), and ours."""
    try:
        with open("/proc/self/oom_score_adj", "rb") as file:
            score = file.read()
        return (os.open("/proc/self/oom_score_adj", os.O_WRONLY) if int(score) < int(OOM_SCORE) else -1), score
    except OSError:
        return -1, b""


def _children_signal() -> int:
    """Return a descriptor that becomes readable when a child ends."""
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    os.set_blocking(theirs, False)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return ours


# --- the loop


def bound_self(bounds: Mapping[str, int]) -> None:
    """Take on the bounds of a process, by the names of `resource`, for ourselves and all that we start.

    Nobody else can set them: the gateway is not privileged over a user namespace's root.
    """
    if not bounds:
        return
    import resource  # containers are bounded by their engine, and start without it

    for name, value in bounds.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (least, least))


class Runner:
    """The loop: what was asked, what is due, and when to end."""

    def __init__(self, directory: str | None) -> None:
        self.poller = Poller()
        self.workplace = Workplace()
        self.link = GatewayLink(self, self.poller, directory)
        # One that is spoken to through the engine may have a kernel that is not Linux, and other rules for signals.
        self.jobs = Jobs(self.poller, self.workplace, self.link, own_kernel=directory is None)
        self.files = Files(self.workplace, self.link)
        self.sequence = 0  # the gateway's own, over all of its connections
        self.taken: int | None = None  # the last of its numbers under which a command came

    def serve(self) -> None:
        """Serve until no gateway has come for ``orphan_s``; the sandbox ends with us."""
        while True:
            try:
                if self.turn():
                    return
            except Exception as error:  # a fault that no exchange had: those under way go on
                _complain(error)
                time.sleep(TICK_S)

    def turn(self) -> bool:
        """Do what is asked and due; return whether all is over."""
        silence, jobs = self.link.silence, self.jobs
        self.poller.handle(self.sleep_s())
        self.files.pump()
        silence.discount_frozen_time()
        jobs.on_clock(time.monotonic())
        if silence.unattended:
            self.link.drop_silent()
            if jobs.claimable():
                jobs.keep("", detached=False)
        over = silence.lasts_s > silence.orphan_s and not jobs.claimable()
        if over:
            jobs.tree.end_all()
        return over

    def sleep_s(self) -> float:
        if self.files.sending:
            return 0.0
        now, silence = time.monotonic(), self.link.silence
        due_s = self.jobs.next_deadline_s(now) - now
        if self.jobs.claimable():
            due_s = min(due_s, silence.unattended_s - silence.lasts_s)
        else:
            due_s = min(due_s, silence.orphan_s - silence.lasts_s)
        return max(0.0, min(silence.longest_sleep_s, due_s))

    def on_hello(self, hello: dict[str, Any], *, known: bool) -> None:
        """Answer the greeting of a gateway that knows the token."""
        if not self.workplace.prepared:
            try:
                self.workplace.prepare_workdir()
            except (RequestDenied, OSError) as error:
                denied = _file_denied(error) if isinstance(error, OSError) else error
                self.link.send(ERROR, 0, _refusal(denied))
                raise SystemExit(f"no commands can run here: {error}") from None
        bound_self(hello.get("bounds", {}))
        if hello.get("sequence", 0) != self.sequence:
            self.sequence, self.taken = hello.get("sequence", 0), None
            self.jobs.drop_attached()
        held = {job.claim: [job.ran_s, job.ended_s is None] for job in self.jobs.claimable()}
        ready = {
            "protocol": PROTOCOL,
            "known": known,
            "pid": os.getpid(),
            "held": held,
            "taken": self.taken,
        }
        self.link.send(READY, 0, as_json({**ready, "begun": self.jobs.claims.started_claims()}))

    def on_gateway_lost(self) -> None:
        self.jobs.on_gateway_lost()
        self.files.abandon()

    def obey(self, kind: int, number: int, payload: bytes) -> None:
        """Carry out one request. What it raises ends its exchange, and no other."""
        request = from_json(payload) if payload and kind != STDIN else {}
        try:
            if kind == STDIN:
                if not self.files.feed(number, payload):
                    self.jobs.feed(number, payload)
            elif kind == RUN:
                self.jobs.run(number, request)
                self.taken = number
            elif kind == KILL:
                self.files.cancel(number)
                self.jobs.kill(number, request["grace_s"])
            elif kind == CLAIM:
                self.jobs.claim(number, request["claim"])
            elif kind == KEEP:
                self.jobs.keep(request["claim"], detached=request["lasting"])
                if not request["lasting"]:
                    self.jobs.claims.forget_claims(request["claim"])
            elif kind == READ:
                self.files.read(number, request)
            elif kind == WRITE:
                self.files.write(number, request)
            elif kind == LIST:
                self.files.list_directory(number, request)
            elif kind == SWEEP:
                self.jobs.tree.sweeps[number] = time.monotonic() + UNKILLABLE_S
                self.jobs.tree.clears = request.get("clear_bytes", self.jobs.tree.clears)
            elif kind == STEER:
                self.jobs.steer(number, request)
            elif kind == REST:
                self.jobs.rest(number, resting=request["resting"], still=request["still"])
        except Exception as error:
            job = self.jobs.running.get(number)
            if job is None:
                self.files.fail(number, error)
            else:
                self.jobs.fail(job, error)


def _shed_privileges() -> None:
    """Do what a container engine has done already, and bubblewrap or a plain start has not."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(47, 4, 0, 0, 0)  # PR_CAP_AMBIENT_CLEAR_ALL: commands would inherit our capabilities through exec
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: commands of the same user could trace and read us
    if os.getpid() != 1:
        libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: without a namespace of our own, adopt the orphans


def _become_root() -> None:
    """Be the root of our user namespace, into which bubblewrap has led us as the host's."""
    os.setgroups([0])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _load() -> None:
    """Import what is used later: who is root in the sandbox by then could have put something else in its place."""
    for name in ("ctypes", "fcntl", "termios"):
        try:
            __import__(name)
        except ImportError:
            pass  # a Python without it


def main() -> None:
    os.umask(0o022)
    _load()
    if "--root" in sys.argv:
        _become_root()
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.set_inheritable(int(name), False)
            except OSError:
                pass
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    runner = Runner(None if sys.argv[1] == "--attached" else sys.argv[1])
    if "--shed" in sys.argv:
        _shed_privileges()
    runner.serve()


if __name__ == "__main__":
    main()
