"""Snapshots of sandboxes: their records, trees and store."""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import shutil
import stat
import sys
import tarfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import structlog

from manager.errors import CapacityExceeded, CodedError, Conflict, NotFound, TooLarge, Unsupported, exhaustion
from manager.function import SandboxSpec, Setting
from tangram.archive import (
    DEPTH_MAX,
    EXTENDED_MAX_BYTES,
    IDS,
    NAMES_MAX_BYTES,
    PATH_MAX_BYTES,
    PERMISSIONS,
    PIECE_BYTES,
    USERS_OWN,
    XATTR,
    Extraction,
    Reader,
    Refused,
    extents,
)

#: In a provider's state directory: a directory for each snapshot.
SNAPSHOTS = "snapshots"
NAME = "record.json"
#: Label of a snapshot's image: the snapshot's id.
LABEL = "tangram.snapshot"
#: The repository of the images of snapshots, whose tag is the id.
REPOSITORY = "tangram-snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSettings:
    """How many snapshots are kept, and for how long; none goes while a trajectory lives that began with it."""

    count_max: Annotated[
        int, Setting("most snapshots; beyond it those used least recently are removed, never one in use", ge=1)
    ] = 64
    total_max_bytes: Annotated[
        int, Setting("most bytes of all of them on the disk; likewise", key="total_max", ge=1)
    ] = 20 * 2**30
    age_s: Annotated[float, Setting("one that was not used for so long is removed", gt=0)] = 7 * 86400.0
    #: Most that are taken at a time; more wait: they share the disk.
    at_once: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshotSettings:
    """How many snapshots all nodes together keep; those of each are its own `sandbox.snapshots`."""

    count_max: Annotated[
        int, Setting("most snapshots on all nodes; beyond it those used least recently are removed", ge=1)
    ] = 4096
    total_max_bytes: Annotated[
        int, Setting("most bytes of all of them on the nodes' disks; likewise", key="total_max", ge=1)
    ] = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRecord:
    """One snapshot."""

    id: str
    #: Whose files they were.
    trajectory: str
    task: str
    #: The kind of provider that made it, and no other can begin a sandbox with it.
    provider: str
    #: The sandbox in which the trajectory lived; of its environment only what the trajectory has chosen.
    spec: SandboxSpec
    #: Time of day at which it was taken, and at which a sandbox began with it last.
    made_s: float
    used_s: float
    #: On the disk, beside what the image has.
    size_bytes: int = 0
    #: False while it is being taken: if the gateway ends meanwhile, the next one removes it.
    ready: bool = False

    @property
    def image(self) -> str:
        """The name of its image, where sandboxes are containers."""
        return f"{REPOSITORY}:{self.id}"

    def write(self, root: Path) -> None:
        """Write it below ``root``, which only the owner may enter."""
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = root / self.id
        place.mkdir(mode=0o700, exist_ok=True)
        part = place / f"{NAME}.part"
        part.write_bytes(msgspec.json.encode(self))
        part.replace(place / NAME)


def read_snapshots(root: Path) -> list[SnapshotRecord]:
    """Return the records below ``root``; what has none that is whole is removed. Blocks."""
    result: list[SnapshotRecord] = []
    for place in sorted(root.iterdir()) if root.is_dir() else ():
        try:
            result.append(msgspec.json.decode((place / NAME).read_bytes(), type=SnapshotRecord))
        except (OSError, msgspec.DecodeError):
            shutil.rmtree(place, ignore_errors=True)
    return result


logger = structlog.get_logger("sandbox.snapshots")

COMPONENT = "sandbox.snapshots"
RETRY_S = 10.0

#: Writes a snapshot's files: (id, its directory, most bytes) -> bytes on the disk; raises CodedError or OSError.
Write = Callable[[str, Path, int], Awaitable[int]]


