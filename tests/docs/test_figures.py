"""Figures of the docs are those of the runs in docs/dev/figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from bench.paper.figures import figures
from scripts.figures import BEGIN, TABLES, cuda, figure, runs, written
from tests.house.source import ROOT


def _read(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def _batches(name: str) -> Sequence[float]:
    """The least and the largest factor over the batches of figure 8a."""
    left = figure("paper", "Figure 8a, left")
    here = [row["here"] for key, row in left.items() if re.fullmatch(rf"{name}, [\d,]+", key)]
    assert len(here) == 3
    return min(here), max(here)


#: Page, the words around its numbers, and what they are in the runs.
CITED: list[tuple[str, str, Callable[[], Sequence[float]]]] = [
    ("README.md", r"are ([\d.]+) to ([\d.]+) times shorter than with a pod for each", lambda: _batches("pods")),
    (
        "README.md",
        r"They are ([\d.]+) to ([\d.]+) times shorter when our sandboxes start as slowly",
        lambda: _batches("pods, ours as slow to start"),
    ),
    (
        "README.md",
        r"an 8B model is swapped in \[([\d.]+) s\]",
        lambda: [cuda()["large"]["figures"]["restore_and_bind_s"]],
    ),
    ("docs/PAPER.md", r"two cores \((\d+) s, 2026-", lambda: [figure("paper", "wall_s")]),
    ("docs/PAPER.md", r"`adaptive` takes ([\d.]+) times", lambda: [figure("paper", "midload_over_bound")]),
    ("docs/PAPER.md", r"An ideal takes ([\d.]+) times", lambda: [figure("paper", "midload_ideal_over_bound")]),
    (
        "docs/SANDBOXES.md",
        r"took ([\d.]+) times as long in fresh process sandboxes, and ([\d.]+) times in containers",
        lambda: [figure("attacks", f"fresh_grade_over_warm_p50_{kind}") for kind in ("process", "container")],
    ),
]


@pytest.mark.parametrize(("page", "words", "value"), CITED, ids=[page for page, _, _ in CITED])
def test_what_a_page_cites_is_what_was_measured(page: str, words: str, value: Callable[[], Sequence[float]]) -> None:
    cited = re.search(words, _read(page))
    assert cited is not None, f"{page} no longer says {words}"
    for said, measured in zip(cited.groups(), value(), strict=True):
        digits = len(said.partition(".")[2])
        assert float(said) == round(measured, digits), f"{page}: {cited[0]}"


@pytest.mark.parametrize("page", TABLES)
def test_the_tables_are_those_of_the_runs(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert written(text, TABLES[page]()) == text, "run: python -m scripts.figures"


def test_every_factor_of_the_paper_was_played() -> None:
    kept = {
        (name, factor)
        for run in runs("paper")
        for name, factors in run["figures"].items()
        if name.startswith(("Figure", "Table"))
        for factor in factors
    }
    drawn = {(each.title.partition(":")[0], factor) for each in figures().values() for factor in each.factors}
    assert kept == drawn


def test_a_run_says_where_and_when_it_was() -> None:
    for path in (ROOT / "docs" / "dev" / "figures").glob("*.json"):
        for run in [cuda()] if path.stem == "cuda" else runs(path.stem):
            assert re.fullmatch(r"20\d\d-\d\d-\d\d", run["date"]) and run["command"] and run["machine"]["cores"], path


def test_a_page_without_marks_is_told() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        written("no marks", "table")
    assert "table" in written(f"a\n{BEGIN}\nold\n<!-- end -->\nb", "table")
