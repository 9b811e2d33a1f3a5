"""Which marks a test has of its own source: beside `ends`. Standard library, Python 3.7 on.

Code that is tested can mark a test, its class, its module or pytest's own record of it while it is imported or called.
A test is skipped, or expected to fail, by what its file says, or a conftest or a plugin of the installation that marks.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

try:
    _texts: Any = importlib.import_module("tangram_texts")
except ImportError:  # no suite is run here
    _texts = importlib.import_module("runtimes.sandbox.pytest.texts")

chain: Callable[[Any], list[str]] = _texts.chain
is_plain: Callable[[Any], bool] = _texts.is_plain
FUNCTIONS, DEFINITIONS = _texts.FUNCTIONS, _texts.DEFINITIONS
#: Verdict -> the marks that bring it about, and other words for it.
MARKS = {"skip": ("skip", "skipif"), "xfail": ("xfail",)}
WORDS = {"skip": re.compile("skip", re.IGNORECASE), "xfail": re.compile("xfail|expectedfailure", re.IGNORECASE)}
#: What lies around a test and marks none, by the first name of a decorator.
_MARK_NONE = (
    *("mock", "patch", "functools", "contextlib", "staticmethod", "classmethod", "property"),
    *("given", "settings"),  # of hypothesis
)
#: Modules of which nothing in the parameters of a test has marks.
_VALUES = ("pytest", "unittest", "sys", "os", "math", "re", "numpy", "platform", "datetime", "decimal", "itertools")
_ADDERS = ("add_marker", "applymarker")
#: Plugins that mark only what is left alone.
_LEAVING = ("pytest_asyncio",)
_EMPTY = "got empty parameter set"


class MarkText(_texts.SourceText):  # type: ignore[misc]  # of whichever of the two
    """One file's source, and the marks that it gives."""

    def __init__(
        self, source: bytes, is_projects: Callable[[str, int, str], bool] = lambda module, level, name: False
    ) -> None:
        """Raises what SourceText raises."""
        super().__init__(source, is_projects)
        self._seen: dict[tuple[str, ...], tuple[bool, list[Any], list[Any]]] = {}

    @property
    def tree(self) -> Any:
        return self._tree

    def accounts_for(self, verdict: str, path: Iterable[str], marks: Iterable[Any]) -> bool:
        """Return whether the source gives a test these marks, or may bring the verdict about otherwise.

        ``path`` are the names of its classes and its own, ``marks`` those that it had in the end.
        """
        key = (verdict, *path)
        if key not in self._seen:
            self._seen[key] = self._marks_of(verdict, key[1:])
        is_open, shapes, around = self._seen[key]
        marks = [mark for mark in marks if mark.name in MARKS[verdict]]
        matching = all(
            any(_matches(mark, shape) for shape in shapes) or _is_for_no_parameter(mark, around) for mark in marks
        )
        return is_open or (bool(marks) and matching)

    def _marks_of(self, verdict: str, path: Iterable[str]) -> tuple[bool, list[Any], list[Any]]:
        """Return whether a test may have any mark; else the forms of those that it may, and what lies around it."""
        found = self._definitions(path)
        if not found:
            return "*" not in self._theirs, [], []  # it is a test of another file, if not of the project
        around = [each for node in found for each in (*node.decorator_list, *getattr(node, "bases", ()))]
        if any(self._is_anything(each) for each in around):
            return True, [], []
        relevant, are_seen = self._relevant(around)
        functions = [node for node in self._statements if isinstance(node, FUNCTIONS)]
        bodies = [node.body for node in functions if node is found[-1] or not node.name.startswith("test")]
        is_open = not are_seen or any(self._says_otherwise(each, verdict) for each in relevant)
        is_open = is_open or any(makes_marks(statement, verdict) for body in bodies for statement in body)
        return is_open, [shape for each in relevant for shape in _shapes(each, verdict)], around

    def is_left_alone(self, verdict: str, path: Iterable[str], when: str) -> bool:
        """Return whether pytest itself, or its plugin for asyncio, has nothing to run such a test with.

        A generator's is expected to fail, a coroutine's is skipped when it is called.
        """
        found = self._definitions(path)[-1:]
        if verdict == "xfail":
            return any(isinstance(node, (ast.Yield, ast.YieldFrom)) for each in found for node in _own_nodes(each))
        return when == "call" and any(isinstance(each, ast.AsyncFunctionDef) for each in found)

    def _is_anything(self, around: Any) -> bool:
        """Return whether a decorator or a base comes from another file, and may mark what it is of."""
        names = chain(around)
        own = bool(names) and (names[0] in _MARK_NONE or names[0] in self._own_names())
        return not own and not is_plain(around)

    def _relevant(self, around: Iterable[Any]) -> tuple[list[Any], bool]:
        """Return what may give marks to a test, and what that is made of; and whether all of it can be seen."""
        found, waiting = [*self._changes()], [*around]
        seen: set[str] = set()
        are_seen = True
        while waiting:
            each = waiting.pop()
            found.append(each)
            names = {node.id for node in ast.walk(each) if isinstance(node, ast.Name)} - seen
            seen |= names
            are_seen = are_seen and not any(self._is_others(name) for name in names)
            waiting += [other for name in names & self._own_names() for other in self._made_of(name)]
        return found, are_seen

    def _imported(self) -> set[str]:
        return {
            alias.asname or alias.name.partition(".")[0]
            for node in self._statements
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }

    def _own_names(self) -> set[str]:
        """Return the names that get their meaning in this file."""
        return {*self.bound} - self._imported()

    def _made_of(self, name: str) -> Iterator[Any]:
        """Yield what gives a name of the file its meaning, and what changes it where it is defined."""
        bodies = [self._tree.body, *(node.body for node in self._statements if isinstance(node, ast.ClassDef))]
        for statement in (statement for body in bodies for statement in body):
            if isinstance(statement, DEFINITIONS):
                if statement.name == name and not name.startswith("test"):
                    yield from (*statement.decorator_list, *statement.body, *getattr(statement, "bases", ()))
            elif any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement)):
                yield statement

    def _is_others(self, name: str) -> bool:
        """Return whether a name comes from a file that is not the project's, and may hold parameters with marks."""
        if name in self._theirs or name not in self._imported():
            return False
        module = self.imports.get(name, ("", ""))[0]
        return module.partition(".")[0] not in _VALUES and name not in _MARK_NONE

    def _says_otherwise(self, expression: Any, verdict: str) -> bool:
        """Return whether an expression says so by another word than that of a mark of pytest's."""
        marks = {id(node) for node in ast.walk(expression) if _mark_name(node)}
        for node in ast.walk(expression):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if name and id(node) not in marks and WORDS[verdict].search(name) and name not in self._own_names():
                return True
        return False


