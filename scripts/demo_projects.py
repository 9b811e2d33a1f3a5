"""Two real projects for the demo: the tests of a release on the source of the release before, and the real fix.

Both releases come from the package index; nothing of them is shipped here. The task of a trajectory is then what it
is in SWE-bench: some tests fail, the fix makes them pass, and no other test may break.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A project with a bug in ``broken`` that ``fixed`` mends."""

    name: str
    broken: str
    fixed: str
    #: Top-level file or package that holds the source.
    source: str
    #: Tests that fail on the broken source and pass on the fixed one.
    fail_to_pass: tuple[str, ...]
    #: A command that an agent would type to find the spot.
    look: str


PROJECTS = (
    Project(
        name="parse",
        broken="1.20.1",
        fixed="1.20.2",
        source="parse.py",
        fail_to_pass=(
            "tests/test_parse.py::test_hyphen_inside_field_name",
            "tests/test_parse.py::test_hyphen_inside_field_name_collision_handling",
        ),
        look="grep -n '_group_to_name_map' parse.py | head -5",
    ),
    Project(
        name="sqlparse",
        broken="0.5.4",
        fixed="0.5.5",
        source="sqlparse",
        fail_to_pass=(
            "tests/test_split.py::test_split_begin_transaction",
            "tests/test_split.py::test_split_begin_transaction_formatted",
        ),
        look="grep -n 'BEGIN' sqlparse/engine/statement_splitter.py | head -5",
    ),
)


def checkout(project: Project, cache: Path) -> bytes:
    """A gzipped tar of the broken project: the fixed release with the broken release's source."""
    members = dict(entries(sdist(project, project.fixed, cache)))
    kept = {name: data for name, data in members.items() if not in_source(name, project)}
    old = {name: data for name, data in entries(sdist(project, project.broken, cache)) if in_source(name, project)}
    return pack(kept | old)


def fix(project: Project, cache: Path) -> bytes:
    """A gzipped tar of the fixed release's source alone."""
    return pack(
        {name: data for name, data in entries(sdist(project, project.fixed, cache)) if in_source(name, project)}
    )


def in_source(name: str, project: Project) -> bool:
    return name == project.source or name.startswith(project.source + "/")


def sdist(project: Project, version: str, cache: Path) -> Path:
    """The release's source archive, downloaded once."""
    archive = cache / f"{project.name}-{version}.tar.gz"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        wanted = ["--no-deps", "--no-binary", ":all:", "--dest", str(cache), f"{project.name}=={version}"]
        subprocess.run(
            [*pip, "download", *wanted],
            check=True,
            timeout=180,
            stderr=subprocess.DEVNULL,
        )
    return archive


def entries(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Regular files of an archive, named from the project's root."""
    with tarfile.open(archive) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None and "/" in member.name:
                yield member.name.split("/", 1)[1], content.read()


def pack(files: dict[str, bytes]) -> bytes:
    """A gzipped tar of the files, the same bytes for the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for name in sorted(files):
            info = tarfile.TarInfo(name)
            info.size = len(files[name])
            info.mode = 0o644
            tar.addfile(info, io.BytesIO(files[name]))
    return buffer.getvalue()
