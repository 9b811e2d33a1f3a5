"""Faults that take their time: `make faults` plays them."""

from __future__ import annotations

import signal

import pytest

from tests.cluster.conftest import MakeNode, StartGateway
from tests.cluster.world import begun, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]


def test_an_idempotent_action_of_a_lost_node_runs_elsewhere_once(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway(lost_after="6s")
    first, second = make_node(gateway, "n1"), make_node(gateway, "n2", core=0)
    first.start()
    gateway.until_state("n1", "ready")
    mine = gateway.submit("there_again", "echo begun; exec sleep 1000")
    begun(gateway, mine)
    first.kill()
    gateway.until_state("n1", "lost")
    until(lambda: gateway.record(mine)["state"] == "queued", "it waits for another node")
    second.start()
    until(lambda: gateway.record(mine)["state"] == "running", "it runs on the other node")
    found = gateway.record(mine)
    assert (found["node"], found["attempt"]) == ("n2", 2), found
    assert [each["reason"] for each in found["attempts"]] == ["node_lost"]
    with gateway.client() as client:
        assert client.cancel(mine).state == "cancelled"


def test_a_frozen_node_that_wakes_after_it_was_given_up_ends_all_that_it_has_before_it_serves(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway(lost_after="6s")
    node = make_node(gateway, "n1")
    node.start()
    gateway.until_state("n1", "ready")
    mine = gateway.submit("there", "echo begun; exec sleep 1000", trajectory="t")
    begun(gateway, mine)
    node.signal(signal.SIGSTOP)
    gateway.until_state("n1", "lost")
    assert gateway.ended(mine)["reason"] == "node_lost"
    node.signal(signal.SIGCONT)
    gateway.until_state("n1", "ready")
    assert "all that it has is ended" in node.log
    found = gateway.node("n1")
    assert found is not None and (found.running, found.trajectories, found.losses) == (0, 0, 1)
    anew = gateway.ended(gateway.submit("there", "ls", trajectory="fresh"))
    assert (anew["state"], anew["result"]["stdout"]) == ("succeeded", ""), anew
