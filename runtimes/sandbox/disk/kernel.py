"""The kernel's calls that Python does not have: mounts and quotas."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path, kind: str, flags: int, options: str) -> None:
    """Raises OSError."""
    _checked(
        _libc.mount(source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode()),
        target,
    )


def unmount(target: Path) -> None:
    """Take what is mounted there out of sight; it ends with its last user. Raises OSError."""
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), target)


def quotactl(command: int, device: str, number: int, data: bytearray) -> None:
    """Raises OSError; ``data`` holds the answer."""
    held = (ctypes.c_char * len(data)).from_buffer(data)
    _checked(_libc.quotactl(command, device.encode(), number, held), Path(device))


def _checked(status: int, place: Path) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(place))
