"""Which files make a configuration: one rule for the server and for whoever sends it files."""

from __future__ import annotations

from pathlib import Path

PATTERNS = ("tangram.yaml", "function.yaml", "*/function.yaml", "functions/*/function.yaml")


def files_of(path: Path) -> list[Path]:
    """Return a file as itself, of a directory its tangram.yaml and the function.yaml of it and of what is in it."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    return [file for pattern in PATTERNS for file in sorted(path.glob(pattern)) if file.is_file()]


def nothing_there(path: Path) -> str:
    """Return what is wrong with a path of which there are no files."""
    return "no tangram.yaml and no function.yaml in this directory" if path.is_dir() else "no such file"
