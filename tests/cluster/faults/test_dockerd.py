"""A node whose Docker engine dies draws nothing new and says why; what lives there lives on, others do not notice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.private_docker import PrivateDocker, private_docker
from tests.cluster.conftest import MakeNode, StartGateway
from tests.cluster.world import TALE, TOLD, ClusterGateway, begun, document, until

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
    well.start(labels={"pool": "elsewhere"})
    gateway.until_state("n1", "ready")
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
