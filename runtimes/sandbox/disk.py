"""The bound of a sandbox's disk."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import shutil
import stat
import struct
import subprocess
import tempfile
import threading
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import structlog

from manager.errors import CapacityExceeded, CodedError, Unsupported
from manager.function import Setting
from runtimes.chores import end_chores
from runtimes.sandbox.linux import take_away
from runtimes.sandbox.sandbox import Sandbox

# Disk images: a sparse ext4 file system on a loop device for each sandbox, whose bytes and inodes end where they end.
#
# The image has no name: its file is unlinked before it is used, and its loop device lets go of it with the last mount.
# A sandbox with mounts of its own keeps the only one, so that its image ends with it, whoever is there to see it. A
# file system is made once for each size; the others are copies of its few written blocks.

COMPONENT = "sandbox.disk"
MS_NOSUID, MS_NODEV = 2, 4
#: One file for so many bytes of disk, and the fewest for any disk.
BYTES_PER_FILE, FILES_MIN = 16384, 4096
BLOCK_BYTES = 4096
MAKE_S = 60.0
#: Sizes of which the written blocks are remembered.
TEMPLATES_MAX = 16
LOOP_CONFIGURE, LOOP_CTL_GET_FREE = 0x4C0A, 0x4C82
LO_FLAGS_AUTOCLEAR = 4
#: How often another free loop device is asked for if somebody else was faster.
LOOP_TRIES = 64
#: Ends a file system at once: what it has not written yet need not be written any more.
FS_IOC_SHUTDOWN, SHUTDOWN_WITHOUT_WRITING = 0x8004587D, struct.pack("I", 2)

_libc = ctypes.CDLL(None, use_errno=True)


def files_max(disk_bytes: int) -> int:
    """Return how many files and directories a disk of so many bytes may hold."""
    return max(FILES_MIN, disk_bytes // BYTES_PER_FILE)


def image_bytes(disk_bytes: int) -> int:
    """Return the size of an image that holds so many bytes beside its own tables."""
    tables = files_max(disk_bytes) * 256 + disk_bytes // 64 + 2 * 2**20
    return -(-(disk_bytes + tables) // BLOCK_BYTES) * BLOCK_BYTES


def is_bounded(place: Path, disk_bytes: int) -> bool:
    """Return whether the file system that ``place`` shows ends at a bound like this one."""
    try:
        status = os.statvfs(place)
    except OSError:
        return False
    return 0 < status.f_blocks * status.f_frsize <= image_bytes(disk_bytes)


class DiskBound:
    """The bound of bytes and files below a directory: none but the watch. Its methods block; any thread may call."""

    name = "walk"

    def bind(self, place: Path, disk_bytes: int) -> None:
        """Bound what is written below an existing directory from now on; raises OSError or CapacityExceeded."""

    def adopt(self, place: Path) -> None:
        """Know of a directory that an earlier gateway bound."""

    def shows(self, place: Path) -> bool:
        """Return whether what was written below a bound directory is to be seen there."""
        return True

    def hand_over(self, place: Path) -> None:
        """Leave a file system of its own to the sandbox alone, which has mounted it elsewhere by now."""

    def release(self, place: Path) -> None:
        """Take the bound away, with what was written if it is a file system of its own; idempotent."""
        take_away(place)


class ImageBound(DiskBound):
    """By images whose files lie in ``directory``."""

    name = "image"

    def __init__(self, directory: Path, images_max: int) -> None:
        self._directory = directory
        self._images_max = images_max
        self._lock = threading.Lock()
        #: Each place with a descriptor of its image, -1 if an earlier gateway made it.
        self._attached: dict[Path, int] = {}
        #: Size -> the written blocks of an empty file system, by their place.
        self._templates: dict[int, list[tuple[int, bytes]]] = {}

    def bind(self, place: Path, disk_bytes: int) -> None:
        """Put a fresh image in place of a directory; what is in that is copied. Raises OSError, CapacityExceeded."""
        with self._lock:
            if len(self._attached) >= self._images_max:
                message = f"{self._images_max} disk images are in use, as many as may be"
                raise CapacityExceeded(message, component=COMPONENT, retry_after_s=1.0)
            self._attached[place] = -1
        try:
            before = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self._attach(place, disk_bytes)
                self._attached[place] = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
                (place / "lost+found").rmdir()
                _copy_into(Path(f"/proc/self/fd/{before}"), place)
            finally:
                os.close(before)
        except BaseException:
            self.release(place)
            raise

    def adopt(self, place: Path) -> None:
        with self._lock:
            self._attached[place] = -1

    def shows(self, place: Path) -> bool:
        return os.path.ismount(place)

    def hand_over(self, place: Path) -> None:
        take_away(place)

    def release(self, place: Path) -> None:
        with self._lock:
            image = self._attached.pop(place, -1)
        if image >= 0:
            with suppress(OSError):
                fcntl.ioctl(image, FS_IOC_SHUTDOWN, SHUTDOWN_WITHOUT_WRITING)
            os.close(image)
        take_away(place)

    def _attach(self, place: Path, disk_bytes: int) -> None:
        with tempfile.TemporaryFile(dir=self._directory, buffering=0) as file:
            self._fill(file.fileno(), disk_bytes)
            device, loop = _loop(file.fileno())
            try:
                _mount(device, place)
            finally:
                os.close(loop)

    def _fill(self, fd: int, disk_bytes: int) -> None:
        os.ftruncate(fd, image_bytes(disk_bytes))
        template = self._templates.get(disk_bytes)
        if template is not None:
            for at, data in template:
                os.pwrite(fd, data, at)
            return
        _make_file_system(fd, files_max(disk_bytes))
        if len(self._templates) < TEMPLATES_MAX:
            self._templates[disk_bytes] = _written(fd)


def probe(directory: Path) -> str:
    """Return why there can be no images here, empty if there can. Blocks."""
    if os.geteuid() != 0:
        return "only root may mount"
    if shutil.which("mkfs.ext4") is None:
        return "mkfs.ext4 is not installed (Debian: e2fsprogs)"
    directory.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=directory, prefix=".probe-"))
    bound = ImageBound(directory, 1)
    try:
        bound.bind(place, 2**20)
        return ""
    except (OSError, subprocess.SubprocessError) as error:
        return f"no image can be mounted: {error}"
    finally:
        bound.release(place)
        with suppress(OSError):
            place.rmdir()


def _mount(device: str, place: Path) -> None:
    """Mount an image's device; raises OSError."""
    flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV)
    _checked(_libc.mount(device.encode(), os.fsencode(place), b"ext4", flags, b"noinit_itable,discard"), place)


