"""The trajectories that real sandboxes play."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench import rollouts
from bench.inputs import VARIABLE


def test_without_a_recording_they_are_drawn_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    made = rollouts.rollouts(5, 3, 0.25, 2.0)
    assert made == rollouts.rollouts(5, 3, 0.25, 2.0)
    assert [len(rollout.turns) for rollout in made] == [3] * 5
    assert all(0.6 <= rollout.reward_s <= 8.0 for rollout in made)
    assert all(shell_s <= rollouts.SHELL_MAX_S for rollout in made for _, shell_s in rollout.turns)


def test_a_recording_gives_think_and_shell_seconds_by_trajectory(tmp_path: Path) -> None:
    steps = [("a", 0.0, 1.0), ("b", 0.0, 2.0), ("a", 5.0, 5.5), ("b", 3.0, 3.25), ("a", 7.5, 8.0)]
    lines = [json.dumps({"run": "x", "traj": name, "t_llm_end": end, "t_obs": seen}) for name, end, seen in steps]
    path = tmp_path / "steps.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert list(rollouts.recorded(path)) == [[(4.0, 0.5), (2.0, 0.5)], [(1.0, 0.25)]]


def test_only_xdist_is_left_of_the_plugins_of_this_machine() -> None:
    options = list(rollouts.unplugged())
    assert options[::2] == ["-p"] * (len(options) // 2)
    assert "no:xdist" not in options and "no:asyncio" in options
