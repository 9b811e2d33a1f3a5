"""``tangram cp``: files and directories into a trajectory's sandbox and out of it."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import click
from rich.console import Console
from rich.progress import track

from tangram import Client, FileEntry
from tangram.cli.options import connected, json_option
from tangram.cli.printing.output import print_json, say

#: Files and directories of one copy: an agent may have made any number of them.
ENTRIES_MAX = 200_000
#: The entries of a directory in the sandbox.
ListFiles = Callable[[str], Sequence[FileEntry]]


class CopiedFile(NamedTuple):
    """One file to copy: its path here, and its path in the sandbox."""

    here: Path
    there: str


class Remote(NamedTuple):
    """A place in a trajectory's sandbox."""

    trajectory: str
    path: str


@click.command()
@click.argument("source")
@click.argument("target")
@click.option("--user", help="Whose rights it has in the sandbox, one of those that the function allows.")
@json_option
@connected
def cp(client: Client, source: str, target: str, user: str | None, as_json: bool) -> None:
    """Copy a file or a directory into the sandbox of a trajectory, or out of it.

    One of SOURCE and TARGET is TRAJECTORY:PATH; a relative PATH begins at the sandbox's working directory. TARGET is
    the name that the copy gets, or a directory that is there, if it ends with a slash.
    """
    inward, outward = remote(target), remote(source)
    if (inward is None) == (outward is None):
        raise click.UsageError("one of SOURCE and TARGET must be TRAJECTORY:PATH")
    if inward is not None:
        sandbox = client.trajectory(inward.trajectory)
        copied = list(_uploads(Path(source), _named(inward.path, Path(source).name)))
        for each in _progress(copied, source):
            mode = stat.S_IMODE(each.here.stat().st_mode)
            sandbox.upload(each.there, each.here.read_bytes(), mode=mode, user=user)
    else:
        assert outward is not None
        sandbox = client.trajectory(outward.trajectory)
        listed = partial(sandbox.list, user=user)
        root = Path(_named(target, PurePosixPath(outward.path).name))
        copied = list(_downloads(listed, outward.path, root))
        for each in _progress(copied, source):
            write_below(root, each.here, sandbox.download(each.there, user=user))
    if as_json:
        print_json({"copied": [{"here": str(each.here), "there": each.there} for each in copied]})
    else:
        say(f"{len(copied)} copied")


def remote(text: str) -> Remote | None:
    """Return the trajectory and the path of ``TRAJECTORY:PATH``; None for a path here.

    A name may have colons of its own: it ends at the first ``:/``, or else at the last colon.
    """
    name, colon, path = text.partition(":/") if ":/" in text else text.rpartition(":")
    if not colon or text.startswith((".", "/")):
        return None
    return Remote(name, f"{colon[1:]}{path}")


def _named(path: str, name: str) -> str:
    """Return the path, completed by the name if it means the directory."""
    return f"{path}{name}" if path.endswith("/") or not path else path


def _uploads(here: Path, there: str) -> Iterator[CopiedFile]:
    if not here.exists():
        raise click.BadParameter(f"{here}: no such file or directory", param_hint="SOURCE")
    if here.is_file():
        yield CopiedFile(here, there)
    for file in sorted(each for each in here.rglob("*") if each.is_file()):
        yield CopiedFile(file, f"{there}/{file.relative_to(here).as_posix()}")


def _downloads(entries_of: ListFiles, there: str, here: Path) -> Iterator[CopiedFile]:
    """Yield the files beneath a path in the sandbox, or the one that it is; raises NotFoundError.

    What the sandbox lists is its word: ClickException for an entry that is no name, and for more than can be meant.
    """
    path = PurePosixPath(there)
    for entry in entries_of(str(path.parent)) if path.name else ():
        if PurePosixPath(entry.path).name == path.name and not entry.directory:
            yield CopiedFile(here, there)
            return
    left, seen = [(CopiedFile(here, there), True)], 0
    while left:
        place, directory = left.pop()
        if not directory:
            yield place
            continue
        found = []
        for entry in entries_of(place.there):
            name = entry.path.rpartition("/")[2]
            if name in ("", ".", "..") or "\0" in name:
                raise click.ClickException(f"the sandbox lists {entry.path!r} in {place.there!r}: nothing was copied")
            found.append((CopiedFile(place.here / name, f"{place.there}/{name}"), entry.directory))
        seen += len(found)
        if seen > ENTRIES_MAX:
            raise click.ClickException(f"{there!r} has more than {ENTRIES_MAX} entries: nothing was copied")
        left += reversed(found)


def write_below(root: Path, file: Path, data: bytes) -> None:
    """Write a file at or below ``root``; raises ClickException rather than follow a link that lies there."""
    for parent in reversed([each for each in file.parents if each == root or root in each.parents]):
        if parent.is_symlink():
            raise click.ClickException(f"{parent} is a link; remove it, or name another target")
    if file.is_symlink():
        raise click.ClickException(f"{file} is a link; remove it, or name another target")
    file.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666), "wb") as opened:
        opened.write(data)


def _progress(files: list[CopiedFile], what: str) -> Iterator[CopiedFile]:
    """Yield the files, with a bar on a terminal's standard error."""
    console = Console(stderr=True, markup=False)
    yield from track(files, what, console=console, transient=True, disable=not sys.stderr.isatty())
