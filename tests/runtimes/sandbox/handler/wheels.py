"""Tiny wheels, made where a test wants them: no package index is asked."""

from __future__ import annotations

import zipfile
from pathlib import Path


def wheel(directory: Path, name: str, version: str, source: str, requires: tuple[str, ...] = ()) -> Path:
    """Write a wheel of one module of that name, and return its file."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    files = {
        f"{name}.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    files[record] = "".join(f"{each},,\n" for each in (*files, record))
    made = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    made.chmod(0o644)
    return made
