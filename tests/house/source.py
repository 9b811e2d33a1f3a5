"""The project's own source as data: modules, their imports and their functions, read without running anything."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("manager", "runtimes", "gateway", "tangram", "bench", "scripts", "tests", "functions")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module (dotted), where, and whether only the type checker sees it."""

    module: str
    line: int


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Path from the root, as in messages."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def package(self) -> str:
        return self.path.relative_to(ROOT).parts[0]

    @property
    def module(self) -> str:
        """Dotted, as an import names it."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """The folder, dotted."""
        return ".".join(self.path.relative_to(ROOT).parent.parts)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    def imports(self) -> tuple[Import, ...]:
        """Every import, wherever it stands; ``from a import b`` gives both ``a`` and ``a.b``."""
        return _contents(self)[0]

    def functions(self) -> tuple[Function, ...]:
        return _contents(self)[1]


@cache
def _contents(source: Source) -> tuple[tuple[Import, ...], tuple[Function, ...]]:
    """Every import and function of a file: its tree is walked once, however many tests ask."""
    imports: list[Import] = []
    functions: list[Function] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            imports += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            imports.append(Import(node.module, node.lineno))
            imports += [Import(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append(node)
    return tuple(imports), tuple(functions)


@cache
def sources() -> tuple[Source, ...]:
    """Every Python file of the house, generated code left out."""
    found = []
    gc.collect()
    gc.disable()  # CPython 3.11 loses count of its recursion when a finalizer runs inside ast.parse
    try:
        for path, text in texts():
            found.append(Source(path, text, ast.parse(text, filename=str(path))))
    finally:
        gc.enable()
    gc.freeze()  # millions of nodes, which every later full collection of this process would look through
    return tuple(found)


def texts() -> Iterator[tuple[Path, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "generated" in path.parts or "__pycache__" in path.parts:
                continue
            yield path, path.read_text(encoding="utf-8")


def within(module: str, package: str) -> bool:
    """Whether a dotted module is a package or lies in it."""
    return module == package or module.startswith(package + ".")
