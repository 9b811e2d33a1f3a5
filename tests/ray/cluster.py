"""A Ray cluster on this machine, run by an interpreter that has Ray: commands on standard input, answers on output.

Standard library and Ray only. Each machine is a raylet of its own, with labels and resources that it only claims.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

# Read by what Ray starts; Ray's names are case-sensitive.
HEALTH = {"period_ms": "500", "timeout_ms": "1000", "failure_threshold": "3", "initial_delay_ms": "500"}
os.environ |= {f"RAY_health_check_{name}": value for name, value in HEALTH.items()}
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


class Holder:
    """Somebody else's actor."""

    def there(self) -> bool:
        return True


class Commands:
    """What a test may ask for."""

    def __init__(self) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        self.nodes: dict[str, Any] = {}
        self.holders: dict[str, Any] = {}

    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, cpus: int, gpus: int, labels: dict[str, str]) -> str:
        """Add a machine; its id, by which it is named from now on."""
        node = self.cluster.add_node(num_cpus=cpus, num_gpus=gpus, labels=labels, wait=False)
        self.nodes[node.node_id] = node
        return str(node.node_id)

    def kill(self, name: str, what: str) -> list[int]:
        """kill -9 of one kind of process (``raylet`` of a machine, or ``gcs_server`` of the head)."""
        node = self.cluster.head_node if name == "head" else self.nodes[name]
        pids = [each.process.pid for each in node.all_processes[what]]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return pids

    def remove(self, name: str) -> None:
        """Take a machine away as `ray stop` does."""
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=True)

    def hold(self, name: str, cpus: int) -> bool:
        """Have another job hold CPUs of a machine."""
        if not ray.is_initialized():
            ray.init(address=self.cluster.address, log_to_driver=False)
        place = NodeAffinitySchedulingStrategy(name, soft=False)
        holder = ray.remote(Holder).options(num_cpus=cpus, scheduling_strategy=place).remote()
        self.holders[name] = holder
        return bool(ray.get(holder.there.remote(), timeout=60))

    def let_go(self, name: str) -> None:
        ray.kill(self.holders.pop(name))

    def drain(self, name: str, within_s: int) -> None:
        """Have a machine drained as an autoscaler does, by an instant."""
        gcs = GcsClient(address=self.cluster.address)
        deadline_ms = int((time.time() + within_s) * 1000)
        accepted, why = gcs.drain_node(name, 2, "spot notice", deadline_ms)  # 2: preemption
        assert accepted, why

    def shutdown(self) -> None:
        if ray.is_initialized():
            ray.shutdown()
        self.cluster.shutdown()


def main() -> None:
    commands = Commands()
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    out.write(json.dumps(commands.address()) + "\n")
    for line in sys.stdin:
        name, *given = json.loads(line)
        out.write(json.dumps(getattr(commands, name)(*given)) + "\n")
    commands.shutdown()


if __name__ == "__main__":
    main()
