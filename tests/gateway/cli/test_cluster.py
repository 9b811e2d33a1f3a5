"""`tangram cluster check`, with interpreters that say what a test wrote."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.cli.node import RayUnseen, check, look
from manager.errors import InvalidInput

SEEN: dict[str, Any] = {
    "python": "3.12.1",
    "version": "2.60.0",
    "token": True,
    "nodes": [
        {
            "id": "head" * 14,
            "address": "10.0.0.1",
            "head": True,
            "labels": {},
            "total": {"CPU": 8.0, "GPU": 0.0},
            "free": {"CPU": 8.0, "GPU": 0.0},
            "draining_ms": None,
        },
        {
            "id": "abcd" * 14,
            "address": "10.0.0.2",
            "head": False,
            "labels": {"tangram-pool": "a"},
            "total": {"CPU": 64.0, "GPU": 8.0},
            "free": {"CPU": 2.0, "GPU": 8.0},
            "draining_ms": None,
        },
    ],
}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that prints the file beside it, whatever it is asked."""
    made = tmp_path / "python"
    made.write_text(f"#!/bin/sh\ncat {tmp_path}/said; cat {tmp_path}/complaint >&2 2>/dev/null; exit 0\n")
    made.chmod(stat.S_IRWXU)
    (tmp_path / "said").write_text(json.dumps(SEEN))
    return made


def checked(python: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(check, ["--python", str(python), "--json", *options])
    assert done.exit_code in (0, 1), done.output
    return done.exit_code, json.loads(done.stdout)


def test_a_machine_that_has_what_is_asked_would_be_taken(python: Path) -> None:
    status, told = checked(python, "--label", "tangram-pool=*", "--cpus", "2", "--gpus", "8")
    assert status == 0 and told["notes"] == [] and told["ray"] == "2.60.0"
    assert [machine["taken"] for machine in told["machines"]] == ["no", "yes"]


def test_what_others_hold_is_told_before_anybody_waits_for_it(python: Path) -> None:
    status, told = checked(python)
    assert status == 1 and told["notes"] == ["abcdabcdabcd would wait: 64 CPUs asked, 2 free"]


def test_the_head_is_taken_if_it_is_asked_for(python: Path) -> None:
    _, told = checked(python, "--head", "--cpus", "1")
    assert [machine["taken"] for machine in told["machines"]] == ["yes", "yes"]


def test_a_cluster_without_a_token_or_without_such_machines_is_told_of(python: Path) -> None:
    (python.parent / "said").write_text(json.dumps(SEEN | {"token": False}))
    status, told = checked(python, "--label", "tangram-pool=b")
    assert status == 1 and "no machine would be taken" in told["notes"][0] and "no token" in told["notes"][1]


def test_people_get_a_table(python: Path) -> None:
    done = CliRunner().invoke(check, ["--python", str(python)])
    assert "abcdabcdabcd" in done.output and "2 CPUs, 8 GPUs" in done.output and "note: " in done.output


@pytest.mark.parametrize("label", ["pool", "=a", "pool="])
def test_a_label_that_is_none_is_refused(python: Path, label: str) -> None:
    done = CliRunner().invoke(check, ["--python", str(python), "--label", label])
    assert isinstance(done.exception, InvalidInput)


def test_a_cluster_that_cannot_be_seen_is_told_in_rays_words(python: Path) -> None:
    (python.parent / "said").write_text(
        json.dumps({"python": "3.12.1", "why": "ConnectionError: token", "token": False})
    )
    with pytest.raises(RayUnseen, match=r"head:6379, seen by Python 3.12.1: ConnectionError: token"):
        look(str(python), "head:6379", 60.0)


def test_an_interpreter_that_is_none_is_told_of(python: Path, tmp_path: Path) -> None:
    with pytest.raises(RayUnseen, match="cannot be run"):
        look(str(tmp_path / "nowhere"), "auto", 60.0)
    (tmp_path / "said").write_text("Python 3.12.1")
    with pytest.raises(RayUnseen, match="nothing of a cluster"):
        look(str(python), "auto", 60.0)
