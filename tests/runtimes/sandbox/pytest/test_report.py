"""What a suite's process writes is read whatever it is, and can be told to anybody."""

from __future__ import annotations

import json

import orjson
import pytest

from runtimes.sandbox.pytest.runtime import SuiteReport, SuiteRequest, judge, notes


def fed(*lines: bytes | dict[str, object]) -> SuiteReport:
    report = SuiteReport("n")
    for line in lines:
        data = line if isinstance(line, bytes) else json.dumps({"nonce": "n", **line}).encode()
        report.feed(data + b"\n")
    return report


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"1" * 5000])
def test_lines_of_others_are_told_and_break_nothing(line: bytes) -> None:
    assert fed(line).doubts == ["somebody else wrote to the report"]


def test_names_that_are_no_text_can_be_told() -> None:
    name = "tests/test_\udcff.py"
    report = fed(
        {"start": {"xdist": "", "workers": 1, "noticed": [f"{name} of the project was kept"]}},
        {"broken": name, "message": "no \udcff"},
        {"selected": [f"{name}::test_a"]},
        {"run": f"{name}::test_a"},
        {"test": f"{name}::test_a", "verdict": "failed"},
        {"turned": name},
        {"end": 1},
    )
    value = judge(SuiteRequest(), report)
    assert orjson.loads(orjson.dumps({**value, "note": notes(SuiteRequest(), report, value)}))["reward"] == 0.0
    assert "tests/test_\\udcff.py::test_a" in report.tests


@pytest.mark.parametrize("record", [{"end": 10**30}, {"end": -1}, {"start": {"xdist": "", "workers": 10**30}}])
def test_numbers_are_those_that_there_can_be(record: dict[str, object]) -> None:
    report = fed({"start": {"xdist": "", "workers": 2, "noticed": []}}, record)
    assert (report.end, report.workers) == (None, 2)


def test_a_suite_that_finds_no_place_of_its_own_is_worth_nothing() -> None:
    report = fed({"blocked": "no temporary file can be made"})
    assert (judge(SuiteRequest(), report)["reward"], bool(report.doubts)) == (0.0, True)
