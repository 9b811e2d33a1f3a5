"""One gateway for a module of end-to-end tests, on local processes and on containers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tangram import Client
from tests.e2e.gateway import GatewayProcess, document


@pytest.fixture(scope="module", params=["process", "container"])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A serving gateway; the container ones need Docker (see the root conftest)."""
    kind = str(request.param)
    directory: Path = tmp_path_factory.mktemp(f"e2e-{kind}")
    described = document(kind, directory / "state")
    if kind == "container":
        request.getfixturevalue("docker")
    process = GatewayProcess(directory, described, fresh=True)
    process.start()
    yield process
    assert process.stop() == 0, "\n".join(process.log[-30:])


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[Client]:
    with Client(gateway.url) as opened:
        yield opened
