"""What the tests of the channel share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from runtimes.node import daemon
from tests.runtimes.node.memory_stream import close_all


@pytest.fixture(autouse=True)
def logs_travel_at_once_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "LOG_WAIT_S", 0.0)
    monkeypatch.setattr(daemon, "LOG_PIECE_BYTES", 64)


@pytest.fixture(autouse=True)
async def links_are_closed() -> AsyncIterator[None]:
    """Close what a test leaves open."""
    yield
    await close_all()