def _checked(status: int, place: Path) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(place))


def _make_file_system(fd: int, files: int) -> None:
    """Make an ext4 without journal and reserve in an open file."""
    options = ["-q", "-F", "-b", str(BLOCK_BYTES), "-m", "0", "-N", str(files), "-O", "^has_journal,^resize_inode"]
    options += ["-I", "256", "-E", "lazy_itable_init=1,nodiscard", f"/proc/{os.getpid()}/fd/{fd}"]
    done = subprocess.run(["mkfs.ext4", *options], capture_output=True, timeout=MAKE_S, check=False)
    if done.returncode != 0:
        raise OSError(errno.EIO, f"mkfs.ext4: {done.stderr.decode(errors='replace').strip()}")


def _written(fd: int) -> list[tuple[int, bytes]]:
    """Return what a sparse file holds, by its place."""
    result: list[tuple[int, bytes]] = []
    at = 0
    while True:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # nothing but a hole is left
            return result
        at = os.lseek(fd, start, os.SEEK_HOLE)
        result.append((start, os.pread(fd, at - start, start)))


def _loop(file: int) -> tuple[str, int]:
    """Return a loop device over a file, and its descriptor: it is free again when that and every mount is closed."""
    info = bytearray(232)  # struct loop_info64, its flags at 52
    struct.pack_into("I", info, 52, LO_FLAGS_AUTOCLEAR)
    wanted = struct.pack("II", file, BLOCK_BYTES) + info + bytes(64)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for tries_left in reversed(range(LOOP_TRIES)):
            device = f"/dev/loop{fcntl.ioctl(control, LOOP_CTL_GET_FREE)}"
            loop = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(loop, LOOP_CONFIGURE, wanted)
                return device, loop
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY or not tries_left:
                    raise
    finally:
        os.close(control)
    raise AssertionError("the last try returns or raises")


def _copy_into(source: Path, target: Path) -> None:
    """Copy a directory's few entries and its own owner and mode."""
    for entry in sorted(source.iterdir()):
        copy = target / entry.name
        if entry.is_dir() and not entry.is_symlink():
            copy.mkdir()
            _copy_into(entry, copy)
        else:
            shutil.copy2(entry, copy, follow_symlinks=False)
            _own_like(entry, copy)
    _own_like(source, target)
    shutil.copystat(source, target)


def _own_like(source: Path, target: Path) -> None:
    info = source.stat() if source.parent == Path("/proc/self/fd") else source.lstat()
    os.chown(target, info.st_uid, info.st_gid, follow_symlinks=False)


