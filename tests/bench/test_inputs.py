"""Inputs: recorded ones if a directory is named, generated ones without, and what was not run is said."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.inputs import PROGRAMS, STEPS, VARIABLE, commands, programs, real_input, told


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of recorded inputs."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def write(path: Path, *lines: dict[str, object]) -> None:
    path.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in lines).encode()))


def test_without_a_directory_inputs_are_generated_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert real_input(PROGRAMS) is None
    assert {each["verdict"] for each in programs()} == {"pass", "fail", "timeout"}
    assert all(len(each) > 1 for each in commands().values())
    assert "not run on recorded" in told(STEPS) and STEPS in told(STEPS)


def test_generated_programs_end_as_their_verdict_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for each in [each for each in programs() if each["verdict"] != "timeout"][:6]:
        done = subprocess.run([sys.executable, "-c", each["program"]], capture_output=True, check=False)
        assert (done.returncode == 0) == (each["verdict"] == "pass"), each


def test_with_a_directory_they_are_the_recorded_ones(named: Path) -> None:
    program: dict[str, object] = {"id": "p", "program": "1", "verdict": "pass"}
    write(named / PROGRAMS, program)
    said = (("a", "ls"), ("b", "pwd"), ("a", "cd"))
    steps: list[dict[str, object]] = [{"run": "x", "traj": name, "command": command} for name, command in said]
    write(named / STEPS, *steps)
    assert programs() == [program]
    assert commands() == {"a-x": ["ls", "cd"], "b-x": ["pwd"]}
    assert told(STEPS) == f"recorded inputs: {STEPS}"


def test_a_directory_that_lacks_an_input_is_refused_by_name(named: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{VARIABLE}={named} holds no {PROGRAMS}"):
        programs()
