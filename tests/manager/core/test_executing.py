"""What runs: where it is placed, what goes on on closed nodes, and what an earlier core had started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from manager.action import ANYWHERE, Chunk, Lease, NodeChoice, State, UnitSet
from manager.assembly import build_core
from manager.config import ManagerSpec, NodeSpec, SchedulerSpec, ServiceSpec
from manager.core.views import resources_view
from manager.engine import Engine, Submission
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
    Refuse,
    Replicate,
    ResidencyReported,
    Resumed,
    Settle,
    Submitted,
    Tick,
    TrajectoryOpened,
)
from manager.executor import Call
from manager.function import FunctionSpec
from manager.resources.pools import ConcurrencySpec, QuotaSpec
from manager.scheduler.policy import PolicySpec
from runtimes.executor import LocalExecutor
from runtimes.testing import ScriptedRuntime, ScriptStep
from tests.manager.conftest import DONE, CoreDriver, Drive, action, cause, finish, node, spec, submit
from tests.runtimes.recorder import RecordingLog
from tests.virtual_clock import VirtualClock

POLICIES = ("price", "adaptive", "paper", "fixed")


def closed(name: str = "n0", why: str = "suspect") -> NodeClosed:
    return NodeClosed(node=name, why=why)


def opened(name: str = "n0") -> NodeOpened:
    return NodeOpened(node=name)


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


def test_no_trajectory_is_placed_on_a_closed_node(drive: Drive) -> None:
    driver = drive(spec(node("n0", memory_bytes=1000), node("n1", memory_bytes=10)))
    driver.step(0, closed(), TrajectoryOpened(trajectory="t", memory_bytes=10))
    driver.step(1, TrajectoryOpened(trajectory="late", memory_bytes=10))
    assert driver.homes() == {"t": "n1"}
    driver.step(2, opened())
    assert driver.homes() == {"t": "n1", "late": "n0"}


def test_a_pinned_action_waits_for_its_node_and_says_so(drive: Drive) -> None:
    driver = drive(spec(node("n0"), node("n1", memory_bytes=1)))
    pinned: dict[str, Any] = {"trajectory": "t", "memory_bytes": 5, "queue_timeout_s": 5.0}
    driver.step(0, submit("first", **pinned))
    driver.step(1, closed(why="silent for 3 s"), finish("first"), submit("second", **pinned))
    assert cause(driver, "second").text == "node n0, which is closed: silent for 3 s"
    driver.step(6)
    outcome = driver.settled["second"].outcome
    assert (outcome.reason, "n0, which is closed: silent for 3 s" in outcome.message) == (Reason.QUEUE_TIMEOUT, True)


@pytest.mark.promise("The trajectories of a draining node go on there, and no new ones are placed there.")
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
    assert cause(driver, "third").text == "node n0, which is closed: silent for 3 s"
    driver.step(3, opened(), drains)
    assert driver.running() == {"third"}


def test_a_closed_node_shows_nothing_free_and_what_it_holds(drive: Drive) -> None:
    driver = drive(spec(node("n0", cores=4, devices=2)))
    driver.step(0, submit("a"))
    driver.step(1, closed())
    pools = resources_view(driver.core)["pools"]
    assert isinstance(pools, dict)
    assert {name: (pool["total"], pool["free"]) for name, pool in pools.items()} == {"cpu:n0": (4, 0), "gpu": (2, 0)}
    pools = [driver.core.state.resources[name] for name in ("cpu:n0", "gpu")]
    assert [pool.total - pool.idle for pool in pools] == [1, 0]


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
    assert cause(driver, "f on big").text == "an open node pool=big and able to run f"
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
        driver.step(now_s, Finished(action_id=name, outcome=DONE))
    assert places(driver)["a1"] == "n0"


@pytest.mark.parametrize("policy", POLICIES)
def test_an_idle_node_is_used_though_what_came_first_cannot_run_there(drive: Drive, policy: str) -> None:
    driver = drive(world(machine("n0", "a"), machine("n1", "b"), policy=policy))
    driver.step(0, ask("a1", "a"))
    driver.step(1, ask("a2", "a"), ask("b1", "b"))
    assert places(driver) == {"a1": "n0", "b1": "n1"}
    assert cause(driver, "a2").kind in ("devices", "hold", "turn")


def test_one_that_no_node_is_able_to_run_waits_for_one_and_says_so(drive: Drive) -> None:
    driver = drive(world(machine("n0")))
    driver.step(0, ask("a1", "a"))
    found = cause(driver, "a1")
    assert (found.kind, found.text) == ("node", "an open node able to run a")
    driver.step(1, NodeJoined(node=machine("n0", "a")))
    assert places(driver) == {"a1": "n0"}


def test_labels_choose_among_the_nodes_with_devices(drive: Drive) -> None:
    driver = drive(world(machine("n0", "a"), replace(machine("n1", "a"), labels={"pool": "big"})))
    driver.step(0, *[ask(f"a{number}", "a", labels=(("pool", "big"),)) for number in range(2)])
    assert places(driver) == {"a0": "n1"}
    driver.step(1, Finished(action_id="a0", outcome=DONE))
    assert places(driver) == {"a0": "n1", "a1": "n1"}


def test_a_node_whose_devices_are_too_small_is_left_alone(drive: Drive) -> None:
    """The price of what goes for a copy must not be asked where it never fits."""
    driver = drive(world(machine("n0", "b", device_bytes=10), machine("n1", "a")))
    driver.step(0, ask("a1", "a"), ask("a2", "a"))
    assert places(driver) == {"a1": "n1"}


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
    driver.step(2, Finished(action_id="a1", outcome=DONE))
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


@pytest.mark.promise("What needs devices alone runs on a machine whose sandboxes' engine is away.")
def test_devices_serve_where_only_sandboxes_cannot_be_made(drive: Drive) -> None:
    driver = drive(world(machine("n0", "a", devices=1)))
    for second, why in enumerate(("unfit", "draining")):
        driver.step(second, NodeClosed(node="n0", why=why, finishing=True, devices=why == "unfit"))
        driver.step(second, ask(f"a{second}", "a"), _needs_memory(f"m{second}", "a"))
        assert driver.running() == ({"a0"} if why == "unfit" else set())
        driver.step(second, *(finish(each) for each in driver.running()))
    driver.step(2, NodeClosed(node="n0", why="unfit", finishing=True, devices=True))
    assert driver.running() == {"a1"}
    assert {each.id for each in driver.core.state.queue} == {"m0", "m1"}, "they want a sandbox"
    driver.step(3, NodeOpened(node="n0"))
    assert driver.running() == {"a1", "m0", "m1"}


def _needs_memory(id: str, function: str) -> Submitted:
    one = ask(id, function)
    return replace(one, action=replace(one.action, cost={}, memory_bytes=1, service=None))


def test_a_node_of_which_a_device_is_leased_keeps_what_it_has(drive: Drive) -> None:
    driver = drive(world(machine("n0", "a", devices=1)))
    driver.step(0, ask("a1", "a"))
    driver.step(1, NodeJoined(node=machine("n0", "a", "b", devices=2)), ask("b1", "b"))
    assert (driver.running(), driver.core.state.nodes["n0"].spec.devices) == ({"a1"}, 1)
    driver.step(2, Finished(action_id="a1", outcome=DONE))
    assert driver.running() == {"b1"}, "and what it is able to run is taken up"


def resumed(id: str, units: Mapping[str, int], started_s: float, **fields: object) -> Resumed:
    return Resumed(action=action(id, dict(units), **fields), units=units, node="n0", started_s=started_s)


def refused(driver: CoreDriver) -> list[str]:
    return [command.action_id for command in driver.commands if isinstance(command, Refuse)]


def test_it_holds_its_cores_before_anything_that_waits_may_take_them(drive: Drive) -> None:
    driver = drive(spec(node(cores=2)))
    driver.step(0, resumed("old", {"cpu": 2}, -30), Submitted(action=action("new")))
    assert driver.running() == {"old"}
    assert driver.started["old"].lease.cores == (0, 1)
    driver.step(5, Finished(action_id="old", outcome=replace(DONE, execution_s=34)))
    assert driver.running() == {"new"}
    assert driver.core.state.resources["cpu:n0"].free == 1


@pytest.mark.promise("A command that is taken over counts from its real start.")
def test_its_three_times_count_from_its_real_start(drive: Drive) -> None:
    driver = drive(spec())
    driver.step(10, resumed("old", {"cpu": 1}, -30, submitted_s=-32))
    assert driver.started["old"].queue_s == 2
    driver.step(20, Finished(action_id="old", outcome=replace(DONE, execution_s=45)))
    settlement = driver.settled["old"]
    assert (settlement.queue_s, settlement.overhead_s, settlement.execution_s) == (2, 5, 45)


def test_memory_is_held_by_one_without_a_trajectory_and_once_by_a_trajectory(drive: Drive) -> None:
    driver = drive(spec(node(memory_bytes=100)))
    opened = TrajectoryOpened(trajectory="t", memory_bytes=60)
    inside = resumed("inside", {"cpu": 1}, -1, trajectory="t", memory_bytes=60)
    alone = resumed("alone", {"cpu": 1}, -1, memory_bytes=40)
    driver.step(0, opened, inside, alone, resumed("large", {"cpu": 1}, -1, memory_bytes=1))
    assert driver.running() == {"inside", "alone"}
    assert driver.core.state.nodes["n0"].free_bytes == 0
    driver.step(1, Finished(action_id="alone", outcome=DONE), Finished(action_id="inside", outcome=DONE))
    assert driver.core.state.nodes["n0"].free_bytes == 40


def test_it_has_the_turn_of_its_trajectory(drive: Drive) -> None:
    driver = drive(spec())
    opened = TrajectoryOpened(trajectory="t", memory_bytes=10, ttl_s=100)
    first = resumed("first", {"cpu": 1}, -1, trajectory="t", memory_bytes=10)
    driver.step(0, opened, first, resumed("beside", {"cpu": 1}, -1, trajectory="t", memory_bytes=10))
    driver.step(1, Submitted(action=action("behind", trajectory="t", memory_bytes=10)))
    assert (driver.running(), refused(driver)) == ({"first"}, ["beside"])
    driver.step(200, Tick())
    assert driver.running() == {"first"}, "a trajectory with a running action is not idle"
    driver.step(201, Finished(action_id="first", outcome=DONE))
    assert driver.running() == {"behind"}


def test_a_quota_is_not_consumed_twice_and_counts_until_its_window_ends(drive: Drive) -> None:
    driver = drive(replace(spec(), resources={"search": QuotaSpec(limit=2, period_s=10)}))
    recent, old = resumed("recent", {"search": 1}, 94), resumed("old", {"search": 2}, 80)
    driver.step(100, old, recent, *(Submitted(action=action(f"n{n}", {"search": 1})) for n in range(2)))
    assert driver.running() == {"old", "recent"}
    driver.step(101, Finished(action_id="old", outcome=DONE))
    driver.step(110.9, Tick())
    assert driver.running() == {"recent"}
    driver.step(111, Tick())
    assert driver.running() == {"recent", "n0"}


@pytest.mark.parametrize("units", [{"cpu": 5}, {"gpu": 1}, {"gone": 1}])
def test_what_is_not_to_be_had_any_more_refuses_it_and_changes_nothing(drive: Drive, units: dict[str, int]) -> None:
    driver = drive(spec(node(cores=4)))
    opened = TrajectoryOpened(trajectory="t", memory_bytes=10)
    driver.step(0, opened, resumed("old", units, -1, trajectory="t", memory_bytes=10))
    assert (refused(driver), driver.core.accepted) == (["old"], 0)
    driver.step(1, Submitted(action=action("next", trajectory="t", memory_bytes=10)))
    assert driver.running() == {"next"}


async def test_the_engine_executes_it_and_tells_its_end() -> None:
    clock = VirtualClock(1000)
    runtime = ScriptedRuntime(ScriptStep(result=7))
    function = FunctionSpec(name="f", runtime="handler")
    engine = Engine(build_core(spec(node(cores=1))), LocalExecutor({"handler": runtime}, clock), clock=clock)
    await engine.start()

    def submission(id: str) -> Submission:
        return Submission(
            action=action(id, submitted_s=400), call=Call(function=function, input={}, log=RecordingLog())
        )

    settled = engine.resume(submission("old"), units={"cpu": 1}, node="n0", started_s=400)
    assert settled is not None
    assert engine.resume(submission("late"), units={"cpu": 1}, node="n0", started_s=400) is None
    (behind,) = engine.submit([submission("behind")])
    settlement = await settled
    assert (settlement.outcome.state, settlement.act_s) == (State.SUCCEEDED, 600)
    assert isinstance(settlement.lease, Lease)
    await asyncio.wait_for(behind, 60)
    engine.check()
    await engine.close()
