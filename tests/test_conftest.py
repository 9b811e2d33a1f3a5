"""What the whole tree shares: its order of tests, its groups, and the process that gateways are forked from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.e2e.gateway import GatewayProcess, document

ROOT = Path(__file__).resolve().parents[1]
SHARING = """
import os
from pathlib import Path

import pytest


def ran(what):
    with (Path(__file__).parent / what).open("a") as seen:
        seen.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")

@pytest.fixture(scope="module", params=["a", "b"])
def made(request):
    ran("made-" + request.param)

@pytest.mark.parametrize("number", range(6))
def test_uses_it(made, number):
    pass

@pytest.mark.xdist_group("marked")
@pytest.mark.parametrize("number", range(6))
def test_is_marked(number):
    ran("marked")

@pytest.mark.parametrize("number", range(12))
def test_stands_alone(number):
    pass
"""


@pytest.mark.slow
def test_what_shares_a_modules_fixture_or_a_group_runs_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_sharing.py").write_text(SHARING)
    plugins = ["-p", "no:cacheprovider", "-p", "tests.conftest"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, "-n", "3", "--dist", "loadgroup"],
        cwd=tmp_path,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 passed" in done.stdout
    assert "@" not in done.stdout, "ids are told as ever"
    for once in ("made-a", "made-b"):
        assert len((tmp_path / once).read_text().split()) == 1, "it is made once"
    marked = (tmp_path / "marked").read_text().split()
    assert (len(marked), len(set(marked))) == (6, 1)


def test_it_says_what_the_command_says_and_ends_as_it_does(tmp_path: Path) -> None:
    words, environment = ["validate", str(tmp_path / "tangram.yaml")], os.environ | {"WORD": "none-of-these"}
    (tmp_path / "tangram.yaml").write_text("server: {auth: '${WORD}'}\n")
    with (tmp_path / "out").open("w") as out:
        process = warm.start(words, out, env=environment)
    assert process.stderr is not None
    with process.stderr as lines:
        told = lines.read()
    command = [sys.executable, "-m", "gateway", *words]
    fresh = subprocess.run(command, cwd=warm.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "none-of-these" in told
    assert (process.wait(warm.START_S), (tmp_path / "out").read_text(), told) == (
        fresh.returncode,
        fresh.stdout,
        fresh.stderr,
    )
    with pytest.raises(AssertionError, match="none-of-these"):
        warm.run(words, timeout_s=warm.START_S, env=environment)


@pytest.mark.slow
def test_its_end_is_told_however_it_ends(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, document("process", tmp_path / "state"))
    gateway.start()
    assert gateway.running
    gateway.kill()
    assert (gateway.running, gateway.stop()) == (False, -signal.SIGKILL)
    gateway.start()
    assert gateway.stop(signal.SIGTERM) == 0
