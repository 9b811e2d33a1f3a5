"""The report: what every bench prints."""

from __future__ import annotations

import io
import json
import math

from bench.report import BenchReport, percentile, table


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


def test_percentiles_are_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)


def test_tables_align() -> None:
    assert table(["a", "b"], [["long", "1"]]).splitlines() == ["a     b", "----  -", "long  1"]
