"""Files, and whole directories as tar archives, between this machine and a sandbox."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from tangram.adapters.outcomes import InfrastructureFailed


def packed(source: str | Path) -> bytes:
    """Return the contents of a directory as a tar: modes, links and empty directories; owners are the reader's.

    Raises FileNotFoundError and NotADirectoryError.
    """
    root = Path(source)
    if not root.exists():
        raise FileNotFoundError(f"no directory {root}")
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is no directory")
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(root.rglob("*")):
            archive.add(path, path.relative_to(root).as_posix(), recursive=False, filter=_anonymous)
    return held.getvalue()


def unpacked(data: bytes, target: str | Path) -> None:
    """Lay out a tar below a directory, which is made; files that are there are overwritten, nothing leaves it.

    A sandbox wrote it: entries that point outside, devices and the like raise InfrastructureFailed.
    """
    root = Path(target)
    root.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(root, filter="data")
    except tarfile.TarError as error:
        raise InfrastructureFailed(f"the tree of the sandbox cannot be laid out: {error}", "unsafe_tree") from error


def read_file(source: str | Path) -> tuple[bytes, int]:
    """Return the contents of a file of this machine, and its permission bits."""
    path = Path(source)
    return path.read_bytes(), path.stat().st_mode & 0o777


def write_file(target: str | Path, data: bytes) -> None:
    """Write a file of this machine, and make its parents."""
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
