"""The world of the fault tests, and a gateway in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.gateway import GatewayProcess
from tests.faults.world import Deeds, faulty


@pytest.fixture
def deeds() -> Iterator[Deeds]:
    with Deeds().serving() as serving:
        yield serving


@pytest.fixture
def gateway(tmp_path: Path, deeds: Deeds) -> Iterator[GatewayProcess]:
    """A gateway that serves; the test may kill and start it as it likes."""
    made = faulty(tmp_path, deeds)
    made.start()
    yield made
    made.stop()
