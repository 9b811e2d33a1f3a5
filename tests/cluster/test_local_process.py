"""`cluster.local: process`: this machine serves by a daemon of its own, which outlives the gateway and ends with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.cluster.local_node import DIRECTORY
from runtimes.node.daemon import PID
from tests.cluster.conftest import StartGateway
from tests.cluster.world import TALE, TOLD, ClusterGateway, begun, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]
HERE = "local"


def daemon(gateway: ClusterGateway) -> int:
    """The pid of the living daemon; 0 if there is none."""
    with suppress(OSError, ValueError):
        pid = int((gateway.directory / "state" / DIRECTORY / PID).read_text())
        words = (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")
        if b"join" in words:
            assert b"--ticket" not in words, "every user reads this"
            return pid
    return 0


@pytest.fixture
def gateway(start_gateway: StartGateway) -> Iterator[ClusterGateway]:
    made = start_gateway(local="process")
    made.until_state(HERE, "ready")
    yield made
    made.stop()
    until(lambda: not daemon(made), "the daemon has ended with its gateway")


def ran(gateway: ClusterGateway, invocation_id: str) -> None:
    found = gateway.ended(invocation_id)
    assert (found["state"], found["message"], found["node"], found["attempt"]) == ("succeeded", "", HERE, 1)
    assert found["result"]["stdout"] == gateway.said(invocation_id) == TOLD


def test_a_daemon_that_is_killed_is_started_again_and_what_it_ran_goes_on(gateway: ClusterGateway) -> None:
    mine = gateway.submit("once", TALE, trajectory="t")
    begun(gateway, mine)
    before = daemon(gateway)
    assert before not in (0, gateway.pid)
    os.kill(before, signal.SIGKILL)
    ran(gateway, mine)
    assert daemon(gateway) not in (0, before)


def test_the_gateway_after_one_that_was_killed_replaces_a_daemon_that_looks_for_it_elsewhere(
    gateway: ClusterGateway,
) -> None:
    mine = gateway.submit("once", TALE, trajectory="t")
    begun(gateway, mine)
    before, listen = daemon(gateway), gateway.door[0]
    gateway.kill()
    gateway.start()
    assert gateway.door[0] != listen
    ran(gateway, mine)
    assert daemon(gateway) not in (0, before)


def test_the_end_of_the_gateway_is_the_daemons_and_keeps_what_an_orchestrator_would_have_kept(
    gateway: ClusterGateway,
) -> None:
    gateway.ended(gateway.submit("once", "echo mine > kept", trajectory="t"))
    gateway.stop(signal.SIGTERM)
    assert not daemon(gateway)
    gateway.start()
    assert gateway.ended(gateway.submit("once", "cat kept", trajectory="t"))["result"]["stdout"] == "mine\n"
    gateway.stop(signal.SIGINT)
    assert not daemon(gateway)
    gateway.start()
    lost = gateway.ended(gateway.submit("once", "cat kept", trajectory="t"))
    assert (lost["state"], lost["reason"]) == ("failed", "environment_lost")


def test_a_daemon_that_was_drained_stays_away_until_the_next_start(gateway: ClusterGateway) -> None:
    with gateway.client() as client:
        client.drain_node(HERE)
    until(lambda: not daemon(gateway), "the drained daemon has ended")
    gateway.until_state(HERE, "drained")
    gateway.stop()
    gateway.start()
    gateway.until_state(HERE, "ready")
