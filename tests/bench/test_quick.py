"""Benches run to their end in the quick form, as a program: their JSON, and the names that others look for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.house.source import ROOT

pytestmark = pytest.mark.slow
RUN_S = 400.0

#: Bench and its options -> the checks that come of it.
RUNS: dict[tuple[str, ...], set[str]] = {
    ("scheduler",): {
        "step_p50_over_json",
        "step_p99_over_json",
        "step_100k_over_1536",
        "burst_1536_over_json",
        "burst_16000_over_json",
        "new_trajectory_over_json",
    },
    ("figures",): {
        "coding_96_adaptive_over_bound",
        "coding_96_paper_over_adaptive",
        "coding_96_adaptive_over_best_fixed",
        "mopd_128_price_over_best_fixed",
        "mixed_moderate_strict_over_reserved",
        "mixed_tight_strict_over_reserved",
    },
    ("gateway",): {
        "exec_overhead_p50_ms",
        "handler_overhead_p50_ms",
        "grpc_overhead_p50_ms",
        "sync_cpu_over_echo",
    },
    ("durable", "--only", "kills,queue,callbacks,shrinks"): {
        "lost_after_kill",
        "run_twice_after_kill",
        "pass_ms_100k_over_1k",
        "callback_told_twice_differently",
        "file_shrinks",
    },
    ("kills", "--kills", "1"): {"accepted_lost", "reward_wrong", "leftovers"},
}
#: Checks that hold however busy the machine is.
STEADY = {"lost_after_kill", "run_twice_after_kill", "callback_told_twice_differently", "file_shrinks"}


@pytest.mark.parametrize("words", RUNS, ids=lambda words: words[0])
def test_a_quick_run_ends_with_one_object_that_has_every_check(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", f"bench.{words[0]}", "--quick", "--json", *words[1:]]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=RUN_S
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert set(report) == {"bench", "machine", "figures", "checks", "notes"} and report["bench"] == words[0]
    checks = {check["name"]: check for check in report["checks"]}
    assert RUNS[words] <= checks.keys(), done.stderr
    assert not [name for name in checks if name.endswith("_ran") or name == "completed"], report["notes"]
    assert all(set(check) == {"name", "value", "limit", "better", "ok"} for check in report["checks"])
    broken = {name for name, check in checks.items() if not check["ok"]}
    if words[0] != "figures":  # whose small batches say little
        assert done.returncode == bool(broken)
    assert not broken & STEADY, report["notes"]
    if words[0] == "kills":
        assert not broken, report["notes"]
