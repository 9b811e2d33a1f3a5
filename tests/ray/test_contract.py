"""The interfaces of Ray's that are no public ones: each is there, and takes and gives what the keeper reads."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.ray.conftest import DEADLINE_S, PYTHON, RealCluster

pytestmark = pytest.mark.slow
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


def test_what_is_private_is_as_the_keeper_reads_it(cluster: RealCluster) -> None:
    words = [PYTHON, "-c", ASKED, cluster.address]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    read = {"NodeID", "Alive", "NodeManagerAddress", "Labels", "Resources", "DeathReasonMessage"}
    assert read <= set(told["node"]), told["version"]
    assert told["draining"] == {} and told["head"] and told["by_value"]
    assert all("CPU" in each for each in told["available"]) and told["available"]
