"""SWE-bench-style tasks as files: unpack a task's source, and apply its patches.

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
from pathlib import Path
from typing import Any


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
    """Apply a diff that git wrote to the files beneath ``root``; returns the paths changed.

    One line of context must fit: an sdist is not quite the repository.
    """
    options: Any = {"input": patch, "cwd": root, "capture_output": True, "text": True, "check": True}
    changed = subprocess.run(["git", "apply", "--numstat"], **options).stdout
    subprocess.run(["git", "apply", "-C1"], **options)
    return [line.split("\t")[2] for line in changed.splitlines()]
