"""A directory as one file and back: owners, modes, times, links, holes and extended attributes. Everything blocks.

The file is a tar (PAX) whose holes are holes of the file. A tree is read from descriptor to descriptor and no link is
followed, for what is in it may have been put there to lead elsewhere. Sockets and devices are left out, and so is what
is mounted in it: that is not the tree's.
"""

from __future__ import annotations

import base64
import errno
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from manager.errors import CodedError, Conflict

COMPONENT = "sandbox.snapshots"
#: Directories inside each other, and bytes of a path, in a tree that can be kept.
DEPTH_MAX, PATH_MAX_BYTES = 256, 4000
#: Ids of one sandbox that has its own (`runtimes.sandbox.process.ids.BLOCK`), and what others become.
IDS, NOBODY = 2**16, 65534
PIECE_BYTES = 2**20
XATTR = "TANGRAM.xattr."
NESTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
CONTENT = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def pack(root: int, target: Path, *, base: int, left_bytes: int, too_large: Callable[[int], CodedError]) -> int:
    """Write the tree below an open directory to a file that is new; return its bytes on the disk.

    ``base`` is the machine's id of the tree's user 0. Raises ``too_large`` beyond ``left_bytes`` of content, Conflict
    for what cannot be kept or read, and OSError.
    """
    with target.open("xb") as file:
        os.fchmod(file.fileno(), 0o600)
        _Packer(file, base, left_bytes, too_large).tree(root)
        file.flush()
        return os.fstat(file.fileno()).st_blocks * 512


