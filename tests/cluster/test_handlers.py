"""Handlers on nodes with real daemons: a gateway that only schedules, and code that travels."""

from __future__ import annotations

from typing import Any

import pytest

from tangram import Client, handler
from tangram.types import ConfigDiff
from tests.cluster.conftest import MakeNode, StartGateway
from tests.cluster.world import DEADLINE_S, ClusterGateway, DaemonProcess, begun
from tests.faults.world import HTTP, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]


@handler(cost={"cpu": 1}, timeout="5m", queue_timeout="5m")
def judge(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """Return what was said, and what is known of the call."""
    import time

    print("begun", flush=True)
    context.log("judging", seconds=event.get("seconds", 0))
    time.sleep(event.get("seconds", 0))
    told = {
        "task": context.task,
        "trajectory": context.trajectory,
        "attempt": context.attempt,
        "id": context.invocation_id,
    }
    return {"score": len(event["text"]), **told}


def other_judge(event: dict[str, Any], context: Any) -> dict[str, Any]:
    return {"score": -1}


@handler(cost={"cpu": 1}, queue_timeout="5m")
def flaky(event: dict[str, Any], context: Any) -> int:
    """Fail twice."""
    if context.attempt < 3:
        raise RuntimeError("not yet")
    attempt: int = context.attempt
    return attempt


@pytest.fixture
def gateway(start_gateway: StartGateway) -> ClusterGateway:
    """A gateway that only schedules."""
    return start_gateway(local="none")


@pytest.fixture
def node(gateway: ClusterGateway, make_node: MakeNode) -> DaemonProcess:
    """Its one node, which serves."""
    return make_node(gateway, "n1").join()


def registered(client: Client, **definition: Any) -> ConfigDiff:
    return client.register(judge, **definition)


def test_a_decorated_function_runs_on_a_node_and_after_a_change_its_new_code_does(
    gateway: ClusterGateway, node: DaemonProcess
) -> None:
    with gateway.client() as client:
        registered(client)
        first = client.invoke("judge", {"text": "four"}, task="rl", trajectory="t").raise_for_failure()
        assert (gateway.record(first.id)["node"], first.result) == (
            "n1",
            {"score": 4, "task": "rl", "trajectory": "t", "attempt": 1, "id": first.id},
        )
        lines = [(line.stream, line.text) for line in client.logs(first.id)]
        assert ("stdout", "begun\n") in lines
        assert any(stream == "log" and '"judging"' in text for stream, text in lines)
        client.register(other_judge, "judge", cost={"cpu": 1})
        assert client.invoke("judge", {"text": "four"}).raise_for_failure().result == {"score": -1}


@pytest.mark.promise("A handler on a daemon that is killed is not begun again unless it is idempotent.")
def test_a_handler_that_ran_on_a_killed_daemon_is_lost_once_and_an_idempotent_one_runs_again(
    gateway: ClusterGateway, node: DaemonProcess
) -> None:
    with gateway.client() as client:
        registered(client)
        registered(client, name="judge_again", idempotent=True)
        once = client.submit("judge", {"text": "once", "seconds": 5}).id
        begun(gateway, once)
        node.kill()
        again = client.submit("judge_again", {"text": "again"}).id
        node.start()
        lost, found = gateway.ended(once), gateway.ended(again)
        assert (lost["state"], lost["reason"]) == ("lost", "node_lost"), lost
        assert found["state"] == "succeeded", found
        twice = client.submit("judge_again", {"text": "twice", "seconds": 5}).id
        begun(gateway, twice)
        node.kill()
        node.start()
        found = gateway.ended(twice)
        assert (found["state"], found["node"]) == ("succeeded", "n1"), found


@pytest.mark.promise("A handler on a node outlives a killed gateway, and its log is whole.")
def test_a_handler_outlives_its_gateway_and_the_next_one_hears_its_end_and_its_whole_log(
    gateway: ClusterGateway, node: DaemonProcess
) -> None:
    with gateway.client() as client:
        registered(client)
        mine = client.submit("judge", {"text": "four", "seconds": 10}).id
        begun(gateway, mine)
    (kept,) = node.handlers()
    gateway.kill_and_start()
    found = gateway.ended(mine)
    assert (found["state"], found["node"], found["attempt"]) == ("succeeded", "n1", 1), found
    assert gateway.said(mine) == "begun\n"
    with gateway.client() as client:
        assert client.invoke("judge", {"text": "four"}).raise_for_failure().result["score"] == 4
    assert node.handlers() == [kept], "it was not sent again"


def test_a_node_forgets_every_try_of_a_call_once_its_end_is_on_record(
    gateway: ClusterGateway, node: DaemonProcess
) -> None:
    with gateway.client() as client:
        client.register(flaky, retry={"max_attempts": 3, "backoff": "10ms", "on": ["handler_error"]})
        found = client.invoke("flaky", {}).raise_for_failure()
        assert (found.result, found.attempt) == (3, 3)
    path = f"{gateway.url}/v1/functions"
    for name, given in (("there", {"command": "true"}), ("flaky", {})):  # without a key: nothing of it is durable
        assert HTTP.post(f"{path}/{name}/invocations", json=given, timeout=DEADLINE_S).json()["state"] == "succeeded"
    until(lambda: node.attempts() == [], "the node has forgotten them")
