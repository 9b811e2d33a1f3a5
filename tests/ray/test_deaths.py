"""What of Ray's may die: driver, actor, daemon, raylet. A machine's daemon outlives all but itself."""

from __future__ import annotations

import os
import signal

import pytest

from tests.ray.conftest import POOL, RealCluster, until
from tests.ray.test_machines import Keep

pytestmark = pytest.mark.slow


async def test_a_driver_that_is_killed_finds_its_actors_again(cluster: RealCluster, keep: Keep) -> None:
    node = cluster.add("driver")
    async with keep(labels={POOL: "driver"}) as kept:
        actor, daemon = await kept.served(node)
        os.kill(await kept.driver_pid(), signal.SIGKILL)
        await kept.driver_pid(count=2)
        assert (await kept.heard("actor", node, count=2)).pid == actor
        assert kept.daemon(node) == daemon
        await kept.gone(node)


async def test_a_actor_that_is_killed_is_replaced_and_finds_the_daemon(cluster: RealCluster, keep: Keep) -> None:
    node = cluster.add("actor")
    async with keep(labels={POOL: "actor"}) as kept:
        actor, daemon = await kept.served(node)
        os.kill(actor, signal.SIGKILL)
        assert (await kept.heard("actor", node, count=2)).pid != actor
        kept.start(node)
        assert (await kept.heard("started", node, count=2)).daemon == daemon
        await kept.gone(node)


async def test_a_daemon_that_is_killed_is_started_again(cluster: RealCluster, keep: Keep) -> None:
    node = cluster.add("daemon")
    async with keep(labels={POOL: "daemon"}) as kept:
        _, daemon = await kept.served(node)
        os.kill(daemon, signal.SIGKILL)
        await until(lambda: kept.daemon(node) not in (0, daemon))
        await kept.gone(node)


async def test_a_raylet_that_is_killed_is_told_and_its_daemon_lives(cluster: RealCluster, keep: Keep) -> None:
    node = cluster.add("raylet")
    async with keep(labels={POOL: "raylet"}) as kept:
        _, daemon = await kept.served(node)
        cluster.ask("kill", node, "raylet")
        assert (await kept.heard("dead", node)).why
        assert kept.daemon(node) == daemon
