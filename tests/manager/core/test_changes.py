"""What could start now that could not before is looked at, wherever it waits: whoever changed says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from manager.action import Chunk, UnitSet
from manager.assembly import build_core
from manager.config import ManagerSpec, ServiceSpec, TaskSpec
from manager.events import Finished, NodeJoined, Reconfigured, ResidencyReported, Submitted, Tick
from manager.resources.cores import CpuPool
from manager.resources.devices import GpuPool
from manager.resources.nodes import Nodes, Resources
from manager.resources.pools import ConcurrencyPool, ConcurrencySpec, PoolRequest, QuotaPool, QuotaSpec
from manager.scheduler.policy import Decision, PoolView, ResizeChoice, Start
from tests.manager.conftest import DONE, CoreDriver, action, node, spec

Drive = Callable[[ManagerSpec], CoreDriver]


def submit(id: str, cost: dict[str, UnitSet | int] | None = None, **fields: object) -> Submitted:
    return Submitted(action=action(id, cost, **fields))


def finish(id: str) -> Finished:
    return Finished(action_id=id, outcome=DONE)


def test_a_pool_announces_that_units_returned_and_nothing_when_they_are_taken() -> None:
    resources = Resources([CpuPool(node()), ConcurrencyPool("parser", ConcurrencySpec(limit=2))])
    assert resources.take_changed() == {"cpu:n0", "parser"}, "they have come"
    resources["cpu:n0"].acquire("a", PoolRequest(units=2), 0.0)
    resources["parser"].acquire("a", PoolRequest(units=1), 0.0)
    resources["cpu:n0"].resize("a", 3)
    assert resources.take_changed() == set()
    resources["cpu:n0"].resize("a", 1)
    assert resources.take_changed() == {"cpu:n0"}
    resources["parser"].release("a", 1.0)
    assert resources.take_changed() == {"parser"}
    assert resources.take_changed() == set(), "each change is told once"


def test_a_quota_announces_the_instant_at_which_units_return() -> None:
    pool = QuotaPool("search", QuotaSpec(limit=1, period_s=2.0))
    resources = Resources([pool])
    pool.advance(0.0)
    pool.acquire("a", PoolRequest(units=1), 0.0)
    pool.release("a", 0.0)
    resources.take_changed()
    pool.advance(1.9)
    assert resources.take_changed() == set()
    pool.advance(2.0)
    assert resources.take_changed() == {"search"}


def test_devices_announce_what_a_node_reports_of_them_and_nothing_of_others() -> None:
    pool = GpuPool([node(devices=2)], {"s": ServiceSpec(name="s", bytes_by_dop={1: 10}, restore_s_by_dop={1: 1.0})})
    resources = Resources([pool])
    resources.take_changed()
    pool.report("elsewhere", {"s": [Chunk(0, 1)]})
    assert resources.take_changed() == set()
    pool.report("n0", {"s": [Chunk(0, 1)]})
    assert resources.take_changed() == {"gpu"}


def test_a_node_announces_that_memory_returned() -> None:
    nodes = Nodes([node("n0"), node("n1")], Resources([]))
    nodes["n1"].hold("t", 10)
    assert nodes.take_changed() == set()
    nodes["n1"].release("t")
    assert nodes.take_changed() == {"n1"}
    nodes.join(node("n2"))
    assert nodes.take_changed() == {"n2"}


def test_an_action_that_needs_memory_alone_starts_when_memory_returns(drive: Drive) -> None:
    driver = drive(spec(node(memory_bytes=100)))
    driver.step(0, submit("a", {}, memory_bytes=80), submit("b", {}, memory_bytes=80))
    assert driver.running() == {"a"}
    driver.step(1, finish("a"))
    assert driver.running() == {"b"}


def test_an_action_that_needs_memory_alone_starts_on_a_node_that_joins(drive: Drive) -> None:
    driver = drive(spec(node(memory_bytes=100)))
    driver.step(0, submit("a", {}, memory_bytes=80), submit("b", {}, memory_bytes=80))
    driver.step(1, NodeJoined(node=node("n1", memory_bytes=100)))
    assert driver.started["b"].lease.node == "n1"


def test_units_that_a_resize_gives_back_to_a_cap_start_an_action_of_the_task_on_another_node() -> None:
    class ShrinksLater:
        """Starts everything as wide as it may; from second five on, everything runs on one unit."""

        name = "shrinks later"

        def decide(self, view: PoolView) -> Decision:
            starts = [Start(action_id=one.action.id, units=one.limit) for one in view.candidates]
            wide = [one.action.id for one in view.running if one.units > 1 and one.action.malleable]
            if view.now_s < 5.0:
                return Decision(starts=starts, wake_s=5.0 if starts else None)
            return Decision(starts=starts, resizes=[ResizeChoice(action_id=id, units=1) for id in wide])

    config = replace(
        spec(node("n0", memory_bytes=10), node("n1", memory_bytes=100)), tasks={"default": TaskSpec(caps={"cpu": 4})}
    )
    driver = CoreDriver(build_core(config, policies={"cpu": ShrinksLater()}))
    driver.step(0, submit("elastic", {"cpu": UnitSet.span(1, 3)}, key="cpu", malleable=True))
    driver.step(1, submit("beside", {"cpu": 2}, trajectory="t", memory_bytes=100))
    assert driver.started["elastic"].lease.node == "n0" and driver.running() == {"elastic"}
    driver.step(5, Tick())
    assert driver.started["beside"].lease.node == "n1"


def test_a_cap_that_is_raised_or_lifted_starts_what_it_held_back(drive: Drive) -> None:
    driver = drive(replace(spec(), tasks={"default": TaskSpec(caps={"cpu": 1})}))
    driver.step(0, *(submit(f"a{index}") for index in range(3)))
    assert driver.running() == {"a0"}
    driver.step(1, Reconfigured(tasks={"default": TaskSpec(caps={"cpu": 2})}))
    assert driver.running() == {"a0", "a1"}
    driver.step(2, Reconfigured(tasks={}))
    assert driver.running() == {"a0", "a1", "a2"}


def test_a_report_of_what_is_resident_asks_no_pool_of_cores_again() -> None:
    class Counts:
        """Starts nothing and counts how often it was asked."""

        name = "counts"
        asked = 0

        def decide(self, view: PoolView) -> Decision:
            self.asked += 1
            return Decision(wake_s=100.0)

    policy = Counts()
    driver = CoreDriver(build_core(spec(node(devices=1)), policies={"cpu": policy}))
    driver.step(0, submit("a"))
    asked = policy.asked
    driver.step(1, ResidencyReported(node="n0", resident={}))
    assert policy.asked == asked > 0


def test_a_pool_that_is_full_of_actions_at_their_minimum_is_not_asked() -> None:
    class Starts:
        name = "starts"
        asked = 0

        def decide(self, view: PoolView) -> Decision:
            self.asked += 1
            return Decision(starts=[Start(action_id=one.action.id, units=1) for one in view.candidates])

    policy = Starts()
    driver = CoreDriver(build_core(spec(node(cores=2)), policies={"cpu": policy}))
    elastic = {"cpu": UnitSet.span(1, 2)}
    events = [Submitted(action=action(f"a{n}", elastic, key="cpu", malleable=True)) for n in range(3)]
    driver.step(0, *events)
    asked = policy.asked
    driver.step(1, Submitted(action=action("b")))
    assert (driver.running(), policy.asked) == ({"a0", "a1"}, asked)
    driver.step(2, Finished(action_id="a0", outcome=DONE))
    assert (driver.running(), policy.asked > asked) == ({"a1", "a2"}, True)
