"""Chunks, residency and the pool of all devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.action import Chunk
from manager.config import NodeSpec, ServiceSpec
from manager.resources.devices import Chunks, GpuPool, Residency, ResidentCopy
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


def test_a_report_does_not_touch_chunks_in_use() -> None:
    gpus = pool(2)
    gpus.acquire("x", PoolRequest(units=1, service="a"), 0.0)
    gpus.report("n0", {})
    assert gpus.chunk_view(0.0).resident == {"a": ((0, 1),)}


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


def test_a_report_costs_what_it_says_however_much_the_device_and_the_pool_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    sized = 0
    size_bytes = Residency.size_bytes

    def counted(residency: Residency, copy: ResidentCopy) -> int:
        nonlocal sized
        sized += 1
        return size_bytes(residency, copy)

    costs = []
    for copies in (16, 64):
        services = {
            f"s{number}": ServiceSpec(name=f"s{number}", bytes_by_dop={1: 100 // copies}, restore_s_by_dop={1: 1.0})
            for number in range(2 * copies)
        }
        nodes = [
            NodeSpec(name=f"n{number}", numa=(), memory_bytes=0, devices=4, device_bytes=100) for number in range(8)
        ]
        gpus = GpuPool(nodes, services)
        for node in nodes:
            gpus.report(node.name, {f"s{number}": [Chunk(each, 1) for each in range(4)] for number in range(copies)})
        sized = 0
        monkeypatch.setattr(Residency, "size_bytes", counted)
        gpus.report("n0", {f"s{number + copies}": [Chunk(each, 1) for each in range(4)] for number in range(copies)})
        monkeypatch.undo()
        gpus.check()
        assert gpus.acquire("x", PoolRequest(units=1, service=f"s{copies}"), 0.0).restore is False
        costs.append(sized / copies)
    assert costs[0] == costs[1] > 0, "four times as many copies cost four times as much"
