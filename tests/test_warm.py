"""A command that is forked is the command: its words, its output, its environment and its end are its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.e2e.gateway import GatewayProcess, document


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
