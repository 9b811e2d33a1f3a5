"""Mistakes of whoever asks for a reward, found in the request alone, before anything of the agent's runs.

Each of them would be a reward of 0.0 whatever the agent has done, told only in a note. What the agent's code can bring
about is never looked at here: that stays a reward of 0.0. Where a request may be right, it is: tests come out of
conftests, plugins and bases too, so that a name is missed only in a file that shows where all of its names come from.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

#: Options with which pytest runs no test.
_RUNS_NONE = frozenset(
    {
        *("--collect-only", "--collectonly", "--co", "--fixtures", "--funcargs", "--fixtures-per-test", "--markers"),
        *("--setup-plan", "--setupplan", "--setup-only", "--setuponly", "--cache-show", "--help", "--version"),
        "--trace",  # which asks what there is nobody to answer
    }
)
#: Options with which the first failures end the suite, and short ones without a value of which -x is one.
_ENDS_EARLY = frozenset({"--exitfirst", "--maxfail", "--sw", "--stepwise", "--sw-skip", "--stepwise-skip"})
_NO_LIMIT = ["--maxfail", "0"]
_EXIT_FIRST = re.compile(r"-[vqslx]*x[vqslx]*")
#: With which pytest goes on after a file that it cannot collect.
_GOES_ON = "--continue-on-collection-errors"
#: Short options without a value, of which -h and -V end pytest before its tests.
_SHORT = re.compile(r"-[vqxslhV]*[hV][vqxslhV]*")
#: Names by which a module may make others.
_MAKERS = frozenset(
    {"globals", "locals", "vars", "exec", "eval", "setattr", "type", "__dict__", "modules", "__getattr__"}
)
#: Bases that bring no tests along.
_PLAIN_BASES = frozenset({"object", "TestCase", "IsolatedAsyncioTestCase"})
#: Words of a conftest that makes or renames tests.
_COLLECTS = re.compile(r"pytest_collect|pytest_pycollect|pytest_itemcollected|_nodeid|pytest_plugins")


def added_options(env: Mapping[str, str]) -> Sequence[str]:
    """Return the options that the environment has for pytest."""
    return _split(env.get("PYTEST_ADDOPTS", ""))


def option_at_fault(args: Sequence[str]) -> str:
    """Return what keeps pytest from running any test, empty if nothing does."""
    words = list(args)
    for value in _values(words, ("-o", "--override-ini")):
        words += _split(value.partition("=")[2]) if value.startswith("addopts=") else []
    return next((word for word in words if word.partition("=")[0] in _RUNS_NONE or _SHORT.fullmatch(word)), "")


def ends_early(args: Iterable[str]) -> bool:
    """Return whether the caller's own options end the suite at its first failures; ``--maxfail=0`` has no limit."""
    words = list(args)
    return any(
        _EXIT_FIRST.fullmatch(word)
        or (word.partition("=")[0] in _ENDS_EARLY and not (word == "--maxfail=0" or words[at : at + 2] == _NO_LIMIT))
        for at, word in enumerate(words)
    )


def goes_on(args: Iterable[str]) -> bool:
    """Return whether the caller's own options have a file that cannot be collected count as one test."""
    return _GOES_ON in args


def left_out(args: Sequence[str], ids: Iterable[str]) -> tuple[str, str]:
    """Return the first listed test that the caller's own options leave out, and by which; empty if none is."""
    dropped = [("--deselect", value) for value in _values(args, ("--deselect",))]
    ignored = [("--ignore", posixpath.normpath(value)) for value in _values(args, ("--ignore",))]
    for id in ids:
        path = posixpath.normpath(id.partition("::")[0])
        for option, value in dropped:
            if id.startswith(value):
                return id, f"{option} {value}"
        for option, value in ignored:
            if path == value or path.startswith(value + "/"):
                return id, f"{option} {value}"
    return "", ""


