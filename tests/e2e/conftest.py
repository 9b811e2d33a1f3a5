"""One gateway for a module of end-to-end tests, on containers and on local processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.client import Client
from tests.e2e.gateway import GatewayProcess, document


@pytest.fixture(scope="module", params=["process", "container"])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A serving gateway; the container one needs Docker (see the root conftest)."""
    provider = str(request.param)
    if provider == "container":
        request.getfixturevalue("docker")
    directory: Path = tmp_path_factory.mktemp(f"e2e-{provider}")
    process = GatewayProcess(directory, document(provider, directory / "state"))
    process.start()
    yield process
    assert process.stop() == 0, "\n".join(process.log[-30:])


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[Client]:
    with Client(gateway.url) as opened:
        yield opened
