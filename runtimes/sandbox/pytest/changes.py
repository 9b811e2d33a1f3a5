"""What a trajectory has changed below its working directory, on its way into a fresh sandbox. Standard library only.

Run in sandboxes as ``python3 -I -S -c SOURCE MODE``, in the working directory and as the sandbox's user:

    list     the fresh one: prints {"known": {path: digest} of what it has already, "python": the interpreter's path,
             "kept": what of the working directory belongs to the installation}
    collect  the trajectory's: standard input {"known", "paths", "left_out", "kept", "ignore", "limit_bytes"}; prints
             one line {"deleted", "changed", "left_out"} or {"error"}, and a tar of the files and links that changed
    apply    the fresh one: standard input is a line {"paths", "left_out", "kept", "ignore", "limit_bytes"} and then
             what ``collect`` printed; prints {"left_out", "failed", "brought": {path: whether there was none} or null}

What the trajectory's sandbox answers is the agent's word, and good for nothing but the content of files below the
working directory of a sandbox that it has never seen. Which of them may come over is decided again where they arrive.
"""

# A sandbox's paths may be any bytes, and each object for one would cost more than the look at it.
# ruff: noqa: PTH100, PTH102, PTH108, PTH109, PTH110, PTH112, PTH114, PTH115, PTH117, PTH118, PTH120, PTH123, PTH211
from __future__ import annotations

import ast
import fnmatch
import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from typing import Any

#: Trees and files that are no part of a solution: compiled code, installed packages, and what Python runs at its start.
NEVER = (
    *("site-packages", "dist-packages", "*.pth", "*.dist-info", "*.egg-info", "*.egg-link", "pyvenv.cfg"),
    *("sitecustomize", "sitecustomize.*", "usercustomize", "usercustomize.*"),
)
#: Of these not even a word is lost.
SILENT = (".git", "__pycache__", "*.pyc", ".tangram-*")
#: Where pytest and its plugins find their options.
OPTIONS = (
    "conftest", "conftest.*", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg",
    "pyproject.toml", ".coveragerc",
)  # fmt: skip
GIT_S = 30
LINKS_MAX = 40
TOLD_MAX = 20
BROUGHT_MAX = 20_000


def digest_of(path: str) -> str:
    """Return what tells a file's content, its right to be executed and a link's target; empty for other things."""
    info = os.lstat(path)
    if stat.S_ISLNK(info.st_mode):
        return "link " + os.readlink(path)
    if not stat.S_ISREG(info.st_mode):
        return ""
    digest = hashlib.blake2b(digest_size=16)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        while True:
            data = file.read(2**20)
            if not data:
                return f"{digest.hexdigest()} {bool(info.st_mode & 0o100)}"
            digest.update(data)


def walked() -> list[str]:
    """Return the files and links below the working directory."""
    found: list[str] = []
    for directory, folders, files in os.walk("."):
        folders[:] = [name for name in folders if not _matches(name, SILENT) and not _is_venv(directory, name)]
        links = [name for name in folders if os.path.islink(os.path.join(directory, name))]
        names = [name for name in files if not _matches(name, SILENT)] + links
        found += [os.path.normpath(os.path.join(directory, name)) for name in names]
    return found


def _is_venv(directory: str, name: str) -> bool:
    return os.path.lexists(os.path.join(directory, name, "pyvenv.cfg"))


def kept_places() -> list[str]:
    """Return what below the working directory is of the installation: the interpreter, its libraries and programs."""
    here, found = os.getcwd(), []
    programs = [os.path.abspath(place) for place in os.environ.get("PATH", "").split(":") if place]
    prefixes = [sys.prefix, sys.exec_prefix, sys.base_prefix, *sys.path]
    for program in _links_of(sys.executable):
        found.append(program)
        home = os.path.dirname(program)
        prefixes += [place for place in (home, os.path.dirname(home)) if _is_venv(place, "")]
    for place in [*programs, *prefixes]:
        found += _links_of(place)
    for directory, folders, _ in os.walk("."):
        venvs = [name for name in folders if _is_venv(directory, name)]
        found += [os.path.abspath(os.path.join(directory, name)) for name in venvs]
        folders[:] = [name for name in folders if name not in venvs and not _matches(name, SILENT)]
    below = {os.path.relpath(place, here) for place in found if place.startswith(here.rstrip("/") + "/")}
    return sorted(below)


