"""Snapshots and forks of trajectories on a node: they stay there, whatever is killed, cut or lost in between."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tangram import Client, ConflictError, NotFoundError, Retries, SnapshotLostError
from tangram.errors import CapacityExceededError, TangramError
from tangram.types import SnapshotInfo
from tests import warm
from tests.cluster.conftest import MakeNode, MakeRelay, StartGateway
from tests.cluster.world import DEADLINE_S, ClusterGateway, DaemonProcess
from tests.faults.world import until
from tests.gateway.http.test_snapshots import images

#: A refusal is raised, not waited out.
ONCE = Retries(max_attempts=1)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cluster")]


@pytest.fixture(params=["process", pytest.param("container", marks=pytest.mark.docker)])
def provider(request: pytest.FixtureRequest) -> str:
    """The kind of sandboxes on every machine."""
    if request.param == "container":
        request.getfixturevalue("docker")
    return str(request.param)


@pytest.fixture
def kept(tmp_path: Path) -> Callable[[str], list[str]]:
    """Tells which snapshots a node's disk holds that are wholly taken."""

    def on(name: str) -> list[str]:
        found = []
        for record in (tmp_path / name / "state" / "sandboxes" / "snapshots").glob("*/record.json"):
            with suppress(OSError):  # it goes while one looks
                if json.loads(record.read_bytes())["ready"]:
                    found.append(record.parent.name)
        return sorted(found)

    return on


