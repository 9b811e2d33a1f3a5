"""Handlers written beside a training script: what of their module is sent, so that it stands by itself elsewhere.

Sent are the handler and what it names of its module's top level, and what those name in turn: functions, classes,
assignments and imports, in the order in which they stand there. What the script does besides stays at home.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import symtable
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tangram.errors import InvalidInputError

#: The module that a handler becomes at the gateway, and the attribute that the decorator leaves.
MODULE, MARK = "registered", "__tangram_function__"
#: Names that every module has.
_OF_MODULES = frozenset({"__name__", "__file__", "__doc__", "__spec__", "__package__", "__builtins__"})
_BUILTINS = frozenset(vars(builtins)) | _OF_MODULES
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class CapturedHandler(NamedTuple):
    """A handler as it is sent."""

    #: ``module:callable``, as a function's ``handler`` names it.
    place: str
    #: Path -> text.
    sources: Mapping[str, str]


def handler(**definition: Any) -> Callable[[_Handler], _Handler]:
    """Mark a Python function as a handler, with the keys that its YAML would have, for `Client.register`.

    ``@handler(cost={"cpu": 1}, timeout="30s")``. The function itself stays as it is, and may be called.
    """

    def mark(function: _Handler) -> _Handler:
        setattr(function, MARK, definition)
        return function

    return mark


def definition_of(function: Callable[..., Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the function's decorator, and those that are given in their place."""
    return {**getattr(function, MARK, {}), **fields}


def captured(function: Callable[..., Any]) -> CapturedHandler:
    """Return the handler with what it needs of its module. Raises InvalidInputError, naming what cannot be sent."""
    name = getattr(function, "__name__", repr(function))
    if not inspect.isfunction(function) or name == "<lambda>" or "." in function.__qualname__:
        raise _refused(name, "it must be a function at the top level of a module: no method, lambda or inner function")
    file = inspect.getsourcefile(function)
    module = sys.modules.get(function.__module__)
    try:
        if file is None or module is None:
            raise OSError
        source = inspect.getsource(module)
        statements = ast.parse(source).body
    except (OSError, TypeError, SyntaxError):
        raise _refused(
            name, "the source of its module is not there (an interactive session?): write it into a file"
        ) from None
    return CapturedHandler(f"{MODULE}:{name}", {f"{MODULE}.py": _excerpt(name, source, statements, Path(file))})


def _excerpt(name: str, source: str, statements: Sequence[ast.stmt], file: Path) -> str:
    """Return the statements that the handler needs, as text."""
    lines = source.splitlines()
    binding: dict[str, list[int]] = {}
    for at, statement in enumerate(statements):
        for bound in _bound(statement):
            binding.setdefault(bound, []).append(at)
    chosen = {
        at for at, each in enumerate(statements) if isinstance(each, ast.ImportFrom) and each.module == "__future__"
    }
    wanted, known = [name], {name}
    while wanted:
        needed = wanted.pop()
        if needed not in binding:
            for each in statements:
                _check_stars(name, each, file)
            raise _refused(name, f"it needs {needed!r}, which nothing at the top level of {file} defines")
        for at in binding[needed]:
            if at in chosen:
                continue
            chosen.add(at)
            _check_import(name, statements[at], file)
            more = _used(_text(statements[at], lines)) - _BUILTINS - known
            known |= more
            wanted += sorted(more)
    parts = [_text(statements[at], lines) for at in sorted(chosen)]
    return (
        f"# Registered from {file.name} by tangram: {name}, and what it needs of its module.\n"
        + "\n".join(parts)
        + "\n"
    )


def _text(statement: ast.stmt, lines: Sequence[str]) -> str:
    """Return a statement as it is written, without the decorator that registered it."""
    assert statement.end_lineno is not None
    kept: list[str] = []
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        kept = [f"@{ast.unparse(each)}" for each in statement.decorator_list if not _is_mark(each)]
    return "\n".join([*kept, *lines[statement.lineno - 1 : statement.end_lineno]])


def _is_mark(decorator: ast.expr) -> bool:
    """Return whether this is ``@handler(...)`` or ``@tangram.handler(...)``."""
    if not isinstance(decorator, ast.Call):
        return False
    called = decorator.func
    if isinstance(called, ast.Attribute):
        return called.attr == "handler" and isinstance(called.value, ast.Name) and called.value.id == "tangram"
    return isinstance(called, ast.Name) and called.id == "handler"


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of the top level defines; nothing of ``if __name__ == "__main__"``."""
    if isinstance(statement, ast.If) and "__name__" in {
        each.id for each in ast.walk(statement.test) if isinstance(each, ast.Name)
    }:
        return
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for table in [symtable.symtable(ast.unparse(statement), "module", "exec")]:
        yield from (each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported())


def _used(text: str) -> set[str]:
    """Return the names of its module that a statement uses, inner functions included."""
    top = symtable.symtable(text, "module", "exec")
    names = {each.get_name() for each in top.get_symbols() if each.is_referenced()}
    tables = list(top.get_children())
    while tables:
        table = tables.pop()
        names |= {each.get_name() for each in table.get_symbols() if each.is_global() and each.is_referenced()}
        tables += table.get_children()
    return {each for each in names if not each.startswith(".")}


def _check_import(name: str, statement: ast.stmt, file: Path) -> None:
    """Refuse modules that are files of the user's own: they are not where the handler will run."""
    for each in ast.walk(statement):
        if not isinstance(each, ast.Import | ast.ImportFrom):
            continue
        where = f"line {each.lineno} of {file}"
        if isinstance(each, ast.ImportFrom) and each.level:
            raise _refused(name, f"{where} imports a module of its own package")
        modules = [each.module or ""] if isinstance(each, ast.ImportFrom) else [alias.name for alias in each.names]
        for module in modules:
            if _is_own(module.partition(".")[0]):
                raise _refused(name, f"{where} imports {module}, a file of yours beside it")


def _check_stars(name: str, statement: ast.stmt, file: Path) -> None:
    if isinstance(statement, ast.ImportFrom) and any(alias.name == "*" for alias in statement.names):
        raise _refused(name, f"line {statement.lineno} of {file} imports *, so what it needs cannot be told")


def _is_own(module: str) -> bool:
    """Return whether a module is neither of Python nor installed."""
    if module in sys.builtin_module_names or module in sys.stdlib_module_names:
        return False
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return spec is not None and not _installed(next(iter(spec.submodule_search_locations or ()), ""))
    return not _installed(spec.origin)


def _installed(place: str) -> bool:
    paths = [sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib")]
    parts = Path(place).parts
    return any(place.startswith(path) for path in paths) or "site-packages" in parts or "dist-packages" in parts


def _refused(name: str, why: str) -> InvalidInputError:
    remedy = "make it stand by itself, or serve it from files (a directory with function.yaml and its modules)"
    return InvalidInputError(f"{name} cannot be sent: {why}; {remedy}")
