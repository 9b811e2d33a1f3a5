"""The files of a process sandbox that a snapshot keeps: its working directory and its own /tmp. Everything blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manager.errors import TooLarge
from manager.function import SandboxSpec
from runtimes.sandbox.runner.protocol import lost
from runtimes.sandbox.snapshots.tree import pack, unpack

COMPONENT = "sandbox.process"
#: In a snapshot's directory.
WORK, TMP = "work.tar", "tmp.tar"


def keep_files(pid: int, directory: Path, spec: SandboxSpec, place: Path, limit_bytes: int) -> int:
    """Write the files of the sandbox of runner ``pid`` to the directory ``place``; return the bytes on the disk.

    Without a file system of its own (plain processes), or where this process may not enter that (it is not root), they
    are its working directory alone. Raises TooLarge, Conflict, OSError, or ActionFailed(environment_lost) if it has
    gone.
    """

    def too_large(size_bytes: int) -> TooLarge:
        told = f"the sandbox's files take {size_bytes} bytes or more; at most {limit_bytes} may be kept"
        return TooLarge(f"{told} (sandbox.snapshots.total_max)", component=COMPONENT)

    root = Path(f"/proc/{pid}/root")
    own = _is_another(root)
    work = root / spec.workdir.lstrip("/") if own else directory / "work"
    size_bytes = 0
    for name, found in ((WORK, work), (TMP, root / "tmp")) if own else ((WORK, work),):
        with _open(found) as fd:
            left_bytes = limit_bytes - size_bytes
            size_bytes += pack(fd, place / name, base=_base(pid), left_bytes=left_bytes, too_large=too_large)
    return size_bytes


def lay_out_work(files: Path, directory: Path, *, base: int, owners: bool) -> None:
    """Fill the working directory of a sandbox that is being made; raises OSError."""
    with _open(directory / "work") as fd:
        unpack(files / WORK, fd, base=base, owners=owners)


def lay_out_tmp(files: Path, pid: int, *, base: int, owners: bool) -> None:
    """Fill /tmp of a sandbox in which no command has run yet; raises OSError."""
    root = Path(f"/proc/{pid}/root")
    if (files / TMP).exists() and _is_another(root):
        with _open(root / "tmp") as fd:
            unpack(files / TMP, fd, base=base, owners=owners)


def _is_another(root: Path) -> bool:
    """Return whether a root directory is not this process's own, and may be entered."""
    try:
        return not root.samefile("/")
    except PermissionError:
        return False
    except FileNotFoundError:
        raise lost("the sandbox's first process is gone") from None


def _base(pid: int) -> int:
    """Return the machine's id of user 0 of a process, which is its own where no ids are mapped."""
    first, second, _ = Path(f"/proc/{pid}/uid_map").read_text(encoding="ascii").splitlines()[0].split()
    return int(second) if first == "0" else 0


@contextmanager
def _open(directory: Path) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
