"""What the source of a test says of skips and expected failures: beside `ends`. Standard library, Python 3.7 on.

Code that is tested can change what a name of a test means, but not what the test says: where a test is ended by a skip,
its own statement must have asked for one, by a name that does not come from the project.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

#: What a statement says that skips, or expects a failure.
_WORD = re.compile(r"skip|xfail", re.IGNORECASE)
#: What a decorator says that has a test skipped, or its failure expected.
_MARK = re.compile(r"skip|xfail|expectedfailure", re.IGNORECASE)
_HOSTS = ("self", "cls", "super")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
_compile = compile

#: Says whether a module (the name, the dots before it, a name taken from it) is the project's and no test's.
IsProjects = Callable[[str, int, str], bool]


class SourceText:
    """One file's source: a test's, or that of a library, of which nothing is the project's."""

    def __init__(self, source: bytes, is_projects: IsProjects = lambda module, level, name: False) -> None:
        """Raises SyntaxError, ValueError or RecursionError for what is no Python."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._tree: Any = _compile(source, "<source>", "exec", ast.PyCF_ONLY_AST)
        nodes = list(ast.walk(self._tree))
        self._statements: list[Any] = [node for node in nodes if isinstance(node, ast.stmt)]
        #: Name -> the module and the name in it that it is imported from, which is empty for the module itself.
        self.imports: dict[str, tuple[str, str]] = {}
        #: Names that the file gives a meaning, as a module's or a class's.
        self.bound: set[str] = set()
        #: Whether something else may have given a meaning to any: a star import, ``globals``.
        self.starred = False
        self._parameters: set[str] = set()
        self._theirs: set[str] = set()
        self._aliases: set[str] = set()
        self._defined = {node.name for node in self._statements if isinstance(node, DEFINITIONS)} | {"pytestmark"}
        for node in nodes:
            self._bind(node, is_projects)
        self._spread()

    def says(self, line: int, *, raised_here: bool) -> bool:
        """Return whether the statement skips: raises what a skip is called, or calls it if it is not raised here."""
        for statement in self._at(line):
            if isinstance(statement, ast.Raise) and statement.exc is not None and self._means(statement.exc):
                return True
            if not raised_here and any(self._means(call.func) for call in _calls(statement)):
                return True
        return False

    def calls_others(self, line: int) -> bool:
        """Return whether the statement calls something, and nothing of the project."""
        theirs = self._called(line)
        return bool(theirs) and not any(theirs)

    def calls_only_the_projects(self, line: int) -> bool:
        theirs = self._called(line)
        return bool(theirs) and all(theirs)

    def _called(self, line: int) -> list[bool]:
        """Return of each call of the statement whether it is the project's."""
        return [(chain(call.func) or [""])[0] in self._theirs for each in self._at(line) for call in _calls(each)]

    def decorated(self, path: Iterable[str]) -> bool:
        """Return whether somebody else's function may lie around a test, given by the names of classes and its own."""
        found = self._definitions(path)
        return not found or any(
            not is_plain(decorator)
            for node in found
            for decorator in (*node.decorator_list, *getattr(node, "bases", ()))
        )

    def marks(self, path: Iterable[str]) -> bool:
        """Return whether the file has such a test skipped, or its failure expected, by a decorator or a mark."""
        found = self._definitions(path)
        if not found or self.starred:
            return True
        for node in found:
            for each in (*node.decorator_list, *getattr(node, "bases", ())):
                if not is_plain(each) or self._marking(each):
                    return True
            if getattr(node, "keywords", ()):
                return True
        return any(self._marking(each) or self._by_others(each) for each in self._changes())

    def _by_others(self, statement: Any) -> bool:
        """Return whether a mark, or what is defined, is given a meaning by a name that says nothing of it."""
        values = list(_given(statement)) if self._defined & set(_stored(statement)) else []
        names = [each.id for value in values for each in ast.walk(value) if isinstance(each, ast.Name)]
        return any(name not in ("pytest", "unittest") for name in names)

    def _marking(self, expression: Any) -> bool:
        names = [each.id for each in ast.walk(expression) if isinstance(each, ast.Name)]
        return any(_MARK.search(name) for name in _names(expression)) or not self._aliases.isdisjoint(names)

    def _changes(self) -> Iterator[Any]:
        """Yield the statements of the module and its classes that may change what is defined, or mark all of it."""
        bodies = [self._tree.body, *(node.body for node in self._statements if isinstance(node, ast.ClassDef))]
        for statement in (statement for body in bodies for statement in body):
            if isinstance(statement, (*DEFINITIONS, ast.Import, ast.ImportFrom)):
                continue
            stored = set(_stored(statement))
            if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or not stored or stored & self._defined:
                yield statement

    def _definitions(self, path: Iterable[str]) -> list[Any]:
        """Return the classes and the function of a test, the last of each name; none if the file does not show all."""
        found: list[Any] = []
        body = self._tree.body
        for name in path:
            named = [node for node in _within(body) if isinstance(node, DEFINITIONS) and node.name == name]
            if not named:
                return []
            found.append(named[-1])
            body = named[-1].body
        return found

    def _at(self, line: int) -> list[Any]:
        """Return the statements that begin where the innermost around a line does."""
        begin = max((each.lineno for each in self._statements if each.lineno <= line), default=0)
        return [each for each in self._statements if each.lineno == begin]

    def _bind(self, node: ast.AST, is_projects: IsProjects) -> None:
        if isinstance(node, ast.Import):
            for each in node.names:
                name = each.asname or each.name.partition(".")[0]
                self.imports[name] = (each.name if each.asname else name), ""
                self._note(name, is_projects(each.name, 0, ""))
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                name, module = each.asname or each.name, node.module or ""
                self.starred |= name == "*"
                if not node.level:
                    self.imports[name] = module, each.name
                self._note(name, is_projects(module, node.level, each.name))
                if _WORD.search(each.name) and name not in self._theirs:
                    self._aliases.add(name)
        elif isinstance(node, DEFINITIONS):
            self.bound.add(node.name)
            self.imports.pop(node.name, None)
        elif isinstance(node, ast.arg):
            self._parameters.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)
            self.imports.pop(node.id, None)
        elif isinstance(node, ast.Name) and node.id in ("globals", "exec"):
            self.starred = True

    def _note(self, name: str, theirs: bool) -> None:
        self.bound.add(name)
        if theirs:
            self._theirs.add(name)

    def _spread(self) -> None:
        """Follow names through assignments: of what is the project's, and of what means a skip."""
        given = [(set(_stored(node)), value) for node in self._statements for value in _given(node)]
        known = -1
        while known != len(self._theirs) + len(self._aliases):
            known = len(self._theirs) + len(self._aliases)
            for names, value in given:
                if any(isinstance(each, ast.Name) and each.id in self._theirs for each in ast.walk(value)):
                    self._theirs |= names
                elif self._means(value):
                    self._aliases |= names

    def _means(self, expression: Any) -> bool:
        """Return whether an expression names a skip, by a name that is not the project's."""
        names = chain(expression)
        if not names or names[0] in self._theirs:
            return False
        if names[0] in _HOSTS:
            return len(names) == 2 and bool(_WORD.search(names[1]))
        if names[0] not in self.bound and names[0] in self._parameters:
            return names[-1] == "skipTest" or (len(names) == 1 and bool(_WORD.search(names[0])))
        if names[0] not in self.bound and "*" in self._theirs:
            return False
        return names[0] in self._aliases or any(_WORD.search(name) for name in names)


