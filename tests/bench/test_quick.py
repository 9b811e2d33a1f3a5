"""Benches run to their end in the quick form: their JSON, and every check of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import uvloop

from bench import scale
from bench.report import BenchReport
from tests.house.source import ROOT

pytestmark = pytest.mark.slow
#: Less than the tier has left when the last of them begins, so that a run that hangs is named.
RUN_S = 240.0
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
    ("gateway", "--only", "latencies,processor,stream"): {  # its peer would be installed
        "exec_overhead_p50_ms",
        "handler_overhead_p50_ms",
        "grpc_overhead_p50_ms",
        "sync_cpu_over_echo",
        "stream_cpu_over_echo",
        "stream_single_p50_over_http",
        "waiting_call_kib",
    },
    ("durable", "--only", "acceptance,stalls"): {"accepted_per_s", "accept_p99_ms", "loop_stall_p999_ms"},
    ("cluster",): {
        "exec_minus_local_p50_ms",
        "gateway_cpu_over_local",
        "process_cpu_over_inline",
        "process_per_s_over_inline",
    },
    ("sandbox", "--only", "one_command"): {"docker_exec_over_action_p50", "docker_exec_over_runner_p50"},
    ("cancels",): {"left_behind", "lost_answers"},
    ("services",): {
        "http_added_p50_ms",
        "thaw_added_p50_ms",
        "idle_cores",
        "idle_cpu_share",
        "broken_sockets",
        "cores_saved",
        "step_added_p50_ms",
    },
    ("runner",): {"wrong_answers", "runner_deaths", "descriptors_left", "processes_left"},
    ("kills", "--kills", "1"): {"lost", "doubled", "order_broken", "told_wrong", "left_behind"},
}
#: Checks that hold however busy the machine is.
STEADY = {"figures_played", "left_behind", "lost_answers", "idle_cores", "broken_sockets"}
WITH_ENGINE = {"cluster", "sandbox"}


@pytest.mark.parametrize(
    "words", [pytest.param(each, id=each[0], marks=[pytest.mark.docker] * (each[0] in WITH_ENGINE)) for each in RUNS]
)
def test_a_quick_run_ends_with_one_object_that_has_every_check(
    words: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    if words[0] in WITH_ENGINE:
        request.getfixturevalue("docker")
    command = [sys.executable, "-m", f"bench.{words[0]}", "--quick", "--json", *words[1:]]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=RUN_S
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (
        set(report) == {"bench", "command", "date", "machine", "figures", "checks", "notes"}
        and report["bench"] == words[0]
    )
    checks = {check["name"]: check for check in report["checks"]}
    assert RUNS[words] <= checks.keys(), done.stderr
    assert not [name for name in checks if name.endswith("_ran") or name == "completed"], report["notes"]
    assert all(set(check) == {"name", "value", "limit", "better", "ok"} for check in report["checks"])
    broken = {name for name, check in checks.items() if not check["ok"]}
    if words[0] != "paper":  # whose small batches say little
        assert done.returncode == bool(broken)
    assert not broken & STEADY, report["notes"]
    if words[0] in ("kills", "runner"):
        assert not broken, report["notes"]


@pytest.mark.docker
@pytest.mark.usefixtures("docker")
def test_a_batch_is_played_in_real_time_and_in_the_simulator() -> None:
    report = BenchReport("scale")
    uvloop.run(scale.batch(report, 60, 8.0))
    assert [check.value for check in report.checks if check.name == "lost_60"] == [0], report.notes
    found = report.figures["coding_60"]
    assert isinstance(found, dict)
    assert 0 < int(str(found["actions"])) <= 1.1 * int(str(found["actions_simulated"]))
