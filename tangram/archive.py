"""Trees as tars: the one way in which a tar that somebody else wrote becomes files, and the program of sandboxes.

Layers, snapshots, handlers of nodes, archives that users send and ``tangram cp`` all go through `Extraction`. It goes
from descriptor to descriptor and follows no link unseen. `Reader` reads the headers: the library's reader believes any
size, nests without bound and keeps every entry.

In a sandbox this file is a program with the rights of its user (standard library, Python 3.8 on): ``python3 -c SOURCE
put PATH LIMIT`` takes a tar on standard input, ``get PATH LIMIT BASE FOLLOW`` writes one to standard output. What goes
wrong is one line of JSON on standard error, and status 65.
"""

# pathlib would cost every archive its import.
# ruff: noqa: PTH103, PTH108, PTH112, PTH114, PTH115, PTH118, PTH119, PTH208
from __future__ import annotations

import base64
import errno
import importlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple

REFUSED = 65
#: Entries of an archive, directories inside each other, bytes of a path, and of one part of it.
ENTRIES_MAX, DEPTH_MAX, PATH_MAX_BYTES, NAME_MAX_BYTES = 200_000, 256, 4000, 255
#: Bytes of the paths of all directories, which are kept until the modes are set.
NAMES_MAX_BYTES = 32 * 2**20
#: Bytes of what extends one header (long names, attributes), and headers that one entry may have.
EXTENDED_MAX_BYTES, HEADERS_MAX = 512 * 2**10, 8
BLOCK_BYTES, PIECE_BYTES = 512, 2**18
#: All bits of a mode, and those that files of the machine can get: none that lends somebody's rights.
ANY_MODE, PERMISSIONS = 0o7777, 0o777
#: Extended attributes are fields of a header, in base64: those that a user may set.
USERS_OWN = "user."
XATTR = f"TANGRAM.xattr.{USERS_OWN}"
#: Ids that a sandbox has.
IDS = 2**16
FILE, HARD_LINK, LINK, DIRECTORY, PIPE, OTHER = "file", "hard link", "link", "directory", "pipe", "other"
KINDS = {b"0": FILE, b"\0": FILE, b"7": FILE, b"1": HARD_LINK, b"2": LINK, b"5": DIRECTORY, b"6": PIPE}
#: How a compressed tar begins, and the errors of its module.
COMPRESSIONS = {b"\x1f\x8b": ("gzip", "zlib", "error"), b"BZh": ("bz2", "zlib", "error")}
COMPRESSIONS[b"\xfd7zXZ\0"] = ("lzma", "lzma", "LZMAError")
#: A directory on the way: it is entered, and perhaps not read.
ENTERED = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
CREATED = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
REWRITTEN = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
ERRORS = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_a_directory",
    errno.EISDIR: "is_a_directory",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.EROFS: "read_only",
}


