"""Sizes: a file is one noun, a function fits a screen, a folder is seen at a glance."""

from __future__ import annotations

from collections import Counter
from statistics import median

import pytest

from tests.house.source import ROOT, sources

#: One process reads the whole tree, for all of them.
pytestmark = pytest.mark.xdist_group("sources")

LONGEST_FILE = 500
#: One file by contract, with its reason.
ONE_FILE = {
    "runtimes/sandbox/runner/runner.py": "started inside foreign images, where there is nothing to import it from"
}
LONGEST_FUNCTION = 60
#: Modules of one folder, ``__init__`` aside.
WIDEST_FOLDER = 20
#: Folders of many alike: plugs of other frameworks, each a module of its own.
WIDE = {"tangram/adapters"}
LONGEST_MEDIAN = 180


def test_a_file_stays_under_five_hundred_lines() -> None:
    assert not [
        f"{source.name}: {source.lines}"
        for source in sources()
        if source.lines > LONGEST_FILE and source.name not in ONE_FILE
    ]


def test_half_of_the_files_are_short() -> None:
    ours = [source.lines for source in sources() if source.package in {"manager", "runtimes", "gateway", "tangram"}]
    assert median(ours) <= LONGEST_MEDIAN


def test_a_function_fits_a_screen() -> None:
    long = {
        f"{source.name} {function.name}": (function.end_lineno or 0) - function.lineno + 1
        for source in sources()
        for function in source.functions()
        if (function.end_lineno or 0) - function.lineno + 1 > LONGEST_FUNCTION
    }
    assert long == {}


def test_no_folder_holds_more_than_twenty_modules() -> None:
    modules = Counter(
        source.path.relative_to(ROOT).parent.as_posix() for source in sources() if source.path.name != "__init__.py"
    )
    assert {folder: count for folder, count in modules.items() if count > WIDEST_FOLDER and folder not in WIDE} == {}


def test_nine_functions_in_ten_are_under_thirty_five_lines() -> None:
    lengths = sorted(
        (function.end_lineno or 0) - function.lineno + 1
        for source in sources()
        if source.package in {"manager", "runtimes", "gateway", "tangram"}
        for function in source.functions()
    )
    assert lengths[int(len(lengths) * 0.9)] < 35


def test_every_file_says_what_lives_there() -> None:
    silent = [
        source.name
        for source in sources()
        if source.tree.body and not (source.path.name == "__init__.py" and source.package == "tests")
        if (source.tree.body and not source.text.startswith(('"""', "#!")))
    ]
    assert not silent


def test_nothing_is_left_for_later() -> None:
    marks = ("TO" + "DO", "FIX" + "ME", "XX" + "X:")
    assert not [source.name for source in sources() if any(mark in source.text for mark in marks)]


def test_no_file_is_a_drawer() -> None:
    drawers = {"utils.py", "helpers.py", "common.py", "misc.py"}
    assert not [source.name for source in sources() if source.path.name in drawers]
