"""Chunks, residency, replicas, and the pool of all devices."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.action import Chunk
from manager.config import NodeSpec, ServiceSpec
from manager.resources.cores import REUSE_S, Demand, Replica
from manager.resources.devices import Chunks, GpuPool
from manager.resources.pools import PoolRequest

SERVICES = {
    name: ServiceSpec(
        name=name,
        bytes_by_dop={1: size, 2: size // 2, 4: size // 4},
        restore_s_by_dop={1: 1.0, 2: 0.5, 4: 0.25},
    )
    for name, size in (("a", 60), ("b", 60), ("c", 40))
}


def pool(*devices: int) -> GpuPool:
    nodes = [
        NodeSpec(name=f"n{index}", numa=(), memory_bytes=0, devices=count, device_bytes=100)
        for index, count in enumerate(devices)
    ]
    return GpuPool(nodes, SERVICES)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from((1, 2, 4, 8))), max_size=40), st.integers(1, 13))
def test_chunks_split_and_merge_back_to_what_they_were(moves: list[tuple[int, int]], count: int) -> None:
    chunks = Chunks()
    chunks.add_region(0, count)
    whole = chunks.free
    held: dict[int, Chunk] = {}
    for holder, size in moves:
        if holder in held:
            chunks.release(held.pop(holder))
        else:
            host = min(
                (chunk for chunk in chunks.free if chunk.size >= size), key=lambda chunk: chunk.size, default=None
            )
            if host is not None:
                held[holder] = Chunk(host.start, size)
                chunks.allocate(held[holder])
        chunks.check(held.values())
    for chunk in held.values():
        chunks.release(chunk)
    assert chunks.free == whole


def test_the_smallest_chunk_that_fits_is_split() -> None:
    gpus = pool(8, 2)
    assert gpus.acquire("x", PoolRequest(units=1, service="a"), 0.0).pool == "gpu:n1"


def test_a_resident_service_is_found_and_needs_no_restore() -> None:
    gpus = pool(4)
    first = gpus.acquire("x", PoolRequest(units=1, service="a"), 0.0)
    gpus.acquire("y", PoolRequest(units=1, service="b"), 0.0)
    gpus.release("x", 1.0)
    gpus.release("y", 1.0)
    again = gpus.acquire("z", PoolRequest(units=1, service="a"), 2.0)
    assert (first.restore, again.restore, again.chunk) == (True, False, first.chunk)


def test_the_least_recently_used_service_is_evicted_and_others_stay() -> None:
    gpus = pool(1)
    for holder, service in (("x", "a"), ("y", "c"), ("z", "a")):
        gpus.acquire(holder, PoolRequest(units=1, service=service), 0.0)
        gpus.release(holder, 0.0)
    grant = gpus.acquire("w", PoolRequest(units=1, service="b"), 1.0)
    assert (grant.restore, grant.evict) == (True, ("c", "a")), "60 bytes need the room of both"
    gpus.check()


def test_several_services_share_a_device_while_they_fit() -> None:
    gpus = pool(1)
    for holder, service in (("x", "a"), ("y", "c")):
        assert gpus.acquire(holder, PoolRequest(units=1, service=service), 0.0).evict == ()
        gpus.release(holder, 0.0)
    assert not gpus.acquire("z", PoolRequest(units=1, service="a"), 0.0).restore


def test_what_a_node_reports_is_believed() -> None:
    gpus = pool(2)
    gpus.acquire("x", PoolRequest(units=1, service="a"), 0.0)
    gpus.release("x", 0.0)
    gpus.report("n0", {"b": [Chunk(1, 1)]})
    assert gpus.chunk_view(0.0).resident == {"b": ((1, 1),)}


def test_what_was_reported_of_a_chunk_in_use_is_believed_once_it_is_free() -> None:
    gpus = pool(2)
    gpus.acquire("x", PoolRequest(units=1, service="a"), 0.0)
    gpus.report("n0", {})
    gpus.release("x", 1.0)
    assert gpus.chunk_view(0.0).resident == {}, "its process was lost under it"


def test_what_was_reported_before_a_chunk_was_taken_is_old_news_when_it_is_free() -> None:
    gpus = pool(2)
    gpus.acquire("x", PoolRequest(units=1, service="c"), 0.0)
    (replica,) = gpus.replicate(0.0)
    gpus.report("n0", {"c": [Chunk(0, 1)]})
    gpus.acquire("y", PoolRequest(units=1, service="b", chunk=Chunk(1, 1)), 1.0)
    gpus.replicated(replica, True)
    gpus.release("y", 2.0)
    assert "b" in gpus.chunk_view(0.0).resident


def test_a_copy_that_reaches_further_than_the_news_is_believed_when_all_of_it_is_free() -> None:
    gpus = pool(2)
    for holder, device in (("x", 0), ("y", 1)):
        gpus.acquire(holder, PoolRequest(units=1, service="c", chunk=Chunk(device, 1)), 0.0)
    gpus.report("n0", {"a": [Chunk(0, 2)]})
    gpus.release("x", 1.0)
    assert "a" not in gpus.chunk_view(0.0).resident
    gpus.release("y", 1.0)
    assert gpus.chunk_view(0.0).resident == {"a": ((0, 2),)}


def test_no_chunk_crosses_a_node_and_its_grant_counts_devices_there() -> None:
    gpus = pool(2, 4)
    grant = gpus.acquire("x", PoolRequest(units=4, service="a"), 0.0)
    assert (grant.pool, grant.chunk) == ("gpu:n1", (0, 4))
    assert not gpus.accepts(PoolRequest(units=4, service="a"))
    gpus.check()


def test_a_copy_that_reaches_a_busy_device_gives_way_to_what_is_reported_beside_it() -> None:
    gpus = pool(2)
    gpus.acquire("x", PoolRequest(units=2, service="a"), 0.0)
    gpus.release("x", 0.0)
    gpus.acquire("y", PoolRequest(units=1, service="c", chunk=Chunk(1, 1)), 0.0)
    gpus.report("n0", {"b": [Chunk(0, 1)], "c": [Chunk(0, 1)]})
    gpus.check()
    assert gpus.acquire("z", PoolRequest(units=1, service="b", chunk=Chunk(0, 1)), 0.0).restore is False


def test_a_service_that_grew_takes_the_place_of_the_least_recently_used() -> None:
    gpus = pool(1)
    for holder, service in (("x", "b"), ("y", "c")):
        gpus.acquire(holder, PoolRequest(units=1, service=service), 0.0)
        gpus.release(holder, 1.0)
    gpus.learn({"c": ServiceSpec(name="c", bytes_by_dop={1: 70}, restore_s_by_dop={1: 1.0})})
    gpus.check()
    assert set(gpus.chunk_view(0.0).resident) == {"c"}
    gpus.learn({"new": ServiceSpec(name="new", bytes_by_dop={1: 50}, restore_s_by_dop={1: 1.0})})
    assert gpus.acquire("z", PoolRequest(units=1, service="new"), 2.0).evict == ("c",)


def test_what_a_restore_would_evict_is_told_beforehand() -> None:
    gpus = pool(2)
    for holder, service, chunk in (("x", "a", Chunk(0, 1)), ("y", "c", Chunk(0, 1)), ("z", "c", Chunk(1, 1))):
        gpus.acquire(holder, PoolRequest(units=1, service=service, chunk=chunk), 1.0)
        gpus.release(holder, 1.0)
    view = gpus.chunk_view(1.0)
    assert (view.evicts("b", Chunk(0, 1)), view.evicts("b", Chunk(1, 1))) == ([("a", 1)], [])
    assert gpus.acquire("w", PoolRequest(units=1, service="b", chunk=Chunk(0, 1)), 1.0).evict == ("a",)


def test_uses_are_counted_by_service_and_fade() -> None:
    gpus = pool(2)
    for holder, service in (("x", "a"), ("y", "a"), ("z", "c")):
        gpus.acquire(holder, PoolRequest(units=1, service=service), 1.0)
        gpus.release(holder, 1.0)
    now, later = gpus.chunk_view(1.0), gpus.chunk_view(31.0)
    assert (now.recent("a"), now.recent("c"), now.recent("b")) == (2.0, 1.0, 0.0)
    assert later.recent("a") < 0.01


def service(name: str, size: int, *, replicable: bool = True) -> ServiceSpec:
    return ServiceSpec(
        name=name, bytes_by_dop={1: size, 2: size // 2}, restore_s_by_dop={1: 1.0, 2: 0.5}, replicable=replicable
    )


REPLICATED = (service("b", 40), service("c", 40), service("server", 10, replicable=False))

#: The first device of a node.
FIRST = Chunk(0, 1)


def replica_pool(devices: Iterable[int] = (2,), services: Iterable[ServiceSpec] = REPLICATED) -> GpuPool:
    nodes = [
        NodeSpec(name=f"n{index}", numa=(), memory_bytes=0, devices=count, device_bytes=100)
        for index, count in enumerate(devices)
    ]
    return GpuPool(nodes, {one.name: one for one in services})


def run(gpus: GpuPool, holder: str, name: str, chunk: Chunk = FIRST, now_s: float = 0.0) -> bool:
    """Begin an action; whether its service was in place."""
    return not gpus.acquire(holder, PoolRequest(units=chunk.size, service=name, chunk=chunk), now_s).restore


def copied(gpus: GpuPool, now_s: float = 0.0) -> list[tuple[str, str, Chunk]]:
    """(service, node, chunk on the node) of what is asked for now."""
    found = [(replica.service, replica.node, replica.chunk) for replica in gpus.replicate(now_s)]
    gpus.check()
    return found


def arrive(gpus: GpuPool, name: str, chunk: Chunk, *, done: bool = True) -> None:
    """End a copy on the first node."""
    gpus.replicated(Replica(name, "n0", chunk, chunk), done)
    gpus.check()


def test_what_is_in_use_is_copied_to_every_idle_device_that_has_room() -> None:
    gpus = replica_pool((2, 2))
    run(gpus, "x", "b")
    assert copied(gpus) == [("b", "n0", (1, 1)), ("b", "n1", (0, 1)), ("b", "n1", (1, 1))]
    assert copied(gpus) == [], "each is on its way"
    arrive(gpus, "b", Chunk(1, 1))
    assert run(gpus, "y", "b", Chunk(1, 1))
    assert gpus.replicas == {"started": 3, "under_way": 2, "hits": 1, "wasted": 0, "failed": 0}


def test_most_used_services_come_first_and_one_travels_to_a_device_at_a_time() -> None:
    gpus = replica_pool((4,))
    for number in range(3):
        run(gpus, f"b{number}", "b")
        gpus.release(f"b{number}", 0.0)
    run(gpus, "x", "c", Chunk(1, 1))
    assert copied(gpus) == [("b", "n0", (2, 1)), ("b", "n0", (3, 1)), ("c", "n0", (0, 1))]
    arrive(gpus, "b", Chunk(2, 1))
    assert copied(gpus) == [("c", "n0", (2, 1))]


def test_nothing_goes_for_a_copy_and_it_goes_before_everything_that_was_used() -> None:
    gpus = replica_pool()
    run(gpus, "x", "b")
    gpus.release("x", 0.0)
    run(gpus, "y", "c", Chunk(1, 1))
    gpus.release("y", 0.0)
    assert copied(gpus) == [("b", "n0", (1, 1)), ("c", "n0", (0, 1))]
    arrive(gpus, "b", Chunk(1, 1))
    arrive(gpus, "c", Chunk(0, 1))
    assert copied(gpus) == []
    gpus.learn({"a": service("a", 60)})
    assert not run(gpus, "z", "a", now_s=1.0)
    assert run(gpus, "w", "c", Chunk(1, 1), now_s=1.0)
    gpus.release("z", 1.0)
    assert not run(gpus, "v", "c", now_s=1.0), "the copy made room, b stayed"
    assert gpus.replicas["wasted"] == 1


def test_room_is_left_for_every_service_that_is_nowhere() -> None:
    gpus = replica_pool(services=(service("a", 60), service("c", 40), service("wide", 90)))
    run(gpus, "x", "c")
    assert copied(gpus) == [], "a and wide need the rest"
    gpus.learn({"wide": service("wide", 50)})
    assert copied(gpus) == [("c", "n0", (1, 1))]


def test_what_was_used_long_ago_or_is_a_server_of_its_own_is_not_copied() -> None:
    gpus = replica_pool()
    run(gpus, "x", "server")
    assert copied(gpus) == []
    gpus.release("x", 0.0)
    run(gpus, "y", "b")
    assert copied(gpus, now_s=60.0) == []


@pytest.mark.parametrize("meanwhile", ["idle", "wanted"])
def test_a_copy_that_does_not_arrive_is_not_tried_again_and_not_counted_on(meanwhile: str) -> None:
    gpus = replica_pool()
    run(gpus, "x", "b")
    assert copied(gpus) == [("b", "n0", (1, 1))]
    if meanwhile == "wanted":
        assert run(gpus, "y", "b", Chunk(1, 1)), "it waits for what is on its way"
        arrive(gpus, "b", Chunk(1, 1), done=False)
        gpus.release("y", 0.0)
    else:
        arrive(gpus, "b", Chunk(1, 1), done=False)
        assert copied(gpus) == []
        assert not run(gpus, "y", "b", Chunk(1, 1)), "the action restores it"
    assert (gpus.replicas["hits"], gpus.replicas["failed"]) == (0, 1)
    assert (1, 1) in gpus.chunk_view(0.0).resident["b"], "the action restores it itself"


def test_a_copy_is_tried_again_once_an_action_has_restored_the_service_there() -> None:
    gpus = replica_pool(services=(service("b", 40), service("large", 90)))
    gpus.learn({"large": service("large", 20)})
    run(gpus, "x", "b")
    assert copied(gpus) == [("b", "n0", (1, 1))]
    arrive(gpus, "b", Chunk(1, 1), done=False)
    assert not run(gpus, "y", "b", Chunk(1, 1))
    gpus.release("y", 0.0)
    gpus.learn({"large": service("large", 90)})
    assert not run(gpus, "z", "large", Chunk(1, 1)), "b goes"
    gpus.release("z", 0.0)
    gpus.learn({"large": service("large", 20)})
    assert ("b", "n0", (1, 1)) in copied(gpus)


def test_a_report_that_lags_behind_does_not_undo_what_is_under_way() -> None:
    gpus = replica_pool()
    run(gpus, "x", "b")
    assert copied(gpus) == [("b", "n0", (1, 1))]
    gpus.report("n0", {"b": [Chunk(0, 1)]})
    assert (1, 1) in gpus.chunk_view(0.0).resident["b"]
    arrive(gpus, "b", Chunk(1, 1))
    gpus.report("n0", {"b": [Chunk(0, 1)]})
    assert gpus.chunk_view(0.0).resident == {"b": ((0, 1),)}, "now it should be there, and is not"


def test_a_lost_node_takes_what_was_under_way_with_it() -> None:
    gpus = replica_pool()
    run(gpus, "x", "b")
    assert copied(gpus) == [("b", "n0", (1, 1))]
    gpus.release("x", 1.0)
    gpus.leave("n0")
    gpus.join(NodeSpec(name="n0", numa=(), memory_bytes=0, devices=2, device_bytes=100))
    arrive(gpus, "b", Chunk(1, 1))
    assert gpus.chunk_view(0.0).resident == {}
    assert gpus.replicas["wasted"] == 1


def test_an_even_rate_counts_what_fell_in_the_last_seconds() -> None:
    demand = Demand()
    for index in range(2000):
        demand.use("s", index * 0.05)
    assert demand.recent("s", 100.0) == pytest.approx(REUSE_S / 0.05, rel=0.05)
