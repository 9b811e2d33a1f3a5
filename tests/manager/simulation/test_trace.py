"""Traces are read as they were written, and a wrong one says where."""

from __future__ import annotations

import json

import pytest

from manager.errors import InvalidInput
from manager.simulation.workloads import PRESETS, read_trace, write_trace

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
        ({"steps": [{"function": "f", "cost": {"cpu": 0}, "t_ori_s": 1}]}, "line 1: steps[0]: cost: cpu"),
        ({"steps": [{"function": "f", "cost": {"cpu": 1}}]}, "t_ori_s"),
        ({"steps": [{"function": "f", "cost": {"cpu": 1}, "t_ori_s": 1, "key": "gpu"}]}, "'gpu' is not in cost"),
        ({"steps": [{"function": "f", "cost": {"cpu": 1}, "t_ori_s": 1, "thinks": 1}]}, "thinks: unknown"),
        ({"arrival_s": -1}, "arrival_s"),
        ({"id": 7}, "id: a text"),
        ({"steps": 3}, "steps: a list"),
    ],
)
def test_a_wrong_line_names_its_place(change: dict[str, object], story: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_trace([json.dumps({**LINE, **change})])
    assert story in caught.value.message and "line 1" in caught.value.message


def test_what_is_no_json_and_what_comes_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="line 2: not JSON"):
        read_trace([json.dumps(LINE), "{"])
    with pytest.raises(InvalidInput, match="twice"):
        read_trace([json.dumps(LINE), json.dumps(LINE)])
