"""What is on record of nodes, for the next gateway."""

from __future__ import annotations

from pathlib import Path

from gateway.cluster.store import EPOCH, NodeRecords
from gateway.store.store import Store, StoreSpec
from manager.config import NodeSpec


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
