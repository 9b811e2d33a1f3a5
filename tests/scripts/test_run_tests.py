"""scripts/run-tests: what fails is run once more, alone, where that is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SCRIPTS

UNSTEADY = """
from pathlib import Path

def test_fails_the_first_time():
    mark = Path(__file__).with_name("ran")
    before, _ = mark.exists(), mark.touch()
    assert before

def test_passes():
    pass
"""
BROKEN = "def test_fails():\n    assert False\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree with the script, this interpreter and no tests yet."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPTS / "run-tests", tmp_path / "scripts")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "scripts" / "run-tests", "-q", "-p", "no:randomly"],
        env={**{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and k != "AGAIN"}, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_a_failure_that_passes_alone_is_named_as_unsteady(checkout: Path) -> None:
    (checkout / "test_unsteady.py").write_text(UNSTEADY)
    done = run(checkout, AGAIN="yes")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "UNSTEADY" in done.stderr
    assert "test_fails_the_first_time" in done.stderr
    assert "test_passes" not in done.stderr


@pytest.mark.slow
def test_a_failure_that_fails_again_fails_the_run(checkout: Path) -> None:
    (checkout / "test_broken.py").write_text(BROKEN)
    done = run(checkout, AGAIN="yes")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "UNSTEADY" not in done.stderr


@pytest.mark.slow
def test_without_being_asked_nothing_is_run_again(checkout: Path) -> None:
    (checkout / "test_unsteady.py").write_text(UNSTEADY)
    assert run(checkout).returncode == 1


@pytest.mark.slow
def test_many_failures_are_not_run_again(checkout: Path) -> None:
    (checkout / "test_broken.py").write_text("".join(BROKEN.replace("fails", f"fails_{n}") for n in range(21)))
    done = run(checkout, AGAIN="yes")
    assert done.returncode == 1
    assert "more than 20" in done.stderr


@pytest.mark.slow
def test_what_has_not_begun_within_its_bound_is_left_out_by_name() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-rs",
            "-p",
            "no:cacheprovider",
            "--begin-within",
            "0",
            "tests/house/test_imports.py",
        ],
        cwd=SCRIPTS.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out: not begun within 0 s" in done.stdout
    assert " passed" not in done.stdout
