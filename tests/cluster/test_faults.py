"""Nodes while disks fill, engines die, machines freeze, networks are cut and strangers flood the listener."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.private_docker import PrivateDocker, private_docker
from tests.cluster.conftest import MakeNode, MakeRelay, StartGateway
from tests.cluster.world import TALE, TOLD, ClusterGateway, Direction, begun, document
from tests.faults.world import until
from tests.small_disk import fill, small_disk_at

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]


@pytest.fixture
def mounted() -> Iterator[ExitStack]:
    """What is mounted until the nodes have stopped."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.promise("A node whose disk is full gets no actions, reports why, and serves again by itself.")
def test_a_node_whose_disk_is_full_is_closed_says_why_and_opens_by_itself_once_there_is_room(
    mounted: ExitStack, start_gateway: StartGateway, make_node: MakeNode, tmp_path: Path
) -> None:
    gateway = start_gateway()
    node = make_node(gateway, "n1")
    mounted.enter_context(small_disk_at(tmp_path / "n1" / "state", "8m"))
    node.configure(server={"free_min": "4Mi"})
    node.join()
    assert gateway.ended(gateway.submit("there", "echo made > file", trajectory="idle"))["state"] == "succeeded"
    mine = gateway.submit("there", TALE, trajectory="t")
    begun(gateway, mine)
    filler = fill(tmp_path / "n1" / "state")
    gateway.until_state("n1", "unfit")
    assert "server.free_min" in gateway.has("n1").why
    assert any("n1" in each and "server.free_min" in each for each in gateway.ready()["warnings"]), "/readyz tells it"
    late = [gateway.submit("there", "echo late", trajectory=trajectory) for trajectory in ("fresh", "idle")]
    here = gateway.ended(gateway.submit("again", "echo here"))
    assert (here["state"], here["node"]) == ("succeeded", "local"), "what needs no such node goes on"
    found = gateway.ended(mine)
    assert (found["state"], found["attempt"]) == ("succeeded", 1), "what had begun goes on"
    assert found["result"]["stdout"] == TOLD
    assert {gateway.record(each)["state"] for each in late} == {"queued"}, "nothing begins there"
    assert (gateway.has("n1").state, gateway.has("n1").losses) == ("unfit", 0)
    filler.unlink()
    gateway.until_state("n1", "ready")
    for each in late:
        after = gateway.ended(each)
        assert (after["state"], after["node"], after["result"]["stdout"]) == ("succeeded", "n1", "late\n"), after
    for trajectory, command, told in (
        ("idle", "cat file", "made\n"),
        ("t", "cat runs", "run\n"),
        ("fresh", "echo a", "a\n"),
    ):
        after = gateway.ended(gateway.submit("there", command, trajectory=trajectory))
        assert (after["state"], after["node"], after["result"]["stdout"]) == ("succeeded", "n1", told), after
        assert gateway.said(after["id"]) == told


@pytest.fixture
def engine(docker: str) -> Iterator[PrivateDocker]:
    """An engine of one node alone."""
    if os.geteuid() != 0 and os.environ.get("CI") != "true":
        pytest.skip("only root can start an engine")
    with private_docker(docker) as made:
        yield made


