"""``tangram cp``: files and directories into a trajectory's sandbox and out of it.

A tree travels as archives, which carry names that are no UTF-8, links, empty directories and modes. Where the sandbox
can make none, its files travel one by one, and what cannot is named.
"""

from __future__ import annotations

import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import click

from tangram import Client, FileEntry
from tangram.archive import (
    DIRECTORY,
    ENTRIES_MAX,
    FILE,
    LINK,
    PERMISSIONS,
    Entry,
    Extraction,
    Reader,
    Refused,
    opened_directory,
    parts_of,
    private_mode,
    take_back,
)
from tangram.cli import exit_status
from tangram.cli.options import connected, json_option, new_option
from tangram.cli.output import copying, print_json, say
from tangram.client.sync import Trajectory
from tangram.errors import ConflictError, NotFoundError, TooLargeError, UnsupportedError


class CopiedFile(NamedTuple):
    """One file or link that was copied: its path here, and its path in the sandbox."""

    here: Path
    there: str


class LeftOut(NamedTuple):
    """What was not copied: its path on the side it comes from, and why."""

    path: str
    why: str


def text_of(path: Path | str) -> str:
    """Return a path as text that can be printed and sent: a byte that is no UTF-8 is written out as ``\\xff``."""
    return str(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def is_sendable(path: str) -> bool:
    """Return whether a path can stand in a request, which is UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


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
        entries, odd = _entries(directory, prefix)
        left_out += odd
        files += [each for each in entries if not stat.S_ISDIR(each.mode)]
        below = [each for each in entries if stat.S_ISDIR(each.mode)]
        directories += below
        waiting += [(each.here, f"{each.name}/") for each in below]
        if len(files) + len(directories) > ENTRIES_MAX:
            raise click.ClickException(f"{text_of(root)} has more than {ENTRIES_MAX} entries: nothing was copied")
    files.sort(key=_name_of)
    directories.sort(key=_name_of)
    return files + directories, left_out


def _entries(directory: Path, prefix: str) -> tuple[list[LocalEntry], list[LeftOut]]:
    """Return the entries of one directory, and what of it cannot be copied."""
    entries, left_out = [], []
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
            entries.append(LocalEntry(place, f"{prefix}{place.name}", info.st_mode, info.st_size))
        else:
            left_out.append(LeftOut(text_of(place), "it is no file, directory or link"))
    return entries, left_out


def _name_of(entry: LocalEntry) -> str:
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


class Unpacking:
    """One archive on its way into a directory of this machine."""

    def __init__(self, root: Path, there: str) -> None:
        self._root = root
        self._there = there.rstrip("/")
        self.copied: list[CopiedFile] = []
        self.left_out: list[LeftOut] = []

    def all(self, data: bytes) -> None:
        """Unpack a tree, or the one file that it is; raises ClickException, before anything is written, for neither."""
        try:
            entries = list(islice(Reader(io.BytesIO(data)), ENTRIES_MAX + 1))
            paths = [parts_of(entry.name) for entry in entries]
        except Refused as error:
            raise click.ClickException(f"the archive of {self._there!r}: {error}: nothing was copied") from None
        if len(entries) > ENTRIES_MAX:
            raise click.ClickException(f"{self._there!r} has more than {ENTRIES_MAX} entries: nothing was copied")
        if [] in paths:
            self._tree(data)
        elif len(entries) == 1 and entries[0].kind == FILE:
            reader = Reader(io.BytesIO(data))
            for entry in reader:
                write_alone(self._root, entry, reader.content())
            self.copied.append(CopiedFile(self._root, self._there))
        else:
            raise click.ClickException(f"{self._there!r} is no plain file or directory: nothing was copied")

    def _tree(self, data: bytes) -> None:
        reader, links = Reader(io.BytesIO(data)), []
        with laid_out(self._root) as tree:
            for entry in reader:
                name = "/".join(parts_of(entry.name))
                try:
                    tree.one(entry, reader.content())
                except (OSError, Refused) as error:
                    self._leave_out(name, _reason(error))
                else:
                    if entry.kind == LINK:
                        links.append(name)
                    elif entry.kind != DIRECTORY:
                        self._note(name)
            # When all are there: one may lead out by way of another.
            leading_out = take_back(str(self._root), links)
        for name in links:
            if name in leading_out:
                self._leave_out(name, f"it is a link that leads out of the copy, to {text_of(leading_out[name])}")
            else:
                self._note(name)

    def _note(self, name: str) -> None:
        self.copied.append(CopiedFile(self._root / name, f"{self._there}/{name}"))

    def _leave_out(self, name: str, why: str) -> None:
        self.left_out.append(LeftOut(text_of(f"{self._there}/{name}"), why))


@contextmanager
def laid_out(root: Path, flags: int = os.O_NOFOLLOW) -> Iterator[Extraction]:
    """Yield what lays out entries in a directory, which is made; raises ClickException where a link has its place."""
    if flags and root.is_symlink():
        raise click.ClickException(f"{text_of(root)} is a link; remove it, or name another target")
    root.mkdir(parents=True, exist_ok=True)
    with opened_directory(root, flags) as fd, Extraction(fd, into=True, mode=private_mode) as tree:
        yield tree


def write_alone(place: Path, entry: Entry, content: Iterable[tuple[int, bytes]]) -> None:
    """Write one file at a place of its own; a link in its place is replaced."""
    with laid_out(place.parent, flags=0) as tree:
        tree.one(entry._replace(name=place.name), content)


def _reason(error: OSError | Refused) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


#: Lines about what was left out; --json has all.
TOLD_MAX = 20
#: For what a request cannot name.
NO_UTF8 = "its name is no UTF-8, and the sandbox takes no archive"
#: The entries of a directory in the sandbox.
ListFiles = Callable[[str], Sequence[FileEntry]]
_Piece = TypeVar("_Piece")


class Remote(NamedTuple):
    """A place in a trajectory's sandbox."""

    trajectory: str
    path: str


class Copy(NamedTuple):
    """What one copy has done."""

    copied: list[CopiedFile]
    left_out: list[LeftOut]


class SandboxPlace(NamedTuple):
    """A path in a sandbox, and with whose rights it is read or written."""

    sandbox: Trajectory
    path: str
    user: str | None

    def beside(self, path: str) -> SandboxPlace:
        return self._replace(path=path)


@click.command()
@click.argument("source")
@click.argument("target")
@click.option(
    "--user", metavar="USER", help="Whose rights it has in the sandbox, one of those that the function allows."
)
@new_option
@json_option
@connected
def cp(client: Client, source: str, target: str, user: str | None, new: bool, as_json: bool) -> int:
    """Copy a file or a directory into the sandbox of a trajectory, or out of it.

    One of SOURCE and TARGET is TRAJECTORY:PATH; a relative PATH begins at the sandbox's working directory. TARGET is
    the name that the copy gets, or a directory that is there, if it ends with a slash. Links are copied as links; one
    that would lead out of a copy on this machine is left out. What is left out is named, and the status is then 73.

    \b
    tangram cp src t1:src --new
    tangram cp t1:out.json .
    """
    inward, outward = remote(target), remote(source)
    if (inward is None) == (outward is None):
        raise click.UsageError("one of SOURCE and TARGET must be TRAJECTORY:PATH")
    if inward is not None:
        path = _named(inward.path, Path(source).name)
        rollout = client.trajectory(inward.trajectory)
        if new:
            rollout.open()
        done = _copy_in(Path(source), SandboxPlace(rollout, path, user))
    else:
        assert outward is not None
        if not is_sendable(outward.path):
            raise click.BadParameter("the path is no UTF-8; copy the directory that it is in", param_hint="SOURCE")
        place = SandboxPlace(client.trajectory(outward.trajectory), outward.path, user)
        done = _copy_out(place, Path(_named(target, PurePosixPath(outward.path).name)))
    _tell(done, as_json=as_json)
    return exit_status.of_code("conflict") if done.left_out else 0


def remote(text: str) -> Remote | None:
    """Return the trajectory and the path of ``TRAJECTORY:PATH``; None for a path here.

    A name may have colons of its own, but no slash: it ends at the last colon before the first slash.
    """
    head, slash, rest = text.partition("/")
    name, colon, first = head.rpartition(":")
    if not colon or text.startswith((".", "/")):
        return None
    return Remote(name, f"{first}{slash}{rest}")


def _named(path: str, name: str) -> str:
    """Return the path, completed by the name if it means the directory."""
    return f"{path}{name}" if path.endswith("/") or not path else path


def _copy_in(here: Path, there: SandboxPlace) -> Copy:
    if not here.exists():
        raise click.BadParameter(f"{text_of(here)}: no such file or directory", param_hint="SOURCE")
    if here.is_dir():
        entries, left_out = walk(here)
        if not is_sendable(there.path):
            raise click.BadParameter("the path in the sandbox is no UTF-8", param_hint="TARGET")
        done = _tree_in(entries, there)
        return Copy(done.copied, left_out + done.left_out)
    if not here.is_file():
        raise click.BadParameter(f"{text_of(here)} is no file or directory", param_hint="SOURCE")
    directory, name = posixpath.split(there.path)
    mode, data = here.stat().st_mode, here.read_bytes()
    if is_sendable(there.path):
        there.sandbox.upload(there.path, data, mode=stat.S_IMODE(mode) & PERMISSIONS, user=there.user)
        return Copy([CopiedFile(here, there.path)], [])
    if not is_sendable(directory):
        raise click.BadParameter("the directory in the sandbox is no UTF-8", param_hint="TARGET")
    return _tree_in([LocalEntry(here.resolve(), name, mode, len(data))], there.beside(directory or "."))


def _tree_in(entries: Sequence[LocalEntry], there: SandboxPlace) -> Copy:
    """Copy the entries of a tree below a directory: as archives, or one by one if the sandbox takes none."""
    done, as_archives = Copy([], []), True
    parents = {posixpath.dirname(entry.name) for entry in entries}
    sent = list(batches(entries)) or [()]  # an empty one makes the directory
    for batch in _shown(sent, [[each.size_bytes for each in batch if not stat.S_ISDIR(each.mode)] for batch in sent]):
        alone = len(batch) == 1 and batch[0].size_bytes > BATCH_BYTES and is_sendable(batch[0].name)
        if as_archives and not alone:
            try:
                _archive_in(pack(batch), there, done)
                continue
            except UnsupportedError:
                as_archives = False
        for entry in batch:
            if not (stat.S_ISDIR(entry.mode) and entry.name in parents):  # it is made by what goes into it
                _one_in(entry, there, done)
    return done


def _archive_in(batch: PackedTree, there: SandboxPlace, done: Copy) -> None:
    there.sandbox.upload_archive(there.path or ".", batch.data, user=there.user)
    done.left_out.extend(batch.left_out)
    files = [entry for entry in batch.packed if not stat.S_ISDIR(entry.mode)]
    done.copied.extend([CopiedFile(entry.here, f"{there.path}/{entry.name}") for entry in files])


def _one_in(entry: LocalEntry, there: SandboxPlace, done: Copy) -> None:
    """Copy one file by itself; what no single upload can carry is left out."""
    path, mode = f"{there.path}/{entry.name}", stat.S_IMODE(entry.mode) & PERMISSIONS
    why = None if stat.S_ISREG(entry.mode) else "it is no file, and the sandbox takes no archive"
    if not is_sendable(path):
        why = NO_UTF8
    if why is None:
        try:
            data = read_file(entry.here)
        except OSError as error:
            why = error.strerror or "cannot be read"
        else:
            there.sandbox.upload(path, data, mode=mode, user=there.user)
            done.copied.append(CopiedFile(entry.here, path))
            return
    done.left_out.append(LeftOut(text_of(entry.here), why))


def _copy_out(there: SandboxPlace, root: Path) -> Copy:
    try:
        data = there.sandbox.download_archive(there.path or ".", user=there.user)
    except (UnsupportedError, TooLargeError, ConflictError):
        return _files_out(there, root)  # no python3, more than one archive may hold, or a file that may not be read
    unpacking = Unpacking(root, there.path)
    unpacking.all(data)
    return Copy(unpacking.copied, unpacking.left_out)


def _files_out(there: SandboxPlace, root: Path) -> Copy:
    """Copy a file, or the files below a directory one by one; what cannot be read is left out."""
    done, path = Copy([], []), PurePosixPath(there.path)
    for entry in there.sandbox.list(str(path.parent), user=there.user) if path.name not in ("", "..") else ():
        if PurePosixPath(entry.path).name == path.name and not entry.directory:
            data = there.sandbox.download(there.path, user=there.user)
            write_alone(root, _entry_of(root.name, entry, data), [(0, data)])
            return Copy([CopiedFile(root, there.path)], [])
    entries = list(_downloads(partial(there.sandbox.list, user=there.user), there.path or ".", root))
    with laid_out(root) as tree:
        for place, entry in _shown(entries, [[file.size_bytes] for _, file in entries]):
            try:
                data = there.sandbox.download(place.there, user=there.user)
                tree.one(_entry_of(str(place.here.relative_to(root)), entry, data), [(0, data)])
            except (NotFoundError, ConflictError, TooLargeError) as error:
                done.left_out.append(LeftOut(place.there, error.message))
            except (OSError, Refused) as error:
                done.left_out.append(LeftOut(place.there, _reason(error)))
            else:
                done.copied.append(place)
    return done


def _entry_of(path: str, file: FileEntry, data: bytes) -> Entry:
    return Entry(path, FILE, int(file.mode, 8), len(data))


def _downloads(entries_of: ListFiles, there: str, here: Path) -> Iterator[tuple[CopiedFile, FileEntry]]:
    """Yield the files beneath a directory of the sandbox; raises NotFoundError.

    What the sandbox lists is its word: ClickException for an entry that is no name, and for more than can be meant.
    """
    root = FileEntry(path=there, size_bytes=0, directory=True, mode="755")
    left, seen = [(CopiedFile(here, there), root)], 0
    while left:
        place, file = left.pop()
        if not file.directory:
            yield place, file
            continue
        downloads = []
        for entry in entries_of(place.there):
            name = entry.path.rpartition("/")[2]
            if name in ("", ".", "..") or "\0" in name:
                raise click.ClickException(f"the sandbox lists {entry.path!r} in {place.there!r}: nothing was copied")
            downloads.append((CopiedFile(place.here / name, f"{place.there}/{name}"), entry))
        seen += len(downloads)
        if seen > ENTRIES_MAX:
            raise click.ClickException(f"{there!r} has more than {ENTRIES_MAX} entries: nothing was copied")
        left += reversed(downloads)


def _tell(done: Copy, *, as_json: bool) -> None:
    if as_json:
        copied = [{"here": text_of(each.here), "there": text_of(each.there)} for each in done.copied]
        print_json({"copied": copied, "left_out": [each._asdict() for each in done.left_out]})
        return
    for each in done.left_out[:TOLD_MAX]:
        say(f"{each.path}: left out: {each.why}")
    if len(done.left_out) > TOLD_MAX:
        say(f"{len(done.left_out) - TOLD_MAX} more are left out: --json has them all")
    omitted = f", {len(done.left_out)} left out" if done.left_out else ""
    say(f"{len(done.copied)} copied{omitted}")


def _shown(pieces: Sequence[_Piece], sizes: Sequence[Sequence[int]]) -> Iterator[_Piece]:
    """Yield the pieces, with a bar of their bytes and files on a terminal's standard error.

    ``sizes`` are the bytes of each file of each piece.
    """
    with copying("copying", sum(map(len, sizes)), sum(map(sum, sizes))) as copied:
        for piece, files in zip(pieces, sizes, strict=True):
            yield piece
            copied(len(files), sum(files))
