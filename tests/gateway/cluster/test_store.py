"""What the cluster keeps: nodes, their snapshots, and tickets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.cluster.store import EPOCH, SIGNING_KEY, JoinTickets, NodeRecords, NodeSnapshots, check_name, signing_key
from gateway.store.store import Store, StoreSpec
from manager.config import NodeSpec
from manager.errors import (
    CapacityExceeded,
    Conflict,
    InvalidInput,
    NotFound,
    SnapshotLost,
    StorageUnavailable,
    Unauthorized,
)
from manager.function import Network, SandboxSpec
from runtimes.node.protocol import ChannelError, SnapshotsKept
from runtimes.node.remote import SNAPSHOTS_MAX, RemoteNode
from runtimes.sandbox.snapshots import NodeSnapshotSettings, SnapshotRecord
from tests.virtual_clock import VirtualClock

FIRST, SECOND = "1" * 12, "2" * 12
KEY = b"k" * 32


async def test_the_next_gateway_knows_the_life_of_a_node_since_its_join(tmp_path: Path) -> None:
    """So what never began there begins again after a plain restart."""
    spec = NodeSpec(name="n1", numa=((0,),), memory_bytes=1)
    epochs = []
    for generation in (1, 2, 3):
        store = Store(StoreSpec(path=tmp_path / "db.sqlite"))
        await store.open()
        records = NodeRecords(store)
        await records.open()
        known = records.get("n1")
        epochs.append(None if known is None else known.epoch)
        records.joined(spec, "digest")
        if generation == 1:
            records.compared("n1", "life")
        await records.durable()
        await store.close()
    assert epochs == [None, "life", "life"]


async def epochs(store: Store) -> list[str]:
    return sorted(str(row["name"]) for row in await store.read("document_names", (EPOCH,)))


async def test_of_nodes_that_are_lost_no_more_stay_on_record_than_there_may_be_and_nothing_of_the_others(
    tmp_path: Path,
) -> None:
    """Machines that come and go under ever new names leave nothing behind that grows."""
    clock = 0.0
    store = Store(StoreSpec(path=tmp_path / "db.sqlite"))
    await store.open()
    records = NodeRecords(store, lambda: clock, nodes_max=3)
    await records.open()
    for number in range(10):
        clock = float(number)
        name = f"n{number}"
        records.joined(NodeSpec(name=name, numa=((0,),), memory_bytes=1), "digest")
        records.compared(name, "life")
        if number != 1:
            records.moved(name, "lost")
    await records.durable()
    assert sorted(records.all) == ["n1", "n8", "n9"], "one that is there stays, however old"
    assert await epochs(store) == [EPOCH + name for name in sorted(records.all)]
    store.save_document(EPOCH + "of an older gateway", "life")
    await store.durable()
    after = NodeRecords(store, lambda: clock, nodes_max=2)
    await after.open()
    assert sorted(after.all) == ["n1", "n9"]
    assert await epochs(store) == [EPOCH + "n1", EPOCH + "n9"]
    await store.close()


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


@pytest.mark.promise("A snapshot whose node is lost is refused as lost, and nobody waits for it.")
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


async def test_a_lost_one_is_forgotten_when_it_is_old(store: Store) -> None:
    snapshots, node = await on_record(store)
    says(node, record(FIRST), record(SECOND, used_s=850.0))
    snapshots.lose("n1", "it was silent")
    assert [each.record.id for each in snapshots.all()] == [FIRST]


async def test_no_snapshot_is_asked_of_a_node_that_is_not_reached(store: Store) -> None:
    snapshots, node = await on_record(store)
    with pytest.raises(CapacityExceeded, match="not reached"):
        await snapshots.take(node, "t")


async def test_a_node_that_tells_of_more_snapshots_than_it_may_keep_is_cut() -> None:
    with pytest.raises(ChannelError):
        RemoteNode("n1")._handle(SnapshotsKept([record(FIRST)] * (SNAPSHOTS_MAX + 1)))


def office(hours: VirtualClock, *, key: bytes = KEY, generation: int = 1, used_max: int = 100) -> JoinTickets:
    return JoinTickets(key, generation, 120.0, wall=hours, used_max=used_max)


def test_a_ticket_admits_its_name_once_and_again_if_its_node_was_refused_for_another_reason() -> None:
    made = office(VirtualClock(1000.0))
    ticket = made.issue("n1")
    made.take(ticket, "n1")
    made.give_back(ticket)
    made.take(ticket, "n1")
    with pytest.raises(Unauthorized, match="used already"):
        made.take(ticket, "n1")


def test_a_stolen_ticket_admits_no_other_name() -> None:
    made = office(VirtualClock(1000.0))
    ticket = made.issue("n1")
    with pytest.raises(Unauthorized, match="admits n1, not n2"):
        made.take(ticket, "n2")
    made.take(ticket, "n1")


def test_a_ticket_expires() -> None:
    hours = VirtualClock(1000.0)
    made = office(hours)
    ticket = made.issue("n1")
    hours.now_s += 120.0
    with pytest.raises(Unauthorized, match="expired"):
        made.take(ticket, "n1")


@pytest.mark.parametrize("other", [{"generation": 2}, {"key": b"o" * 32}])
def test_a_ticket_of_another_gateway_or_of_an_earlier_start_is_worth_nothing(other: dict[str, object]) -> None:
    hours = VirtualClock(1000.0)
    ticket = office(hours).issue("n1")
    with pytest.raises(Unauthorized, match="no gateway's"):
        JoinTickets(
            other.get("key", KEY),  # type: ignore[arg-type]  # as the parameters say
            other.get("generation", 1),  # type: ignore[arg-type]
            120.0,
            wall=hours,
        ).take(ticket, "n1")


def test_a_ticket_of_which_one_sign_was_changed_is_refused() -> None:
    made = office(VirtualClock(1000.0))
    ticket = made.issue("n1")
    for place in range(len(ticket)):
        changed = ticket[:place] + ("x" if ticket[place] != "x" else "y") + ticket[place + 1 :]
        with pytest.raises(Unauthorized):
            made.take(changed, "n1")


def test_used_tickets_are_remembered_up_to_a_bound_and_forgotten_when_they_expire() -> None:
    hours = VirtualClock(1000.0)
    made = office(hours, used_max=2)
    for name in ("n1", "n2"):
        made.take(made.issue(name), name)
    with pytest.raises(CapacityExceeded):
        made.take(made.issue("n3"), "n3")
    hours.now_s += 121.0
    made.take(made.issue("n3"), "n3")


@pytest.mark.parametrize("name", ["", "a b", "../x", "n" * 129, "n\n"])
def test_what_is_no_name_gets_no_ticket(name: str) -> None:
    with pytest.raises(InvalidInput):
        check_name(name)


def test_the_signing_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    key = signing_key(tmp_path)
    assert signing_key(tmp_path) == key and len(key) == 32
    assert (tmp_path / SIGNING_KEY).stat().st_mode & 0o777 == 0o600
    (tmp_path / SIGNING_KEY).write_bytes(b"short")
    with pytest.raises(StorageUnavailable, match="remove it"):
        signing_key(tmp_path)
