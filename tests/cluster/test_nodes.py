"""Nodes with real daemons: they join, are killed, lost, frozen and drained, and what was promised is kept."""

from __future__ import annotations

import signal

import pytest

from gateway.cli.node import homeless
from tangram.errors import TangramError
from tests.cluster.conftest import MakeNode, StartGateway
from tests.cluster.world import TALE, TOLD, ClusterGateway, begun

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]


def succeeded(gateway: ClusterGateway, invocation_id: str, stdout: str) -> dict[str, object]:
    found = gateway.ended(invocation_id)
    assert (found["state"], found["message"]) == ("succeeded", ""), found
    assert found["result"]["stdout"] == gateway.said(invocation_id) == stdout
    return found


def test_a_daemon_is_killed_in_the_middle_and_what_it_ran_goes_on_with_its_whole_log(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway()
    node = make_node(gateway, "n1")
    node.environment = {"RAY_AUTH_TOKEN": "secret"}
    node.join()
    assert "RAY_" not in gateway.ended(gateway.submit("there", "env", trajectory="t"))["result"]["stdout"]
    mine = gateway.submit("there", TALE, trajectory="t")
    begun(gateway, mine)
    node.kill()
    gateway.until_state("n1", "suspect")
    later = gateway.submit("there", "cat runs", trajectory="t")
    node.start()
    found = succeeded(gateway, mine, TOLD)
    assert (found["node"], found["attempt"]) == ("n1", 1)
    succeeded(gateway, later, "run\n")
    tests = "def test_good():\n    assert True\n\ndef test_bad():\n    assert False\n"
    with gateway.client() as client:
        client.trajectory("t").upload("test_it.py", tests.encode())
        rewarded = client.invoke("suite_there", {"targets": ["test_it.py"]}, trajectory="t").raise_for_failure()
    assert rewarded.result["reward"] == 0.5, rewarded


def test_a_gateway_is_killed_in_the_middle_and_the_next_one_finds_all_that_runs_on_its_nodes(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway()
    make_node(gateway, "n1").join()
    mine = gateway.submit("there", TALE, trajectory="t")
    behind = gateway.submit("there", "cat runs; echo behind >> runs", trajectory="t")
    begun(gateway, mine)
    gateway.kill_and_start()
    with gateway.client() as client:
        assert client.get(mine).state == "running", "it is known to run, whether its node is back or not"
        here = client.invoke("again", {"command": "echo here"})
        assert (here.state, here.result["stdout"]) == ("succeeded", "here\n")
    found = succeeded(gateway, mine, TOLD)
    assert (found["node"], found["attempt"]) == ("n1", 1)
    succeeded(gateway, behind, "run\n")
    succeeded(gateway, gateway.submit("there", "cat runs", trajectory="t"), "run\nbehind\n")


def test_what_a_lost_node_ran_is_told_or_runs_elsewhere_once_and_its_trajectories_hear_of_it(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway(lost_after="6s")
    node = make_node(gateway, "n1").join(labels={"pool": "there", "kind": "big"})
    for name in ("idle", "later"):
        made = gateway.submit("there", "echo made > file", trajectory=name)
        assert gateway.ended(made)["state"] == "succeeded"
    once = gateway.submit("there", "echo begun; exec sleep 1000", trajectory="t")
    begun(gateway, once)
    node.kill()
    gateway.until_state("n1", "lost")
    assert [each for each in gateway.ready()["warnings"] if "lost" in each and "n1 (1)" in each], (
        "/readyz names it still"
    )
    assert 'tangram_node_up{node="n1"} 0.0' in gateway.metrics()
    found = gateway.ended(once)
    assert (found["state"], found["reason"]) == ("lost", "node_lost"), found
    told = gateway.ended(gateway.submit("once", "cat file", trajectory="idle"))
    assert told["reason"] == "environment_lost", told
    anew = gateway.ended(gateway.submit("once", "cat file || echo empty", trajectory="idle"))
    assert (anew["node"], anew["result"]["stdout"]) == ("local", "empty\n"), anew
    gateway.stop(signal.SIGTERM)
    gateway.start()
    with gateway.client() as client:
        assert [each.trajectory for each in client.trajectories()] == ["idle"], "what was lost holds nothing here"
    still = gateway.ended(gateway.submit("once", "cat file", trajectory="idle"))
    assert (still["state"], still["result"]["exit_code"]) == ("succeeded", 1), still
    told = gateway.ended(gateway.submit("once", "cat file", trajectory="later"))
    assert told["reason"] == "environment_lost", "whichever gateway it is"
    anew = gateway.ended(gateway.submit("once", "cat file || echo empty", trajectory="later"))
    assert (anew["node"], anew["result"]["stdout"]) == ("local", "empty\n"), anew


def test_a_draining_node_takes_nothing_new_ends_what_it_has_and_leaves(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway()
    node = make_node(gateway, "n1").join()
    mine = gateway.submit("there", TALE)
    begun(gateway, mine)
    with gateway.client() as client:
        assert client.drain_node("n1", "maintenance").state == "draining"
    late = gateway.submit("there", "echo late")
    succeeded(gateway, mine, TOLD)
    gateway.until_state("n1", "drained")
    assert node.wait() == 0
    assert gateway.record(late)["state"] == "queued"
    assert 'tangram_node_up{node="n1"}' not in gateway.metrics(), "it is no machine that is down"
    with gateway.client() as client:
        (line,) = [each for each in homeless(client.functions(), client.nodes()) if each.startswith("there ")]
    assert "no machine has the labels pool=there" in line
    with gateway.client() as client, pytest.raises(TangramError, match="no node"):
        client.drain_node("n1")
