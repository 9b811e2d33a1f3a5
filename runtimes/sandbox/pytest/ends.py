"""Who ends a test, and how: beside `plugin`, in the processes that run tests. Standard library, Python 3.7 on.

A test may skip itself or expect its own failure. Code that it tests may not: a solution that raises pytest's skip has
not passed, nor has one that makes an assertion raise it, and a hook of the project that calls a failure something else
has not mended it. The frames through which a skip came decide, and what the tests' source says where it left them.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import unittest
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

#: Names by which a file or a directory says that it belongs to the tests, where none were given with the request.
TEST_FOLDERS = frozenset({"test", "tests", "testing"})
KEPT, MARKS = "tangram_kept", "tangram_marks"
SOURCE_MAX_BYTES = 8 * 2**20
_GENERATOR = 0x20
_open = open


class TestEnds:
    """What tests of this process have raised."""

    def __init__(self, places: Iterable[str], plugins: Iterable[Any] = ()) -> None:
        """``places`` are where the project's modules are, the working directory first; ``plugins`` are others'."""
        outcomes: Any = importlib.import_module("_pytest.outcomes")
        self._own_words = (outcomes.skip.Exception, outcomes.xfail.Exception, unittest.SkipTest)
        self._places = [os.path.realpath(place) + os.sep for place in places]
        self._given: set[str] = set()
        self._conftests = True
        parts = {name: _folder_of(name) for name in ("_pytest", "pluggy", "unittest")}
        self._hooks, self._framework = parts["pluggy"], tuple(parts.values())
        # An environment of Python's may lie within the project.
        self._installed = (parts["_pytest"], parts["pluggy"], os.path.realpath(sys.prefix) + os.sep)
        self._marks: Any = importlib.import_module(MARKS)
        others = [each for each in plugins if not self._is_frameworks(str(getattr(each, "__file__", None)))]
        self._mark_sources = self._marks.MarkSources(others)
        self.kept: Any = importlib.import_module(KEPT).KeptNames()
        self._sources: dict[str, bytes] = {}
        self._read: dict[str, Any] = {}
        #: Tests that failed, whatever is reported of them.
        self.failed: set[str] = set()

    def give(self, tests: Iterable[str], *, conftests: bool = True) -> None:
        """Take these files, seen from the working directory, for those of the tests, with what they say by now."""
        tests = list(tests)
        self._conftests = conftests
        self._mark_sources.read(tests, conftests=conftests, given=tests)
        for path in tests:
            real = os.path.realpath(path)
            self._given.add(real)
            if real.endswith(".py"):
                self._sources[real] = _content(real)

    def look(self, name: str, item: Any, call: Any) -> str:
        """Note that a phase of a test has failed; return what `ended_by` says of it, or what is not the test's own.

        pytest changes what was raised while it makes its report, and so may hooks: it is looked at before and after. A
        further try of a test begins with its setup.
        """
        error = _error_of(item, call)
        own = str(getattr(item, "fspath", ""))
        by = self.ended_by(error, own, item if call.when == "call" else None) or self._planted(item, own)
        ours = error is not None and self._is_word(error)
        if by or (error is not None and not ours and not any(item.iter_markers("xfail"))):
            self.failed.add(name)
        return by

    def unmarked(self, item: Any, call: Any, report: Any) -> str:
        """Return what does not mark a test that was skipped, or whose failure was expected, by a mark.

        Empty if something does, or if there was no mark: what the code under test has marked is known by nothing that
        the test's module, or pytest, holds when it ends, and so its source decides, with conftests and plugins.
        """
        expected = hasattr(report, "wasxfail")
        module, id = getattr(item, "module", None), str(item.nodeid)
        if not (expected or report.outcome == "skipped") or not isinstance(module, types.ModuleType):
            return ""
        error, own = _error_of(item, call), str(getattr(item, "fspath", ""))
        if error is not None and self._is_word(error) and not self._is_by_mark(error, call.when):
            return ""
        text = self._text(own, own)
        verdict = "xfail" if expected else "skip"
        path = id.partition("[")[0].split("::")[1:]
        if (
            text is None
            or text.accounts_for(verdict, path, list(item.iter_markers()))
            or text.is_left_alone(verdict, path, call.when)
        ):
            return ""
        self._mark_sources.read([own], conftests=self._conftests, given=self._given)
        return "" if self._mark_sources.make_marks(verdict, own) else f"a mark that {self._seen(own)} does not give"

    def _is_by_mark(self, error: BaseException, when: str) -> bool:
        """Return whether a skip or an expected failure came from pytest itself or unittest, and not out of a test."""
        if not all(self._is_frameworks(file) for file, _, _ in _steps(error.__traceback__)):
            return False
        before = error.__context__
        if before is not None and self._is_word(before):
            return False
        # Before Python 3.11, unittest says a skip again when it has forgotten where it came from.
        return when != "call" or sys.version_info >= (3, 11) or not isinstance(error, self._own_words[0])

    def ended_by(self, error: BaseException | None, own: str, item: Any = None) -> str:
        """Return where a skip or an expected failure came from that no test asked for.

        That is the file of the project whose code has raised it under a test (``own`` is the test's file), or the line
        of a test that says nothing of it. Empty if it was the test's own, and for what is raised before a test or
        around it, as far as something is there to raise it (``item`` is a test that was called).
        """
        if error is None or not self._is_word(error):
            return ""
        steps = list(_steps(error.__traceback__))
        by = self._raised_by(steps, own) or self._unasked(steps, own) or self._around(steps, own, item)
        before = error.__context__
        if by or before is None:
            return by
        steps_before = list(_steps(before.__traceback__))
        by = self._raised_by(steps_before, own)
        if not by and all(self._is_frameworks(file) for file, _, _ in steps):
            # unittest says a skip again, in pytest's word.
            if self._is_word(before):
                return self._unasked(steps_before, own)
            tested = [step for step in steps_before if self._is_tests(step[0], own)]
            return self._place(tested[-1]) if tested else ""
        return by

    def _is_word(self, error: BaseException) -> bool:
        return any(kind is word for kind in self.kept.mro(type(error)) for word in self._own_words)

    def _raised_by(self, steps: list[Any], own: str) -> str:
        """Return the file of the project through which an error came under a test."""
        under_test = False
        for at, (file, _, _) in enumerate(steps):
            if self._is_tests(file, own):
                under_test = under_test or not self._only_passes(steps, at)
            elif under_test and self._is_projects(file):
                return self._seen(file)
        return ""

    def _unasked(self, steps: list[Any], own: str) -> str:
        """Return the line of a test where a skip came from although nothing there asks for it."""
        tested = [
            at for at in range(len(steps)) if self._is_tests(steps[at][0], own) and not self._only_passes(steps, at)
        ]
        last = len(steps) - 1
        others = [at for at in range(len(steps)) if not self._is_frameworks(steps[at][0])]
        if not tested:
            said = (
                not steps or not self._is_frameworks(steps[last][0]) or self._says(steps[last], own, raised_here=True)
            )
            said = said or self._says(steps[last], own, raised_here=False)
            return "" if said else self._place(steps[last])
        asked = steps[tested[-1]]
        for at, following in zip(tested, tested[1:]):  # noqa: B905, RUF007  # Python 3.7
            if following == at + 1 and self._calls_only_the_projects(steps[at], own):
                return self._place(steps[at])
        if others[-1] == tested[-1]:
            said = self._says(asked, own, raised_here=tested[-1] == last)
            said = said and (tested[-1] == last or self._says(steps[last], own, raised_here=True))
        else:  # a library's own way to skip
            text = self._text(asked[0], own)
            said = text is not None and text.calls_others(asked[1])
            said = said and self._says(steps[others[-1]], own, raised_here=others[-1] == last)
        return "" if said else self._place(asked)

    def _around(self, steps: list[Any], own: str, item: Any) -> str:
        """Return the file of the project that has skipped a test in its place, where nothing of it is to be around."""
        tested = [file for file, _, _ in steps if self._is_tests(file, own) and Path(file).name != "conftest.py"]
        theirs = [file for file, _, _ in steps if self._is_projects(file) and not self._is_tests(file, own)]
        if tested or not theirs or not isinstance(_function_of(item), types.FunctionType):
            return ""
        text = self._text(own, own)
        return "" if text is None or text.decorated(_path_of(item)) else self._seen(theirs[-1])

    def _planted(self, item: Any, own: str) -> str:
        """Return what a test's module holds, or says of the test, that its source does not: somebody else did it."""
        module, function = getattr(item, "module", None), _function_of(item)
        if not isinstance(module, types.ModuleType):
            return ""
        kind = getattr(item, "cls", None)
        names = list(self.kept.strange_names(vars(module)))
        marked = any(self.kept.is_marked(each) for each in (module, kind, function) if each is not None)
        fails = kind is not None and not self.kept.fails_plainly(kind)
        if not self.kept.has_builtins(vars(module), function):
            return f"{self._seen(own)}, whose builtins were changed"
        text = self._text(own, own) if names or marked or fails else None
        if text is None:
            return ""
        for name, origin in names:
            own_meaning = name in text.bound or text.starred
            if text.imports.get(name) == origin if origin or name in text.imports else not own_meaning:
                return f"{self._seen(own)}, whose {name} was changed"
        if fails and "failureException" not in text.bound:
            return f"{self._seen(own)}, whose failureException was changed"
        return f"{self._seen(own)}, which was marked" if marked and not text.marks(_path_of(item)) else ""

    def _calls_only_the_projects(self, step: Any, own: str) -> bool:
        text = self._text(step[0], own)
        return text is not None and text.calls_only_the_projects(step[1])

    def _says(self, step: Any, own: str, *, raised_here: bool) -> bool:
        text = self._text(step[0], own)
        return text is not None and bool(text.says(step[1], raised_here=raised_here))

    def _text(self, file: str, own: str) -> Any:
        """Return what a file says; None if it is no Python, or cannot be read."""
        real = os.path.realpath(file)
        if real not in self._read:
            source = self._sources.get(real) or _content(real)
            tested = self._is_tests(file, own)

            def is_projects(module: str, level: int, name: str) -> bool:
                return tested and any(
                    self._is_projects(each) and not self._is_tests(each, own)
                    for each in self._files_of(real, module, level, name)
                )

            try:
                self._read[real] = self._marks.MarkText(source, is_projects) if source else None
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                self._read[real] = None
        return self._read[real]

    def _files_of(self, here: str, module: str, level: int, name: str) -> Iterator[str]:
        """Yield the files in which an imported module, or what is taken from it, may lie."""
        parts = [part for part in module.split(".") if part]
        parents = Path(here).parents
        places = [parents[level - 1]] if 0 < level <= len(parents) else [Path(place) for place in self._places]
        for place in places:
            base = place.joinpath(*parts)
            found = (
                base / f"{name}.py",
                base / name / "__init__.py",
                base.parent / f"{base.name}.py",
                base / "__init__.py",
            )
            yield from [str(each) for each in (found if name else found[2:]) if each.is_file()][:1]
        for each in () if level else (f"{module}.{name}", module):
            file = getattr(sys.modules.get(each), "__file__", None)
            if isinstance(file, str):
                yield file
                return

    def _only_passes(self, steps: list[Any], at: int) -> bool:
        """Return whether it is a hook around others, through which an error went on its way."""
        return steps[at][2] and at + 1 < len(steps) and os.path.realpath(steps[at + 1][0]).startswith(self._hooks)

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

    def _is_frameworks(self, file: str) -> bool:
        return os.path.realpath(file).startswith(self._framework)

    def _seen(self, file: str) -> str:
        return os.path.relpath(file, self._places[0]) if os.sep in file else file

    def _place(self, step: Any) -> str:
        return f"{self._seen(step[0])}:{step[1]}"


def _folder_of(module: str) -> str:
    return str(Path(os.path.realpath(str(importlib.import_module(module).__file__))).parent) + os.sep


def _content(path: str) -> bytes:
    try:
        with _open(path, "rb") as file:
            return file.read(SOURCE_MAX_BYTES)
    except OSError:
        return b""


def _error_of(item: Any, call: Any) -> BaseException | None:
    """Return what a phase has raised; unittest's cases keep theirs until pytest asks for it."""
    kept = getattr(item, "_excinfo", None)
    excinfo = call.excinfo or (kept[-1] if kept else None)
    return None if excinfo is None else excinfo.value


def _function_of(item: Any) -> Any:
    return getattr(item, "function", None)


def _path_of(item: Any) -> list[str]:
    """Return the names of a test's classes, and its own."""
    kinds = [node.name for node in item.listchain() if isinstance(getattr(node, "obj", None), type)]
    return [*kinds, getattr(item, "originalname", None) or item.name]


def _steps(trace: TracebackType | None) -> Iterator[tuple[str, int, bool]]:
    """Yield each frame's file, the line that it has come to, and whether it is a generator's."""
    while trace is not None:
        code = trace.tb_frame.f_code
        yield code.co_filename, trace.tb_lineno or 0, bool(code.co_flags & _GENERATOR)
        trace = trace.tb_next