def chain(expression: Any) -> list[str]:
    """Return the names of ``a.b().c``, from the first on; none if it does not begin with a name."""
    names: list[str] = []
    while True:
        if isinstance(expression, ast.Attribute):
            names.insert(0, expression.attr)
            expression = expression.value
        elif isinstance(expression, ast.Call):
            expression = expression.func
        elif isinstance(expression, (ast.Subscript, ast.Await)):
            expression = expression.value
        else:
            return [expression.id, *names] if isinstance(expression, ast.Name) else []


def is_plain(decorator: Any) -> bool:
    """Return whether a decorator or a base is pytest's or unittest's own, and puts nothing of others in."""
    names = chain(decorator)
    return bool(names) and (names[0] in ("pytest", "unittest") or names[-1] in ("TestCase", "object"))


def _names(node: Any) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


def _calls(statement: Any) -> Iterator[Any]:
    """Yield the calls of a statement itself, and not of those within it."""
    waiting = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Call):
            yield node
        waiting += [each for each in ast.iter_child_nodes(node) if not isinstance(each, (ast.stmt, ast.excepthandler))]


def _within(body: Iterable[Any]) -> Iterator[Any]:
    """Yield the statements of a body, also those under a condition, but none of a function or class in it."""
    for node in body:
        yield node
        if not isinstance(node, DEFINITIONS):
            yield from _within(each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt))


def _given(node: Any) -> Iterator[Any]:
    """Yield the expressions from which a statement gives names their meaning."""
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        if node.value is not None:
            yield node.value
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        yield node.iter
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            yield item.context_expr
    elif isinstance(node, ast.ClassDef):
        yield from node.bases


def _stored(node: Any) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        yield node.name
        return
    targets = list(getattr(node, "targets", None) or [getattr(node, "target", None)])
    targets += [item.optional_vars for item in getattr(node, "items", ())]
    for target in targets:
        for each in ast.walk(target) if target is not None else ():
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                yield each.id
