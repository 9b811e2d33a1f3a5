"""Networks that are cut, one-way or slow: nothing is lost, nothing runs twice, and no log has a hole."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import MakeNode, MakeRelay, StartGateway
from tests.cluster.relay import Direction
from tests.cluster.world import ClusterGateway, begun, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]
LINES, CUTS_MIN = 400, 4
#: Ends after some eight seconds.
TALE = f'i=0; while [ $i -lt {LINES} ]; do i=$((i+1)); echo "line $i"; sleep 0.02; done; echo run >> runs; cat runs'
TOLD = "".join(f"line {number}\n" for number in range(1, LINES + 1)) + "run\n"


def ran_once(gateway: ClusterGateway, invocation_id: str, node: str) -> None:
    """It has ended well, at its first try, where it began, and its log is whole."""
    found = gateway.ended(invocation_id)
    assert (found["state"], found["message"], found["node"], found["attempt"]) == ("succeeded", "", node, 1), found
    assert found["result"]["stdout"] == gateway.said(invocation_id) == TOLD


def test_a_link_that_is_cut_again_and_again_costs_nothing(
    start_gateway: StartGateway, make_node: MakeNode, make_relay: MakeRelay
) -> None:
    gateway = start_gateway()
    node, relay = make_node(gateway, "n1"), make_relay(gateway)
    node.start(through=relay.address)
    gateway.until_state("n1", "ready")
    mine = gateway.submit("there", TALE, trajectory="t")
    begun(gateway, mine)
    cuts = 0
    while gateway.record(mine)["state"] == "running":
        relay.cut()
        gateway.until_state("n1", "suspect")
        relay.mend()
        gateway.until_state("n1", "ready")
        cuts += 1
    ran_once(gateway, mine, "n1")
    assert cuts >= CUTS_MIN


@pytest.mark.parametrize("direction", ["to the gateway", "to the node"])
def test_a_network_of_one_direction_makes_a_node_suspect_and_costs_nothing_else(
    start_gateway: StartGateway, make_node: MakeNode, make_relay: MakeRelay, direction: Direction
) -> None:
    gateway = start_gateway()
    node, relay = make_node(gateway, "n1"), make_relay(gateway)
    node.start(through=relay.address)
    gateway.until_state("n1", "ready")
    mine = gateway.submit("there", TALE, trajectory="t")
    begun(gateway, mine)
    relay.block(direction)
    gateway.until_state("n1", "suspect")
    later = gateway.submit("there", "cat runs", trajectory="t")
    here = gateway.ended(gateway.submit("again", "echo here"))
    assert (here["state"], here["node"]) == ("succeeded", "local"), "what needs no silent node goes on"
    relay.mend()
    gateway.until_state("n1", "ready")
    ran_once(gateway, mine, "n1")
    assert gateway.ended(later)["result"]["stdout"] == "run\n"


@pytest.mark.parametrize("lost_share", [0.0, 0.01, 0.2])
def test_what_travels_slowly_or_is_lost_on_the_way_arrives_whole(
    start_gateway: StartGateway, make_node: MakeNode, make_relay: MakeRelay, lost_share: float
) -> None:
    gateway = start_gateway()
    node, relay = make_node(gateway, "n1"), make_relay(gateway)
    relay.slow(0.1, lost_share)
    node.start(through=relay.address)
    gateway.until_state("n1", "ready")
    mine = [gateway.submit("there", f"seq {number} 2000", trajectory=f"t{number % 4}") for number in range(16)]
    for number, invocation_id in enumerate(mine):
        found = gateway.ended(invocation_id)
        expected = "".join(f"{each}\n" for each in range(number, 2001))
        assert (found["state"], found["attempt"], found["result"]["stdout"]) == ("succeeded", 1, expected)
    assert (gateway.has("n1").state, gateway.has("n1").losses) == ("ready", 0)
    assert relay.lost > 0 or lost_share < 0.2


def test_silence_of_all_nodes_at_once_is_the_gateways_own_and_no_verdict_falls(
    start_gateway: StartGateway, make_node: MakeNode, make_relay: MakeRelay
) -> None:
    gateway = start_gateway(lost_after="4s")
    relays = {name: make_relay(gateway) for name in ("n0", "n1")}
    for core, (name, relay) in enumerate(relays.items()):
        make_node(gateway, name, core=core).start(through=relay.address)
    for name in relays:
        gateway.until_state(name, "ready")
    mine = [gateway.submit("there", TALE, trajectory=name) for name in relays]
    for each in mine:
        begun(gateway, each)
    on = {gateway.record(each)["node"]: each for each in mine}
    assert on.keys() == relays.keys()
    for relay in relays.values():
        relay.cut()
    until(lambda: "none is counted lost" in " ".join(gateway.ready()["warnings"]), "the storm is told")
    held = [each.node for each in gateway.nodes() if each.state == "suspect"]
    assert held, "one may be lost within a minute; of more it is first of all our own network"
    for name in held:
        relays[name].mend()
        gateway.until_state(name, "ready")
        ran_once(gateway, on[name], name)