def _links_of(place: str) -> list[str]:
    """Return a path and, where it or a directory on its way is a link, what each of them leads to."""
    found = [os.path.abspath(place)]
    for _ in range(LINKS_MAX):
        parts = found[-1].split("/")
        link = next((at for at in range(2, len(parts) + 1) if os.path.islink("/".join(parts[:at]))), 0)
        if not link:
            break
        head, rest = "/".join(parts[:link]), parts[link:]
        found.append(head)
        target = os.path.join(os.path.dirname(head), os.readlink(head))
        found.append(os.path.abspath(os.path.join(target, *rest)))
    return found


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def known_files() -> dict[str, str]:
    known = {}
    for path in walked():
        try:
            known[path] = digest_of(path)
        except OSError:
            known[path] = ""
    return known


def git(*arguments: str, given: bytes = b"") -> list[str] | None:
    """Return the paths that git names, None if it does not."""
    safe = ["-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"]
    try:
        done = subprocess.run(
            ["git", *safe, *arguments],
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=GIT_S,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode not in (0, 1):
        return None
    return [os.path.normpath(path) for path in done.stdout.decode("utf-8", "surrogateescape").split("\0") if path]


class Rules:
    """What may come over: by both sides, as nobody is believed who says that it was kept to."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.named = [os.path.normpath(each) for each in told["paths"]]
        self.out = {os.path.normpath(path) for path in told["left_out"]}
        self.kept = [os.path.normpath(path) for path in told["kept"]]
        self.never = (*NEVER, *(OPTIONS if told["ignore"] else ()))
        self.stems = {path[:-3] for path in self.out if path.endswith(".py")}

    def counts(self, path: str) -> bool:
        """Return whether it is among the paths that were asked for, and no file, or its directory, that is given."""
        if self.named and not any(each == "." or (path + "/").startswith(each + "/") for each in self.named):
            return False
        return path not in self.out and not any(each.startswith(path + "/") for each in self.out)

    def stays_behind(self, path: str) -> bool:
        """Return whether it is no part of a solution: it is of the installation, or holds options that do not count."""
        if any((path + "/").startswith(each + "/") or each.startswith(path + "/") for each in self.kept):
            return True
        if any((path + "/").startswith((stem + "/", stem + ".")) for stem in self.stems):
            return True  # Python would import it in place of a given test
        return any(_matches(part, self.never) for part in path.split("/"))

    def is_beside_tests(self, path: str) -> bool:
        """Return whether it is the code of a package of tests in which given ones lie, or of one that is all the tree.

        That of any other package is the solution's, and is imported when a test asks for it (`plugin`).
        """
        directory, _, name = path.rpartition("/")
        if not name.startswith("__init__.") or not any(
            not directory or each.startswith(directory + "/") for each in self.out
        ):
            return False
        return not directory or any(part.startswith("test") for part in directory.split("/"))

    def admit(self, path: str) -> bool:
        silent = any(_matches(part, SILENT) for part in path.split("/"))
        return self.counts(path) and not silent and not self.stays_behind(path)


def collect(told: dict[str, Any]) -> bytes:
    """Return what changed, as `apply` takes it."""
    known: dict[str, str] = told["known"]
    found = walked()
    left: list[str] = []
    rules = Rules(told)
    gone = [path for path in known if not os.path.lexists(path)]
    if os.path.exists(".git"):
        theirs = git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
        ignored = git("check-ignore", "-z", "--stdin", given="\0".join(gone).encode("utf-8", "surrogateescape"))
        if theirs is not None and ignored is not None:
            found, gone = sorted(set(found) & set(theirs)), sorted(set(gone) - set(ignored))
    changed: list[str] = []
    size = 0
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in filter(rules.counts, found):
            try:
                digest = digest_of(path)
                if not digest or digest == known.get(path):
                    continue
                if rules.stays_behind(path):
                    left.append(path)
                    continue
                size += os.lstat(path).st_size
                if size > told["limit_bytes"]:
                    return json.dumps({"error": f"more than {told['limit_bytes']} bytes have changed"}).encode()
                tar.add(path, recursive=False, filter=_plain)
                changed.append(path)
            except OSError:
                left.append(path)
    deleted = [path for path in gone if rules.admit(path)]
    head = {"deleted": deleted, "changed": len(changed), "left_out": left[:TOLD_MAX]}
    return json.dumps(head).encode() + b"\n" + packed.getvalue()


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if not (entry.isreg() or entry.issym()):
        if not entry.islnk():
            return None
        entry.type = tarfile.REGTYPE
        entry.size = os.lstat(entry.name).st_size
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def apply(data: bytes) -> dict[str, Any]:
    """Bring the files and links in, and take the deleted ones away; return what was not let in, or could not be done.

    Ends the process with a message if what was collected is an error, or more than may change.
    """
    line, _, data = data.partition(b"\n")
    told = json.loads(line)
    rules, size = Rules(told), 0
    line, _, packed = data.partition(b"\n")
    head = json.loads(line)
    if "error" in head:
        raise SystemExit(str(head["error"])[:500])
    left, failed = [str(path) for path in head["left_out"]], []
    brought: dict[str, bool] = {}
    for name in head["deleted"]:
        try:
            path = _admitted(name, rules, left)
            if path:
                os.unlink(_place(path))
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            failed.append(name)
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as tar:
        for entry in tar:
            size += entry.size
            if size > told["limit_bytes"]:
                raise SystemExit(f"more than {told['limit_bytes']} bytes have changed")
            try:
                path = _admitted(entry.name, rules, left)
                if path and rules.is_beside_tests(path) and _has_code(tar, entry):
                    left.append(path)
                elif path:
                    brought[path] = not os.path.lexists(path)
                    _bring(tar, entry, _place(path), rules)
            except (OSError, ValueError):
                failed.append(entry.name)
    told_of = brought if len(brought) <= BROUGHT_MAX else None
    return {"left_out": left[:TOLD_MAX], "failed": failed[:TOLD_MAX], "brought": told_of}


def _admitted(name: str, rules: Rules, left: list[str]) -> str:
    """Return the plain path, empty if it may not come over (of which ``left`` takes note); raises ValueError."""
    path = os.path.normpath(name)
    if os.path.isabs(path) or path.split("/")[0] in ("..", ".", "") or "\0" in path:
        raise ValueError("not below the working directory")
    if rules.admit(path):
        return path
    if path not in left:
        left.append(path)
    return ""


def _has_code(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> bool:
    """Return whether a module does anything when it is imported."""
    source = tar.extractfile(entry) if entry.isreg() and entry.name.endswith(".py") else None
    if source is None:
        return True
    try:
        body = ast.parse(source.read()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return not all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in body)


def _bring(tar: tarfile.TarFile, entry: tarfile.TarInfo, path: str, rules: Rules) -> None:
    _clear(path, rules)
    if entry.issym():
        os.symlink(entry.linkname, path)
        return
    source = tar.extractfile(entry) if entry.isreg() else None
    if source is None:
        raise ValueError("neither a file nor a link")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        shutil.copyfileobj(source, file)
        os.fchmod(fd, 0o644 | (entry.mode & 0o111))


def _place(path: str) -> str:
    """Return the path when its directories are no links, and are there."""
    parts = path.split("/")
    for depth in range(1, len(parts)):
        parent = "/".join(parts[:depth])
        if not os.path.lexists(parent):
            os.mkdir(parent, 0o755)
        elif os.path.islink(parent) or not os.path.isdir(parent):
            os.unlink(parent)
            os.mkdir(parent, 0o755)
    return path


def _clear(path: str, rules: Rules) -> None:
    """Make room for a file or link; raises ValueError if there is a directory with files that must stay."""
    if not os.path.isdir(path) or os.path.islink(path):
        if os.path.lexists(path):
            os.unlink(path)
        return
    for directory, _, files in os.walk(path):
        if any(rules.stays_behind(os.path.normpath(os.path.join(directory, name))) for name in files):
            raise ValueError("a directory with files that stay")
    shutil.rmtree(path)


def main() -> None:
    mode, given = sys.argv[1], sys.stdin.buffer.read()
    if mode == "list":
        answer = json.dumps({"known": known_files(), "python": sys.executable, "kept": kept_places()}).encode()
    elif mode == "collect":
        answer = collect(json.loads(given))
    else:
        answer = json.dumps(apply(given)).encode()
    sys.stdout.buffer.write(answer)


if __name__ == "__main__":
    main()
