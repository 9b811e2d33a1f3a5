"""What reads and writes a tree as one tar, inside the sandbox and as its user: the standard library, Python 3.8 on.

``python3 -c SOURCE put PATH LIMIT`` takes a tar on standard input, ``get PATH LIMIT BASE`` writes one to standard
output. What goes wrong is one line of JSON on standard error, and status 65.
"""

# pathlib and contextlib would cost every archive their import.
# ruff: noqa: PTH101, PTH102, PTH103, PTH108, PTH112, PTH114, PTH118, PTH119, PTH208, PTH211, SIM105
from __future__ import annotations

import errno
import json
import os
import stat
import sys
import tarfile

REFUSED = 65
ENTRIES_MAX = 200_000
ERRORS = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_a_directory",
    errno.EISDIR: "is_a_directory",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.EROFS: "read_only",
}


class Refused(Exception):
    """A code of the gateway's errors, what is wrong with a file, and a message."""

    def __init__(self, code: str, file_error: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.file_error = file_error


def outside(name: str) -> Refused:
    return Refused("invalid_input", "outside", f"the entry {name!r} leaves the directory")


def parts_of(name: str) -> list[str]:
    """Return the parts of an entry's name; raises Refused for one that begins at the root or goes up."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise outside(name)
    return parts


class Extraction:
    """A tar on its way into a directory, which no entry leaves, neither by its name nor through a link."""

    def __init__(self, path: str, limit: int) -> None:
        os.makedirs(path, exist_ok=True)
        self.root = os.path.realpath(path)
        self.limit = limit
        self.left = limit
        self.entries = 0
        self.directories: list[tuple[str, int]] = []  # whose modes are set last: one may forbid what goes into it

    def all(self, tar: tarfile.TarFile) -> None:
        for entry in tar:
            self.entries += 1
            self.left -= entry.size if entry.isreg() else 0
            if self.left < 0 or self.entries > ENTRIES_MAX:
                message = f"the archive holds more than {self.limit} bytes (server.file_limit) or {ENTRIES_MAX} entries"
                raise Refused("too_large", "", message)
            self.one(tar, entry)
        for place, mode in reversed(self.directories):
            set_mode(place, mode)

    def place(self, parts: list[str], name: str) -> str:
        """Return where an entry goes, its directories made; raises Refused if a link leads out."""
        parent = self.root
        for part in parts[:-1]:
            parent = os.path.join(parent, part)
            if not os.path.lexists(parent):
                os.mkdir(parent)
        true = os.path.realpath(parent)
        if true != self.root and not true.startswith(self.root.rstrip("/") + "/"):
            raise outside(name)
        return os.path.join(true, parts[-1])

    def one(self, tar: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
        parts = parts_of(entry.name)
        if not parts:
            return
        place = self.place(parts, entry.name)
        if entry.isdir():
            if os.path.islink(place):
                self.place([*parts, "."], entry.name)  # a directory elsewhere in the tree may stand behind a link
            elif not os.path.isdir(place):
                os.mkdir(place)
            self.directories.append((place, entry.mode))
        elif entry.isreg():
            self.write(tar, entry, place)
        elif entry.issym():
            clear(place)
            os.symlink(entry.linkname, place)
        elif entry.islnk():
            source = self.place(parts_of(entry.linkname), entry.name)
            if source != place:
                clear(place)
                os.link(source, place, follow_symlinks=False)
        else:
            raise Refused("invalid_input", "not_a_file", f"the entry {entry.name!r} is no file, directory or link")

    def write(self, tar: tarfile.TarFile, entry: tarfile.TarInfo, place: str) -> None:
        """Write a file; one that is there keeps its owner, one that is new is there whole or not at all."""
        data = tar.extractfile(entry)
        if data is None:
            raise Refused("invalid_input", "", f"the entry {entry.name!r} has no content")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        if os.path.lexists(place) and not stat.S_ISREG(os.lstat(place).st_mode):
            clear(place)
        is_new = not os.path.lexists(place)
        try:
            fd = os.open(place, flags, 0o600)
        except OSError as error:
            if error.errno != errno.ETXTBSY:
                raise
            os.unlink(place)  # a program that runs goes on with what it was
            fd = os.open(place, flags, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                while True:
                    chunk = data.read(65536)
                    if not chunk:
                        break
                    file.write(chunk)
        except BaseException:
            if is_new:
                os.unlink(place)
            raise
        set_mode(place, entry.mode)
        try:
            os.utime(place, (entry.mtime, entry.mtime))
        except OSError:
            pass  # of a file of another owner


def clear(place: str) -> None:
    """Take away what stands in the place of an entry, if it is no directory."""
    if os.path.lexists(place):
        if os.path.isdir(place) and not os.path.islink(place):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), place)
        os.unlink(place)


def set_mode(place: str, mode: int) -> None:
    try:
        os.chmod(place, stat.S_IMODE(mode))
    except PermissionError:
        pass  # it is another's, who lets us write


def put(path: str, limit: int) -> None:
    extraction = Extraction(path, limit)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|*") as tar:
        extraction.all(tar)
    while sys.stdin.buffer.read(65536):
        pass  # what pads the archive


def measure(path: str, limit: int) -> None:
    """Raise, before anything is written, if the tree holds too much or something that may not be read."""
    left, entries = limit, 0
    stack = [path]
    while stack:
        place = stack.pop()
        info = os.lstat(place)
        entries += 1
        if stat.S_ISDIR(info.st_mode):
            stack += [os.path.join(place, name) for name in os.listdir(place)]
        elif stat.S_ISREG(info.st_mode):
            left -= info.st_size
            if not os.access(place, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)
        if left < 0 or entries > ENTRIES_MAX:
            raise Refused(
                "too_large", "", f"{path!r} holds more than {limit} bytes (server.file_limit) or {ENTRIES_MAX} entries"
            )


def get(path: str, limit: int, base: bool, follow: bool) -> None:
    if follow and os.path.islink(path):
        path = os.path.realpath(path)
    measure(path, limit)
    alone = os.path.islink(path) or not os.path.isdir(path)
    name = os.path.basename(os.path.normpath(path)) if base or alone else "."
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        tar.add(path, arcname=name or ".", filter=kept)
    sys.stdout.buffer.flush()


def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return entry if entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() else None


def main(words: list[str]) -> int:
    os.umask(0o022)
    try:
        if words[0] == "put":
            put(words[1], int(words[2]))
        else:
            get(words[1], int(words[2]), words[3] == "base", words[4] == "follow")
        return 0
    except Refused as error:
        values = {"code": error.code, "message": str(error), "file_error": error.file_error}
    except tarfile.TarError as error:
        values = {"code": "invalid_input", "message": f"this is no tar: {error}", "file_error": ""}
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        code = "too_large" if full else "not_found" if error.errno == errno.ENOENT else "invalid_input"
        message = f"{error.filename or 'archive'}: {os.strerror(error.errno or 0)}"
        message += " (sandbox.disk)" if full else ""
        values = {"code": code, "message": message, "file_error": ERRORS.get(error.errno or 0, "")}
    sys.stderr.write(json.dumps(values))
    return REFUSED


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)
