"""A gateway with `cluster.ray` on a real cluster: machines join, may lose their raylet, and are given back."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.cluster.world import ClusterGateway, document
from tests.e2e.gateway import ROOT
from tests.faults.world import until
from tests.ray.conftest import POOL, PYTHON, RealCluster

pytestmark = [pytest.mark.slow, pytest.mark.docker]
OURS = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "gateway"]


def daemon(place: Path, node: str) -> int:
    """The pid of a node's daemon; 0 if none lives."""
    with suppress(OSError, ValueError):
        pid = int((place / node / "pid").read_text())
        if node in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    return 0


def serves(gateway: ClusterGateway, node: str) -> bool:
    """Whether a machine's actor is known, and its node is there."""
    with gateway.client() as client:
        return node in [each.node for each in client.ray_machines() if each.state == "serving"]


def ran_on(gateway: ClusterGateway, trajectory: str) -> str:
    found = gateway.ended(gateway.submit("once", "echo done", trajectory=trajectory))
    assert (found["state"], found["result"]["stdout"]) == ("succeeded", "done\n"), found
    return str(found["node"])


@pytest.mark.usefixtures("docker")
def test_machines_of_a_real_cluster_serve_a_gateway_and_are_given_back(cluster: RealCluster, tmp_path: Path) -> None:
    machines = [cluster.add("gateway"), cluster.add("gateway")]
    names = [f"ray-{each[:12]}" for each in machines]
    place = tmp_path / "nodes"
    place.mkdir()
    cluster.places.append(place)  # daemons of a machine without its raylet end with the cluster
    sandbox = {"provider": "container", "image": "tangram-base:bookworm", "memory": "128Mi"}
    (place / "node.yaml").write_text(yaml.safe_dump({"sandbox": sandbox, "node": {"memory": "1Gi"}}))
    ray = {
        "address": cluster.address,
        "python": PYTHON,
        "labels": {POOL: "gateway"},
        "name": "ray-{id}",
        "state_dir": str(place / "{name}"),
        "command": OURS,
        "join": ["--config", str(place / "node.yaml")],
        "at_end": "release",
    }
    gateway = ClusterGateway(tmp_path / "gateway", document(tmp_path / "state", "container", local="none", ray=ray))
    gateway.start()
    try:
        for name in names:
            gateway.until_state(name, "ready")
        assert {ran_on(gateway, f"t{number}") for number in range(4)} == set(names)
        before = [daemon(place, name) for name in names]
        cluster.ask("kill", machines[0], "raylet")
        listen = gateway.door[0]
        gateway.kill()
        gateway.listen_at(listen)
        gateway.start()
        until(lambda: serves(gateway, names[1]), "the actor is found again")
        assert [daemon(place, name) for name in names] == before, "they outlive raylet and gateway"
        assert ran_on(gateway, "u") in names
        with gateway.client() as client:
            for trajectory in client.trajectories():
                client.end_trajectory(trajectory.trajectory)
        gateway.stop()
        assert not daemon(place, names[1])
        assert cluster.ask("hold", machines[1], 2), "another job may have what was reserved"
        cluster.ask("let_go", machines[1])
    finally:
        gateway.stop()
