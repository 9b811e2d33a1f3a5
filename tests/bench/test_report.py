"""The report: what every bench prints."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import signal
from pathlib import Path

import pytest

from bench import report as report_module
from bench.report import BenchReport, parser, play


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where reports are kept."""
    monkeypatch.setattr(report_module, "KEPT", tmp_path)
    return tmp_path / "demo.json"


def test_the_last_line_is_one_object_with_figures_and_checks() -> None:
    report = BenchReport("demo")
    report.figure("echo_p50_ms", 0.4)
    report.figure("by_policy", {"paper": {"act_s": 3.0}, "price": {"act_s": math.inf}})
    report.check("overhead_ms", 1.5, limit=2.0, better="lower")
    out = io.StringIO()
    assert report.print(as_json=True, file=out) == 0
    last = json.loads(out.getvalue().splitlines()[-1])
    assert last["bench"] == "demo"
    assert last["machine"]["cores"] >= 1
    assert last["figures"]["by_policy"]["price"]["act_s"] is None
    assert last["checks"] == [{"name": "overhead_ms", "value": 1.5, "limit": 2.0, "better": "lower", "ok": True}]


def test_a_broken_check_fails_the_bench_and_is_named() -> None:
    report = BenchReport("demo")
    report.check("ratio", 1.2, limit=1.5, better="higher")
    out = io.StringIO()
    assert report.print(as_json=False, file=out) == 1
    assert "FAILED" in out.getvalue()


def test_a_value_that_is_not_a_number_never_passes() -> None:
    report = BenchReport("demo")
    report.check("low", math.nan, limit=1.0, better="lower")
    report.check("high", math.nan, limit=1.0, better="higher")
    assert [check.ok for check in report.checks] == [False, False]


def test_a_part_that_fails_or_has_no_time_left_is_named_and_fails_the_bench() -> None:
    report, done = BenchReport("demo"), list[str]()

    async def sound() -> None:
        await asyncio.sleep(0)
        done.append("sound")

    report.play({"broken": lambda: 1 / 0, "sound": sound})
    report.ends_s = 0.0
    report.play({"late": lambda: done.append("late")})
    assert done == ["sound"]
    assert [check.name for check in report.checks if not check.ok] == ["broken_ran", "late_ran"]
    assert report.notes == [
        "broken is missing: ZeroDivisionError: division by zero",
        "late is missing: the time was up",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_bench_that_is_cut_prints_and_keeps_what_it_has(
    kept: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    report = BenchReport("demo")
    options = parser("demo", parts=True).parse_args(["--json"])
    parts = {
        "first": lambda: report.check("ratio", 1.2, limit=1.5, better="lower"),
        "second": lambda: os.kill(os.getpid(), number),
        "third": lambda: report.figure("never", 1),
    }
    assert play(report, options, parts) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [check["name"] for check in last["checks"]] == ["ratio", "completed"] and not last["figures"]
    assert json.loads(kept.read_text())["checks"][0]["name"] == "ratio"


def test_a_run_that_is_kept_takes_the_place_of_what_it_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_module, "PUBLISHED", tmp_path / "figures")
    monkeypatch.setattr("sys.argv", ["bench", "--only", "one", "--json", "--keep"])
    options = parser("demo", parts=True).parse_args(["--keep"])
    for limit, name in ((1.0, "ratio"), (2.0, "ratio"), (3.0, "other")):
        report = BenchReport("demo")
        part = {"one": lambda report=report, name=name, limit=limit: report.check(name, 1, limit, "lower")}
        play(report, options, part)
    runs = json.loads((tmp_path / "figures" / "demo.json").read_text())
    assert [(check["name"], check["limit"]) for run in runs for check in run["checks"]] == [
        ("ratio", 2.0),
        ("other", 3.0),
    ]
    assert {run["command"] for run in runs} == {"python -m bench.demo --only one"}
    interrupted = {"one": lambda: os.kill(os.getpid(), signal.SIGINT)}
    play(BenchReport("demo"), options, interrupted)
    assert json.loads((tmp_path / "figures" / "demo.json").read_text()) == runs


def test_only_the_parts_that_are_named_are_played_and_a_wrong_name_is_told() -> None:
    report, done = BenchReport("demo"), list[str]()
    parts = {name: lambda name=name: done.append(name) for name in ("one", "two")}
    assert play(report, parser("demo", parts=True).parse_args(["--only", "two"]), parts) == 0
    assert done == ["two"]
    with pytest.raises(SystemExit, match="no part is named three; known are one, two"):
        play(report, parser("demo", parts=True).parse_args(["--only", "three"]), parts)
