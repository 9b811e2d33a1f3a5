"""What is on record of nodes, for the next gateway."""

from __future__ import annotations

from pathlib import Path

from gateway.cluster.records import NodeRecords
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
