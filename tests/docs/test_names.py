"""What documents and docstrings name of the code exists: files by path, and modules and their names by dots."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house.source import ROOT, sources

#: One process reads the whole tree, for all of them.
pytestmark = pytest.mark.xdist_group("sources")

ROOMS = ("gateway", "manager", "runtimes", "tangram", "bench", "scripts", "tests")
#: Pages that tell what was: they may name what is gone.
HISTORY = {"CHANGELOG.md"}
_PATH = re.compile(rf"(?<![\w./-])((?:{'|'.join(ROOMS)})/[\w./-]*\w)")
#: A package of protobuf and a file in somebody's directory begin like ours.
_DOTTED = re.compile(r"`((?:gateway|manager|runtimes|bench|tangram(?!\.v1|\.yaml|\.sqlite))(?:\.\w+)+)")


def documents() -> Iterator[tuple[str, str]]:
    """Every page and every module, by name."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        if page.name not in HISTORY:
            yield page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
    for source in sources():
        yield source.name, source.text


def test_every_path_that_a_page_names_is_there() -> None:
    pages = [(name, text) for name, text in documents() if name.endswith(".md")]
    gone = {f"{name}: {path}" for name, text in pages for path in _PATH.findall(text) if not _there(path)}
    assert not gone


def test_every_dotted_name_leads_somewhere() -> None:
    gone = {f"{name}: {dotted}" for name, text in documents() for dotted in _DOTTED.findall(text) if not _leads(dotted)}
    assert not gone


def _there(path: str) -> bool:
    """Return whether a file or folder of that path exists, with or without the ending of a module."""
    return any((ROOT / f"{path}{ending}").exists() for ending in ("", ".py", ".md"))


def _leads(dotted: str) -> bool:
    """Return whether the longest prefix that is a module or a folder defines what comes next."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:length])
        module = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
        rest = parts[length:]
        if module.is_file():
            return not rest or rest[0] in _names(module)
        if place.exists():
            return not rest
    return False


@cache
def _names(module: Path) -> frozenset[str]:
    """Everything that a module's text calls by a name of its own: definitions, assignments and imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found.update(alias.asname or alias.name for alias in node.names)
    return frozenset(found)
