"""The head dies: by itself in its module, as its cluster is of no use afterwards."""

from __future__ import annotations

import os

import pytest

from tests.ray.conftest import POOL, RealCluster, alive, until
from tests.ray.test_machines import Keep

pytestmark = pytest.mark.slow


async def test_a_head_that_is_killed_costs_a_warning_and_neither_gateway_nor_daemon(
    cluster: RealCluster, keep: Keep
) -> None:
    node = cluster.add("head")
    async with keep(labels={POOL: "head"}) as kept:
        _, daemon = await kept.served(node)
        await until(lambda: kept.driver.warning() is None)
        cluster.ask("kill", "head", "gcs_server")
        await until(lambda: kept.driver.warning() is not None)
        assert "unreachable" in str(kept.driver.warning())
        assert kept.daemon(node) == daemon and alive(os.getpid())
