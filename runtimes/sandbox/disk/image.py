"""Disk images: a sparse ext4 file system on a loop device for each sandbox, whose bytes and inodes end where they end.

The image has no name: its file is unlinked before it is used, and its loop device lets go of it with the last mount. A
sandbox with mounts of its own keeps the only one, so that its image ends with it, whoever is there to see it. A file
system is made once for each size; the others are copies of its few written blocks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from manager.errors import CapacityExceeded

COMPONENT = "sandbox.disk"
MS_NOSUID, MS_NODEV = 2, 4
MNT_DETACH = 2
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


class ImageBound:
    """`runtimes.sandbox.disk.bound.DiskBound` by images whose files lie in ``directory``. Blocks; threads may call."""

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
                message = f"{self._images_max} disk images are in use (sandbox.disk_bound.images_max)"
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
        """Count the image of a sandbox that an earlier gateway made."""
        with self._lock:
            self._attached[place] = -1

    def shows(self, place: Path) -> bool:
        return os.path.ismount(place)

    def hand_over(self, place: Path) -> None:
        take_away(place)

    def release(self, place: Path) -> None:
        """Take it away, without writing what is still in memory."""
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


def take_away(place: Path) -> None:
    """Take away what is mounted at a place, if anything is; a file system ends with its last user."""
    if os.path.ismount(place):
        with suppress(OSError):
            _checked(_libc.umount2(os.fsencode(place), MNT_DETACH), place)


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
    found: list[tuple[int, bytes]] = []
    at = 0
    while True:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # nothing but a hole is left
            return found
        at = os.lseek(fd, start, os.SEEK_HOLE)
        found.append((start, os.pread(fd, at - start, start)))


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
