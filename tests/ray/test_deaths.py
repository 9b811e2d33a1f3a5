"""What of Ray's may die: keeper, steward, daemon, raylet. A machine's daemon outlives all but itself."""

from __future__ import annotations

import os
import signal

import pytest

from runtimes.node.ray.messages import DaemonStarted, RayNodeDead, StewardReady
from tests.ray.conftest import POOL, RealCluster, until
from tests.ray.test_machines import Keep

pytestmark = pytest.mark.slow


async def test_a_keeper_that_is_killed_finds_its_stewards_again(cluster: RealCluster, keep: Keep) -> None:
    node = cluster.add("keeper")
    async with keep(labels={POOL: "keeper"}) as kept:
        steward, daemon = await kept.served(node)
        os.kill(await kept.keeper_pid(), signal.SIGKILL)
        await kept.keeper_pid(count=2)
        assert (await kept.heard(StewardReady, node, count=2)).pid == steward
        assert kept.daemon(node) == daemon
        await kept.gone(node)


async def test_a_steward_that_is_killed_is_replaced_and_finds_the_daemon(cluster: RealCluster, keep: Keep) -> None:
    node = cluster.add("steward")
    async with keep(labels={POOL: "steward"}) as kept:
        steward, daemon = await kept.served(node)
        os.kill(steward, signal.SIGKILL)
        assert (await kept.heard(StewardReady, node, count=2)).pid != steward
        kept.start(node)
        assert (await kept.heard(DaemonStarted, node, count=2)).daemon == daemon
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
        assert (await kept.heard(RayNodeDead, node)).why
        assert kept.daemon(node) == daemon