Kept = Callable[[str], list[str]]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Whatever a test leaves, ``tangram clean`` removes, once all have ended."""
    yield
    states = [str(each) for each in tmp_path.glob("n*/state")]
    warm.run(["clean", "--yes", *states], timeout_s=DEADLINE_S)
    assert not list(tmp_path.glob("n*/state/sandboxes/snapshots/*"))
    assert images(tmp_path) == []


def joined(gateway: ClusterGateway, node: DaemonProcess, through: str = "") -> None:
    node.start(through=through)
    gateway.until_state(node.name, "ready")
    until(lambda: "there" in gateway.has(node.name).able, "the node is able to run it")


def opened(client: Client, name: str = "t") -> None:
    """A trajectory on the node, with a file."""
    trajectory = client.trajectory(name, function="there").open()
    assert trajectory.exec(f"echo {name} > file").result["exit_code"] == 0


def reads(client: Client, name: str, snapshot: str) -> str:
    """Open a trajectory with a snapshot, and return what its file says."""
    with client.trajectory(name, function="there", snapshot=snapshot) as trajectory:
        return str(trajectory.exec("cat file").result["stdout"])


def taken(client: Client, name: str = "t") -> SnapshotInfo:
    return client.trajectory(name, function="there").snapshot()


def known(client: Client) -> list[str]:
    return sorted(each.snapshot for each in client.snapshots())


def test_a_trajectory_on_a_node_is_kept_there_and_its_forks_begin_there(
    start_gateway: StartGateway, make_node: MakeNode, kept: Kept
) -> None:
    gateway = start_gateway()
    joined(gateway, make_node(gateway, "n1"))
    with gateway.client() as client:
        opened(client)
        snapshot = taken(client)
        assert (snapshot.node, snapshot.lost, snapshot.trajectory) == ("n1", None, "t")
        assert kept("n1") == known(client) == [snapshot.snapshot]
        assert client.trajectory("t", function="there").exec("echo later > file").result["exit_code"] == 0
        forks = client.trajectory("t", function="there").fork(["f1", "f2"])
        assert [each.exec("cat file").result["stdout"] for each in forks] == ["later\n"] * 2
        assert {each.node for each in client.trajectories()} == {"n1"}
        client.trajectory("t").close()
        assert reads(client, "again", snapshot.snapshot) == "t\n"
        (forked,) = (each for each in client.snapshots() if each.snapshot != snapshot.snapshot)
        assert forked.in_use and not next(each for each in client.snapshots() if each is not forked).in_use
        with pytest.raises(ConflictError, match="in use by trajectory"):
            client.remove_snapshot(forked.snapshot)
        for each in forks:
            each.close()
        for id in known(client):
            client.remove_snapshot(id)
        assert kept("n1") == known(client) == []
        with pytest.raises(NotFoundError):
            client.trajectory("none", function="there", snapshot=snapshot.snapshot).open()


@pytest.mark.promise(
    "Snapshots on a node outlive daemon and gateway; deleted and unreported ones go when the node joins."
)
def test_a_snapshot_outlives_daemon_and_gateway_and_what_was_deleted_meanwhile_goes(
    start_gateway: StartGateway, make_node: MakeNode, kept: Kept
) -> None:
    gateway = start_gateway()
    node = make_node(gateway, "n1")
    joined(gateway, node)
    with gateway.client() as client:
        opened(client)
        mine, other = taken(client), taken(client)
        node.kill()
        gateway.until_state("n1", "suspect")
        with gateway.client(ONCE) as impatient, pytest.raises(CapacityExceededError, match="not reached"):
            taken(impatient)
        client.remove_snapshot(other.snapshot)
        assert known(client) == [mine.snapshot] and len(kept("n1")) == 2
    gateway.kill_and_start()
    with gateway.client() as client:
        assert known(client) == [mine.snapshot]
        joined(gateway, node)
        until(lambda: kept("n1") == [mine.snapshot], "what was deleted while its node was away is gone")
        assert reads(client, "f", mine.snapshot) == "t\n"
        client.trajectory("t").close()
        client.remove_snapshot(mine.snapshot)
    assert kept("n1") == []


def test_what_a_killed_gateway_was_not_told_of_is_removed_when_its_node_joins_the_next(
    start_gateway: StartGateway, make_node: MakeNode, make_relay: MakeRelay, kept: Kept
) -> None:
    gateway = start_gateway()
    relay = make_relay(gateway)
    joined(gateway, make_node(gateway, "n1"), relay.address)
    listen = gateway.door[0]
    with gateway.client() as client, ThreadPoolExecutor(1) as pool:
        opened(client)
        relay.block("to the gateway")
        taking = pool.submit(taken, client)
        until(lambda: bool(kept("n1")), "the node has it, and nobody has heard of that")
        gateway.kill()
        with pytest.raises(TangramError):
            taking.result(DEADLINE_S)
    relay.cut()
    relay.mend()
    gateway.listen_at(listen)
    gateway.start()
    with gateway.client() as client:
        until(lambda: not kept("n1"), "what nobody knows of is gone")
        assert known(client) == []
        assert taken(client).node == "n1", "the trajectory lives on"
        client.remove_snapshot(*known(client))


@pytest.mark.promise("A snapshot whose node is lost is refused as lost, and nobody waits for it.")
def test_a_snapshot_of_a_lost_node_says_so_and_is_there_again_with_its_node(
    start_gateway: StartGateway, make_node: MakeNode
) -> None:
    gateway = start_gateway(lost_after="6s")
    node = make_node(gateway, "n1")
    joined(gateway, node)
    with gateway.client() as client, ThreadPoolExecutor(1) as pool:
        opened(client)
        snapshot = taken(client).snapshot
        client.trajectory("t").close()
        node.kill()
        gateway.until_state("n1", "suspect")
        waiting = pool.submit(reads, client, "f", snapshot)
        gateway.until_state("n1", "lost")
        with pytest.raises(SnapshotLostError, match="node n1"):
            waiting.result(DEADLINE_S)
        with pytest.raises(SnapshotLostError, match="node n1"):
            reads(client, "g", snapshot)
        (found,) = client.snapshots()
        assert found.lost is not None and "n1" in found.lost
        joined(gateway, node)
        until(lambda: client.snapshots()[0].lost is None, "it is there again")
        assert reads(client, "h", snapshot) == "t\n"
        client.drain_node("n1", "maintenance")
        gateway.until_state("n1", "drained")
        with pytest.raises(SnapshotLostError):
            reads(client, "i", snapshot)
        client.remove_snapshot(snapshot)
        assert known(client) == []