class _Packer:
    """Writes one tree."""

    def __init__(self, file: BinaryIO, base: int, left_bytes: int, too_large: Callable[[int], CodedError]) -> None:
        self._file, self._base = file, base
        self._limit_bytes, self._written_bytes, self._too_large = left_bytes, 0, too_large
        #: The first name of each file that has several.
        self._names: dict[tuple[int, int], str] = {}
        #: The file system of the tree.
        self._device = -1

    def tree(self, root: int) -> None:
        self._device = os.fstat(root).st_dev
        self._directory(root, ".", os.fstat(root))
        self._below(root, "", 1)
        self._file.write(bytes(2 * tarfile.BLOCKSIZE))

    def _below(self, directory: int, prefix: str, depth: int) -> None:
        if depth > DEPTH_MAX:
            raise _unkept(prefix, f"lies in more than {DEPTH_MAX} directories")
        for name in sorted(os.listdir(directory)):
            path = f"{prefix}{name}"
            if len(os.fsencode(path)) > PATH_MAX_BYTES:
                raise _unkept(path[:200], f"has a path of more than {PATH_MAX_BYTES} bytes")
            with suppress(FileNotFoundError):
                self._entry(directory, name, path, depth)

    def _entry(self, directory: int, name: str, path: str, depth: int) -> None:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if info.st_dev != self._device:
            return
        if stat.S_ISDIR(info.st_mode):
            below = _opened(name, NESTED, directory, path)
            try:
                self._directory(below, path, info)
                self._below(below, f"{path}/", depth + 1)
            finally:
                os.close(below)
            return
        header = self._header(path, info)
        first = self._names.setdefault((info.st_dev, info.st_ino), path) if info.st_nlink > 1 else path
        if first != path:
            header.type, header.linkname = tarfile.LNKTYPE, first
        elif stat.S_ISLNK(info.st_mode):
            header.type, header.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=directory)
        elif stat.S_ISFIFO(info.st_mode):
            header.type = tarfile.FIFOTYPE
        elif stat.S_ISREG(info.st_mode):
            self._regular(directory, name, header)
            return
        else:
            self._names.pop((info.st_dev, info.st_ino), None)
            return
        self._say(header)

    def _directory(self, fd: int, path: str, info: os.stat_result) -> None:
        header = self._header(path, info)
        header.type = tarfile.DIRTYPE
        header.pax_headers = _attributes(fd)
        self._say(header)

    def _regular(self, directory: int, name: str, header: tarfile.TarInfo) -> None:
        fd = _opened(name, CONTENT, directory, header.name)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                return
            header.size, header.pax_headers = info.st_size, _attributes(fd)
            self._say(header)
            begin = self._file.tell()
            after = begin + -(-info.st_size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            self._require_place(header.name, after)
            for start, end in _extents(fd, 0, info.st_size):
                self._copy(fd, start, end, begin)
            self._file.seek(after)
        finally:
            os.close(fd)

    def _require_place(self, path: str, after: int) -> None:
        """Raise Conflict for a file whose holes reach beyond what a file of this disk can be."""
        try:
            self._file.seek(after + PIECE_BYTES)
        except (OSError, OverflowError):
            raise _unkept(path, "is larger than the gateway's disk can have a file") from None

    def _copy(self, fd: int, start: int, end: int, begin: int) -> None:
        self._written_bytes += end - start
        if self._written_bytes > self._limit_bytes:
            raise self._too_large(self._written_bytes)
        self._file.seek(begin + start)
        while start < end and (data := os.pread(fd, min(PIECE_BYTES, end - start), start)):
            self._file.write(data)
            start += len(data)

    def _header(self, path: str, info: os.stat_result) -> tarfile.TarInfo:
        header = tarfile.TarInfo(path)
        header.mode, header.mtime = stat.S_IMODE(info.st_mode), info.st_mtime_ns / 1e9
        header.uid, header.gid = self._inside(info.st_uid), self._inside(info.st_gid)
        return header

    def _inside(self, id: int) -> int:
        return id - self._base if 0 <= id - self._base < IDS else NOBODY

    def _say(self, header: tarfile.TarInfo) -> None:
        said = header.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        self._written_bytes += len(said)
        if self._written_bytes > self._limit_bytes:
            raise self._too_large(self._written_bytes)
        self._file.write(said)


def unpack(source: Path, root: int, *, base: int, owners: bool) -> None:
    """Lay out a packed tree in an open directory, in which nobody else is at work.

    It has nothing but directories, in which something may be mounted.

    ``base`` as for `pack`; without ``owners`` everything is this process's own. Raises OSError.
    """
    # Holes are looked for with a descriptor of its own, as that moves its position.
    with source.open("rb") as data, tarfile.open(source, mode="r:", errors="surrogateescape") as tar:
        directories: list[tarfile.TarInfo] = []
        for info in tar:
            if info.isdir():
                with suppress(FileExistsError):
                    os.mkdir(info.name, 0o700, dir_fd=root)
                directories.append(info)
            elif info.islnk():
                os.link(info.linkname, info.name, src_dir_fd=root, dst_dir_fd=root, follow_symlinks=False)
            else:
                _lay_out(data.fileno(), info, root, base if owners else -1)
        for info in reversed(directories):  # last, as what is made in one changes its time, and may not be allowed
            fd = os.open(info.name, NESTED, dir_fd=root)
            try:
                _finish(fd, info, base if owners else -1)
            finally:
                os.close(fd)


def _lay_out(data: int, info: tarfile.TarInfo, root: int, base: int) -> None:
    """Make one that is no directory; ``base`` is -1 where it is to be this process's own."""
    if info.isreg():
        fd = os.open(info.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=root)
        try:
            for start, end in _extents(data, info.offset_data, info.offset_data + info.size):
                _fill(data, start, end, fd, start - info.offset_data)
            os.ftruncate(fd, info.size)
            _finish(fd, info, base)
        finally:
            os.close(fd)
        return
    if info.issym():
        os.symlink(info.linkname, info.name, dir_fd=root)
    else:
        os.mkfifo(info.name, 0o600, dir_fd=root)
    if base >= 0:
        os.chown(info.name, base + info.uid, base + info.gid, dir_fd=root, follow_symlinks=False)
    if not info.issym():
        os.chmod(info.name, info.mode, dir_fd=root)
    times = (round(info.mtime * 1e9),) * 2
    os.utime(info.name, ns=(times[0], times[1]), dir_fd=root, follow_symlinks=False)


def _fill(source: int, start: int, end: int, target: int, at: int) -> None:
    while start < end and (data := os.pread(source, min(PIECE_BYTES, end - start), start)):
        at += os.pwrite(target, data, at)
        start += len(data)


def _finish(fd: int, info: tarfile.TarInfo, base: int) -> None:
    """Give a file or directory its owner, mode, attributes and time; the owner first, as that takes setuid away."""
    if base >= 0:
        os.fchown(fd, base + info.uid, base + info.gid)
    for key, value in info.pax_headers.items():
        if key.startswith(XATTR):
            os.setxattr(fd, key.removeprefix(XATTR), base64.b64decode(value))
    os.fchmod(fd, info.mode)
    nanoseconds = round(info.mtime * 1e9)
    os.utime(fd, ns=(nanoseconds, nanoseconds))


def _opened(name: str, flags: int, directory: int, path: str) -> int:
    try:
        return os.open(name, flags, dir_fd=directory)
    except PermissionError:
        raise _unkept(path, "cannot be read by the gateway, which is not root: chmod it first") from None


def _unkept(path: str, why: str) -> Conflict:
    told = path.rstrip("/").encode("utf-8", "replace").decode()
    return Conflict(f"no snapshot can be taken: {told!r} {why}", component=COMPONENT, detail={"path": told})


def _attributes(fd: int) -> dict[str, str]:
    """Return the extended attributes that a user can set, as fields of a header."""
    found: dict[str, str] = {}
    with suppress(OSError):  # of a file system without them
        for name in os.listxattr(fd):
            if name.startswith("user.") and "=" not in name:
                found[f"{XATTR}{name}"] = base64.b64encode(os.getxattr(fd, name)).decode("ascii")
    return found


def _extents(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
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
