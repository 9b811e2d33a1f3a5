"""A node whose Docker engine dies draws nothing new and says why; what lives there lives on, others do not notice."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bench.private_docker import PrivateDocker, private_docker
from tests.cluster.conftest import MakeNode, StartGateway
from tests.cluster.world import TALE, TOLD, begun, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]


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
    assert engine.host in why and "systemctl start docker" in why, "what is wrong, and what mends it"
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
