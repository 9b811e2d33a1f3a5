"""The benches of the scheduler run to their end in the quick form, with the names that others look for."""

from __future__ import annotations

import gc
import json

import pytest

from bench import scheduler
from bench.figures import __main__ as figures


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    value = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(value, dict)
    return value


def names(report: dict[str, object]) -> set[str]:
    checks = report["checks"]
    assert isinstance(checks, list)
    return {check["name"] for check in checks}


@pytest.mark.slow
def test_scheduler_reports_steps_and_bursts(capsys: pytest.CaptureFixture[str]) -> None:
    threshold = gc.get_threshold()
    try:
        scheduler.main(["--quick", "--json"])
    finally:
        gc.set_threshold(*threshold)
    report = last_line(capsys)
    assert names(report) == {
        "step_p50_over_json",
        "step_p99_over_json",
        "step_100k_over_1536",
        "burst_1536_over_json",
        "burst_16000_over_json",
        "new_trajectory_over_json",
    }
    assert isinstance(report["figures"], dict)
    assert {"decision_p99_ms", "burst_step_ms"} <= report["figures"].keys()


@pytest.mark.slow
def test_figures_report_every_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["--quick", "--json"]) == 0
    found = names(last_line(capsys))
    assert {"coding_96_adaptive_over_bound", "coding_96_paper_over_adaptive", "mopd_128_price_over_best_fixed"} <= found
    assert {"mixed_moderate_strict_over_reserved", "mixed_tight_strict_over_reserved"} <= found
