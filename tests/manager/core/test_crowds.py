"""A crowd in the core: the default policy orders it, and never gives way to its stand-in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from manager.action import Amdahl, UnitSet
from manager.config import ManagerSpec, SchedulerSpec, TaskSpec
from manager.events import Finished, NodeJoined, NodeLost, Submitted
from manager.scheduler.policy import PolicySpec
from tests.manager.conftest import DONE, CoreDriver, action, node, spec

Drive = Callable[[ManagerSpec], CoreDriver]


def crowded(*, cores: int = 4, tasks: dict[str, TaskSpec] | None = None, window: int = 2048) -> ManagerSpec:
    policies = {"default": PolicySpec(name="adaptive", options={"crowd": 2})}
    scheduler = SchedulerSpec(policies=policies, queue_window=window)
    return replace(spec(node(cores=cores)), scheduler=scheduler, tasks=tasks or {})


def suite(name: str, t_ori_s: float, **fields: object) -> Submitted:
    cost = {"cpu": UnitSet.span(1, 8)}
    return Submitted(
        action=action(name, cost, key="cpu", t_ori_s=t_ori_s, elasticity=Amdahl(0.05), malleable=True, **fields)
    )


def fill(driver: CoreDriver) -> None:
    """Take every core for as long as the test likes."""
    cores = driver.core.state.resources.of_kind("cpu")[0].total
    driver.step(0, *(Submitted(action=action(f"busy{index}", t_ori_s=900.0)) for index in range(cores)))


def test_the_shortest_of_a_crowd_starts_when_a_core_comes_free(drive: Drive) -> None:
    driver = drive(crowded())
    fill(driver)
    driver.step(1, suite("long", 90.0), suite("short", 10.0), suite("middle", 50.0))
    driver.step(2, Finished(action_id="busy0", outcome=DONE))
    assert driver.running() >= {"short"} and not driver.running() & {"middle", "long"}


def test_the_shortest_is_found_beyond_the_window_of_what_a_policy_is_shown_in_order(drive: Drive) -> None:
    driver = drive(crowded(window=2))
    fill(driver)
    driver.step(1, *(suite(f"long{index}", 90.0) for index in range(6)), suite("short", 10.0))
    driver.step(2, Finished(action_id="busy0", outcome=DONE))
    assert driver.running() >= {"short"}


def test_wide_commands_of_a_crowd_wait_for_cores_that_are_free(drive: Drive) -> None:
    driver = drive(crowded())
    fill(driver)
    wide = [Submitted(action=action(f"wide{index}", {"cpu": 3}, t_ori_s=1.0)) for index in range(3)]
    driver.step(1, *(suite(f"a{index}", 20.0) for index in range(4)), *wide)
    for now_s in range(2, 40):
        for name in sorted(driver.running()):
            driver.step(now_s, Finished(action_id=name, outcome=DONE))
    assert len(driver.settled) == 11


def test_a_crowd_passes_no_wide_action_that_is_the_oldest_and_waits_for_its_cores(drive: Drive) -> None:
    driver = drive(crowded())
    fill(driver)
    driver.step(1, Submitted(action=action("wide", {"cpu": 3}, t_ori_s=60.0)))
    driver.step(2, *(suite(f"a{index}", 5000.0) for index in range(3)))
    for index in range(3):
        driver.step(3 + index, Finished(action_id=f"busy{index}", outcome=DONE))
        assert not driver.running() & {"a0", "a1", "a2"}, "a suite that outlives the wait of the wide one was started"
    assert "wide" in driver.running()


def test_a_task_with_a_cap_keeps_it_in_a_crowd(drive: Drive) -> None:
    driver = drive(crowded(cores=8, tasks={"red": TaskSpec(caps={"cpu": 3})}))
    driver.step(1, *(suite(f"a{index}", 10.0 + index, task="red") for index in range(5)))
    held = sum(one.lease.units("cpu") for one in driver.started.values())
    assert 1 <= held <= 3 and driver.running()


def test_what_is_lost_in_the_instant_of_its_start_is_queued_again(drive: Drive) -> None:
    driver = drive(crowded())
    driver.step(1, replace(suite("a", 10.0), idempotent=True))
    driver.step(1, NodeLost(node="n0"))
    driver.step(1, NodeJoined(node=node()))
    assert driver.started["a"].action.attempt == 2