class MarkSources:
    """What gives marks beside the tests' own files: conftests, packages, and plugins of the installation."""

    def __init__(self, plugins: Iterable[Any]) -> None:
        """``plugins`` are those that there were before anything of the project."""
        self._plugins = {str(getattr(plugin, "__file__", None) or "") for plugin in plugins}
        self._beside: dict[str, Any] = {}
        self._known: dict[tuple[str, str], bool] = {}

    def read(self, tests: Iterable[str], *, conftests: bool, given: Iterable[str]) -> None:
        """Read what lies around tests and may mark them, as it is by now: of packages, what is given."""
        given = {os.path.realpath(each) for each in given}
        modules = [Path(os.path.realpath(test)) for test in tests if test.endswith(".py")]
        for parent in {parent for module in modules for parent in module.parents}:
            for name in ("conftest.py", "__init__.py"):
                file = str(parent / name)
                counts = conftests if name == "conftest.py" else not given
                if file not in self._beside and (counts or file in given):
                    self._beside[file] = _text_of(file)

    def make_marks(self, verdict: str, own: str) -> bool:
        """Return whether something beside a test's file makes such marks."""
        key = (verdict, str(Path(os.path.realpath(own)).parent))
        if key not in self._known:
            places = [str(parent) for parent in Path(os.path.realpath(own)).parents]
            texts = [text for file, text in self._beside.items() if str(Path(file).parent) in places]
            texts += [
                _text_of(file)
                for plugin in self._plugins
                if Path(plugin).parent.name not in _LEAVING
                for file in _files_of(plugin)
            ]
            self._known[key] = any(text is not None and makes_marks(text.tree, verdict) for text in texts)
        return self._known[key]