logger = structlog.get_logger("sandbox.disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings:
    """How what a sandbox writes is bounded."""

    by: Annotated[
        Literal["auto", "image", "walk"],
        Setting(
            "by a file system image of its own, or by walks that end a sandbox above it; auto takes images where they "
            "can be made"
        ),
    ] = "auto"
    #: File system images, and so loop devices, in use at once: more sandboxes than a machine has memory for.
    images_max: int = 1024


def choose_bound(settings: DiskSettings, images: Path) -> DiskBound:
    """Return the bound of sandboxes' directories; images lie in ``images``. Blocks.

    Raises Unsupported, with the reason, if the one that is asked for by name cannot be had.
    """
    if settings.by in ("auto", "image"):
        reason = probe(images)
        if not reason:
            return ImageBound(images, settings.images_max)
        if settings.by == "image":
            raise Unsupported(f"sandbox.disk_bound.by: image cannot be had: {reason}", component=COMPONENT)
        logger.warning("no disk images: sandboxes are measured, and ended above their bound", why=reason)
    return DiskBound()


#: What mends a disk that is full.
REMEDY = "make room there, or have the state directory (server.state_dir, of a node --state-dir) on a larger disk"


def shortage_of(directory: Path, free_min_bytes: int) -> str:
    """Return what there is too little of where a state directory is; empty if there is enough."""
    try:
        status = os.statvfs(directory)
    except OSError as error:
        return f"{directory}: {error}"
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < free_min_bytes:
        return f"{free_bytes} bytes are free in {directory}, less than server.free_min ({free_min_bytes}): {REMEDY}"
    if status.f_files and not status.f_favail:
        return f"no file can be made in {directory}: its file system has no free inode: {REMEDY}"
    return ""


# The walk: what lies below some directories, also where no path reaches, and what was deleted but is still open.
#
# It goes from descriptor to descriptor and never by a path, so that a tree deeper than the longest path hides nothing.
# What only a message under way in a socket holds open is not seen; an image bounds that too.

#: Directories inside each other; one that goes deeper is taken for full.
DEPTH_MAX = 256
SECTOR_BYTES = 512
NESTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
DELETED = " (deleted)\n"
#: Not what was walked is at fault, but whoever walks.
NO_MORE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@dataclass(slots=True)
class DiskUsage:
    """Bytes on disk and entries; ``endless`` if a tree is nested too deeply to be counted."""

    used_bytes: int = 0
    files: int = 0
    endless: bool = False

    def exceeds(self, limit_bytes: int, limit_files: int) -> bool:
        return self.endless or self.used_bytes > limit_bytes or self.files > limit_files


def measure(
    roots: Iterable[os.PathLike[str]], limit_bytes: int, limit_files: int, processes: Collection[int] = ()
) -> DiskUsage:
    """Return what is below ``roots`` (directories or files), and what ``processes`` hold open of deleted files there.

    Links are not followed, files with several names count once, and counting stops above a limit. What changes under
    the walk may be missed once. Blocks; raises OSError if this process has too few descriptors or too little memory.
    """
    usage, seen, devices = DiskUsage(), set[tuple[int, int]](), set[int]()
    for root in roots:
        try:
            info = os.lstat(root)
        except FileNotFoundError:
            continue
        devices.add(info.st_dev)
        if not stat.S_ISDIR(info.st_mode):
            _count(usage, info, seen)
            continue
        for entry in _entries(os.open(root, NESTED), usage, 1):
            _count(usage, entry, seen)
            if usage.exceeds(limit_bytes, limit_files):
                return usage
    for process in processes:
        for entry in _deleted(process, devices):
            _count(usage, entry, seen)
        if usage.exceeds(limit_bytes, limit_files):
            break
    return usage


def _count(usage: DiskUsage, info: os.stat_result, seen: set[tuple[int, int]]) -> None:
    if info.st_nlink != 1 and not stat.S_ISDIR(info.st_mode):
        if (info.st_dev, info.st_ino) in seen:
            return
        seen.add((info.st_dev, info.st_ino))
    usage.files += 1
    usage.used_bytes += info.st_blocks * SECTOR_BYTES


def _entries(directory: int, usage: DiskUsage, depth: int) -> Generator[os.stat_result, None, None]:
    """Yield everything below an open directory, and close it. One descriptor is open for each level."""
    try:
        if depth > DEPTH_MAX:
            usage.endless = True
            return
        nested = []
        with os.scandir(directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(info.st_mode):
                        nested.append(entry.name)
                    yield info
        for name in nested:
            try:
                below = os.open(name, NESTED, dir_fd=directory)
            except OSError as error:
                if error.errno in NO_MORE:
                    raise
                continue  # gone meanwhile, or not ours to read
            with closing(_entries(below, usage, depth + 1)) as inside:
                yield from inside
    finally:
        os.close(directory)


def _deleted(process: int, devices: set[int]) -> Iterator[os.stat_result]:
    """Yield the deleted files that a process holds open or mapped on these devices, or on that of its own root."""
    here = Path(f"/proc/{process}")
    with suppress(OSError):
        devices = {*devices, (here / "root").stat().st_dev}
        held = list((here / "fd").iterdir())
        with (here / "maps").open(encoding="utf-8", errors="replace") as maps:
            held += [here / "map_files" / _range(line) for line in maps if line.endswith(DELETED)]
        for link in held:
            with suppress(OSError):
                info = link.stat()
                if info.st_nlink == 0 and stat.S_ISREG(info.st_mode) and info.st_dev in devices:
                    yield info


def _range(line: str) -> str:
    """Return the name of a mapping's link: its addresses without leading zeros."""
    first, _, last = line.split(" ", 1)[0].partition("-")
    return f"{int(first, 16):x}-{int(last, 16):x}"


# The disk watch: a sandbox that fills the disk is ended before it hurts the others.
#
# The only bound if the machine has none of its own, and beside one for what that does not reach. It measures when the
# file system has lost space or inodes, and every minute.

#: Seconds between two looks at the free space, and between two measurements when it did not shrink.
LOOK_S, MEASURE_S = 1.0, 60.0
#: Free bytes and inodes lost since the last measurement that call for another.
SHRUNK_BYTES, SHRUNK_FILES = 64 * 2**20, 20_000
#: What may lie where only the runner has something to write, but root inside could.
RUN_BYTES, RUN_FILES = 2**20, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A sandbox's own files, and how much they may be."""

    sandbox: Sandbox
    limit_bytes: int
    #: Returns what there is, and what is wrong with it: empty while it is within its bounds.
    measure: Callable[[], Awaitable[str]]
    #: Their place; None if it is not to be seen from here.
    path: Path | None = None


class DiskWatch:
    """Looks after any number of sandboxes with one task."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._task: asyncio.Task[None] | None = None
        self._free = (0, 0)
        self._measured_s = 0.0

    def add(
        self,
        sandbox: Sandbox,
        roots: Sequence[Path],
        limit_bytes: int,
        limit_files: int,
        processes: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """Watch what lies below ``roots``, and what these processes hold open of it, until the sandbox ends."""

        def look() -> str:
            usage = measure(roots, limit_bytes, limit_files, processes())
            return _excess(usage, limit_bytes, limit_files)

        self._watch_place(
            Place(
                sandbox=sandbox,
                limit_bytes=limit_bytes,
                measure=lambda: asyncio.to_thread(look),
                path=roots[0],
            )
        )

    def add_unseen(self, sandbox: Sandbox, used_bytes: Callable[[], Awaitable[int]], limit_bytes: int) -> None:
        """Watch one whose bytes another knows alone: looked after every `MEASURE_S`, however fast it grows."""

        async def look() -> str:
            return _excess(DiskUsage(await used_bytes()), limit_bytes, 0)

        self._watch_place(Place(sandbox=sandbox, limit_bytes=limit_bytes, measure=look))

    async def check(self) -> None:
        """Measure all of them now, and end those above their bound."""
        self._places = [place for place in self._places if place.sandbox.alive]
        for place in self._places:
            try:
                excess = await place.measure()
            except (CodedError, OSError) as error:
                logger.warning("a sandbox's disk cannot be measured", sandbox=place.sandbox.id, why=str(error))
                continue
            if excess:
                logger.warning("a sandbox exceeds its disk", sandbox=place.sandbox.id, why=excess)
                await place.sandbox.kill_for(excess)

    async def close(self) -> None:
        await end_chores(self._task)
        self._task = None

    def _watch_place(self, place: Place) -> None:
        self._places.append(place)
        if self._task is None:
            self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if self._places and self._due():
                await self.check()
                self._free = self._free_now()

    def _due(self) -> bool:
        now = asyncio.get_running_loop().time()
        free, files = self._free_now()
        shrunk = free <= self._free[0] - SHRUNK_BYTES or files <= self._free[1] - SHRUNK_FILES
        if not shrunk and now - self._measured_s < MEASURE_S:
            return False
        self._measured_s = now
        return True

    def _free_now(self) -> tuple[int, int]:
        """Return the free bytes and files of the first file system that can be asked."""
        for place in self._places:
            if place.path is not None:
                with suppress(OSError):
                    status = os.statvfs(place.path)
                    return status.f_bavail * status.f_frsize, status.f_favail
        return 0, 0


def _excess(usage: DiskUsage, limit_bytes: int, limit_files: int) -> str:
    """Return which bound is exceeded, empty if none is. Without ``limit_files`` the bytes alone are bounded."""
    if usage.endless:
        return f"its directories are nested deeper than {DEPTH_MAX}"
    if usage.used_bytes > limit_bytes:
        return f"its disk bound of {limit_bytes} bytes (sandbox.disk) is exceeded"
    if limit_files and usage.files > limit_files:
        return f"its disk bound of {limit_files} files is exceeded"
    return ""
