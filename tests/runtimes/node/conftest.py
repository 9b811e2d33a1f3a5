"""What the tests of the channel share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.runtimes.node.memory_stream import close_all


@pytest.fixture(autouse=True)
async def links_are_closed() -> AsyncIterator[None]:
    """Close what a test leaves open."""
    yield
    await close_all()
