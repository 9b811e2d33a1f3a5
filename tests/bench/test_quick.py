"""Benches run to their end in the quick form: their JSON, and what they measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import uvloop

from bench import scale
from bench.cluster import channel, fleet, strains
from bench.report import BenchReport
from tests.house.source import ROOT

pytestmark = pytest.mark.slow
RUN_S = 400.0
#: Bench and its options -> the checks that come of it.
RUNS: dict[tuple[str, ...], set[str]] = {
    ("scheduler",): {
        "step_p50_over_json",
        "step_p99_over_json",
        "step_100k_over_1536",
        "end_1000_nodes_p50_ms",
        "end_1000_over_10_nodes",
        "end_50k_over_10k_queued",
        "burst_1536_over_json",
        "burst_16000_over_json",
        "new_trajectory_over_json",
    },
    ("paper",): {"figures_played", "wall_s"},
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
    ("cancels",): {"left_behind", "lost_answers"},
    ("kills", "--kills", "1"): {"accepted_lost", "reward_wrong", "leftovers"},
}
#: Checks that hold however busy the machine is.
STEADY = {
    "figures_played",
    "left_behind",
    "lost_answers",
    "lost_after_kill",
    "run_twice_after_kill",
    "callback_told_twice_differently",
    "file_shrinks",
}


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
    if words[0] != "paper":  # whose small batches say little
        assert done.returncode == bool(broken)
    assert not broken & STEADY, report["notes"]
    if words[0] == "kills":
        assert not broken, report["notes"]


def values(report: BenchReport) -> dict[str, float]:
    return {check.name: check.value for check in report.checks}


def test_no_ops_go_by_both_ways_and_lines_and_frames_arrive() -> None:
    report = BenchReport("cluster")
    cpu_us = uvloop.run(channel.no_ops(report, 40))
    uvloop.run(channel.frames(report, 0.2))
    found = values(report)
    assert set(found) == {"channel_minus_local_p50_ms", "log_line_cpu_us", "channel_frames_per_s"}
    assert cpu_us > 0 and found["channel_frames_per_s"] > 0
    noop = report.figures["noop"]
    assert isinstance(noop, dict) and noop["n"] == 40


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_a_crowd_joins_a_real_gateway_and_idempotent_actions_outlive_a_node() -> None:
    report = BenchReport("cluster")
    uvloop.run(fleet.crowd(report, 40, 0.5))
    uvloop.run(fleet.losses(report, 100))
    found = values(report)
    assert {"join_40_s", "beats_40_core_share", "first_lease_after_join_ms"} < set(found)
    assert found["node_loss_lost_idempotent"] == 0
    loss = report.figures["node_loss"]
    assert isinstance(loss, dict) and loss["succeeded"] == 100 and int(str(loss["run_elsewhere"])) > 0


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_a_batch_is_played_in_real_time_and_in_the_simulator() -> None:
    report = BenchReport("scale")
    uvloop.run(scale.batch(report, 60, 8.0))
    assert values(report)["lost_60"] == 0, report.notes
    found = report.figures["coding_60"]
    assert isinstance(found, dict)
    assert 0 < int(str(found["actions"])) <= 1.1 * int(str(found["actions_simulated"]))


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_strains_are_measured_beside_the_same_without_them() -> None:
    report = BenchReport("cluster")
    uvloop.run(strains.frozen(report, 1))
    uvloop.run(strains.strangers(report, 50, 0.2))
    uvloop.run(strains.deaf(report))
    uvloop.run(strains.files(report, 50))
    found = values(report)
    assert found["frozen_node_noticed_s"] > 1.0, "it beat before"
    assert found["strangers_loop_lag_ms"] > 0 < found["deaf_node_loop_lag_ms"]
    deaf, files = report.figures["deaf_node"], report.figures["files"]
    assert isinstance(deaf, dict) and "unread" in str(deaf["why"])
    assert isinstance(files, dict) and int(str(files["loud_n"])) > 0 < found["file_slowdown_p99"]
