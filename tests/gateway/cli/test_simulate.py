"""The verbs simulate and trace, as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli.simulate import simulate

SMALL = ["--batch", "12", "--seed", "3", "--nodes", "1", "--cores", "32", "--gpus", "8"]


def test_simulate_compares_policies_and_writes_the_trace_that_it_played(tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    first = CliRunner().invoke(
        simulate, [*SMALL, "--workload", "mixed", "--policy", "adaptive", "--policy", "k8s", "--export-trace", str(out)]
    )
    assert first.exit_code == 0, first.output
    assert "adaptive" in first.output and "k8s" in first.output
    assert len({json.loads(line)["id"] for line in out.read_text().splitlines()}) == 12


@pytest.mark.slow
def test_a_trace_is_played_again_with_another_size(tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    CliRunner().invoke(simulate, [*SMALL, "--export-trace", str(out), "--policy", "price"])
    again = CliRunner().invoke(
        simulate, ["--workload", str(out), "--cores", "16", "--nodes", "1", "--policy", "price", "--bound", "--json"]
    )
    assert again.exit_code == 0, again.output
    value = json.loads(again.output)
    assert value["trajectories"] == 12 and value["policies"][0]["over_bound"] >= 1.0


def test_a_gateways_own_configuration_bounds_what_is_played(tmp_path: Path) -> None:
    config = tmp_path / "tangram.yaml"
    config.write_text("resources:\n  search: {kind: quota, limit: 1, period: 10s}\n")
    played = {}
    for name, options in {"free": [], "configured": ["--config", str(config)]}.items():
        arguments = [*SMALL, "--workload", "deepsearch", "--policy", "price", "--json", *options]
        done = CliRunner().invoke(simulate, arguments)
        assert done.exit_code == 0, done.output
        played[name] = json.loads(done.output)["policies"][0]
    assert played["configured"]["act_s"] > 2 * played["free"]["act_s"]


def test_a_configuration_without_sizes_brings_its_machine(tmp_path: Path) -> None:
    config = tmp_path / "tangram.yaml"
    config.write_text("node:\n  cpu: {cores: '0'}\n")
    done = CliRunner().invoke(
        simulate, ["--batch", "4", "--config", str(config), "--policy", "price", "--policy", "paper", "--find", "cores"]
    )
    assert done.exit_code == 1 and "--target-act" in done.output
    done = CliRunner().invoke(simulate, ["--batch", "4", "--config", str(config), "--policy", "price", "--json"])
    assert done.exit_code == 0, done.output


def test_mistakes_are_told_and_not_traced(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for command, arguments in [
        (simulate, ["--workload", "coding"]),
        (simulate, [*SMALL, "--policy", "best"]),
        (simulate, [*SMALL, "--find", "cores"]),
        (simulate, [*SMALL, "--workload", str(broken)]),
    ]:
        done = CliRunner().invoke(command, arguments)
        assert done.exit_code == 1 and done.output.startswith("Error:"), done.output