def undefined(ids: Iterable[str], tests: Mapping[str, str]) -> str:
    """Return the first id of a test that its file, which is given with the request, cannot have; empty if none is."""
    if any(posixpath.basename(path) == "conftest.py" and _COLLECTS.search(text) for path, text in tests.items()):
        return ""
    given = {posixpath.normpath(path): text for path, text in tests.items()}
    modules: dict[str, _Names | None] = {}
    for id in ids:
        path, _, name = id.partition("::")
        path = posixpath.normpath(path)
        if not name or path not in given or not path.endswith(".py"):
            continue
        if path not in modules:
            modules[path] = _names_of(given[path])
        names = modules[path]
        if names is not None and not names.may_have(name.partition("[")[0].split("::")):
            return id
    return ""


def testless(paths: Iterable[str], tests: Mapping[str, str]) -> bool:
    """Return whether none of these given files can have a test: nothing in them is called one, or made elsewhere."""
    if any(posixpath.basename(path) == "conftest.py" and _COLLECTS.search(text) for path, text in tests.items()):
        return False
    found = [_names_of(tests[path]) for path in paths]
    return bool(found) and all(names is not None and names.has_none for names in found)


def no_python(text: str) -> str:
    """Return why a file cannot be read as Python, with its line; empty if it can.

    Another Python may have grammar that this one has not: ask it as well.
    """
    try:
        ast.parse(text)
    except SyntaxError as error:
        return f"{error.msg}, line {error.lineno}"
    except (ValueError, RecursionError, MemoryError) as error:
        return str(error)
    return ""


class _Names:
    """What a module of tests defines, of which every name can be seen."""

    def __init__(self, tree: ast.Module) -> None:
        self._names: set[str] = set()
        #: Names that a decorator may lengthen, as that of `parameterized` does.
        self._decorated: set[str] = set()
        #: Whether a class may have what it does not show.
        self._inherits = False
        for node in ast.walk(tree):
            self._see(node)

    @property
    def has_none(self) -> bool:
        return not any(_is_test(name) for name in self._names)

    def may_have(self, parts: Sequence[str]) -> bool:
        """Return whether there may be such a test: what is no name of a test is a plugin's."""
        if not all(part.isidentifier() and (_is_test(part) or part in self._names) for part in parts):
            return True
        return all(
            part in self._names
            or (self._inherits and level > 0)
            or any(part.startswith(name) for name in self._decorated)
            for level, part in enumerate(parts)
        )

    def _see(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._names.add(node.name)
                if node.decorator_list:
                    self._decorated.add(node.name)
            case ast.ClassDef():
                self._names.add(node.name)
                plain = all(_last_name(base) in _PLAIN_BASES for base in node.bases)
                self._inherits |= bool(not plain or node.keywords or node.decorator_list)
            case ast.Name(ctx=ast.Store()):
                self._names.add(node.id)
                self._inherits |= _is_test(node.id)  # it may be a class
            case ast.alias():
                bound = node.asname or node.name.partition(".")[0]
                self._names.add(bound)
                self._inherits |= _is_test(bound) and bound not in _PLAIN_BASES


def _names_of(text: str) -> _Names | None:
    """Return the names of a module; None if they cannot all be seen (another Python's grammar may read it, too)."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.alias) and node.name == "*":
            return None
        if isinstance(node, ast.Name | ast.Attribute) and _last_name(node) in _MAKERS:
            return None
    called = any(isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) for node in tree.body)
    return None if called else _Names(tree)  # a call may make tests: `pytest_bdd.scenarios` does


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_test(name: str) -> bool:
    return "test" in name.lower().replace("pytest", "").replace("unittest", "")


def _split(words: str) -> list[str]:
    try:
        return shlex.split(words)
    except ValueError:
        return []  # pytest says so itself


def _values(args: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    """Yield what is given to one of the options, behind it or in the next word."""
    for at, word in enumerate(args):
        name, is_joined, value = word.partition("=")
        if name not in options and word[:2] in options and not word.startswith("--"):
            yield word[2:]
        elif name in options and is_joined:
            yield value
        elif word in options and at + 1 < len(args):
            yield args[at + 1]
