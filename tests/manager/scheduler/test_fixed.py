"""The policy ``fixed``, through the core that obeys it."""

from __future__ import annotations

from collections.abc import Callable

from manager.action import UnitSet
from manager.config import ManagerSpec, SchedulerSpec
from manager.events import Finished, Submitted, Tick
from manager.scheduler.fixed import FixedPolicy
from manager.scheduler.policy import PolicySpec, PoolView, WaitingView
from tests.manager.conftest import DONE, CoreDriver, action, node, spec


def view(free: int, *candidates: WaitingView) -> PoolView:
    queued = [candidate.action for candidate in candidates]
    return PoolView(
        name="cpu:n0",
        now_s=0.0,
        total=8,
        free=free,
        running=(),
        candidates=candidates,
        queued=queued,
        backlog=len(queued),
    )


def elastic(id: str, units: UnitSet, limit: int) -> WaitingView:
    return WaitingView(action=action(id, {"cpu": units}, key="cpu"), limit=limit)


def started(policy: FixedPolicy, pool: PoolView) -> dict[str, int]:
    return {start.action_id: start.units for start in policy.decide(pool).starts}


def test_elastic_actions_get_the_dop_clipped_to_their_unit_set() -> None:
    pool = view(
        8,
        elastic("a", UnitSet.span(1, 2), 8),
        elastic("b", UnitSet.of((1, 3, 6)), 8),
        elastic("c", UnitSet.span(1, 8), 8),
    )
    assert started(FixedPolicy(dop=4), pool) == {"a": 2, "b": 3, "c": 3}


def test_rigid_actions_get_their_minimum_whatever_the_dop() -> None:
    pool = view(8, WaitingView(action=action("a", {"cpu": 3}), limit=8))
    assert started(FixedPolicy(dop=4), pool) == {"a": 3}


def test_nobody_behind_one_that_does_not_fit_is_started() -> None:
    pool = view(
        3, elastic("a", UnitSet.span(2, 8), 3), elastic("b", UnitSet.span(2, 8), 3), elastic("c", UnitSet.span(1, 8), 3)
    )
    assert started(FixedPolicy(dop=2), pool) == {"a": 2}


def test_the_core_leases_what_fixed_asks_for(drive: Callable[[ManagerSpec], CoreDriver]) -> None:
    driver = drive(spec(node(cores=8), dop=3))
    wide = [action(f"a{index}", {"cpu": UnitSet.span(1, 8)}, key="cpu") for index in range(3)]
    driver.step(0.0, *(Submitted(action=one) for one in wide))
    assert [driver.started[one.id].lease.units("cpu") for one in wide] == [3, 3, 2]


def test_an_elastic_action_waits_for_its_dop_and_only_rigid_ones_pass() -> None:
    pool = view(
        5,
        elastic("a", UnitSet.span(1, 8), 5),
        elastic("b", UnitSet.span(1, 8), 5),
        WaitingView(action=action("c", {"cpu": 1}), limit=5),
        elastic("d", UnitSet.span(1, 2), 5),
    )
    assert started(FixedPolicy(dop=3), pool) == {"a": 3, "b": 2}
    assert started(FixedPolicy(dop=3, wait_s=9.0), pool) == {"a": 3, "c": 1}
    assert FixedPolicy(dop=3, wait_s=9.0).decide(pool).wake_s == 9.0


def test_after_the_wait_it_takes_what_is_free(drive: Callable[[ManagerSpec], CoreDriver]) -> None:
    policies = {"default": PolicySpec(name="fixed", options={"dop": 3, "wait_s": 5.0})}
    driver = drive(ManagerSpec(nodes=(node(cores=4),), scheduler=SchedulerSpec(policies=policies)))
    driver.step(0.0, *(Submitted(action=elastic(id, UnitSet.span(1, 8), 8).action) for id in "ab"))
    assert set(driver.started) == {"a"}
    driver.step(5.0, Tick())
    assert driver.started["b"].lease.units("cpu") == 1


def test_a_dop_above_the_pool_is_the_whole_pool(drive: Callable[[ManagerSpec], CoreDriver]) -> None:
    policies = {"default": PolicySpec(name="fixed", options={"dop": 16, "wait_s": 9.0})}
    driver = drive(ManagerSpec(nodes=(node(cores=4),), scheduler=SchedulerSpec(policies=policies)))
    wide = [action(f"a{index}", {"cpu": UnitSet.span(1, 32)}, key="cpu") for index in range(2)]
    driver.step(0.0, *(Submitted(action=one) for one in wide))
    assert {id: begun.lease.units("cpu") for id, begun in driver.started.items()} == {"a0": 4}


def test_it_waits_for_nothing_that_a_wide_action_behind_it_keeps(drive: Callable[[ManagerSpec], CoreDriver]) -> None:
    policies = {"default": PolicySpec(name="fixed", options={"dop": 3, "wait_s": 1e9})}
    driver = drive(ManagerSpec(nodes=(node(cores=4),), scheduler=SchedulerSpec(policies=policies)))
    driver.step(0.0, Submitted(action=action("first", {"cpu": 4})))
    waiting = elastic("a", UnitSet.span(1, 4), 4).action, action("wide", {"cpu": 4})
    driver.step(1.0, *(Submitted(action=one) for one in waiting))
    driver.step(2.0, Finished(action_id="first", outcome=DONE))
    assert "a" in driver.started
    driver.step(3.0, Finished(action_id="a", outcome=DONE))
    assert "wide" in driver.started
