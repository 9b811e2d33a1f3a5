"""The world of the fault tests, and a gateway in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.private_docker import PrivateDocker, private_docker
from tests.e2e.gateway import GatewayProcess
from tests.faults.world import Deeds, faulty


@pytest.fixture
def deeds() -> Iterator[Deeds]:
    with Deeds() as serving:
        yield serving


@pytest.fixture
def gateway(tmp_path: Path, deeds: Deeds) -> Iterator[GatewayProcess]:
    """A gateway that serves; the test may kill and start it as it likes."""
    made = faulty(tmp_path, deeds)
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="session")
def private_engine(docker: str) -> Iterator[PrivateDocker]:
    """An engine that may be killed; skipped where none can be had, but failed where ``CI=true``."""
    if os.geteuid() != 0 and os.environ.get("CI") != "true":
        pytest.skip("only root can start an engine")
    with private_docker(docker) as made:
        yield made


@pytest.fixture
def engine(private_engine: PrivateDocker) -> Iterator[PrivateDocker]:
    """The engine that may be killed, alive at first and as at first."""
    private_engine.revive()
    yield private_engine
    private_engine.revive()
    if names := private_engine.containers():
        private_engine.docker("rm", "--force", *names)
