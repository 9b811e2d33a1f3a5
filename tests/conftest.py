"""Fixtures of the whole tree: the Docker engine of this machine, and one that is as good as on another."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.remote_engine import RemoteEngine

SCRIPTS = Path(__file__).parent.parent / "scripts"
BASE_IMAGE = "tangram-base:bookworm"
#: Seconds for the engine's start and for the base image, the first time made from a Debian mirror.
ENGINE_S, IMAGE_S = 90, 600


@pytest.fixture(scope="session")
def docker() -> str:
    """A Docker engine with the base image, started and made if that can be; returns the image's name.

    Without one the test is skipped with the reason, but fails where ``CI=true``.
    """
    for script, seconds in (("docker-up", ENGINE_S), ("base-image", IMAGE_S)):
        complaint = _run(SCRIPTS / script, seconds)
        if complaint:
            if os.environ.get("CI") == "true":
                pytest.fail(f"{script}: {complaint}")
            pytest.skip(f"no Docker engine with a base image: {complaint}")
    return BASE_IMAGE


#: For parameters that stand for containers on the remote engine: one process of pytest-xdist has it.
REMOTE = pytest.param("remote", marks=[pytest.mark.docker, pytest.mark.xdist_group("remote-engine")])


@pytest.fixture(scope="session")
def remote_engine(docker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteEngine]:
    """A second engine, reached over TCP, that shares neither files nor process ids with us; skipped or failed alike."""
    engine = RemoteEngine(tmp_path_factory.mktemp("remote-engine") / "log")
    try:
        engine.start(docker)
    except (RuntimeError, subprocess.SubprocessError) as error:
        engine.stop()
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    yield engine
    engine.stop()


def _run(script: Path, seconds: float) -> str:
    """Run a script, one process of pytest-xdist at a time; its complaint, or nothing."""
    with (Path(tempfile.gettempdir()) / f"tangram-{script.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            done = subprocess.run([script], capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return f"not done after {seconds} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["failed"])[-1]
