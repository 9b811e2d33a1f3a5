"""Which files of a handler's directory its code is, wherever it runs: on a node, or here from a copy."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from manager.errors import InvalidConfig
from runtimes.sandbox.handler.sources import COMPONENT, SOURCES_LIMIT_BYTES, SOURCES_MAX


class HandlerFile(NamedTuple):
    """One file of a handler."""

    name: str
    path: Path
    size_bytes: int
    changed_ns: int
    executable: bool

    @property
    def mode(self) -> int:
        """Its mode wherever it is copied to."""
        return 0o755 if self.executable else 0o644


def handler_files(directory: Path, excluded: frozenset[Path]) -> list[HandlerFile]:
    """Return the files that are the handler's, in order of the names.

    That is every Python file, and whatever else all users of the machine may read, as a sandbox's own user must; but
    nothing hidden, nothing that Python compiles, nothing of the excluded directories, and no link to what is none of
    these itself. Raises InvalidConfig for more than a handler may have, OSError.
    """
    root = directory.resolve(strict=True)
    found: list[HandlerFile] = []
    size_bytes = 0
    for each in _walked(root, excluded):
        size_bytes += each.size_bytes
        if len(found) >= SOURCES_MAX or size_bytes > SOURCES_LIMIT_BYTES:
            raise too_much(directory)
        found.append(each)
    return sorted(found)


def _walked(root: Path, excluded: frozenset[Path]) -> Iterator[HandlerFile]:
    closed: set[Path] = set()  # directories that not everybody may enter
    for place, folders, names in os.walk(root):
        folder = Path(place)
        folders[:] = [name for name in folders if not _stays(name) and folder / name not in excluded]
        if folder in closed:
            closed |= {folder / name for name in folders}
        else:
            closed |= {folder / name for name in folders if not (folder / name).stat().st_mode & stat.S_IXOTH}
        for name in names:
            path = folder / name
            real = Path(os.path.realpath(path))
            if _stays(name) or not path.is_file() or (real != path and not _within(root, real, excluded)):
                continue
            known = path.stat()
            python = name.endswith(".py") and real.name.endswith(".py")
            entered = folder not in closed and (real == path or _entered(root, real))
            if python or (known.st_mode & stat.S_IROTH and entered):
                relative = str(path.relative_to(root))
                yield HandlerFile(relative, path, known.st_size, known.st_mtime_ns, bool(known.st_mode & stat.S_IXUSR))


def _stays(name: str) -> bool:
    """Return whether nothing of this name travels."""
    return name[0] == "." or name == "__pycache__"


def _within(root: Path, real: Path, excluded: frozenset[Path]) -> bool:
    """Return whether a file that a link leads to lies where files travel from."""
    if not real.is_relative_to(root) or any(map(_stays, real.relative_to(root).parts)):
        return False
    return excluded.isdisjoint(_between(root, real))


def _between(root: Path, real: Path) -> list[Path]:
    """Return the directories in which a file lies, below the root."""
    return [each for each in real.parents if each != root and each.is_relative_to(root)]


def _entered(root: Path, real: Path) -> bool:
    """Return whether everybody may enter each directory between the root and a file in it."""
    return all(each.stat().st_mode & stat.S_IXOTH for each in _between(root, real))


def too_much(directory: Path) -> InvalidConfig:
    """Return what is said of a directory that holds more than a handler may have."""
    return InvalidConfig(
        f"{directory} holds more than {SOURCES_MAX} files or {SOURCES_LIMIT_BYTES >> 20} MiB, which is too "
        "much for a handler: give the handler a directory of its own",
        component=COMPONENT,
    )
