"""SWE-bench-style tasks as files: unpack a task's source, and apply its patches, without git.

A task is {"instance_id", "pypi_sdist": "name==version", "test_patch", "patch", "FAIL_TO_PASS", "PASS_TO_PASS",
"pythonpath", ...}; its sdist comes from the package registry that pip is configured for.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
#: Lines by which a hunk may lie elsewhere than it says.
_OFFSET_LINES = 200
#: Lines of context that need not fit at each end of a hunk, as with patch(1).
_FUZZ_LINES = 2


class PatchError(ValueError):
    """The patch does not fit the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """One change: at which line, and its lines, each with its mark (space, minus or plus)."""

    start: int
    lines: tuple[tuple[str, str], ...]

    @property
    def old(self) -> list[str]:
        return [text for mark, text in self.lines if mark != "+"]

    @property
    def new(self) -> list[str]:
        return [text for mark, text in self.lines if mark != "-"]

    def trimmed(self, fuzz: int) -> Hunk:
        """Without up to ``fuzz`` lines of context at each end."""
        lines = list(self.lines)
        first = next((n for n, (mark, _) in enumerate(lines[:fuzz]) if mark != " "), min(fuzz, len(lines)))
        last = next((n for n, (mark, _) in enumerate(lines[::-1][:fuzz]) if mark != " "), min(fuzz, len(lines)))
        return Hunk(start=self.start + first, lines=tuple(lines[first : len(lines) - last]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a patch does to one file; no old path for a new file, no new path for a removed one."""

    old_path: str | None
    new_path: str | None
    hunks: tuple[Hunk, ...]


def load_task(path: Path) -> dict[str, Any]:
    task: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return task


def prepare(task: Mapping[str, Any], directory: Path, *, cache: Path | None = None) -> Path:
    """Download and unpack the task's sdist and apply its ``test_patch``; returns the project's root.

    Sdists are kept in ``cache``, where it is given, and not downloaded again.
    """
    sdist = download(str(task["pypi_sdist"]), directory / "sdist" if cache is None else cache)
    root = unpack(sdist, directory / "source")
    apply_patch(root, str(task["test_patch"]))
    return root


def download(requirement: str, directory: Path) -> Path:
    """The sdist of ``name==version`` in ``directory``, fetched by pip; RuntimeError with pip's words when it cannot."""
    directory.mkdir(parents=True, exist_ok=True)
    name, _, version = requirement.partition("==")
    pattern = f"{re.sub('[-_.]', '[-_.]', name)}-{version}.tar.gz"
    if kept := sorted(directory.glob(pattern)):
        return kept[0]
    options = ["--no-deps", "--no-binary", ":all:", "--quiet", "--dest", str(directory)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, requirement], capture_output=True, text=True, check=False
    )
    found = sorted(directory.glob(pattern))
    if not found:
        raise RuntimeError(f"pip could not download {requirement}: {done.stderr.strip()[-2000:]}")
    return found[0]


def install_dependencies(task: Mapping[str, Any], directory: Path) -> None:
    """Install what the task's tests import (``deps``) into ``directory``, to be put on PYTHONPATH."""
    wanted = [str(name) for name in task.get("deps", [])]
    if wanted:
        options = ["--quiet", "--no-compile", "--target", str(directory)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wanted], check=True)


def unpack(sdist: Path, directory: Path) -> Path:
    """Unpack into ``directory``; returns the one folder that an sdist holds."""
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    [root] = [path for path in directory.iterdir() if path.is_dir()]
    return root


def files_of(root: Path) -> Iterator[tuple[str, bytes]]:
    """(relative path, content) of every file beneath ``root``, sorted."""
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path.relative_to(root).as_posix(), path.read_bytes()


def apply_patch(root: Path, patch: str) -> list[str]:
    """Apply a unified diff to the files beneath ``root``; returns the paths changed.

    All of it or nothing: PatchError, before anything is written, when a hunk does not fit.
    """
    results: dict[str, str | None] = {}
    for change in parse_patch(patch):
        before = "" if change.old_path is None else (_inside(root, change.old_path)).read_text(encoding="utf-8")
        if change.old_path is not None and change.new_path != change.old_path:
            results[change.old_path] = None
        if change.new_path is not None:
            results[change.new_path] = patched(before, change)
    for name, text in results.items():
        path = _inside(root, name)
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return list(results)


def parse_patch(patch: str) -> list[Change]:
    """The files and hunks of a unified diff, as git writes it; PatchError for binary patches and torn hunks."""
    changes: list[Change] = []
    lines = patch.split("\n")
    at = 0
    while at < len(lines):
        if lines[at].startswith("GIT binary patch"):
            raise PatchError("a binary patch")
        if lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            old_path, new_path = _path(lines[at]), _path(lines[at + 1])
            hunks, at = _hunks(lines, at + 2)
            changes.append(Change(old_path=old_path, new_path=new_path, hunks=hunks))
        else:
            at += 1
    return changes


def patched(before: str, change: Change) -> str:
    """The file's text after the change's hunks; PatchError when one of them does not fit."""
    lines = before.split("\n")
    offset = 0
    for hunk in change.hunks:
        fitting = hunk
        at = None
        for fuzz in range(_FUZZ_LINES + 1):
            fitting = hunk.trimmed(fuzz)
            # A hunk without old lines names the line behind which it goes.
            at = _find(lines, fitting.old, max(0, fitting.start - bool(fitting.old) + offset))
            if at is not None:
                break
        if at is None:
            raise PatchError(f"{change.new_path}: the hunk at line {hunk.start} does not fit")
        lines[at : at + len(fitting.old)] = fitting.new
        offset = at + len(fitting.new) - len(fitting.old) - (fitting.start - 1)
    text = "\n".join(lines)
    return text if change.old_path is not None or text.endswith("\n") else text + "\n"


def _hunks(lines: list[str], at: int) -> tuple[tuple[Hunk, ...], int]:
    hunks: list[Hunk] = []
    while at < len(lines) and (head := _HUNK.match(lines[at])) is not None:
        old_left, new_left = int(head[2] or 1), int(head[4] or 1)
        taken: list[tuple[str, str]] = []
        at += 1
        while old_left > 0 or new_left > 0:
            # An editor may have stripped the space of an empty line of context.
            mark, text = (lines[at][:1] or " ", lines[at][1:]) if at < len(lines) else ("", "")
            if mark not in (" ", "-", "+"):
                raise PatchError(f"a hunk ends early at line {at + 1} of the patch")
            taken.append((mark, text))
            old_left -= mark != "+"
            new_left -= mark != "-"
            at += 1
        at += at < len(lines) and lines[at].startswith("\\")  # no newline at the end of the file
        hunks.append(Hunk(start=int(head[1]), lines=tuple(taken)))
    return tuple(hunks), at


def _find(lines: list[str], old: list[str], expected: int) -> int | None:
    """Where the old lines are, nearest to where they should be."""
    if not old:
        return min(expected, len(lines))
    for distance in range(_OFFSET_LINES + 1):
        for at in (expected + distance, expected - distance):
            if at >= 0 and lines[at : at + len(old)] == old:
                return at
    return None


def _path(line: str) -> str | None:
    name = line[4:].split("\t")[0].strip()
    return None if name == "/dev/null" else re.sub(r"^[ab]/", "", name)


def _inside(root: Path, name: str) -> Path:
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise PatchError(f"{name!r} leaves the project")
    return path
