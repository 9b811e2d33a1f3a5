"""The verbs simulate and trace, as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli.simulate import simulate
from gateway.cli.trace import read_trace, write_trace
from manager.errors import InvalidInput
from manager.simulation.workloads import PRESETS

LINE = {
    "id": "t1",
    "task": "coding",
    "arrival_s": 1.5,
    "memory_bytes": 1024,
    "steps": [
        {"think_s": 6, "function": "shell", "cost": {"cpu": 1}, "t_ori_s": 0.3},
        {
            "think_s": 1,
            "function": "unit_tests",
            "cost": {"cpu": {"min": 1, "max": 32}, "search": 1},
            "key": "cpu",
            "t_ori_s": 80.0,
            "serial_fraction": 0.05,
        },
        {
            "think_s": 1,
            "function": "judge",
            "cost": {"gpu": {"choices": [1, 2, 4]}},
            "key": "gpu",
            "t_ori_s": 2.0,
            "efficiency": {"1": 1.0, "2": 0.9},
            "service": "judge",
            "batch_tokens": 700,
            "size": 512,
        },
    ],
}
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


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_survives_its_trace(preset: str) -> None:
    trajectories = list(PRESETS[preset](12, 3).trajectories)
    assert read_trace(write_trace(trajectories)) == trajectories


def test_the_documented_line_is_read() -> None:
    (trajectory,) = read_trace(["", json.dumps(LINE)])
    assert (trajectory.id, trajectory.arrival_s, trajectory.memory_bytes) == ("t1", 1.5, 1024)
    shell, tests, judge = trajectory.steps
    assert shell.key is None and not shell.malleable
    assert (
        tests.malleable and tests.elasticity is not None and tests.elasticity.efficiency(2) == pytest.approx(1 / 1.05)
    )
    assert judge.service == "judge" and not judge.malleable and judge.cost["gpu"].choices == (1, 2, 4)
    assert (tests.batch_tokens, judge.batch_tokens) == (0, 700)
    assert (tests.size, judge.size) == (None, 512.0)
    assert read_trace(write_trace([trajectory])) == [trajectory]


@pytest.mark.parametrize(
    ("change", "story"),
    [
        ({"steps": [{"function": "f", "cost": {"cpu": 0}, "t_ori_s": 1}]}, "at `$.steps[0].cost["),
        ({"steps": [{"function": "f", "cost": {"cpu": 1}}]}, "t_ori_s"),
        ({"steps": [{"function": "f", "cost": {"cpu": 1}, "t_ori_s": 1, "key": "gpu"}]}, "'gpu' is not in cost"),
        ({"steps": [{"function": "f", "cost": {"cpu": 1}, "t_ori_s": 1, "thinks": 1}]}, "unknown field `thinks`"),
        ({"arrival_s": -1}, "arrival_s"),
        ({"id": 7}, "at `$.id`"),
        ({"steps": 3}, "at `$.steps`"),
    ],
)
def test_a_wrong_line_names_its_place(change: dict[str, object], story: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_trace([json.dumps({**LINE, **change})])
    assert story in caught.value.message and "line 1" in caught.value.message


def test_what_is_no_json_and_what_comes_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="line 2: "):
        read_trace([json.dumps(LINE), "{"])
    with pytest.raises(InvalidInput, match="twice"):
        read_trace([json.dumps(LINE), json.dumps(LINE)])
