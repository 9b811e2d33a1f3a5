"""The walk: what lies below some directories, also where no path reaches, and what was deleted but is still open.

It goes from descriptor to descriptor and never by a path, so that a tree deeper than the longest path hides nothing.
What only a message under way in a socket holds open is not seen; an image bounds that too.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

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