def makes_marks(tree: Any, verdict: str) -> bool:
    """Return whether code makes a mark, or adds one by its name."""
    for node in ast.walk(tree):
        if _mark_name(node) in MARKS[verdict]:
            return True
        adds = isinstance(node, ast.Call) and (chain(node.func) or [""])[-1] in _ADDERS
        if adds and any(_string(each) in MARKS[verdict] for each in getattr(node, "args", ())):
            return True
    return False


def _own_nodes(function: Any) -> Iterator[Any]:
    """Yield what is in a function, and in none within it."""
    waiting = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (*DEFINITIONS, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def _is_for_no_parameter(mark: Any, around: Iterable[Any]) -> bool:
    """Return whether it is pytest's own mark of a test of which there is no case."""
    reason = str(mark.kwargs.get("reason", ""))
    return reason.startswith(_EMPTY) and any("parametrize" in chain(each) for each in around)


def _mark_name(node: Any) -> str:
    """Return the name of ``mark.xfail`` or the like, empty for what is none."""
    is_mark = isinstance(node, ast.Attribute) and (chain(node.value) or [""])[-1] == "mark"
    return str(node.attr) if is_mark else ""


def _shapes(expression: Any, verdict: str) -> Iterator[Any]:
    """Yield the marks of an expression: the name, the call of it or None, and whether that is called again."""
    called = {id(node.func): node for node in ast.walk(expression) if isinstance(node, ast.Call)}
    for node in ast.walk(expression):
        if _mark_name(node) in MARKS[verdict]:
            call = called.get(id(node))
            yield _mark_name(node), call, id(call) in called


def _matches(mark: Any, shape: Any) -> bool:
    """Return whether a mark is what the source says, as far as it says it in constants."""
    name, call, called_again = shape
    if mark.name != name:
        return False
    args = [] if call is None else call.args
    words = {} if call is None else {word.arg: word.value for word in call.keywords}
    if called_again or None in words or any(isinstance(each, ast.Starred) for each in args):
        return True
    if len(args) == 1 and not words and not mark.args and isinstance(args[0], (ast.Name, ast.Attribute)):
        return not mark.kwargs  # it is called with what it marks
    if len(args) != len(mark.args) or set(words) != set(mark.kwargs):
        return False
    pairs = [*zip(args, mark.args), *((value, mark.kwargs[word]) for word, value in words.items())]  # noqa: B905  # 3.7
    return all(_may_be(node, value) for node, value in pairs)


def _may_be(node: Any, value: Any) -> bool:
    try:
        said = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return True
    return type(said) is type(value) and bool(said == value)


def _string(node: Any) -> str:
    value = getattr(node, "value", getattr(node, "s", None))
    return value if isinstance(value, str) else ""


def _files_of(plugin: str) -> list[str]:
    """Return the file of a plugin, and those beside it where it is part of a package."""
    folder = Path(plugin).parent
    return [str(each) for each in folder.glob("*.py")] if (folder / "__init__.py").is_file() else [plugin]


def _text_of(file: str) -> Any:
    """Return what a file says; None if there is none, or it is no Python."""
    try:
        return MarkText(Path(file).read_bytes()) if file.endswith(".py") else None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