class Refused(Exception):
    """A code of the gateway's errors, what is wrong with a file, and a message."""

    def __init__(self, code: str, file_error: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.file_error = file_error


def no_tar(why: str) -> Refused:
    return Refused("invalid_input", "", f"this is no tar: {why}")


def refused(name: str, why: str, file_error: str = "") -> Refused:
    return Refused("invalid_input", file_error, f"the entry {name[:200]!r} {why}")


def parts_of(name: str) -> list[str]:
    """Return the parts of a path below a directory; raises Refused for one that leaves it, or that no file can have."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise refused(name, "leaves the directory", "outside")
    longest = max([len(os.fsencode(part)) for part in parts], default=0)
    path_bytes = len(os.fsencode(name))
    if "\0" in name or len(parts) > DEPTH_MAX or path_bytes > PATH_MAX_BYTES or longest > NAME_MAX_BYTES:
        raise refused(name, f"is no path of at most {PATH_MAX_BYTES} bytes and {DEPTH_MAX} directories")
    return parts


class Entry(NamedTuple):
    """An entry of a tar, as it says of itself."""

    name: str
    kind: str
    mode: int
    size_bytes: int = 0
    mtime_ns: int | None = None
    #: Where a link leads.
    target: str = ""
    uid: int = 0
    gid: int = 0
    extended: dict[str, str] = {}  # noqa: RUF012 - of a tuple, and never changed


class Reader:
    """The entries of a tar as ustar, pax and GNU tar write it, one after the other; nothing is kept of earlier ones.

    Sparse files are none that it knows. Raises Refused for what is no tar.
    """

    def __init__(self, file: IO[bytes], holes: int = -1) -> None:
        """``holes`` is a second descriptor of the same plain file: its holes are then those of the entries' files.

        Such a one is whole only with the two empty blocks at its end: what it lost before them would be holes.
        """
        self._file: Any = file
        self._holes = holes
        self._broken: tuple[Any, ...] = ()
        #: Bytes of the last entry's file, and of those the ones that were read.
        self._size_bytes = self._read_bytes = 0
        if holes >= 0:
            return
        first = file.read(BLOCK_BYTES)
        self._file = _Rejoined(first, file)
        for begin, (module, of_error, error) in COMPRESSIONS.items():
            if first.startswith(begin):
                self._broken = (EOFError, OSError, getattr(importlib.import_module(of_error), error))
                self._file = importlib.import_module(module).open(self._file)

    def __iter__(self) -> Iterator[Entry]:
        head = self._get(BLOCK_BYTES)
        if not head:
            raise no_tar("it is empty")
        extended: dict[str, str] = {}
        headers = 0
        while head.strip(b"\0"):
            kind, size_bytes, headers = head[156:157], self._size_of(head), headers + 1
            if kind in (b"x", b"g", b"L", b"K"):
                if size_bytes > EXTENDED_MAX_BYTES or headers >= HEADERS_MAX:
                    raise no_tar("the headers of an entry are too long, or too many")
                data = self._get(size_bytes)
                self._pass_over(-size_bytes % BLOCK_BYTES)
                if kind == b"x":
                    extended.update(_fields(data))
                elif kind != b"g":  # what is said of all entries is a comment of git
                    extended["path" if kind == b"L" else "linkpath"] = os.fsdecode(data.rstrip(b"\0"))
            else:
                entry = self._entry(head, extended, size_bytes)
                # An other one has content as a file has it; links and directories have none, whatever they say.
                self._size_bytes = entry.size_bytes
                yield entry
                self._pass_over(self._size_bytes - self._read_bytes + -self._size_bytes % BLOCK_BYTES)
                extended, headers = {}, 0
                self._size_bytes = self._read_bytes = 0
            head = self._get(BLOCK_BYTES)
        if self._holes >= 0 and head + self._get(BLOCK_BYTES + 1) != bytes(2 * BLOCK_BYTES):
            raise no_tar("it has lost its end")

    def content(self) -> Iterator[tuple[int, bytes]]:
        """Yield the content of the last entry's file in pieces, each with its place; between them it is zeros."""
        if self._holes < 0:
            while self._read_bytes < self._size_bytes:
                data = self._get(min(PIECE_BYTES, self._size_bytes - self._read_bytes))
                if not data:
                    raise no_tar("it ends in a file")
                yield self._read_bytes, data
                self._read_bytes += len(data)
            return
        begin = self._file.tell()
        for start, end in extents(self._holes, begin, begin + self._size_bytes):
            while start < end:
                data = os.pread(self._holes, min(PIECE_BYTES, end - start), start)
                if not data:
                    raise no_tar("it ends in a file")
                yield start - begin, data
                start += len(data)

    def _size_of(self, head: bytes) -> int:
        if len(head) < BLOCK_BYTES or _number(head[148:156]) != sum(head[:148]) + 8 * ord(" ") + sum(head[156:]):
            raise no_tar("a header is damaged")
        return _number(head[124:136])

    def _entry(self, head: bytes, extended: dict[str, str], size_bytes: int) -> Entry:
        name, target = (head[begin : begin + 100].partition(b"\0")[0] for begin in (0, 157))
        if head[257:263] == b"ustar\0" and head[345]:
            name = head[345:500].partition(b"\0")[0] + b"/" + name
        kind = KINDS.get(head[156:157], OTHER)
        path = extended.get("path", os.fsdecode(name))
        if head[156] == 0 and path.endswith("/"):
            kind = DIRECTORY
        if any(key.startswith("GNU.sparse.") for key in extended):
            kind = OTHER
        mtime = 0 if head[136] == 0xFF else _number(head[136:148])
        try:
            size_bytes = int(extended.get("size", str(size_bytes))[:40])
            mtime_ns = round(float(extended.get("mtime", mtime)) * 1e9)
        except (ValueError, OverflowError):
            raise no_tar("a number of a header is none") from None
        if not 0 <= size_bytes < 2**62 or abs(mtime_ns) >= 2**63:
            raise no_tar("a number of a header is out of bounds")
        return Entry(
            path,
            kind,
            _number(head[100:108]) & ANY_MODE,
            size_bytes if kind in (FILE, OTHER) else 0,
            mtime_ns,
            extended.get("linkpath", os.fsdecode(target)),
            _number(head[108:116]),
            _number(head[116:124]),
            extended,
        )

    def _pass_over(self, size_bytes: int) -> None:
        if self._holes >= 0:
            self._file.seek(size_bytes, os.SEEK_CUR)
            return
        while size_bytes > 0:
            data = self._get(min(PIECE_BYTES, size_bytes))
            if not data:
                raise no_tar("it ends in a file")
            size_bytes -= len(data)

    def _get(self, size_bytes: int) -> bytes:
        """Return so many bytes, or less at the end only."""
        output = b""
        try:
            while len(output) < size_bytes:
                data = self._file.read(size_bytes - len(output))
                if not data:
                    break
                output += data
        except self._broken as error:
            raise no_tar(f"it cannot be decompressed: {error}") from None
        return output


class _Rejoined:
    """A stream whose beginning has been read."""

    def __init__(self, first: bytes, rest: IO[bytes]) -> None:
        self._first, self._rest = first, rest

    def read(self, size: int = -1) -> bytes:
        if not self._first:
            return self._rest.read(size)
        end = len(self._first) if size < 0 else size
        data, self._first = self._first[:end], self._first[end:]
        return data


def _number(field: bytes) -> int:
    """Return a number of a header; raises Refused for what is none, and for a negative one."""
    if field[0] == 0x80:  # of GNU tar, in base 256
        return int.from_bytes(field[1:], "big")
    try:
        value = int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        value = -1
    if value < 0:
        raise no_tar("a number of a header is none, or is negative")
    return value


def _fields(data: bytes) -> dict[str, str]:
    """Return the fields of an extended header; raises Refused for what is none."""
    result: dict[str, str] = {}
    place = 0
    while place < len(data):
        length, _, _ = data[place : place + 20].partition(b" ")
        end = place + int(length) if length.isdigit() else 0
        key, equals, value = data[place + len(length) + 1 : end - 1].partition(b"=")
        if not equals or end > len(data) or data[end - 1 : end] != b"\n":
            raise no_tar("an extended header is damaged")
        result[os.fsdecode(key)] = os.fsdecode(value)
        place = end
    return result


def extents(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a file between two places that are no holes."""
    while start < end:
        try:
            start = os.lseek(fd, start, os.SEEK_DATA)
            stop = min(end, os.lseek(fd, start, os.SEEK_HOLE))
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return
            stop = end  # the file system does not tell
        if start >= end:
            return
        yield start, stop
        start = stop


@contextmanager
def opened_directory(path: str | os.PathLike[str], flags: int = 0, dir_fd: int | None = None) -> Iterator[int]:
    """Yield the descriptor of a directory; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def entered(root: int, parts: Iterable[str]) -> int:
    """Return a directory below an open one, to be entered, not read; raises OSError, also for a link on the way."""
    fd = os.dup(root)
    for part in parts:
        above = fd
        try:
            fd = os.open(part, ENTERED, dir_fd=above)
        finally:
            os.close(above)
    return fd


def as_it_was(mode: int, kind: str) -> int:
    return mode


def private_mode(mode: int, kind: str) -> int:
    """Return the mode of a copy on a user's machine: it lends no rights, and its owner can enter and remove it."""
    return mode & PERMISSIONS | (0o700 if kind == DIRECTORY else 0)


def take_back(root: str, links: Iterable[str]) -> dict[str, str]:
    """Remove those of a tree's links that lead out of it; return their paths, and where they led."""
    within, led = os.path.realpath(root).rstrip("/") + "/", {}
    for path in links:
        place = os.path.join(root, path)
        if not (os.path.realpath(place) + "/").startswith(within):
            led[path] = os.readlink(place)
            os.unlink(place)
    return led


class Extraction:
    """Entries on their way into a directory, which none leaves, neither by its name nor through a link.

    A name comes once, unless it is a directory's. As a context manager it sets the modes of directories at its end,
    also after an error: one may forbid what goes into it.
    """

    def __init__(
        self,
        root: int,
        *,
        limit_bytes: int = 2**63,
        entries_max: int = ENTRIES_MAX,
        into: bool = False,
        followed: str = "",
        links: bool = True,
        faithful: bool = False,
        owner: int = -1,
        mode: Callable[[int, str], int] = as_it_was,
    ) -> None:
        """``root`` is the open directory; what is in it is replaced only if entries go ``into`` it, as nothing else is.

        With ``followed``, its path, links that stay in it are followed on the way to an entry. Without ``links`` they
        are passed over. A ``faithful`` copy has pipes, attributes, and the root's own entry; ``owner`` is the id of the
        tree's user 0, or -1 where all belongs to this process. ``mode`` returns the mode of what has one and a kind.
        """
        self.limit_bytes = self.left_bytes = limit_bytes
        self._root, self._followed = root, os.path.realpath(followed) if followed else ""
        self._entries_max, self._into, self._links, self._mode = entries_max, into, links, mode
        self._faithful, self._owner = faithful, owner
        self._entries = self._names_bytes = 0
        #: Of what came: the hash of its path, and whether it is a directory.
        self._came: dict[int, bool] = {}
        #: Path, mode and time of each directory.
        self._directories: list[tuple[str, int, int | None]] = []
        #: The directory that was entered last.
        self._parts: list[str] = []
        self._entered = os.dup(root)

    def __enter__(self) -> Extraction:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for path, mode, mtime_ns in reversed(self._directories):
                fd = self._directory(parts_of(path), make=False)
                with suppress(PermissionError), opened_directory(".", dir_fd=fd) as opened:
                    self._set(opened, mode, mtime_ns)
        finally:
            os.close(self._entered)

    def all(self, reader: Reader) -> None:
        """Lay out a tar; raises Refused for what may not be, and OSError."""
        for entry in reader:
            self.one(entry, reader.content())

    def one(self, entry: Entry, content: Iterable[tuple[int, bytes]] = ()) -> None:
        """Make what an entry says; raises as `all`."""
        parts = self.admitted(entry)
        try:
            if entry.kind == DIRECTORY:
                self._make_directory(parts, entry)
            elif entry.kind != LINK or self._links:
                self._make(parts, entry, content)
        except FileExistsError:
            raise refused(entry.name, "comes twice") from None
        except OSError as error:
            error.filename = entry.name
            raise

    def admitted(self, entry: Entry) -> list[str]:
        """Return the parts of an entry's path; raises Refused for more than there may be, and for a path that came."""
        parts = parts_of(entry.name)
        self._entries += 1
        self.left_bytes -= entry.size_bytes
        if self.left_bytes < 0 or self._entries > self._entries_max:
            bounds = f"{self.limit_bytes} bytes (server.file_limit) or {self._entries_max} entries"
            raise Refused("too_large", "", f"the archive holds more than {bounds}")
        if not parts and entry.kind != DIRECTORY:
            raise refused(entry.name, "has no name")
        if entry.kind in (LINK, HARD_LINK) and ("\0" in entry.target or not 0 < len(entry.target) <= PATH_MAX_BYTES):
            raise refused(entry.name, "is a link to no path")
        if self._into:  # else what is there already says so
            key, is_directory = hash(tuple(parts)), entry.kind == DIRECTORY
            if key in self._came and not (self._came[key] and is_directory):
                raise refused(entry.name, "comes twice")
            self._came[key] = is_directory
        return parts

    def _make(self, parts: list[str], entry: Entry, content: Iterable[tuple[int, bytes]]) -> None:
        if entry.kind == HARD_LINK:
            self._hard_link(parts, entry)
            return
        directory, name = self._directory(parts[:-1]), parts[-1]
        if entry.kind == FILE:
            self._write(directory, name, entry, content)
            return
        self._clear(directory, name)
        if entry.kind == LINK:
            os.symlink(entry.target, name, dir_fd=directory)
        elif entry.kind == PIPE and self._faithful:
            os.mkfifo(name, 0o600, dir_fd=directory)
        else:
            raise refused(entry.name, "is no plain file, directory or link", "not_a_file")
        if self._faithful:
            if self._owner >= 0:
                os.chown(name, *self._ids(entry), dir_fd=directory, follow_symlinks=False)
            if entry.kind == PIPE:
                os.chmod(name, self._mode(entry.mode, PIPE), dir_fd=directory)
            times = entry.mtime_ns or 0
            os.utime(name, ns=(times, times), dir_fd=directory, follow_symlinks=False)

    def _make_directory(self, parts: list[str], entry: Entry) -> None:
        if parts:
            above = self._directory(parts[:-1])
            with suppress(FileExistsError):  # what it is turns out when it is entered
                os.mkdir(parts[-1], 0o700, dir_fd=above)
        elif not self._faithful:
            return
        fd = self._directory(parts)
        if self._faithful:
            with opened_directory(".", dir_fd=fd) as opened:
                self._own(opened, entry)
        self._note(parts, entry.mode, entry.mtime_ns)

    def _hard_link(self, parts: list[str], entry: Entry) -> None:
        source = parts_of(entry.target)
        if not source or source == parts or (self._into and self._came.get(hash(tuple(source))) is not False):
            raise refused(entry.name, "is another name of a file that did not come")
        there = os.dup(self._directory(source[:-1], make=False))
        try:
            if not self._faithful and stat.S_ISLNK(os.stat(source[-1], dir_fd=there, follow_symlinks=False).st_mode):
                raise refused(entry.name, "is another name of a link")
            directory, name = self._directory(parts[:-1]), parts[-1]
            self._clear(directory, name)
            os.link(source[-1], name, src_dir_fd=there, dst_dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            raise refused(entry.name, "is another name of a file that did not come") from None
        finally:
            os.close(there)

    def _write(self, directory: int, name: str, entry: Entry, content: Iterable[tuple[int, bytes]]) -> None:
        """Write a file; one that is there keeps its owner, one that is new is there whole or not at all."""
        fd, is_new = self._opened(directory, name)
        try:
            for place, data in content:
                while data:
                    written = os.pwrite(fd, data, place)
                    data, place = data[written:], place + written
            os.ftruncate(fd, entry.size_bytes)
            if self._faithful:
                self._own(fd, entry)
            self._set(fd, self._mode(entry.mode, FILE), entry.mtime_ns)
        except BaseException:
            if is_new:
                os.unlink(name, dir_fd=directory)
            raise
        finally:
            os.close(fd)

    def _opened(self, directory: int, name: str) -> tuple[int, bool]:
        """Return a file to write to, and whether it is new; a program that runs goes on with what it was."""
        try:
            return os.open(name, CREATED, 0o600, dir_fd=directory), True
        except FileExistsError:
            if not self._into:
                raise
        if stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            try:
                fd = os.open(name, REWRITTEN, dir_fd=directory)
            except OSError as error:
                if error.errno != errno.ETXTBSY:
                    raise
            else:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    os.ftruncate(fd, 0)
                    return fd, False
                os.close(fd)
        self._clear(directory, name)
        return os.open(name, CREATED, 0o600, dir_fd=directory), True

    def _clear(self, directory: int, name: str) -> None:
        """Take away what stands in the place of an entry, if that may be replaced and is no directory."""
        if not self._into:
            return
        try:
            if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            pass

    def _directory(self, parts: list[str], *, make: bool = True) -> int:
        """Return a directory below the root, made with those above it; its descriptor is good until the next call."""
        begin = len(self._parts) if parts[: len(self._parts)] == self._parts else 0
        fd = os.dup(self._entered if begin else self._root)
        for depth in range(begin, len(parts)):
            above = fd
            try:
                fd = self._enter(above, parts[: depth + 1], make)
            finally:
                os.close(above)
        os.close(self._entered)
        self._parts, self._entered = parts, fd
        return fd

    def _enter(self, above: int, parts: list[str], make: bool) -> int:
        try:
            return os.open(parts[-1], ENTERED, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
        except OSError:
            if stat.S_ISLNK(os.stat(parts[-1], dir_fd=above, follow_symlinks=False).st_mode):
                return self._follow(parts)
            raise
        os.mkdir(parts[-1], 0o700, dir_fd=above)
        self._note(parts, 0o755, None)
        return os.open(parts[-1], ENTERED, dir_fd=above)

    def _follow(self, parts: list[str]) -> int:
        """Return the directory of the tree to which a link leads; raises Refused where that is none of it."""
        if not self._followed:
            raise refused("/".join(parts), "is a link here; remove it, or name another target")
        true = os.path.realpath(os.path.join(self._followed, *parts))
        within = self._followed.rstrip("/") + "/"
        if not (true + "/").startswith(within):
            raise refused("/".join(parts), "leaves the directory", "outside")
        return entered(self._root, parts_of(true[len(within) :]))

    def _note(self, parts: list[str], mode: int, mtime_ns: int | None) -> None:
        path = "/".join(parts)
        self._names_bytes += len(os.fsencode(path))
        if self._names_bytes > NAMES_MAX_BYTES:
            raise Refused("too_large", "", f"the paths of the directories take more than {NAMES_MAX_BYTES} bytes")
        self._directories.append((path, self._mode(mode, DIRECTORY), mtime_ns))

    def _set(self, fd: int, mode: int, mtime_ns: int | None) -> None:
        with suppress(PermissionError):  # it is another's, who lets us write
            os.fchmod(fd, mode)
            if mtime_ns is not None:
                os.utime(fd, ns=(mtime_ns, mtime_ns))

    def _own(self, fd: int, entry: Entry) -> None:
        """Give a file or directory its owner and attributes; the owner first, as that takes setuid away."""
        if self._owner >= 0:
            os.fchown(fd, *self._ids(entry))
        for key, value in entry.extended.items():
            if key.startswith(XATTR):
                try:
                    os.setxattr(fd, USERS_OWN + key[len(XATTR) :], base64.b64decode(value, validate=True))
                except ValueError:
                    raise refused(entry.name, "has an attribute that is none") from None

    def _ids(self, entry: Entry) -> tuple[int, int]:
        if entry.uid >= IDS or entry.gid >= IDS:
            raise refused(entry.name, f"belongs to an id above {IDS}")
        return self._owner + entry.uid, self._owner + entry.gid


def put(path: str, limit: int) -> None:
    os.makedirs(path, exist_ok=True)
    with opened_directory(path) as root, Extraction(root, limit_bytes=limit, into=True, followed=path) as tree:
        tree.all(Reader(sys.stdin.buffer))
    while sys.stdin.buffer.read(65536):
        pass  # what pads the archive


def measure(path: str, limit: int) -> None:
    """Raise, before anything is written, if the tree holds too much or something that may not be read."""
    left, entries = limit, 0
    stack = [path]
    while stack:
        place = stack.pop()
        info = os.lstat(place)
        entries += 1
        if stat.S_ISDIR(info.st_mode):
            stack += [os.path.join(place, name) for name in os.listdir(place)]
        elif stat.S_ISREG(info.st_mode):
            left -= info.st_size
            if not os.access(place, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)
        if left < 0 or entries > ENTRIES_MAX:
            raise Refused(
                "too_large", "", f"{path!r} holds more than {limit} bytes (server.file_limit) or {ENTRIES_MAX} entries"
            )


def get(path: str, limit: int, base: bool, follow: bool) -> None:
    if follow and os.path.islink(path):
        path = os.path.realpath(path)
    measure(path, limit)
    alone = os.path.islink(path) or not os.path.isdir(path)
    name = os.path.basename(os.path.normpath(path)) if base or alone else "."
    import tarfile  # what unpacks does not need it

    def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return entry if entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() else None

    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        tar.add(path, arcname=name or ".", filter=kept)
    sys.stdout.buffer.flush()


def main(words: list[str]) -> int:
    os.umask(0o022)
    try:
        if words[0] == "put":
            put(words[1], int(words[2]))
        else:
            get(words[1], int(words[2]), words[3] == "base", words[4] == "follow")
        return 0
    except Refused as error:
        values = {"code": error.code, "message": str(error), "file_error": error.file_error}
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        code = "too_large" if full else "not_found" if error.errno == errno.ENOENT else "invalid_input"
        message = f"{error.filename or 'archive'}: {os.strerror(error.errno or 0)}"
        message += " (sandbox.disk)" if full else ""
        values = {"code": code, "message": message, "file_error": ERRORS.get(error.errno or 0, "")}
    sys.stderr.write(json.dumps(values))
    return REFUSED


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)