def test_a_dead_engine_is_its_nodes_own_trouble_and_over_once_it_is_back(
    engine: PrivateDocker, start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway()
    ill, well = make_node(gateway, "n1"), make_node(gateway, "n2", core=0)
    ill.environment = engine.environment
    ill.start(labels={"pool": "there"})
    well.start(labels={"pool": "elsewhere"})
    for name in ("n1", "n2"):
        gateway.until_state(name, "ready")
    until(lambda: "there" in gateway.has("n1").able, "the node is able to run it")
    assert gateway.ended(gateway.submit("there", "echo made > file", trajectory="idle"))["state"] == "succeeded"
    mine = gateway.submit("there", TALE, trajectory="t")
    begun(gateway, mine)
    engine.kill()
    gateway.until_state("n1", "unfit")
    why = gateway.has("n1").why
    assert engine.host in why and "systemctl restart docker" in why, "what is wrong, and what mends it"
    assert any("n1" in each and engine.host in each for each in gateway.ready()["warnings"]), "/readyz tells it"
    late = gateway.submit("there", "echo late", trajectory="fresh")
    anywhere = [gateway.ended(gateway.submit("again", "echo a", trajectory=f"new-{n}")) for n in range(3)]
    assert all(each["state"] == "succeeded" and each["node"] != "n1" for each in anywhere), "it draws nothing new"
    found = gateway.ended(mine)
    assert (found["state"], found["attempt"], found["result"]["stdout"]) == ("succeeded", 1, TOLD), "what began goes on"
    idle = gateway.ended(gateway.submit("there", "cat file", trajectory="idle"))
    assert (idle["state"], idle["result"]["stdout"]) == ("succeeded", "made\n"), "a living sandbox needs no engine"
    elsewhere = gateway.ended(gateway.submit("elsewhere", "echo well", trajectory="well"))
    assert (elsewhere["state"], elsewhere["node"]) == ("succeeded", "n2"), "others do not notice"
    assert gateway.record(late)["state"] == "queued", "what can go nowhere else waits"
    states = [(gateway.has(name).state, gateway.has(name).losses) for name in ("n1", "n2")]
    assert states == [("unfit", 0), ("ready", 0)]
    engine.start()
    gateway.until_state("n1", "ready")
    after = gateway.ended(late)
    assert (after["state"], after["node"], after["result"]["stdout"]) == ("succeeded", "n1", "late\n"), after
    assert gateway.ended(gateway.submit("there", "cat file", trajectory="idle"))["result"]["stdout"] == "made\n"


@pytest.fixture
def gateway_there(tmp_path: Path, engine: PrivateDocker) -> Iterator[ClusterGateway]:
    """A gateway whose own machine has the engine that dies."""
    described = document(tmp_path / "gateway" / "state", "container")
    described["sandbox"]["engine_silence"] = "2s"
    made = ClusterGateway(tmp_path / "gateway", described, engine.environment)
    made.start()
    yield made
    made.stop()


def test_the_gateways_own_machine_draws_nothing_new_while_its_engine_is_dead_or_stopped(
    engine: PrivateDocker, gateway_there: ClusterGateway, make_node: MakeNode
) -> None:
    gateway, well = gateway_there, make_node(gateway_there, "n1", core=0)
    well.join(labels={"pool": "elsewhere"})
    until(lambda: gateway.has("local").state == "ready" and "again" in gateway.has("local").able, "it serves")
    homes = {name: gateway.ended(gateway.submit("again", "echo made > file", trajectory=name)) for name in ("a", "b")}
    mine = next((name for name, ended in homes.items() if ended["node"] == "local"), None)
    assert mine is not None, {name: ended["node"] for name, ended in homes.items()}

    def shut_until(back: Callable[[], None]) -> None:
        gateway.until_state("local", "unfit")
        why = gateway.has("local").why
        assert engine.host in why and "systemctl restart docker" in why, "what is wrong, and what mends it"
        assert any(engine.host in each for each in gateway.ready()["warnings"]), "/readyz tells it"
        anywhere = [gateway.ended(gateway.submit("once", "echo a", trajectory=f"new-{n}")) for n in range(3)]
        assert {(each["state"], each["node"]) for each in anywhere} == {("succeeded", "n1")}, "it draws nothing new"
        lives = gateway.ended(gateway.submit("again", "cat file", trajectory=mine))
        assert (lives["state"], lives["result"]["stdout"]) == ("succeeded", "made\n"), "what lives there goes on"
        back()
        gateway.until_state("local", "ready")
        with gateway.client() as client:
            for number in range(3):
                client.end_trajectory(f"new-{number}")

    engine.signal(signal.SIGSTOP)
    shut_until(lambda: engine.signal(signal.SIGCONT))
    engine.kill()
    shut_until(engine.start)
    assert not gateway.ready()["warnings"]
    ends = [gateway.ended(gateway.submit("once", "true", trajectory=f"after-{n}")) for n in range(4)]
    assert {each["state"] for each in ends} == {"succeeded"} and "local" in {each["node"] for each in ends}


def test_a_frozen_node_that_wakes_after_it_was_given_up_ends_all_that_it_has_before_it_serves(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway(lost_after="6s")
    node = make_node(gateway, "n1").join()
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


LINES, CUTS_MIN = 400, 4
#: Ends after some eight seconds.
LONG_TALE = (
    f'i=0; while [ $i -lt {LINES} ]; do i=$((i+1)); echo "line $i"; sleep 0.02; done; echo run >> runs; cat runs'
)
LONG_TOLD = "".join(f"line {number}\n" for number in range(1, LINES + 1)) + "run\n"


def ran_once(gateway: ClusterGateway, invocation_id: str, node: str) -> None:
    """It has ended well, at its first try, where it began, and its log is whole."""
    found = gateway.ended(invocation_id)
    assert (found["state"], found["message"], found["node"], found["attempt"]) == ("succeeded", "", node, 1), found
    assert found["result"]["stdout"] == gateway.said(invocation_id) == LONG_TOLD


def test_a_link_that_is_cut_again_and_again_costs_nothing(
    start_gateway: StartGateway, make_node: MakeNode, make_relay: MakeRelay
) -> None:
    gateway = start_gateway()
    node, relay = make_node(gateway, "n1"), make_relay(gateway)
    node.join(through=relay.address)
    mine = gateway.submit("there", LONG_TALE, trajectory="t")
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
    node.join(through=relay.address)
    mine = gateway.submit("there", LONG_TALE, trajectory="t")
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
    node.join(through=relay.address)
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
    mine = [gateway.submit("there", LONG_TALE, trajectory=name) for name in relays]
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
