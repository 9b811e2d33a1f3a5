"""docs/PROMISES.md: each promise of its tables names tests, and each of them is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.house.source import ROOT

PAGE = ROOT / "docs" / "PROMISES.md"
OPEN = "## Not yet held by a test"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
GROUPS = (
    "Acceptance and records",
    "Results and logs",
    "Rewards",
    "Times",
    "Scheduling and quotas",
    "Sandboxes",
    "Servers and facades",
    "Restarts",
)


def problems(text: str) -> Iterator[str]:
    """What is wrong with the rows of the tables, row by row."""
    for line in text.splitlines():
        if not line.startswith("|") or line in ("| promise | tests |", "|---|---|"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 2 or not cells[0].endswith("."):
            yield f"no row of a promise, a sentence, and its tests: {line}"
            continue
        tests = cells[1].split(", ")
        for named in tests:
            if (match := TEST.fullmatch(named)) is None:
                yield f"{cells[0]} names no test: {named!r}"
            elif match[2] not in _tests(match[1]):
                yield f"{cells[0]} names a test that is not there: {named}"


@cache
def _tests(path: str) -> frozenset[str]:
    """The tests that pytest would find in a file: functions of the module and of its Test classes."""
    place = ROOT / path
    if not place.is_file():
        return frozenset()
    body = ast.parse(place.read_text(encoding="utf-8")).body
    classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")]
    held = [*body, *(node for each in classes for node in each.body)]
    return frozenset(node.name for node in held if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_promise_names_tests_that_are_there() -> None:
    held, _, rest = PAGE.read_text(encoding="utf-8").partition(OPEN)
    assert list(problems(held)) == []
    assert "|" not in rest, "what no test holds is a list, and no table"


def test_every_group_has_its_table() -> None:
    held, _, rest = PAGE.read_text(encoding="utf-8").partition(OPEN)
    sections = {part.partition("\n")[0]: part for part in held.split("\n## ")[1:]}
    assert tuple(sections) == GROUPS and rest
    assert all(TEST.search(part) for part in sections.values())


def test_readme_leads_to_the_page() -> None:
    assert "(docs/PROMISES.md)" in (ROOT / "README.md").read_text(encoding="utf-8").partition("## Read on")[2]


@pytest.mark.parametrize(
    "row",
    [
        "| It is fast. | |",
        "| It is fast. | soon |",
        "| It is fast. | `tests/docs/test_promises.py::test_that_nobody_wrote` |",
        "| It is fast. | `tests/docs/test_nowhere.py::test_it` |",
        "| It is fast. | `tests/docs/test_promises.py::test_readme_leads_to_the_page`, and others |",
        "| It is fast. |",
        "| It is fast | `tests/docs/test_promises.py::test_readme_leads_to_the_page` |",
    ],
)
def test_a_promise_without_a_test_is_seen(row: str) -> None:
    assert list(problems(row))
