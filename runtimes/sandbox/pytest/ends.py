"""Who ends a test, and how: beside `plugin`, in the processes that run tests. Standard library, Python 3.7 on.

A test may skip itself or expect its own failure. Code that it tests may not: a solution that raises pytest's skip has
not passed, and a hook of the project that calls a failure something else has not mended it.
"""

from __future__ import annotations

import importlib
import os
import sys
import unittest
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

#: Names by which a file or a directory says that it belongs to the tests, where none were given with the request.
TEST_FOLDERS = frozenset({"test", "tests", "testing"})


class TestEnds:
    """What tests of this process have raised."""

    def __init__(self, places: Iterable[str]) -> None:
        """``places`` are where the project's modules are, the working directory first."""
        outcomes: Any = importlib.import_module("_pytest.outcomes")
        self._own_words = (outcomes.skip.Exception, outcomes.xfail.Exception, unittest.SkipTest)
        self._places = [os.path.realpath(place) + os.sep for place in places]
        self._given: set[str] = set()
        parts = [importlib.import_module(name) for name in ("_pytest", "pluggy")]
        folders = {str(Path(os.path.realpath(str(part.__file__))).parent) for part in parts}
        # An environment of Python's may lie within the project.
        self._installed = tuple(folder + os.sep for folder in {*folders, os.path.realpath(sys.prefix)})
        #: Tests that failed, whatever is reported of them.
        self.failed: set[str] = set()

    def give(self, tests: Iterable[str]) -> None:
        """Take these files, seen from the working directory, for those of the tests."""
        self._given.update(os.path.realpath(path) for path in tests)

    def look(self, name: str, item: Any, call: Any) -> str:
        """Note that a phase of a test has failed; return what `ended_by` says of it.

        pytest changes what was raised while it makes its report, and so may hooks: it is looked at before and after. A
        further try of a test begins with its setup.
        """
        error = _error_of(item, call)
        by = self.ended_by(error, str(getattr(item, "fspath", "")))
        ours = isinstance(error, self._own_words)
        if by or (error is not None and not ours and not any(item.iter_markers("xfail"))):
            self.failed.add(name)
        return by

    def ended_by(self, error: BaseException | None, own: str) -> str:
        """Return the file of the project whose code has raised a skip or an expected failure under a test.

        Empty if it was the test's own (``own`` is its file), and for what is raised before a test or around it.
        """
        if error is None or not isinstance(error, self._own_words):
            return ""
        for frames in _frames(error):
            under_test = False
            for file in frames:
                if self._is_tests(file, own):
                    under_test = True
                elif under_test and self._is_projects(file):
                    return os.path.relpath(file, self._places[0]) if os.sep in file else file
        return ""

    def _is_tests(self, file: str, own: str) -> bool:
        real = os.path.realpath(file)
        if real == os.path.realpath(own) or real in self._given or Path(real).name == "conftest.py":
            return True
        place = next((place for place in self._places if real.startswith(place)), None)
        if self._given or place is None:
            return False
        path = Path(real[len(place) :])
        return path.name.startswith("test_") or path.name.endswith("_test.py") or bool({*path.parts} & TEST_FOLDERS)

    def _is_projects(self, file: str) -> bool:
        if file.startswith("<"):
            return not file.startswith("<frozen ")
        real = os.path.realpath(file)
        return any(real.startswith(place) for place in self._places) and not real.startswith(self._installed)


def _error_of(item: Any, call: Any) -> BaseException | None:
    """Return what a phase has raised; unittest's cases keep theirs until pytest asks for it."""
    kept = getattr(item, "_excinfo", None)
    excinfo = call.excinfo or (kept[-1] if kept else None)
    return None if excinfo is None else excinfo.value


def _frames(error: BaseException) -> Iterator[Iterator[str]]:
    """Return the files through which an error came, and through which that came in whose place it was raised."""
    yield _files(error.__traceback__)
    if error.__context__ is not None:
        yield _files(error.__context__.__traceback__)


def _files(trace: TracebackType | None) -> Iterator[str]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
