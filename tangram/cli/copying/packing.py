"""A tree of this machine as tars: directories, files and links, each as what it is."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from tangram.cli.copying.copied import ENTRIES_MAX, PERMISSIONS, LeftOut, text_of

#: Bytes of files that one tar holds: it is kept in memory. A larger file goes alone.
BATCH_BYTES = 32 * 2**20
#: Bytes that an entry has beside its file.
_ENTRY_BYTES = 1024


class LocalEntry(NamedTuple):
    """A directory, a file or a link of a tree: its path here, its name below the tree, and what it is."""

    here: Path
    name: str
    mode: int
    size_bytes: int


class PackedTree(NamedTuple):
    """A tar, what it holds, and what could not be read."""

    data: bytes
    packed: tuple[LocalEntry, ...]
    left_out: tuple[LeftOut, ...]


def walk(root: Path) -> tuple[list[LocalEntry], list[LeftOut]]:
    """Return what lies below a directory, and what cannot be copied; no link is followed.

    Directories come last, each after the one it lies in: a mode may forbid what goes into it. Raises ClickException for
    more than `ENTRIES_MAX`.
    """
    files: list[LocalEntry] = []
    directories: list[LocalEntry] = []
    left_out: list[LeftOut] = []
    waiting = [(root, "")]
    while waiting:
        directory, prefix = waiting.pop()
        found, odd = _entries(directory, prefix)
        left_out += odd
        files += [each for each in found if not stat.S_ISDIR(each.mode)]
        below = [each for each in found if stat.S_ISDIR(each.mode)]
        directories += below
        waiting += [(each.here, f"{each.name}/") for each in below]
        if len(files) + len(directories) > ENTRIES_MAX:
            raise click.ClickException(f"{text_of(root)} has more than {ENTRIES_MAX} entries: nothing was copied")
    files.sort(key=_name)
    directories.sort(key=_name)
    return files + directories, left_out


def _entries(directory: Path, prefix: str) -> tuple[list[LocalEntry], list[LeftOut]]:
    """Return the entries of one directory, and what of it cannot be copied."""
    found, left_out = [], []
    try:
        places = sorted(directory.iterdir())
    except OSError as error:
        return [], [LeftOut(text_of(directory), error.strerror or "cannot be read")]
    for place in places:
        try:
            info = place.lstat()
        except OSError as error:
            left_out.append(LeftOut(text_of(place), error.strerror or "cannot be read"))
            continue
        if stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
            found.append(LocalEntry(place, f"{prefix}{place.name}", info.st_mode, info.st_size))
        else:
            left_out.append(LeftOut(text_of(place), "it is no file, directory or link"))
    return found, left_out


def _name(entry: LocalEntry) -> str:
    return entry.name


def batches(entries: Iterable[LocalEntry], limit_bytes: int = BATCH_BYTES) -> Iterator[Sequence[LocalEntry]]:
    """Yield the entries in runs, each of so many bytes at most, or of one entry."""
    held: list[LocalEntry] = []
    held_bytes = 0
    for entry in entries:
        size_bytes = _ENTRY_BYTES + entry.size_bytes
        if held and held_bytes + size_bytes > limit_bytes:
            yield held
            held, held_bytes = [], 0
        held.append(entry)
        held_bytes += size_bytes
    if held:
        yield held


def pack(entries: Iterable[LocalEntry]) -> PackedTree:
    """Return the entries as a tar, without owners; what cannot be read is left out."""
    packed, left_out, written = [], [], io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            header = tarfile.TarInfo(entry.name)
            header.mode = stat.S_IMODE(entry.mode) & PERMISSIONS
            data = b""
            try:
                header.mtime = int(entry.here.lstat().st_mtime)
                if stat.S_ISDIR(entry.mode):
                    header.type = tarfile.DIRTYPE
                elif stat.S_ISLNK(entry.mode):
                    header.type, header.linkname = tarfile.SYMTYPE, str(entry.here.readlink())
                else:
                    data = read_file(entry.here)
            except OSError as error:
                left_out.append(LeftOut(text_of(entry.here), error.strerror or "cannot be read"))
                continue
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
            packed.append(entry)
    return PackedTree(written.getvalue(), tuple(packed), tuple(left_out))


def read_file(place: Path) -> bytes:
    """Return a file of the tree whole; raises OSError, also if a link has taken its place."""
    with os.fdopen(os.open(place, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return file.read()
