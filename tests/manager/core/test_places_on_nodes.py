"""Places that are right: device actions start only on nodes that are able to run their function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from manager.action import Chunk, NodeChoice, UnitSet
from manager.config import ManagerSpec, NodeSpec, SchedulerSpec, ServiceSpec
from manager.core.state import cause_of
from manager.events import (
    Finished,
    NodeClosed,
    NodeJoined,
    NodeLost,
    NodeOpened,
    Replicate,
    ResidencyReported,
    Submitted,
)
from manager.scheduler.policy import PolicySpec
from tests.manager.conftest import DONE, CoreDriver, action, node

Drive = Callable[[ManagerSpec], CoreDriver]
POLICIES = ("price", "adaptive", "paper", "fixed")


def machine(name: str, *able: str, devices: int = 1, device_bytes: int = 100) -> NodeSpec:
    return replace(node(name, devices=devices, device_bytes=device_bytes), able=frozenset(able))


def world(*nodes: NodeSpec, policy: str = "price", **by_node: dict[int, float]) -> ManagerSpec:
    """Services a and b of 40 bytes that take a second to restore, or as ``by_node`` says."""
    services = {
        name: ServiceSpec(
            name=name, bytes_by_dop={1: 40, 2: 20}, restore_s_by_dop={1: 1.0, 2: 0.5}, restore_s_by_node=by_node
        )
        for name in ("a", "b")
    }
    scheduler = SchedulerSpec(policies={"default": PolicySpec(name=policy)})
    return ManagerSpec(nodes=nodes, services=services, scheduler=scheduler)


def ask(id: str, function: str, gpus: int = 1, labels: tuple[tuple[str, str], ...] = ()) -> Submitted:
    """An action of ten seconds of the function ``a`` or ``b``, on the service of the same name."""
    placement = NodeChoice(labels, function)
    return Submitted(
        action=action(id, {"gpu": gpus}, function=function, service=function, t_ori_s=10.0, placement=placement)
    )


def places(driver: CoreDriver) -> dict[str, str]:
    return {name: execute.lease.node for name, execute in driver.started.items()}


@pytest.mark.parametrize("policy", POLICIES)
def test_each_starts_where_its_function_can_run_whoever_came_first(drive: Drive, policy: str) -> None:
    driver = drive(world(machine("n0", "a", "b"), machine("n1", "b"), policy=policy))
    driver.step(0, ask("b1", "b"), ask("b2", "b"), ask("a1", "a"))
    started = places(driver)
    assert {name: where for name, where in started.items() if name.startswith("a")} in ({}, {"a1": "n0"})
    assert len(started) == 2 and not driver.core.state.faults
    for now_s, name in enumerate(list(started), 1):
        driver.step(now_s, Finished(action_id=name, attempt=1, outcome=DONE))
    assert places(driver)["a1"] == "n0"


@pytest.mark.parametrize("policy", POLICIES)
def test_an_idle_node_is_used_though_what_came_first_cannot_run_there(drive: Drive, policy: str) -> None:
    driver = drive(world(machine("n0", "a"), machine("n1", "b"), policy=policy))
    driver.step(0, ask("a1", "a"))
    driver.step(1, ask("a2", "a"), ask("b1", "b"))
    assert places(driver) == {"a1": "n0", "b1": "n1"}
    waiting = driver.core.state.queue.get("a2")
    assert waiting is not None and cause_of(driver.core.state, waiting).kind in ("devices", "hold", "turn")


def test_one_that_no_node_is_able_to_run_waits_for_one_and_says_so(drive: Drive) -> None:
    driver = drive(world(machine("n0")))
    driver.step(0, ask("a1", "a"))
    waiting = driver.core.state.queue.get("a1")
    assert waiting is not None
    cause = cause_of(driver.core.state, waiting)
    assert (cause.kind, cause.text) == ("node", "an open node able to run a")
    driver.step(1, NodeJoined(node=machine("n0", "a")))
    assert places(driver) == {"a1": "n0"}


def test_labels_choose_among_the_nodes_with_devices(drive: Drive) -> None:
    driver = drive(world(machine("n0", "a"), replace(machine("n1", "a"), labels={"pool": "big"})))
    driver.step(0, *[ask(f"a{number}", "a", labels=(("pool", "big"),)) for number in range(2)])
    assert places(driver) == {"a0": "n1"}
    driver.step(1, Finished(action_id="a0", attempt=1, outcome=DONE))
    assert places(driver) == {"a0": "n1", "a1": "n1"}


def test_a_node_whose_devices_are_too_small_is_left_alone(drive: Drive) -> None:
    """The price of what goes for a copy must not be asked where it never fits."""
    driver = drive(world(machine("n0", "b", device_bytes=10), machine("n1", "a")))
    driver.step(0, ask("a1", "a"), ask("a2", "a"))
    assert places(driver) == {"a1": "n1"}


def test_a_chunk_lies_within_one_node(drive: Drive) -> None:
    driver = drive(world(machine("n0", "a"), machine("n1", "a", devices=2), machine("n2", "a")))
    driver.step(0, ask("wide", "a", 2), ask("wider", "a", 2))
    assert places(driver) == {"wide": "n1"}
    assert driver.started["wide"].lease.chunk == Chunk(0, 2)


def test_copies_are_made_only_where_the_service_can_be(drive: Drive) -> None:
    driver = drive(world(machine("n0", "a"), machine("n1"), machine("n2", "a"), n0={1: 1.0}, n2={1: 1.0}))
    driver.step(0, ask("a1", "a"))
    copies = [command.node for command in driver.commands if isinstance(command, Replicate)]
    assert copies == [({"n0", "n2"} - {places(driver)["a1"]}).pop()]


def test_a_cold_start_goes_where_a_restore_is_quickest(drive: Drive) -> None:
    slow_first = world(machine("n0", "a"), machine("n1", "a"), n0={1: 9.0}, n1={1: 0.5})
    driver = drive(slow_first)
    driver.step(0, ask("a1", "a"))
    assert places(driver) == {"a1": "n1"}


def test_what_a_node_says_is_resident_decides_and_goes_with_it(drive: Drive) -> None:
    driver = drive(world(machine("n0", "a"), machine("n1", "a")))
    driver.step(0, ResidencyReported(node="n1", resident={"a": (Chunk(0, 1),)}), ask("a1", "a"))
    grant = driver.started["a1"].lease.grants["gpu"]
    assert (driver.started["a1"].lease.node, grant.restore) == ("n1", False)
    driver.step(1, NodeClosed(node="n1", why="silent"), NodeLost(node="n1"))
    driver.step(2, NodeJoined(node=machine("n1", "a")), NodeClosed(node="n0", why="silent"), ask("a2", "a"))
    grant = driver.started["a2"].lease.grants["gpu"]
    assert (driver.started["a2"].lease.node, grant.restore) == ("n1", True)


def test_what_needs_cores_as_well_goes_to_the_node_where_its_service_is_warm(drive: Drive) -> None:
    driver = drive(world(machine("n0", "a"), machine("n1", "a")))
    both = ask("a1", "a")
    both = replace(both, action=replace(both.action, cost={"gpu": UnitSet.fixed(1), "cpu": UnitSet.fixed(1)}))
    driver.step(0, ResidencyReported(node="n1", resident={"a": (Chunk(0, 1),)}), both)
    grants = driver.started["a1"].lease.grants
    assert (grants["gpu"].pool, grants["cpu"].pool, grants["gpu"].restore) == ("gpu:n1", "cpu:n1", False)


def test_actions_of_several_functions_of_a_service_run_as_one_batch_where_all_of_them_can(drive: Drive) -> None:
    told = world(machine("n0", "a", "c"), machine("n1", "a", "b"))
    services = {"a": replace(told.services["a"], batch_tokens=100)}
    driver = drive(replace(told, services=services))
    driver.step(0, NodeClosed(node="n0", why="silent"), _batched("a1", "a"))
    driver.step(1, *[_batched(name, name[0]) for name in ("a2", "b1", "c1")])
    driver.step(2, Finished(action_id="a1", attempt=1, outcome=DONE))
    assert [set(driver.started[name].lease.batch) for name in ("a2", "b1")] == [{"a2", "b1"}] * 2
    assert "c1" not in driver.started, "the open node is not able to run it"


def test_a_node_that_tells_of_more_than_its_devices_hold_stops_nobody(drive: Drive) -> None:
    driver = drive(world(machine("n0", "a", device_bytes=10), machine("n1", "a")))
    driver.step(0, ResidencyReported(node="n0", resident={"a": (Chunk(0, 1), Chunk(0, 4), Chunk(7, 1))}))
    driver.step(1, ask("a1", "a"), ask("a2", "a"))
    assert sorted(places(driver).values()) == ["n0", "n1"]


def _batched(id: str, function: str) -> Submitted:
    one = ask(id, function)
    return replace(one, action=replace(one.action, service="a", batch_tokens=10))


@pytest.mark.parametrize("before", [0, 1])
def test_an_awaited_node_serves_with_the_devices_that_it_comes_with(drive: Drive, before: int) -> None:
    """What is on record may be of a gateway that knew of no devices."""
    driver = drive(world(machine("n0", devices=before), machine("n1", "b")))
    driver.step(0, NodeClosed(node="n0", why="awaited"), ask("a1", "a", gpus=2))
    driver.step(1, NodeJoined(node=machine("n0", "a", devices=2)))
    assert not driver.running(), "it is closed still"
    driver.step(2, NodeOpened(node="n0"))
    assert places(driver) == {"a1": "n0"}
    assert driver.core.state.nodes["n0"].spec.devices == 2


def test_a_node_without_devices_any_more_is_counted_on_for_none(drive: Drive) -> None:
    driver = drive(world(machine("n0", "a", devices=2), machine("n1", "b")))
    driver.step(0, NodeJoined(node=machine("n0", "a", devices=0)), ask("a1", "a"), ask("b1", "b"))
    assert places(driver) == {"b1": "n1"}
    assert driver.core.state.resources["gpu"].total == 1


def test_a_node_of_which_a_device_is_leased_keeps_what_it_has(drive: Drive) -> None:
    driver = drive(world(machine("n0", "a", devices=1)))
    driver.step(0, ask("a1", "a"))
    driver.step(1, NodeJoined(node=machine("n0", "a", "b", devices=2)), ask("b1", "b"))
    assert (driver.running(), driver.core.state.nodes["n0"].spec.devices) == ({"a1"}, 1)
    driver.step(2, Finished(action_id="a1", attempt=1, outcome=DONE))
    assert driver.running() == {"b1"}, "and what it is able to run is taken up"
