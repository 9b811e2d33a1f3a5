"""``tangram cp``: files and directories into a trajectory's sandbox and out of it.

A tree travels as archives, which carry names that are no UTF-8, links, empty directories and modes. Where the sandbox
can make none, its files travel one by one, and what cannot is named.
"""

from __future__ import annotations

import posixpath
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import click

from tangram import Client, FileEntry
from tangram.cli import exit_status
from tangram.cli.copying.copied import ENTRIES_MAX, PERMISSIONS, CopiedFile, LeftOut, is_sendable, text_of
from tangram.cli.copying.packing import BATCH_BYTES, LocalEntry, PackedTree, batches, pack, read_file, walk
from tangram.cli.copying.unpacking import Unpacking, make_directory, write_below
from tangram.cli.options import connected, json_option
from tangram.cli.printing.output import print_json, say
from tangram.cli.printing.progress import copying
from tangram.client.sync.trajectory import Trajectory
from tangram.errors import ConflictError, NotFoundError, TooLargeError, UnsupportedError

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
@click.option("--user", help="Whose rights it has in the sandbox, one of those that the function allows.")
@json_option
@connected
def cp(client: Client, source: str, target: str, user: str | None, as_json: bool) -> int:
    """Copy a file or a directory into the sandbox of a trajectory, or out of it.

    One of SOURCE and TARGET is TRAJECTORY:PATH; a relative PATH begins at the sandbox's working directory. TARGET is
    the name that the copy gets, or a directory that is there, if it ends with a slash. Links are copied as links; one
    that would lead out of a copy on this machine is left out. What is left out is named, and the status is then 73.
    """
    inward, outward = remote(target), remote(source)
    if (inward is None) == (outward is None):
        raise click.UsageError("one of SOURCE and TARGET must be TRAJECTORY:PATH")
    if inward is not None:
        path = _named(inward.path, Path(source).name)
        done = _copy_in(Path(source), SandboxPlace(client.trajectory(inward.trajectory), path, user))
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
            write_below(root, root, data, int(entry.mode, 8))
            return Copy([CopiedFile(root, there.path)], [])
    make_directory(root, root)
    found = list(_downloads(partial(there.sandbox.list, user=there.user), there.path or ".", root))
    for place, entry in _shown(found, [[file.size_bytes] for _, file in found]):
        try:
            data = there.sandbox.download(place.there, user=there.user)
            write_below(root, place.here, data, int(entry.mode, 8))
        except (NotFoundError, ConflictError, TooLargeError) as error:
            done.left_out.append(LeftOut(place.there, error.message))
        else:
            done.copied.append(place)
    return done


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
        found = []
        for entry in entries_of(place.there):
            name = entry.path.rpartition("/")[2]
            if name in ("", ".", "..") or "\0" in name:
                raise click.ClickException(f"the sandbox lists {entry.path!r} in {place.there!r}: nothing was copied")
            found.append((CopiedFile(place.here / name, f"{place.there}/{name}"), entry))
        seen += len(found)
        if seen > ENTRIES_MAX:
            raise click.ClickException(f"{there!r} has more than {ENTRIES_MAX} entries: nothing was copied")
        left += reversed(found)


def _tell(done: Copy, *, as_json: bool) -> None:
    if as_json:
        copied = [{"here": text_of(each.here), "there": text_of(each.there)} for each in done.copied]
        print_json({"copied": copied, "left_out": [each._asdict() for each in done.left_out]})
        return
    for each in done.left_out[:TOLD_MAX]:
        say(f"{each.path}: left out: {each.why}")
    if len(done.left_out) > TOLD_MAX:
        say(f"{len(done.left_out) - TOLD_MAX} more are left out: --json has them all")
    told = f", {len(done.left_out)} left out" if done.left_out else ""
    say(f"{len(done.copied)} copied{told}")


def _shown(pieces: Sequence[_Piece], sizes: Sequence[Sequence[int]]) -> Iterator[_Piece]:
    """Yield the pieces, with a bar of their bytes and files on a terminal's standard error.

    ``sizes`` are the bytes of each file of each piece.
    """
    with copying("copying", sum(map(len, sizes)), sum(map(sum, sizes))) as copied:
        for piece, files in zip(pieces, sizes, strict=True):
            yield piece
            copied(len(files), sum(files))
