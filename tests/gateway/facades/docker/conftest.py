"""A door of Docker's over process sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.facades.docker.world import EngineWorld, engine_world


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[EngineWorld]:
    async with engine_world(tmp_path) as world:
        yield world
