"""An archive of a sandbox as a tree of this machine. What it says is the sandbox's word: nothing leaves the tree."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import click

from tangram.cli.copying.copied import ENTRIES_MAX, PERMISSIONS, CopiedFile, LeftOut, text_of

#: The order in which entries are made: links last, so that nothing is written through them.
_RANKS = {tarfile.DIRTYPE: 0, tarfile.REGTYPE: 1, tarfile.AREGTYPE: 1, tarfile.LNKTYPE: 2, tarfile.SYMTYPE: 3}


class Unpacking:
    """One archive on its way into a directory."""

    def __init__(self, root: Path, there: str) -> None:
        self._root = root
        self._there = there.rstrip("/")
        self._tree = False
        self._written: set[str] = set()
        self.copied: list[CopiedFile] = []
        self.left_out: list[LeftOut] = []

    def all(self, data: bytes) -> None:
        """Unpack a tree, or the one file that it is; raises ClickException, before anything is written, for neither."""
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
                entries = sorted(self._entries(tar).items(), key=lambda each: (_rank(each[1]), each[0]))
                if self._tree:
                    self._make(tar, entries)
                else:
                    self._alone(tar, [entry for _, entry in entries])
        except tarfile.TarError as error:
            raise click.ClickException(f"the sandbox sent no whole archive: {error}") from None

    def _make(self, tar: tarfile.TarFile, entries: list[tuple[str, tarfile.TarInfo]]) -> None:
        make_directory(self._root, self._root)
        for name, entry in entries:
            try:
                self._one(tar, name, entry)
            except (OSError, click.ClickException) as error:
                self._leave_out(name, _reason(error))
        self._take_back([name for name, entry in entries if entry.issym()])
        for name, entry in reversed(entries):
            if entry.isdir():
                self._set_mode(name, entry.mode)

    def _alone(self, tar: tarfile.TarFile, entries: list[tarfile.TarInfo]) -> None:
        if len(entries) != 1 or not entries[0].isreg() or entries[0].issparse():
            raise click.ClickException(f"{self._there!r} is no plain file or directory: nothing was copied")
        write_below(self._root, self._root, _content(tar, entries[0]), entries[0].mode)
        self.copied.append(CopiedFile(self._root, self._there))

    def _entries(self, tar: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
        """Return the entries by their names; raises ClickException for one that is no name below the tree."""
        entries: dict[str, tarfile.TarInfo] = {}
        for entry in tar:
            parts = [part for part in entry.name.split("/") if part not in ("", ".")]
            if entry.name.startswith("/") or ".." in parts or "\0" in entry.name:
                told = f"the sandbox's archive of {self._there!r} has an entry {text_of(entry.name)!r}"
                raise click.ClickException(f"{told}: nothing was copied")
            if parts:
                entries["/".join(parts)] = entry
            else:
                self._tree = True
            if len(entries) > ENTRIES_MAX:
                raise click.ClickException(f"{self._there!r} has more than {ENTRIES_MAX} entries: nothing was copied")
        return entries

    def _one(self, tar: tarfile.TarFile, name: str, entry: tarfile.TarInfo) -> None:
        """Make one entry; raises OSError and ClickException for one that cannot be."""
        place = self._root / name
        if entry.isdir():
            make_directory(self._root, place)
            return
        if entry.issym():
            clear(self._root, place)
            place.symlink_to(entry.linkname)
            return
        if entry.islnk():
            if entry.linkname.removeprefix("./") not in self._written:
                raise click.ClickException("it is another name of a file that was not copied")
            clear(self._root, place)
            place.hardlink_to(self._root / entry.linkname)
        elif entry.issparse() or not entry.isreg():  # a sparse file may claim any size
            raise click.ClickException("it is no plain file, directory or link")
        else:
            write_below(self._root, place, _content(tar, entry), entry.mode)
        self._written.add(name)
        self._note(name)

    def _take_back(self, links: list[str]) -> None:
        """Remove the links that lead out of the tree; all must be there, as one may lead out by way of another."""
        within = os.path.realpath(self._root)
        for name in links:
            place = self._root / name
            if not place.is_symlink():
                continue
            target, true = place.readlink(), os.path.realpath(place)
            if true == within or true.startswith(within.rstrip("/") + "/"):
                self._note(name)
            else:
                place.unlink()
                self._leave_out(name, f"it is a link that leads out of the copy, to {text_of(target)}")

    def _set_mode(self, name: str, mode: int) -> None:
        place = self._root / name
        if place.is_dir() and not place.is_symlink():
            # Its owner can always read the copy, and remove it.
            place.chmod(mode & PERMISSIONS | 0o700)

    def _note(self, name: str) -> None:
        self.copied.append(CopiedFile(self._root / name, f"{self._there}/{name}"))

    def _leave_out(self, name: str, why: str) -> None:
        self.left_out.append(LeftOut(text_of(f"{self._there}/{name}"), why))


def make_directory(root: Path, directory: Path) -> None:
    """Make a directory at or below ``root``; raises ClickException for a link on the way to it."""
    for each in reversed([directory, *directory.parents]):
        if (each == root or root in each.parents) and each.is_symlink():
            raise click.ClickException(f"{text_of(each)} is a link; remove it, or name another target")
    directory.mkdir(parents=True, exist_ok=True)


def clear(root: Path, place: Path) -> None:
    """Make room for a link at or below ``root``; raises IsADirectoryError for a directory, which stays."""
    make_directory(root, place.parent)
    place.unlink(missing_ok=True)


def write_below(root: Path, file: Path, data: bytes, mode: int) -> None:
    """Write a file at or below ``root``; raises ClickException rather than follow a link that lies there."""
    make_directory(root, file.parent)
    if file.is_symlink():
        raise click.ClickException(f"{text_of(file)} is a link; remove it, or name another target")
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as opened:
        opened.write(data)
        if os.fstat(opened.fileno()).st_uid == os.geteuid():  # the mode of another's file is not ours to set
            os.fchmod(opened.fileno(), mode & PERMISSIONS)


def _content(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    data = tar.extractfile(entry)
    return b"" if data is None else data.read()


def _rank(entry: tarfile.TarInfo) -> int:
    return _RANKS.get(entry.type, 4)


def _reason(error: OSError | click.ClickException) -> str:
    if isinstance(error, click.ClickException):
        return error.message
    return error.strerror or str(error)
