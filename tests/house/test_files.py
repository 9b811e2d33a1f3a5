"""What every file has and has not: a docstring, no mark of unfinished work, no name that says nothing."""

from __future__ import annotations

import pytest

from tests.house.source import sources

#: One process reads the whole tree, for all of them.
pytestmark = pytest.mark.xdist_group("sources")


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