class SnapshotStore:
    """Snapshots and their records, a directory for each below ``root``, used from one event loop."""

    def __init__(
        self,
        root: Path,
        settings: SnapshotSettings,
        *,
        provider: Callable[[], str],
        remove: Callable[[SnapshotRecord], Awaitable[None]] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``provider`` is the kind of sandboxes; ``remove`` removes what one has beside its directory. Blocks."""
        self.settings = settings
        self._root = root
        self._provider = provider
        self._remove = remove
        self._wall = wall
        self._records = {record.id: record for record in read_snapshots(root)}
        self._gate = asyncio.Semaphore(settings.at_once)
        #: Being taken, and being removed.
        self._taking: set[str] = set()
        self._leaving: set[str] = set()
        #: Being taken, and nobody wants them any more.
        self._unwanted: set[str] = set()
        #: How many sandboxes are being made from each.
        self._held: Counter[str] = Counter()
        #: Tells which snapshots living trajectories began with, and one trajectory of each.
        self.users: Callable[[], Mapping[str, str]] = dict[str, str]
        #: Called when one that could be used has come, was used or has gone.
        self.on_change: Callable[[], None] = lambda: None

    @property
    def ids(self) -> set[str]:
        """Every snapshot that is known, also one that is being taken or removed."""
        return {*self._records, *self._leaving}

    def all(self) -> list[SnapshotRecord]:
        """Return every snapshot that can be used, the oldest first."""
        return sorted((each for each in self._records.values() if each.ready), key=lambda each: each.made_s)

    def user(self, id: str) -> str:
        """Return a trajectory that needs a snapshot, or what else does; empty if nothing does."""
        if self._held[id]:
            return "a sandbox that is being made"
        trajectory = self.users().get(id)
        return "" if trajectory is None else f"trajectory {trajectory!r}"

    def get(self, id: str) -> SnapshotRecord:
        """Return a snapshot; raises NotFound, or Unsupported for one of another kind of sandbox."""
        record = self._records.get(id)
        if record is None or not record.ready:
            raise NotFound(f"no snapshot {id!r}", component=COMPONENT)
        if record.provider != self._provider():
            message = f"snapshot {id!r} is of sandboxes of kind {record.provider}, and these are {self._provider()}"
            raise Unsupported(message, component=COMPONENT)
        return record

    async def take(
        self, trajectory: str, task: str, spec: SandboxSpec, write: Write, *, id: str = "", spared: Collection[str] = ()
    ) -> SnapshotRecord:
        """Take a snapshot with what ``write`` writes, and make room for it.

        ``id`` is its own if somebody else names it: then it is taken once, however often that is asked. Those in
        ``spared`` are not removed to make room. Raises CapacityExceeded if those in use leave no room, TooLarge if it
        alone is larger than all may be, Conflict if it was given up meanwhile, and what ``write`` raises.
        """
        id = id or secrets.token_hex(6)
        if (known := self._records.get(id)) is not None and known.ready:
            return known
        if known is not None and id not in self._taking:
            await self._forget(id)  # half taken when an earlier life of this machine ended
        self._taking.add(id)
        try:
            async with self._gate:
                record = await self._take(id, trajectory, task, spec, write, spared)
            if id in self._unwanted:
                await self._forget(id)
                raise Conflict(f"snapshot {id!r} was given up while it was taken", component=COMPONENT)
            return record
        finally:
            self._taking.discard(id)
            self._unwanted.discard(id)

    async def _take(
        self, id: str, trajectory: str, task: str, spec: SandboxSpec, write: Write, spared: Collection[str]
    ) -> SnapshotRecord:
        now_s = self._wall()
        record = SnapshotRecord(
            id=id,
            trajectory=trajectory,
            task=task,
            provider=self._provider(),
            spec=spec,
            made_s=now_s,
            used_s=now_s,
        )
        self._records[id] = record
        try:
            await self._make_room(spared)
            await asyncio.to_thread(record.write, self._root)
            size_bytes = await write(id, self._root / id, self.settings.total_max_bytes)
            if size_bytes > self.settings.total_max_bytes:
                raise self.too_large(size_bytes)
            self._records[id] = replace(record, size_bytes=size_bytes)
            await self._make_room(spared)
            record = replace(record, size_bytes=size_bytes, ready=True)
            await asyncio.to_thread(record.write, self._root)
            self._records[id] = record
        except BaseException as error:
            await asyncio.shield(self._forget(id))
            if short := exhaustion(error, COMPONENT):
                raise short from None
            raise
        logger.info("snapshot taken", snapshot=id, trajectory=trajectory, size_bytes=record.size_bytes)
        self.on_change()
        return record

    def too_large(self, size_bytes: int) -> TooLarge:
        """Return what is told of a snapshot that is larger than all together may be."""
        bound = self.settings.total_max_bytes
        message = (
            f"the snapshot takes {size_bytes} bytes or more, and all may take {bound} (sandbox.snapshots.total_max)"
        )
        return TooLarge(message, component=COMPONENT)

    @asynccontextmanager
    async def held(self, id: str) -> AsyncIterator[SnapshotRecord]:
        """Yield a snapshot, which is not removed meanwhile; raises as `get`."""
        record = self.get(id)
        self._held[id] += 1
        try:
            record = self._records[id] = replace(record, used_s=self._wall())
            with suppress(OSError):
                await asyncio.to_thread(record.write, self._root)
            self.on_change()
            yield record  # nothing is awaited after it: a sandbox that was made would be lost with a cancelled caller
        finally:
            self._held[id] -= 1

    async def remove(self, id: str) -> None:
        """Remove a snapshot; raises NotFound, or Conflict for one that a living trajectory needs."""
        record = self._records.get(id)
        if record is None or not record.ready:
            raise NotFound(f"no snapshot {id!r}", component=COMPONENT)
        if user := self.user(id):
            raise Conflict(f"snapshot {id!r} is in use by {user}: end that first", component=COMPONENT)
        await self._forget(id)

    async def give_up(self, id: str) -> None:
        """Let nothing begin with a snapshot any more, and remove it once nothing needs it; idempotent.

        One that is being taken is removed as soon as it is taken.
        """
        record = self._records.get(id)
        if id in self._taking:
            self._unwanted.add(id)
        elif record is not None and self.user(id):
            self._records[id] = replace(record, ready=False)  # `prune` removes it, or that of the next life does
            with suppress(OSError):
                await asyncio.to_thread(self._records[id].write, self._root)
            self.on_change()
        elif record is not None:
            await self._forget(id)

    async def prune(self) -> int:
        """Remove what was not used for too long, and what an earlier gateway left half taken; return how many."""
        oldest_s = self._wall() - self.settings.age_s
        old = [
            each.id
            for each in self._records.values()
            if each.id not in self._taking and (not each.ready or each.used_s < oldest_s) and not self.user(each.id)
        ]
        for id in old:
            await self._forget(id)
        return len(old)

    async def lose(self, present: set[str], ready: set[str]) -> None:
        """Forget those that were ``ready`` and are not ``present``: somebody else has removed what they hold."""
        for id in [id for id in ready - present if id in self._records]:
            logger.warning("a snapshot was removed by somebody else", snapshot=id)
            await self._forget(id)

    async def _make_room(self, spared: Collection[str]) -> None:
        """Remove what was used least recently until the others and the one that is being taken are within the bounds.

        Raises CapacityExceeded if what is in use leaves no room.
        """
        for id in [each.id for each in sorted(self._records.values(), key=lambda each: each.used_s)]:
            if self._fits():
                return
            if id in self._records and id not in self._taking and id not in spared and not self.user(id):
                logger.info("snapshot removed, as it was used least recently", snapshot=id)
                await self._forget(id)
        if not self._fits():
            message = (
                f"{len(self._records) - 1} snapshots are in use and leave no room for another: delete some, end "
                "trajectories that began with them, or raise sandbox.snapshots.count_max and total_max"
            )
            raise CapacityExceeded(message, component=COMPONENT, retry_after_s=RETRY_S)

    def _fits(self) -> bool:
        used_bytes = sum(each.size_bytes for each in self._records.values())
        return len(self._records) <= self.settings.count_max and used_bytes <= self.settings.total_max_bytes

    async def _forget(self, id: str) -> None:
        """Remove a snapshot with all that it has; its record last, as long as it is there somebody knows of it."""
        record = self._records.pop(id)
        self._leaving.add(id)
        try:
            if self._remove is not None:
                await self._remove(record)
            await asyncio.to_thread(shutil.rmtree, self._root / id, ignore_errors=True)
        except CodedError as error:
            logger.warning("a snapshot was not removed; it will be tried again", snapshot=id, why=error.message)
            self._records[id] = replace(record, ready=False)
        finally:
            self._leaving.discard(id)
            if record.ready:
                self.on_change()


# A directory as one file and back: owners, modes, times, links, holes and extended attributes. Everything blocks.
#
# The file is a tar (PAX) whose holes are holes of the file. A tree is read from descriptor to descriptor and no link is
# followed, for what is in it may have been put there to lead elsewhere. Sockets and devices are left out, and so is
# what is mounted in it: that is not the tree's.

#: What ids become that are not of the sandbox.
NOBODY = 65534
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
        #: Bytes of those, and of the paths of directories, which who lays it out keeps.
        self._names_bytes = 0
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
        first = path
        if info.st_nlink > 1:
            first = self._names.setdefault((info.st_dev, info.st_ino), path)
            self._count_name(path)
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
        header.pax_headers = _attributes(fd, path)
        self._count_name(path)
        self._say(header)

    def _regular(self, directory: int, name: str, header: tarfile.TarInfo) -> None:
        fd = _opened(name, CONTENT, directory, header.name)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                return
            header.size, header.pax_headers = info.st_size, _attributes(fd, header.name)
            self._say(header)
            begin = self._file.tell()
            after = begin + -(-info.st_size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            self._require_place(header.name, after)
            for start, end in extents(fd, 0, info.st_size):
                self._copy(fd, start, end, begin)
            self._file.seek(after)
        finally:
            os.close(fd)

    def _count_name(self, path: str) -> None:
        self._names_bytes += len(os.fsencode(path))
        if self._names_bytes > NAMES_MAX_BYTES:
            raise _unkept(path, f"is one of more directories and second names than {NAMES_MAX_BYTES} bytes can name")

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
        output = header.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        self._written_bytes += len(output)
        if self._written_bytes > self._limit_bytes:
            raise self._too_large(self._written_bytes)
        self._file.write(output)


def unpack(source: Path, root: int, *, base: int, owners: bool) -> None:
    """Lay out a packed tree in an open directory, in which nobody else is at work.

    It has nothing but directories, in which something may be mounted.

    ``base`` as for `pack`; without ``owners`` everything is this process's own. A mode lends the rights of its owner
    only where that is nobody of the machine. Raises OSError, and Conflict for what no packed tree is.
    """
    lends = owners and base > 0

    def mode(mode: int, kind: str) -> int:
        return mode if lends else mode & (PERMISSIONS | stat.S_ISVTX)

    owner = base if owners else -1
    # Holes are looked for with a descriptor of its own, as that moves its position.
    with source.open("rb") as file, source.open("rb") as holes:
        tree = Extraction(root, entries_max=sys.maxsize, faithful=True, owner=owner, mode=mode)
        try:
            with tree:
                tree.all(Reader(file, holes.fileno()))
        except Refused as error:
            raise Conflict(f"the snapshot is damaged: {error}", component=COMPONENT) from None


def _opened(name: str, flags: int, directory: int, path: str) -> int:
    try:
        return os.open(name, flags, dir_fd=directory)
    except PermissionError:
        raise _unkept(path, "cannot be read by the gateway, which is not root: chmod it first") from None


def _unkept(path: str, why: str) -> Conflict:
    description = path.rstrip("/").encode("utf-8", "replace").decode()
    return Conflict(
        f"no snapshot can be taken: {description!r} {why}", component=COMPONENT, detail={"path": description}
    )


def _attributes(fd: int, path: str) -> dict[str, str]:
    """Return the extended attributes that a user can set, as fields of a header; raises Conflict for too many."""
    result: dict[str, str] = {}
    size_bytes = 0
    with suppress(OSError):  # of a file system without them
        for name in os.listxattr(fd):
            if name.startswith(USERS_OWN) and name.isprintable() and "=" not in name:
                value = base64.b64encode(os.getxattr(fd, name)).decode("ascii")
                result[f"{XATTR}{name.removeprefix(USERS_OWN)}"] = value
                size_bytes += len(value) + 2 * len(name)
                if size_bytes > EXTENDED_MAX_BYTES // 2:
                    raise _unkept(path, f"has extended attributes of more than {EXTENDED_MAX_BYTES // 4} bytes")
    return result
