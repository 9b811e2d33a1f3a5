"""Machines of a real cluster: which are taken, what is held there, and what a daemon gets to know of Ray."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeAlias

import pytest

from runtimes.node.ray.messages import (
    DaemonReleased,
    RayNodeAlive,
    RayNodeDraining,
    ReservationWaiting,
    StewardReady,
)
from tests.ray.conftest import POOL, KeptCluster, RealCluster

pytestmark = pytest.mark.slow
Keep: TypeAlias = Callable[..., AbstractAsyncContextManager[KeptCluster]]


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


async def test_machines_are_taken_by_label_and_their_devices_told(cluster: RealCluster, keep: Keep) -> None:
    other, ours = cluster.add("others"), cluster.add("ours", gpus=2)
    async with keep(labels={POOL: "ours"}, reserve_cpus=1.0, reserve_gpus=1.0) as kept:
        assert (await kept.heard(RayNodeAlive, ours)).labels[POOL] == "ours"
        (device,) = (await kept.heard(StewardReady, ours)).gpu_ids
        await kept.served(ours)
        assert {message.node for message in kept.said if isinstance(message, RayNodeAlive)} == {ours}
        environment = environment_of(kept.daemon(ours))
        assert not [each for each in environment if each.startswith(b"RAY_")]
        assert {b"OWN=yes", f"CUDA_VISIBLE_DEVICES={device}".encode()} <= set(environment)
        kept.keeper.release(ours, kill=True)
        assert (await kept.heard(DaemonReleased, ours)).gone and not kept.daemon(ours)
    for node in (other, ours):
        cluster.ask("remove", node)


async def test_a_reservation_that_waits_says_what_is_free(cluster: RealCluster, keep: Keep) -> None:
    node = cluster.add("held", cpus=3)
    cluster.ask("hold", node, 2)
    async with keep(labels={POOL: "held"}, waiting_s=2.0) as kept:
        waiting = await kept.heard(ReservationWaiting, node)
        assert waiting.cpus == 3.0 and "3 CPUs asked, 1 free" in waiting.text()
        cluster.ask("let_go", node)
        await kept.heard(StewardReady, node)
        await kept.gone(node)


async def test_a_drain_is_told_with_its_deadline_and_its_daemon_lives(cluster: RealCluster, keep: Keep) -> None:
    node = cluster.add("drained")
    async with keep(labels={POOL: "drained"}) as kept:
        _, daemon = await kept.served(node)
        cluster.ask("drain", node, 600)
        assert (await kept.heard(RayNodeDraining, node)).deadline_ms > 0
        assert kept.daemon(node) == daemon
        await kept.gone(node)
