"""Paired ratios: which side is the worse one, what is lost, and what was nothing before."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import pairs
from bench.report import BenchReport

BEFORE, AFTER = Path("before"), Path("after")
Bench = Callable[[Path], pairs.Values]


@pytest.fixture
def report_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Bench], dict[str, float]]:
    """Four pairs of a bench that is played instead; returns the checks."""

    def played(bench: Bench) -> dict[str, float]:
        monkeypatch.setattr(pairs, "values", lambda name, checkout, options: bench(checkout))
        report = BenchReport("pairs")
        given = argparse.Namespace(before=BEFORE, after=AFTER, pairs=4, options=[])
        pairs.compare(report, "part", given)
        return {check.name: check.value for check in report.checks}

    monkeypatch.setattr(BenchReport, "keep", lambda report: None)
    return played


Played = Callable[[Bench], dict[str, float]]


def test_a_ratio_above_one_is_worse_whichever_side_is_better(report_of: Played) -> None:
    def part(checkout: Path) -> pairs.Values:
        slow = checkout.name == "after"
        return {"ms": (3.0 if slow else 2.0, True), "per_s": (10.0 if slow else 20.0, False)}

    assert report_of(part) == {"part_ms_worse": 1.5, "part_per_s_worse": 2.0}


def test_both_checkouts_go_first_equally_often(report_of: Played) -> None:
    seen: list[str] = []

    def part(checkout: Path) -> pairs.Values:
        seen.append(checkout.name)
        return {"ms": (1.0, True)}

    report_of(part)
    assert seen == ["before", "after", "after", "before"] * 2


@pytest.mark.parametrize(("after", "ratio"), [(0.0, 1.0), (2.0, math.inf)])
def test_what_was_nothing_before_must_be_nothing_afterwards(report_of: Played, after: float, ratio: float) -> None:
    found = report_of(lambda checkout: {"wrong": (after if checkout.name == "after" else 0.0, True)})
    assert found == {"part_wrong_worse": ratio}


def test_a_part_that_never_ran_is_a_failure(report_of: Played) -> None:
    def part(checkout: Path) -> pairs.Values:
        raise ValueError("it printed nothing")

    assert report_of(part) == {"part_ran": 0.0}
