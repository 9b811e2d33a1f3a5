"""`tangram cluster check` on a real cluster."""

from __future__ import annotations

import pytest

from gateway.cli.node import look
from tests.ray.conftest import DEADLINE_S, PYTHON, RealCluster

pytestmark = pytest.mark.slow


def test_a_real_cluster_is_seen_as_it_is(cluster: RealCluster) -> None:
    seen = look(PYTHON, cluster.address, DEADLINE_S)
    (head,) = seen["nodes"]
    assert head["head"] and head["total"]["CPU"] == head["free"]["CPU"] == 1.0 and not seen["token"]
