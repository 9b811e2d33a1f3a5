"""Room: whether a file system has what a state directory needs of it."""

from __future__ import annotations

import os
from pathlib import Path

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
