"""The bench of many machines measures what it says, in a small form: a crowd that joins, a node that is lost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import uvloop

from bench.cluster import channel, fleet, strains
from bench.cluster.__main__ import ROOT
from bench.report import BenchReport

pytestmark = pytest.mark.slow


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


def test_the_peer_says_what_it_lacks() -> None:
    program = ROOT / "bench/cluster/actor_peer.py"
    done = subprocess.run([sys.executable, "-I", str(program), "1", "1"], capture_output=True, text=True, check=False)
    if done.returncode == 0:  # this interpreter has Ray
        assert json.loads(done.stdout)["cpu_us"] > 0
    else:
        assert "No module named 'ray'" in done.stderr
