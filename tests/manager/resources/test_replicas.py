"""Replicas: free memory of idle devices holds what is in use, costs nobody anything, and is the first to go."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from manager.action import Chunk
from manager.config import NodeSpec, ServiceSpec
from manager.resources.cores import Replica
from manager.resources.devices import GpuPool
from manager.resources.pools import PoolRequest


def service(name: str, size: int, *, replicable: bool = True) -> ServiceSpec:
    return ServiceSpec(
        name=name, bytes_by_dop={1: size, 2: size // 2}, restore_s_by_dop={1: 1.0, 2: 0.5}, replicable=replicable
    )


SERVICES = (service("b", 40), service("c", 40), service("server", 10, replicable=False))

#: The first device of a node.
FIRST = Chunk(0, 1)


def pool(devices: Iterable[int] = (2,), services: Iterable[ServiceSpec] = SERVICES) -> GpuPool:
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
    gpus = pool((2, 2))
    run(gpus, "x", "b")
    assert copied(gpus) == [("b", "n0", (1, 1)), ("b", "n1", (0, 1)), ("b", "n1", (1, 1))]
    assert copied(gpus) == [], "each is on its way"
    arrive(gpus, "b", Chunk(1, 1))
    assert run(gpus, "y", "b", Chunk(1, 1))
    assert gpus.replicas == {"started": 3, "under_way": 2, "hits": 1, "wasted": 0, "failed": 0}


def test_a_copy_that_is_still_under_way_is_found_as_well() -> None:
    gpus = pool()
    run(gpus, "x", "b")
    assert copied(gpus) == [("b", "n0", (1, 1))]
    assert run(gpus, "y", "b", Chunk(1, 1))
    assert (gpus.replicas["hits"], gpus.replicas["under_way"]) == (0, 1), "it may still fail"
    arrive(gpus, "b", Chunk(1, 1))
    assert (gpus.replicas["hits"], gpus.replicas["under_way"]) == (1, 0)


def test_the_copies_have_the_width_of_the_last_use() -> None:
    gpus = pool((2, 4))
    run(gpus, "x", "b", Chunk(0, 2))
    assert copied(gpus) == [("b", "n1", (0, 2)), ("b", "n1", (2, 2))]


def test_most_used_services_come_first_and_one_travels_to_a_device_at_a_time() -> None:
    gpus = pool((4,))
    for number in range(3):
        run(gpus, f"b{number}", "b")
        gpus.release(f"b{number}", 0.0)
    run(gpus, "x", "c", Chunk(1, 1))
    assert copied(gpus) == [("b", "n0", (2, 1)), ("b", "n0", (3, 1)), ("c", "n0", (0, 1))]
    arrive(gpus, "b", Chunk(2, 1))
    assert copied(gpus) == [("c", "n0", (2, 1))]


def test_nothing_goes_for_a_copy_and_it_goes_before_everything_that_was_used() -> None:
    gpus = pool()
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
    gpus = pool(services=(service("a", 60), service("c", 40), service("wide", 90)))
    run(gpus, "x", "c")
    assert copied(gpus) == [], "a and wide need the rest"
    gpus.learn({"wide": service("wide", 50)})
    assert copied(gpus) == [("c", "n0", (1, 1))]


def test_what_was_used_long_ago_or_is_a_server_of_its_own_is_not_copied() -> None:
    gpus = pool()
    run(gpus, "x", "server")
    assert copied(gpus) == []
    gpus.release("x", 0.0)
    run(gpus, "y", "b")
    assert copied(gpus, now_s=60.0) == []


@pytest.mark.parametrize("meanwhile", ["idle", "wanted"])
def test_a_copy_that_does_not_arrive_is_not_tried_again_and_not_counted_on(meanwhile: str) -> None:
    gpus = pool()
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
    gpus = pool(services=(service("b", 40), service("large", 90)))
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
    gpus = pool()
    run(gpus, "x", "b")
    assert copied(gpus) == [("b", "n0", (1, 1))]
    gpus.report("n0", {"b": [Chunk(0, 1)]})
    assert (1, 1) in gpus.chunk_view(0.0).resident["b"]
    arrive(gpus, "b", Chunk(1, 1))
    gpus.report("n0", {"b": [Chunk(0, 1)]})
    assert gpus.chunk_view(0.0).resident == {"b": ((0, 1),)}, "now it should be there, and is not"


def test_a_lost_node_takes_what_was_under_way_with_it() -> None:
    gpus = pool()
    run(gpus, "x", "b")
    assert copied(gpus) == [("b", "n0", (1, 1))]
    gpus.release("x", 1.0)
    gpus.leave("n0")
    gpus.join(NodeSpec(name="n0", numa=(), memory_bytes=0, devices=2, device_bytes=100))
    arrive(gpus, "b", Chunk(1, 1))
    assert gpus.chunk_view(0.0).resident == {}
    assert gpus.replicas["wasted"] == 1
