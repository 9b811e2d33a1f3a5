"""Strangers at the nodes' door, thousands at once: nodes join and serve meanwhile, and nothing of it is left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.conftest import MakeNode, StartGateway
from tests.cluster.world import ClusterGateway, begun, until
from tests.e2e.gateway import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]
#: Less where the machine allows a process fewer descriptors.
STRANGERS, STRANGERS_MIN = 10_000, 500
#: Places of strangers, and descriptors of the gateway that come and go besides (HTTP, cut connections that linger).
HANDSHAKES_MAX, OTHERS = 64, 160
STOP_S = 60.0


@contextmanager
def flooded(gateway: ClusterGateway) -> Iterator[int]:
    """Strangers dial, and dial again; yield how many have, once each did."""
    host, _, port = gateway.door[0].rpartition(":")
    words = [sys.executable, "-m", "bench.cluster.flood", host, port, str(STRANGERS)]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flood:
        assert flood.stdin is not None and flood.stdout is not None
        try:
            yield int(json.loads(flood.stdout.readline())["dialled"])
            flood.stdin.close()
            assert json.loads(flood.stdout.readline())["dialled"] > 0
            assert flood.wait(STOP_S) == 0
        finally:
            flood.kill()


def descriptors(gateway: ClusterGateway) -> int:
    return len(list(Path(f"/proc/{gateway.pid}/fd").iterdir()))


def test_nodes_join_and_serve_beside_ten_thousand_strangers_and_every_descriptor_is_given_back(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway(handshakes_max=HANDSHAKES_MAX, handshake="5s")
    first, second = make_node(gateway, "n1"), make_node(gateway, "n2", core=0)
    first.start()
    gateway.until_state("n1", "ready")
    mine = gateway.submit("there", "echo begun; exec sleep 1000")
    begun(gateway, mine)
    before = descriptors(gateway)
    with flooded(gateway) as dialled:
        assert dialled >= STRANGERS_MIN
        print(f"{dialled} strangers")
        assert descriptors(gateway) <= before + HANDSHAKES_MAX + OTHERS
        second.start()
        gateway.until_state("n2", "ready")
        there = gateway.ended(gateway.submit("there", "echo served"))
        assert (there["state"], there["node"], there["result"]["stdout"]) == ("succeeded", "n2", "served\n")
        assert descriptors(gateway) <= before + HANDSHAKES_MAX + OTHERS
        found = gateway.has("n1")
        assert (found.state, found.running) == ("ready", 1), "who was there before has not noticed"
    until(lambda: descriptors(gateway) <= before + 16, "every descriptor is given back")
    with gateway.client() as client:
        assert client.cancel(mine).state == "cancelled"
