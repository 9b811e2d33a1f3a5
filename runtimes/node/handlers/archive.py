"""The files of a handler as one archive, and the digest of all of them, which is their name on a node.

The digest is that of names, bytes and modes, not of the archive: a node takes it of what it has unpacked, and again of
what it finds when it was started anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from manager.errors import InvalidConfig, exhaustion
from runtimes.sandbox.handler.sources import SOURCES_LIMIT_BYTES, SOURCES_MAX

COMPONENT = "node.handlers"
#: Bytes of the largest archive: its files, and what a tar says of each of them.
ARCHIVE_MAX_BYTES = SOURCES_LIMIT_BYTES + SOURCES_MAX * 8 * tarfile.BLOCKSIZE
#: Bytes of archives that a gateway keeps in mind for the next node.
KEPT_MAX_BYTES = 2 * ARCHIVE_MAX_BYTES


class _Found(NamedTuple):
    """One file that travels."""

    name: str
    path: Path
    size_bytes: int
    changed_ns: int
    executable: bool


class HandlerArchive(NamedTuple):
    """What travels, and its name."""

    digest: str
    data: bytes


class HandlerArchives:
    """The archives of a gateway's handlers. Use from one event loop."""

    def __init__(self, excluded: Collection[Path] = (), uploads: Path | None = None) -> None:
        """Nothing of the ``excluded`` directories ever travels, such as the gateway's own state.

        But each directory in ``uploads``, in which the gateway keeps handlers that it was sent, does.
        """
        self._excluded = frozenset(path.resolve() for path in excluded)
        self._uploads = None if uploads is None else uploads.resolve()
        #: By directory, the one used last at the end.
        self._kept: dict[Path, tuple[list[_Found], HandlerArchive]] = {}
        self._one = asyncio.Lock()

    async def of(self, directory: Path) -> HandlerArchive:
        """Return the files of a handler's directory as they are now.

        Raises InvalidConfig for more than travels, CapacityExceeded where this machine ran short.
        """
        async with self._one:
            try:
                found = await asyncio.to_thread(self._found, directory)
                kept = self._kept.pop(directory, None)
                if kept is None or kept[0] != found:
                    kept = found, await asyncio.to_thread(_packed, directory, found)
            except OSError as error:
                told = f"the files of {directory} cannot be read: {error}"
                raise exhaustion(error, COMPONENT) or InvalidConfig(told, component=COMPONENT) from None
            self._kept[directory] = kept
            while sum(len(archive.data) for _, archive in self._kept.values()) > KEPT_MAX_BYTES:
                del self._kept[next(iter(self._kept))]
            return kept[1]

    def _found(self, directory: Path) -> list[_Found]:
        root = directory.resolve(strict=True)
        if root.parent != self._uploads and not self._excluded.isdisjoint((root, *root.parents)):
            told = (
                f"{directory} lies where nothing travels from, as the gateway's state does: keep the handler elsewhere"
            )
            raise InvalidConfig(told, component=COMPONENT)
        return _found(directory, self._excluded)


def digest_of(directory: Path) -> str:
    """Return the digest of the files in a directory; raises InvalidConfig and OSError."""
    return _packed(directory, _found(directory, frozenset())).digest


def _packed(directory: Path, found: list[_Found]) -> HandlerArchive:
    out, digest, left_bytes = io.BytesIO(), hashlib.sha256(), SOURCES_LIMIT_BYTES
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for each in found:
            with each.path.open("rb") as file:
                data = file.read(left_bytes + 1)
            left_bytes -= len(data)
            if left_bytes < 0:
                raise _too_much(directory)
            entry = tarfile.TarInfo(each.name)
            entry.size, entry.mode = len(data), 0o755 if each.executable else 0o644
            tar.addfile(entry, io.BytesIO(data))
            digest.update(os.fsencode(f"{each.name}\0{entry.mode:o}\0{len(data)}\0"))
            digest.update(data)
    return HandlerArchive(digest.hexdigest(), out.getvalue())


def _found(directory: Path, excluded: frozenset[Path]) -> list[_Found]:
    """Return what travels, in order of the names.

    That is every Python file, and whatever else all users of the machine may read, as a sandbox's own user must; but
    nothing hidden, nothing that Python compiles, and no link to what does not travel itself. Raises InvalidConfig.
    """
    root = directory.resolve(strict=True)
    found: list[_Found] = []
    size_bytes = 0
    for each in _walked(root, excluded):
        size_bytes += each.size_bytes
        if len(found) >= SOURCES_MAX or size_bytes > SOURCES_LIMIT_BYTES:
            raise _too_much(directory)
        found.append(each)
    return sorted(found)


def _walked(root: Path, excluded: frozenset[Path]) -> Iterator[_Found]:
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
                yield _Found(relative, path, known.st_size, known.st_mtime_ns, bool(known.st_mode & stat.S_IXUSR))


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


def _too_much(directory: Path) -> InvalidConfig:
    return InvalidConfig(
        f"{directory} holds more than {SOURCES_MAX} files or {SOURCES_LIMIT_BYTES >> 20} MiB, which do not travel to "
        "nodes: give the handler a directory of its own",
        component=COMPONENT,
    )
