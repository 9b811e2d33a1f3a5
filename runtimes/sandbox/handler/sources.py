"""A handler's source on disk, looked at and never run."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

from manager.errors import exhaustion

COMPONENT = "handler"
#: Bounds of what a handler's digest covers; beyond them the function is refused.
SOURCES_MAX = 2000
SOURCES_LIMIT_BYTES = 64 * 2**20


def handler_problem(directory: Path, module: str, callable_name: str) -> str | None:
    """What is wrong with a handler, or None: its file exists, parses, and names the callable at its top level."""
    file = source_of(directory, module)
    if file is None:
        return f"no {module.replace('.', '/')}.py in {directory}: the handler's module stands beside its YAML file"
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        return f"{file}:{line} is not Python: {getattr(error, 'msg', None) or error}"
    except OSError as error:
        if short := exhaustion(error, COMPONENT):
            raise short from None
        return f"{file} cannot be read: {error.strerror}"
    names = set(_top_level_names(tree.body))
    if callable_name in names or "*" in names:
        return None
    functions = sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return f"{file} has no {callable_name!r}" + (f"; it defines {', '.join(functions)}" if functions else "")


def source_of(directory: Path, module: str) -> Path | None:
    """The file of a module under ``directory``: ``a/b.py`` or ``a/b/__init__.py``."""
    base = directory.joinpath(*module.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


def sources_digest(directory: Path) -> str:
    """A digest of every Python file under ``directory``; raises ValueError beyond the bounds."""
    digest = hashlib.sha256()
    total_bytes = 0
    for count, file in enumerate(sorted(_python_files(directory))):
        data = file.read_bytes()
        total_bytes += len(data)
        if count >= SOURCES_MAX or total_bytes > SOURCES_LIMIT_BYTES:
            raise ValueError(f"{directory} holds too much Python for a handler: give it a directory of its own")
        digest.update(f"{file.relative_to(directory)}\0{len(data)}\0".encode("utf-8", "surrogateescape"))
        digest.update(data)
    return digest.hexdigest()


def _python_files(directory: Path) -> Iterator[Path]:
    for file in directory.rglob("*.py"):
        inside = file.relative_to(directory).parts
        if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in inside):
            yield file


def _top_level_names(body: list[ast.stmt]) -> Iterator[str]:
    """Names bound by a module's top level, conditional branches included; ``*`` for a star import."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)
            case ast.If() | ast.Try():
                yield from _top_level_names([*node.body, *node.orelse])
                if isinstance(node, ast.Try):
                    yield from _top_level_names([*node.finalbody, *(each for h in node.handlers for each in h.body)])
            case _:
                continue
