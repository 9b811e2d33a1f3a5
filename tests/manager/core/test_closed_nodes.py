"""Closed nodes: nothing starts or is placed there, what runs goes on, and what waits is told why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from manager.action import ANYWHERE, NodeChoice, UnitSet
from manager.config import ManagerSpec, ServiceSpec
from manager.core.state import cause_of
from manager.core.views import resources_view
from manager.errors import Reason
from manager.events import (
    Abort,
    EndTrajectory,
    Event,
    Finished,
    NodeClosed,
    NodeJoined,
    NodeLost,
    NodeOpened,
    Resumed,
    Settle,
    Submitted,
    TrajectoryOpened,
    TrajectoryPlaced,
)
from manager.resources.pools import ConcurrencySpec
from tests.manager.conftest import DONE, CoreDriver, action, node, spec

Drive = Callable[[ManagerSpec], CoreDriver]


def submit(id: str, cost: Mapping[str, UnitSet | int] | None = None, **fields: Any) -> Submitted:
    return Submitted(action=action(id, cost, **fields))


def closed(name: str = "n0", why: str = "suspect") -> NodeClosed:
    return NodeClosed(node=name, why=why)


def opened(name: str = "n0") -> NodeOpened:
    return NodeOpened(node=name)


def finish(id: str) -> Finished:
    return Finished(action_id=id, outcome=DONE)


def cause(driver: CoreDriver, id: str) -> str:
    waiting = driver.core.state.queue.get(id)
    assert waiting is not None, f"{id} does not wait"
    return cause_of(driver.core.state, waiting).text


def test_what_runs_on_a_closed_node_goes_on_and_nothing_starts_there_until_it_is_open_again(drive: Drive) -> None:
    driver = drive(spec())
    driver.step(0, submit("before"))
    commands = driver.step(1, closed(), submit("after"))
    assert not any(isinstance(command, Abort | Settle) for command in commands)
    assert driver.running() == {"before"}
    driver.step(2, finish("before"))
    assert (driver.settled["before"].outcome, set(driver.started)) == (DONE, {"before"})
    driver.step(3, opened())
    assert driver.running() == {"after"}


def test_what_may_run_elsewhere_starts_elsewhere(drive: Drive) -> None:
    driver = drive(spec(node("n0", cores=8), node("n1", cores=1)))
    driver.step(0, closed(), *(submit(f"a{number}") for number in range(2)))
    assert [execute.lease.node for execute in driver.started.values()] == ["n1"], "the roomier one is closed"
    driver.step(1, submit("wide", cost={"cpu": 2}), finish("a0"))
    assert driver.running() == {"a1"}


def test_no_trajectory_is_placed_on_a_closed_node(drive: Drive) -> None:
    driver = drive(spec(node("n0", memory_bytes=1000), node("n1", memory_bytes=10)))
    commands = driver.step(0, closed(), TrajectoryOpened(trajectory="t", memory_bytes=10))
    assert TrajectoryPlaced(trajectory="t", node="n1") in commands
    commands = driver.step(1, TrajectoryOpened(trajectory="late", memory_bytes=10))
    assert not any(isinstance(command, TrajectoryPlaced) for command in commands)
    assert TrajectoryPlaced(trajectory="late", node="n0") in driver.step(2, opened())


def test_a_pinned_action_waits_for_its_node_and_says_so(drive: Drive) -> None:
    driver = drive(spec(node("n0"), node("n1", memory_bytes=1)))
    pinned: dict[str, Any] = {"trajectory": "t", "memory_bytes": 5, "queue_timeout_s": 5.0}
    driver.step(0, submit("first", **pinned))
    driver.step(1, closed(why="silent for 3 s"), finish("first"), submit("second", **pinned))
    assert cause(driver, "second") == "node n0, which is closed: silent for 3 s"
    driver.step(6)
    outcome = driver.settled["second"].outcome
    assert (outcome.reason, "n0, which is closed: silent for 3 s" in outcome.message) == (Reason.QUEUE_TIMEOUT, True)


def test_the_trajectories_of_a_node_that_finishes_go_on_there_and_nobody_else(drive: Drive) -> None:
    driver = drive(spec(node("n0", cores=2), node("n1", memory_bytes=1)))
    pinned: dict[str, Any] = {"trajectory": "t", "memory_bytes": 5}
    driver.step(0, submit("first", **pinned))
    drains = NodeClosed(node="n0", why="draining", finishing=True)
    driver.step(1, drains, finish("first"), submit("second", **pinned), submit("roomy", memory_bytes=5))
    driver.step(1, submit("other", trajectory="u", memory_bytes=5))
    assert driver.running() == {"second"}
    assert driver.started["second"].lease.node == "n0"
    driver.step(2, finish("second"), closed(why="silent for 3 s"), submit("third", **pinned))
    assert cause(driver, "third") == "node n0, which is closed: silent for 3 s"
    driver.step(3, opened(), drains)
    assert driver.running() == {"third"}


def test_no_chunk_of_a_node_that_finishes_is_given(drive: Drive) -> None:
    service = ServiceSpec(name="s", bytes_by_dop={1: 10}, restore_s_by_dop={1: 0.1})
    driver = drive(replace(spec(node("n0", devices=2)), services={"s": service}))
    driver.step(0, NodeClosed(node="n0", why="draining", finishing=True), submit("g", cost={"gpu": 1}, service="s"))
    assert driver.running() == set()


def test_a_closed_node_shows_nothing_free_and_what_it_holds(drive: Drive) -> None:
    driver = drive(spec(node("n0", cores=4, devices=2)))
    driver.step(0, submit("a"))
    driver.step(1, closed())
    pools = resources_view(driver.core)["pools"]
    assert isinstance(pools, dict)
    assert {name: (pool["total"], pool["free"]) for name, pool in pools.items()} == {"cpu:n0": (4, 0), "gpu": (2, 0)}
    pools = [driver.core.state.resources[name] for name in ("cpu:n0", "gpu")]
    assert [pool.total - pool.idle for pool in pools] == [1, 0]


def test_no_chunk_of_a_closed_node_is_given(drive: Drive) -> None:
    service = ServiceSpec(name="s", bytes_by_dop={1: 10}, restore_s_by_dop={1: 0.1})
    driver = drive(replace(spec(node("n0", devices=2), node("n1", devices=1)), services={"s": service}))
    asks = [submit(f"g{number}", cost={"gpu": 1}, service="s") for number in range(3)]
    driver.step(0, closed(), *asks)
    assert [execute.lease.node for execute in driver.started.values()] == ["n1"]
    driver.step(1, opened())
    assert sorted(execute.lease.node for execute in driver.started.values()) == ["n0", "n0", "n1"]


def test_no_child_is_lent_units_on_a_closed_node(drive: Drive) -> None:
    driver = drive(spec(node(cores=1)))
    driver.step(0, submit("parent"))
    driver.step(1, closed(), submit("child", parent="parent"))
    assert driver.running() == {"parent"}
    driver.step(2, opened())
    assert driver.running() == {"parent", "child"}


def test_what_a_closed_node_had_reserved_serves_others(drive: Drive) -> None:
    """Else a quota would wait for a node that may be gone."""
    driver = drive(replace(spec(node(cores=1)), resources={"parser": ConcurrencySpec(limit=1)}))
    driver.step(0, submit("busy"), submit("both", cost={"cpu": 1, "parser": 1}), submit("call", cost={"parser": 1}))
    assert driver.running() == {"busy"}
    driver.step(1, closed())
    assert driver.running() == {"busy", "call"}


@pytest.mark.parametrize("events", [[closed(), NodeLost(node="n0")], [NodeLost(node="n0")]])
def test_a_lost_node_is_as_lost_whether_it_was_closed_or_not(drive: Drive, events: list[Event]) -> None:
    driver = drive(spec(node("n0"), node("n1", memory_bytes=1)))
    pinned: dict[str, Any] = {"trajectory": "t", "memory_bytes": 5}
    driver.step(0, submit("a", **pinned), submit("b", **pinned))
    commands = driver.step(1, *events)
    assert driver.settled["a"].outcome.reason is Reason.NODE_LOST
    assert driver.settled["b"].outcome.reason is Reason.ENVIRONMENT_LOST
    assert EndTrajectory(trajectory="t") in commands
    driver.step(2, NodeJoined(node=node("n0")), submit("c", **pinned))
    assert driver.started["c"].lease.node == "n0", "a node that comes back is open"


def test_closing_and_opening_are_told_in_any_order_and_of_unknown_nodes(drive: Drive) -> None:
    driver = drive(spec())
    driver.step(0, opened(), closed("nobody"), opened("nobody"), closed(), closed(why="draining"))
    driver.step(1, submit("a"))
    assert cause(driver, "a").startswith("an open node"), "it is bound to none"
    driver.step(2, opened(), opened())
    assert driver.running() == {"a"}


def test_what_ran_under_an_earlier_core_is_resumed_on_a_node_that_is_not_back_yet(drive: Drive) -> None:
    driver = drive(spec(node("n0"), node("n1")))
    driver.step(0, closed(why="not back yet"))
    driver.step(
        1,
        TrajectoryOpened(trajectory="t", memory_bytes=5, node="n0"),
        Resumed(action=action("a", trajectory="t", memory_bytes=5), units={"cpu": 1}, node="n0", started_s=0.5),
        submit("next", trajectory="t", memory_bytes=5),
        submit("free"),
    )
    assert {name: execute.lease.node for name, execute in driver.started.items()} == {"a": "n0", "free": "n1"}
    driver.step(2, finish("a"))
    assert "next" not in driver.started
    driver.step(3, opened())
    assert driver.started["next"].lease.node == "n0"


def test_functions_run_where_the_labels_are_and_where_they_are_able_to(drive: Drive) -> None:
    big = replace(node("n0"), labels={"pool": "big"}, able=frozenset({"g"}))
    small = replace(node("n1"), labels={"pool": "small"})
    driver = drive(spec(big, small))
    driver.step(
        0,
        submit("any", placement=ANYWHERE),
        submit("big", placement=NodeChoice((("pool", "big"),))),
        submit("f", placement=NodeChoice((), "f")),
        submit("f on big", placement=NodeChoice((("pool", "big"),), "f"), queue_timeout_s=1.0),
    )
    assert driver.started["big"].lease.node == "n0"
    assert driver.started["f"].lease.node == "n1"
    assert cause(driver, "f on big") == "an open node pool=big and able to run f"
    driver.step(0.5, NodeJoined(node=replace(big, able=frozenset({"f", "g"}))))
    assert driver.started["f on big"].lease.node == "n0", "what a node is able to run may grow while it serves"


def test_a_trajectory_is_placed_where_its_first_action_may_run(drive: Drive) -> None:
    driver = drive(spec(node("n0", memory_bytes=1000), replace(node("n1", memory_bytes=10), labels={"pool": "small"})))
    placement = NodeChoice((("pool", "small"),))
    driver.step(0, submit("a", trajectory="t", memory_bytes=5, placement=placement))
    assert driver.started["a"].lease.node == "n1"


def test_what_is_kept_on_one_node_begins_there_and_nowhere_else(drive: Drive) -> None:
    driver = drive(spec(node("n0"), node("n1")))
    driver.step(0, *(submit(f"a{each}", placement=NodeChoice(node="n1")) for each in range(2)))
    assert {execute.lease.node for execute in driver.started.values()} == {"n1"}
