"""A real Ray cluster: machines, drains, and the deaths of drivers, actors, daemons, raylets and the head."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.ray.conftest import DEADLINE_S, POOL, PYTHON, KeptCluster, RealCluster, alive, until

pytestmark = pytest.mark.slow


Keep: TypeAlias = Callable[..., AbstractAsyncContextManager[KeptCluster]]
ASKED = """
import json, sys, ray
from ray._raylet import GcsClient
from ray._private.state import available_resources_per_node
ray.init(address=sys.argv[1], namespace="tangram", log_to_driver=False, configure_logging=False)
node = ray.nodes()[0]
gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
print(json.dumps({
    "version": ray.__version__,
    "node": sorted(node),
    "draining": dict(gcs.get_draining_nodes(timeout=5)),
    "available": [sorted(each) for each in available_resources_per_node().values()],
    "head": "node:__internal_head__" in node["Resources"],
    "by_value": callable(ray.cloudpickle.register_pickle_by_value),
}))
"""


def environment_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


async def test_machines_are_taken_by_label_and_their_devices_told(cluster: RealCluster, keep: Keep) -> None:
    other, ours = cluster.add("others"), cluster.add("ours", gpus=2)
    async with keep(labels={POOL: "ours"}, reserve_cpus=1.0, reserve_gpus=1.0) as kept:
        assert (await kept.heard("alive", ours)).labels[POOL] == "ours"
        (device,) = (await kept.heard("actor", ours)).gpu_ids
        await kept.served(ours)
        assert {message.node for message in kept.said if message.kind == "alive"} == {ours}
        environment = environment_of(kept.daemon(ours))
        assert not [each for each in environment if each.startswith(b"RAY_")]
        assert {b"OWN=yes", f"CUDA_VISIBLE_DEVICES={device}".encode()} <= set(environment)
        kept.driver.release(ours, kill=True)
        assert (await kept.heard("released", ours)).gone and not kept.daemon(ours)
    for node in (other, ours):
        cluster.ask("remove", node)


async def test_a_reservation_that_waits_says_what_is_free(cluster: RealCluster, keep: Keep) -> None:
    node = cluster.add("held", cpus=3)
    cluster.ask("hold", node, 2)
    async with keep(labels={POOL: "held"}, waiting_s=2.0) as kept:
        waiting = await kept.heard("waiting", node)
        assert waiting.cpus == 3.0 and "3 CPUs asked, 1 free" in waiting.reservation()
        cluster.ask("let_go", node)
        await kept.heard("actor", node)
        await kept.gone(node)


async def test_a_drain_is_told_with_its_deadline_and_its_daemon_lives(cluster: RealCluster, keep: Keep) -> None:
    node = cluster.add("drained")
    async with keep(labels={POOL: "drained"}) as kept:
        _, daemon = await kept.served(node)
        cluster.ask("drain", node, 600)
        await kept.heard("draining", node)
        assert kept.daemon(node) == daemon
        await kept.gone(node)


def test_what_is_private_is_as_the_driver_reads_it(cluster: RealCluster) -> None:
    words = [PYTHON, "-c", ASKED, cluster.address]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    read = {"NodeID", "Alive", "NodeManagerAddress", "Labels", "Resources", "DeathReasonMessage"}
    assert read <= set(told["node"]), told["version"]
    assert told["draining"] == {} and told["head"] and told["by_value"]
    assert all("CPU" in each for each in told["available"]) and told["available"]


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
