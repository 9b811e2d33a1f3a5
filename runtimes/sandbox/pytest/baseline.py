"""What tests fail, skip and expect failures with, as it was before the project came: beside `plugin`. Python 3.7 on.

Code that is tested can put another class in the place of AssertionError, or another function in that of `pytest.fail`.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import types
import unittest
from collections.abc import Iterator, Mapping
from typing import Any

#: Modules of which none is to be another when a test ends.
MODULES = (
    *("builtins", "pytest", "unittest", "unittest.case"),
    *("_pytest.outcomes", "_pytest.runner", "_pytest.skipping", "_pytest.unittest", "_pytest.python"),
)
#: What ends a test, in pytest's words; its modules take them from each other.
OUTCOMES = ("OutcomeException", "Skipped", "Failed", "XFailed", "Exit", "skip", "fail", "xfail", "exit", "importorskip")
#: What a class of unittest's says of its tests.
CLASS_WORDS = ("failureException", "__unittest_skip__", "__unittest_expecting_failure__")


class Baseline:
    """Names and what they meant when this was made."""

    def __init__(self) -> None:
        self._builtins = vars(builtins)
        self._pytest: Any = sys.modules["pytest"]
        self._mark = self._pytest.mark
        self._meant = [(label, scope, name, scope.get(name)) for label, scope, name in _watched()]

    def altered(self) -> list[str]:
        """Return the names that no longer mean what they meant."""
        found = [label for label, scope, name, value in self._meant if scope.get(name) is not value]
        # Marks are made as they are asked for, unless there is one by that name.
        return found + [f"pytest.mark.{name}" for name in vars(self._mark) if not name.startswith("_")]

    def is_found_by(self, item: Any) -> bool:
        """Return whether a test's module and its function find Python's own builtins, and pytest itself by its name."""
        module, function = getattr(item, "module", None), getattr(item, "function", None)
        found = []
        if isinstance(module, types.ModuleType):
            if vars(module).get("pytest", self._pytest) is not self._pytest:
                return False
            found.append(vars(module).get("__builtins__", self._builtins))
        if isinstance(function, types.FunctionType):
            found.append(getattr(function, "__builtins__", self._builtins))
        return all(each is self._builtins or each is builtins for each in found)


def _watched() -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield what tests fail, skip and expect failures with: what it is called, and by which name it is found where."""
    outcomes: Any = importlib.import_module("_pytest.outcomes")
    case: Any = importlib.import_module("unittest.case")
    for name in MODULES:
        yield f"the module {name}", sys.modules, name
    for name, _ in _exceptions():
        yield f"builtins.{name}", vars(builtins), name
    words = {id(getattr(outcomes, name, case.SkipTest)) for name in OUTCOMES} | {
        id(case.SkipTest),
        id(case._ShouldStop),
    }
    for module in [name for name in sys.modules if name.partition(".")[0] in ("_pytest", "unittest")]:
        scope = getattr(sys.modules[module], "__dict__", {})
        for name in [name for name, value in scope.items() if id(value) in words]:
            yield f"{module}.{name}", scope, name
    for word in ("skip", "fail", "xfail", "exit"):
        doer = getattr(outcomes, word)
        for scope in (getattr(doer, "__dict__", {}), vars(type(doer))):
            if "Exception" in scope:
                yield f"pytest.{word}.Exception", scope, "Exception"
    for module in ("pytest", "unittest"):
        for name, _ in _public(module):
            yield f"{module}.{name}", vars(sys.modules[module]), name
    for kind in (unittest.TestCase, unittest.FunctionTestCase):
        for word in CLASS_WORDS:
            yield f"unittest.{kind.__name__}.{word}", vars(kind), word


def _exceptions() -> Iterator[tuple[str, type]]:
    for name, value in vars(builtins).items():
        if isinstance(value, type) and any(each is BaseException for each in _mro(value)):
            yield name, value


def _public(module: str) -> Iterator[tuple[str, Any]]:
    scope = getattr(sys.modules.get(module), "__dict__", {})
    for name in scope.get("__all__", ()):
        if name in scope:
            yield name, scope[name]


def _mro(kind: type) -> tuple[type, ...]:
    found: tuple[type, ...] = type.__dict__["__mro__"].__get__(kind)
    return found
