"""Project quotas: the kernel itself counts what is below a directory (xfs and ext4 mounted with ``prjquota``)."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runtimes.sandbox.disk.image import files_max
from runtimes.sandbox.disk.kernel import quotactl

FS_IOC_FSGETXATTR, FS_IOC_FSSETXATTR = 0x801C581F, 0x401C5820
#: struct fsxattr: flags, extent size, extents, project, extent size for copies, padding.
FSXATTR = struct.Struct("5I8x")
#: What is made in the directory belongs to its project.
PROJECT_INHERIT = 0x200
#: struct if_dqblk: bytes as KiB (hard, soft, used), inodes (hard, soft, used), two times, what of it is valid.
DQBLK = struct.Struct("8QI4x")
LIMITS_ARE_VALID = 1 | 4
SET_PROJECT_QUOTA = 0x800008 << 8 | 2
OPTIONS = frozenset(("prjquota", "pquota"))
#: Ours have this bit: engines count theirs from 1.
OURS = 0x4000_0000

Quotactl = Callable[[int, str, int, bytearray], None]
Ioctl = Callable[[int, int, bytes], bytes]


@dataclass(frozen=True, slots=True)
class QuotaBound:
    """`runtimes.sandbox.disk.bound.DiskBound` by the project quotas of one file system."""

    device: str
    quotactl: Quotactl = quotactl
    ioctl: Ioctl = fcntl.ioctl
    name: str = "quota"

    def bind(self, place: Path, disk_bytes: int) -> None:
        """Make a directory a project of its own, with what is in it, and bound that. Raises OSError."""
        project = _project(place)
        self._limit(project, disk_bytes, files_max(disk_bytes))
        for directory in [place, *(entry for entry in place.rglob("*") if entry.is_dir() and not entry.is_symlink())]:
            self._assign(directory, project)

    def adopt(self, place: Path) -> None:
        """Do nothing: the file system remembers."""

    def shows(self, place: Path) -> bool:
        return True

    def hand_over(self, place: Path) -> None:
        """Do nothing: the directory is the bound."""

    def release(self, place: Path) -> None:
        """Forget the project's bounds; its files are removed by whoever owns them."""
        with suppress(OSError):
            self._limit(_project(place), 0, 0)

    def _limit(self, project: int, size_bytes: int, files: int) -> None:
        limits = DQBLK.pack(-(-size_bytes // 1024), 0, 0, files, 0, 0, 0, 0, LIMITS_ARE_VALID)
        self.quotactl(SET_PROJECT_QUOTA, self.device, project, bytearray(limits))

    def _assign(self, directory: Path, project: int) -> None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            flags, extent, extents, _, copies = FSXATTR.unpack(self.ioctl(fd, FS_IOC_FSGETXATTR, bytes(FSXATTR.size)))
            wanted = FSXATTR.pack(flags | PROJECT_INHERIT, extent, extents, project, copies)
            self.ioctl(fd, FS_IOC_FSSETXATTR, wanted)
        finally:
            os.close(fd)


def quota_device(place: Path, mounts: str) -> str:
    """Return the device of the file system of ``place`` if it counts projects, else an empty text.

    ``mounts`` is the kernel's table (``/proc/self/mountinfo``).
    """
    number = place.stat().st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for line in mounts.splitlines():
        fields = line.split(" ")
        kind, device, options = fields[fields.index("-") + 1 :][:3]
        if fields[2] == wanted and kind in ("xfs", "ext4") and OPTIONS & set(options.split(",")):
            return device
    return ""


def _project(place: Path) -> int:
    """Return the project of a directory: what no other of the file system has while it is there."""
    return OURS | place.stat().st_ino % OURS
