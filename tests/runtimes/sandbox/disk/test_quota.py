"""Project quotas: what the kernel is told, as its headers lay it out. No kernel here enforces it."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from manager.errors import Unsupported
from runtimes.sandbox.disk.bound import DiskSettings, choose_bound
from runtimes.sandbox.disk.image import files_max
from runtimes.sandbox.disk.quota import FS_IOC_FSGETXATTR, FS_IOC_FSSETXATTR, QuotaBound, quota_device

DISK_BYTES = 2**30


@dataclass
class RecordedKernel:
    """Answers of an xfs with ``prjquota``: what was asked, in order."""

    limits: dict[int, tuple[int, int]] = field(default_factory=dict)
    projects: dict[int, tuple[int, int]] = field(default_factory=dict)

    def quotactl(self, command: int, device: str, number: int, data: bytearray) -> None:
        assert command & 0xFFFFFFFF == 0x80000802, "Q_SETQUOTA of PRJQUOTA"
        assert device == "/dev/sdb1"
        blocks, inodes = struct.unpack_from("Q16xQ", data)
        (valid,) = struct.unpack_from("I", data, 64)
        assert (len(data), valid) == (72, 5), "struct if_dqblk: block and inode limits are valid"
        self.limits[number] = blocks * 1024, inodes

    def ioctl(self, fd: int, request: int, data: bytes) -> bytes:
        assert len(data) == 28, "struct fsxattr"
        inode = os.fstat(fd).st_ino
        if request == FS_IOC_FSGETXATTR:
            flags, project = self.projects.get(inode, (0x80, 0))
            return struct.pack("5I8x", flags, 7, 0, project, 0)
        assert request == FS_IOC_FSSETXATTR
        flags, extent, _, project, _ = struct.unpack("5I8x", data)
        assert extent == 7, "what is not ours stays as it was"
        self.projects[inode] = flags, project
        return data


def test_a_directory_and_what_is_in_it_become_a_project_with_bounds(tmp_path: Path) -> None:
    (tmp_path / "work" / "work").mkdir(parents=True)
    kernel = RecordedKernel()
    bound = QuotaBound("/dev/sdb1", quotactl=kernel.quotactl, ioctl=kernel.ioctl)
    bound.bind(tmp_path, DISK_BYTES)
    [(project, limits)] = kernel.limits.items()
    assert limits == (DISK_BYTES, files_max(DISK_BYTES))
    inodes = {place.stat().st_ino for place in (tmp_path, tmp_path / "work", tmp_path / "work" / "work")}
    assert kernel.projects == dict.fromkeys(inodes, (0x80 | 0x200, project)), "inherited by what is made in it"
    bound.release(tmp_path)
    assert kernel.limits == {project: (0, 0)}, "forgotten"


@pytest.mark.parametrize(
    ("kind", "options", "device"),
    [
        ("xfs", "rw,attr2,inode64,prjquota", "/dev/sdb1"),
        ("xfs", "rw,pquota", "/dev/sdb1"),
        ("ext4", "rw,prjquota", "/dev/sdb1"),
        ("xfs", "rw,usrquota", ""),
        ("btrfs", "rw,prjquota", ""),
    ],
)
def test_a_file_system_that_counts_projects_is_known_by_its_mount(
    tmp_path: Path, kind: str, options: str, device: str
) -> None:
    number = tmp_path.stat().st_dev
    place = f"{os.major(number)}:{os.minor(number)}"
    table = (
        f"22 1 0:21 / /proc rw shared:5 - proc proc rw\n36 22 {place} / /mnt rw,noatime - {kind} /dev/sdb1 {options}\n"
    )
    assert quota_device(tmp_path, table) == device


def test_a_quota_that_is_asked_for_by_name_is_never_less(tmp_path: Path) -> None:
    if quota_device(tmp_path, Path("/proc/self/mountinfo").read_text(encoding="utf-8")):
        pytest.skip("this file system has project quotas")
    with pytest.raises(Unsupported, match="prjquota"):
        choose_bound(DiskSettings(by="quota"), tmp_path, tmp_path)
