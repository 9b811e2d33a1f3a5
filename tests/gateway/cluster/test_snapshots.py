"""What is on record of snapshots on nodes, and what becomes of it as nodes say what they have, and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from gateway.cluster.store import NodeSnapshots
from gateway.store.store import Store, StoreSpec
from manager.errors import CapacityExceeded, Conflict, NotFound, SnapshotLost
from manager.function import Network, SandboxSpec
from runtimes.node.protocol import HEADER, ChannelError, SnapshotsKept, decode, encode
from runtimes.node.remote import SNAPSHOTS_MAX, RemoteNode
from runtimes.sandbox.snapshots import NodeSnapshotSettings, SnapshotRecord

FIRST, SECOND = "1" * 12, "2" * 12
SPEC = SandboxSpec(image="any", env={"TASK": "7"}, network=Network.NONE, chosen=True)


def record(id: str, used_s: float = 1000.0) -> SnapshotRecord:
    return SnapshotRecord(
        id=id,
        trajectory="t",
        task="task",
        provider="process",
        spec=SPEC,
        made_s=900.0,
        used_s=used_s,
        size_bytes=10,
        ready=True,
    )


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store(StoreSpec(path=tmp_path / "db.sqlite"))
    await store.open()
    yield store
    await store.close()


async def reopened(store: Store, **bounds: int) -> NodeSnapshots:
    """What a gateway knows that starts now."""
    await store.durable()
    found = NodeSnapshots(store, NodeSnapshotSettings(**bounds), age_s=100.0, wall=lambda: 1000.0)
    await found.open(["n1", "n2"])
    return found


def says(node: RemoteNode, *kept: SnapshotRecord) -> None:
    """The node says which it keeps, as a frame from it does."""
    node._handle(SnapshotsKept(list(kept)))


async def on_record(store: Store) -> tuple[NodeSnapshots, RemoteNode]:
    """Two snapshots of a node, on record."""
    snapshots, node = await reopened(store), RemoteNode("n1")
    snapshots.watch(node)
    for id in (FIRST, SECOND):
        snapshots.adopt("n1", record(id))
    return snapshots, node


async def test_the_next_gateway_knows_what_nodes_have_and_what_is_lost(store: Store) -> None:
    snapshots, _ = await on_record(store)
    snapshots.lose("n1", "it was silent")
    again = await reopened(store)
    assert {each.record.id: each.node for each in again.all()} == {FIRST: "n1", SECOND: "n1"}
    assert again.all()[0].record == record(FIRST), "whole, as it travelled"
    with pytest.raises(SnapshotLost, match="node n1: it was silent"):
        again.get(FIRST)
    node = RemoteNode("n1")
    again.watch(node)
    says(node, record(FIRST))
    assert again.get(FIRST).node == "n1", "it is back with its node"
    with pytest.raises(SnapshotLost):
        again.get(SECOND)
    await again.remove(SECOND)
    assert [each.record.id for each in (await reopened(store)).all()] == [FIRST]


async def test_what_a_node_has_removed_for_room_is_no_more_and_its_use_is_known(store: Store) -> None:
    snapshots, node = await on_record(store)
    says(node, record(SECOND, used_s=1050.0))
    with pytest.raises(NotFound):
        snapshots.get(FIRST)
    assert snapshots.get(SECOND).record.used_s == 1050.0


async def test_what_a_node_claims_to_have_of_another_stays_the_others(store: Store) -> None:
    snapshots, _ = await on_record(store)
    other = RemoteNode("n2")
    snapshots.watch(other)
    says(other, record(FIRST))
    assert snapshots.get(FIRST).node == "n1"
    says(other)
    assert snapshots.get(FIRST).node == "n1"


async def test_what_begins_with_a_snapshot_ends_when_that_is_lost_and_nothing_removes_it_meanwhile(
    store: Store,
) -> None:
    snapshots, _ = await on_record(store)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    working = asyncio.create_task(snapshots.begin(FIRST, work))
    await begun.wait()
    with pytest.raises(Conflict, match="in use by a sandbox"):
        await snapshots.remove(FIRST)
    snapshots.lose("n1", "it was silent")
    with pytest.raises(SnapshotLost, match="it was silent"):
        await working
    assert ended.is_set() and snapshots.used() == {}
    await snapshots.remove(FIRST)


async def test_what_begins_and_fails_or_ends_says_so_itself(store: Store) -> None:
    snapshots, _ = await on_record(store)

    async def fails() -> None:
        raise Conflict("it lives", component="test")

    async def ends() -> str:
        return "done"

    with pytest.raises(Conflict, match="it lives"):
        await snapshots.begin(FIRST, fails)
    assert await snapshots.begin(FIRST, ends) == "done"
    with pytest.raises(NotFound):
        await snapshots.begin("3" * 12, ends)
    assert snapshots.used() == {}


async def test_a_lost_one_is_forgotten_when_it_is_old(store: Store) -> None:
    snapshots, node = await on_record(store)
    says(node, record(FIRST), record(SECOND, used_s=850.0))
    snapshots.lose("n1", "it was silent")
    assert [each.record.id for each in snapshots.all()] == [FIRST]


async def test_no_snapshot_is_asked_of_a_node_that_is_not_reached(store: Store) -> None:
    snapshots, node = await on_record(store)
    with pytest.raises(CapacityExceeded, match="not reached"):
        await snapshots.take(node, "t")


def test_a_node_that_says_nonsense_is_cut() -> None:
    frame = encode(SnapshotsKept([]))
    kind = HEADER.unpack_from(frame)[1]
    nonsense: tuple[object, ...] = ("", {}, [{"id": 1}], b"\xff")
    for records in nonsense:
        with pytest.raises(ChannelError):
            decode(kind, msgspec.msgpack.encode([records]))
    assert decode(kind, frame[HEADER.size :]) == SnapshotsKept([])


async def test_a_node_that_tells_of_more_snapshots_than_it_may_keep_is_cut() -> None:
    with pytest.raises(ChannelError):
        RemoteNode("n1")._handle(SnapshotsKept([record(FIRST)] * (SNAPSHOTS_MAX + 1)))
