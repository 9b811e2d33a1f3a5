"""Copies brought in ahead of their use: counted on from the start, given up where that was wrong, and accounted."""

from __future__ import annotations

from manager.config import NodeSpec, ServiceSpec
from manager.resources.gpu import GpuPool
from manager.resources.pool import Ahead, PoolRequest

SERVICES = {
    name: ServiceSpec(name=name, bytes_by_dop={1: size, 2: size // 2}, restore_s_by_dop={1: 1.0, 2: 0.5})
    for name, size in (("a", 60), ("b", 40), ("c", 40), ("large", 90))
}


def pool(devices: int = 2) -> GpuPool:
    node = NodeSpec(name="n0", numa=(), memory_bytes=0, devices=devices, device_bytes=100)
    return GpuPool([node], SERVICES)


def run(gpus: GpuPool, holder: str, service: str, chunk: tuple[int, int] = (0, 1)) -> bool:
    """Begin an action; whether its service was in place."""
    return not gpus.acquire(PoolRequest(holder=holder, units=chunk[1], service=service, chunk=chunk), 0.0).restore


def nothing(service: str) -> bool:
    """No service is spared."""
    return False


def bring(gpus: GpuPool, service: str, chunk: tuple[int, int] = (0, 1), spared: str = "") -> bool:
    found = gpus.prefetch(service, chunk, lambda service: service == spared) is not None
    gpus.check()
    return found


def test_what_arrives_is_found_by_the_next_action() -> None:
    gpus = pool()
    run(gpus, "x", "a")
    assert gpus.prefetch("b", (0, 1), nothing) == Ahead("b", "n0", (0, 1), ())
    gpus.prefetched("b", (0, 1), True)
    gpus.release("x", 1.0)
    assert run(gpus, "y", "b")
    assert gpus.prefetches == {"started": 1, "under_way": 0, "hits": 1, "wasted": 0, "failed": 0}


def test_what_is_still_under_way_is_found_as_well() -> None:
    gpus = pool()
    run(gpus, "x", "a")
    assert bring(gpus, "b")
    gpus.release("x", 1.0)
    assert run(gpus, "y", "b")
    assert (gpus.prefetches["hits"], gpus.prefetches["under_way"]) == (0, 1), "it may still fail"
    gpus.prefetched("b", (0, 1), True)
    assert gpus.prefetches["hits"] == 1


def test_nothing_is_brought_where_nothing_computes_or_there_is_no_room() -> None:
    gpus = pool()
    assert not bring(gpus, "b")
    run(gpus, "x", "a")
    assert not bring(gpus, "a"), "it is there"
    assert not bring(gpus, "large"), "what is in use leaves it no room"
    assert not bring(gpus, "b", (1, 1)), "nothing computes there"
    assert not bring(gpus, "b", (0, 2)), "only a part of it computes"


def test_an_action_is_accompanied_once() -> None:
    gpus = pool()
    run(gpus, "x", "b", (0, 2))
    assert bring(gpus, "c", (0, 1))
    assert not bring(gpus, "a", (1, 1))
    assert gpus.forecast(0.0) is None
    gpus.release("x", 1.0)
    run(gpus, "y", "b", (1, 1))
    assert gpus.forecast(0.0) is not None
    assert bring(gpus, "a", (1, 1)), "another action, another chance"


def test_one_copy_at_a_time_is_under_way_to_a_device() -> None:
    gpus = pool()
    run(gpus, "x", "b")
    assert bring(gpus, "c")
    gpus.release("x", 1.0)
    run(gpus, "y", "b")
    assert not bring(gpus, "a"), "c is still under way"
    gpus.prefetched("c", (0, 1), True)
    assert bring(gpus, "a"), "40 bytes of c go for it"


def test_idle_copies_go_for_it_but_not_those_that_somebody_waits_for() -> None:
    gpus = pool()
    run(gpus, "x", "c")
    gpus.release("x", 0.0)
    run(gpus, "y", "b")
    assert not bring(gpus, "a", spared="c")
    assert gpus.prefetch("a", (0, 1), nothing) == Ahead("a", "n0", (0, 1), ("c",))
    assert set(gpus.chunk_view(0.0).resident) == {"a", "b"}


def test_what_failed_is_not_counted_on_nor_tried_again_until_an_action_restored_it() -> None:
    gpus = pool()
    run(gpus, "x", "a")
    assert bring(gpus, "b")
    gpus.prefetched("b", (0, 1), False)
    assert "b" not in gpus.chunk_view(0.0).resident
    gpus.release("x", 1.0)
    run(gpus, "y", "a")
    assert not bring(gpus, "b")
    gpus.release("y", 1.0)
    assert not run(gpus, "z", "b"), "the action restores it"
    gpus.release("z", 1.0)
    run(gpus, "u", "large")
    gpus.release("u", 1.0)
    run(gpus, "v", "a")
    assert bring(gpus, "b")
    assert gpus.prefetches["failed"] == 1


def test_what_an_action_has_begun_on_stays_when_it_fails_to_arrive() -> None:
    gpus = pool()
    run(gpus, "x", "a")
    assert bring(gpus, "b")
    gpus.release("x", 1.0)
    assert run(gpus, "y", "b")
    gpus.prefetched("b", (0, 1), False)
    assert "b" in gpus.chunk_view(0.0).resident, "the action restores it itself"
    assert (gpus.prefetches["hits"], gpus.prefetches["failed"]) == (0, 1)


def test_what_is_evicted_before_its_use_is_wasted() -> None:
    gpus = pool()
    run(gpus, "x", "a")
    assert bring(gpus, "b")
    gpus.prefetched("b", (0, 1), True)
    gpus.release("x", 1.0)
    assert not run(gpus, "y", "large")
    assert gpus.prefetches["wasted"] == 1
    gpus.release("y", 1.0)
    assert not run(gpus, "z", "b")
    assert gpus.prefetches["hits"] == 0


def test_a_report_that_lags_behind_does_not_undo_what_is_under_way() -> None:
    gpus = pool()
    run(gpus, "x", "a")
    assert bring(gpus, "b")
    gpus.release("x", 1.0)
    gpus.report("n0", [("a", 0, 1)])
    assert "b" in gpus.chunk_view(0.0).resident
    gpus.prefetched("b", (0, 1), True)
    gpus.report("n0", [("a", 0, 1)])
    assert "b" not in gpus.chunk_view(0.0).resident, "now it should be there, and is not"


def test_a_lost_node_takes_what_was_under_way_with_it() -> None:
    gpus = pool()
    run(gpus, "x", "a")
    assert bring(gpus, "b")
    gpus.release("x", 1.0)
    gpus.leave("n0")
    gpus.join(NodeSpec(name="n0", numa=(), memory_bytes=0, devices=2, device_bytes=100))
    gpus.prefetched("b", (0, 1), True)
    assert gpus.chunk_view(0.0).resident == {}
    assert gpus.prefetches["wasted"] == 1
    gpus.check()
