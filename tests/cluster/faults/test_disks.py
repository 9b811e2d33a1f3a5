"""A node whose disk is full: it is closed and says why, what began goes on, and it serves again once there is room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.conftest import MakeNode, StartGateway
from tests.cluster.world import TALE, TOLD, begun
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
    node.start()
    gateway.until_state("n1", "ready")
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
