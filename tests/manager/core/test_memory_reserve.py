"""The memory that trajectories leave to others: rewards start while trajectories wait, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from manager.config import ManagerSpec
from manager.events import Finished, Submitted, TrajectoryEnded, TrajectoryOpened, TrajectoryPlaced
from tests.manager.conftest import DONE, CoreDriver, action, node, spec

Drive = Callable[[ManagerSpec], CoreDriver]


@pytest.fixture
def driver(drive: Drive) -> CoreDriver:
    """One node of 100 bytes, of which trajectories leave a tenth."""
    return drive(spec(node(cores=8, memory_bytes=100)))


def opened(name: str, memory_bytes: int) -> TrajectoryOpened:
    return TrajectoryOpened(trajectory=name, memory_bytes=memory_bytes)


def reward(id: str, memory_bytes: int, **fields: object) -> Submitted:
    return Submitted(action=action(id, None, memory_bytes=memory_bytes, **fields))


def placed(driver: CoreDriver) -> list[str]:
    return [command.trajectory for command in driver.commands if isinstance(command, TrajectoryPlaced)]


def test_a_reward_starts_in_what_trajectories_leave_while_more_of_them_wait(driver: CoreDriver) -> None:
    driver.step(0, *(opened(f"t{n}", 30) for n in range(5)))
    assert placed(driver) == ["t0", "t1", "t2"], "the fourth would reach into the reserve"
    driver.step(1, reward("r", 10), reward("more", 10))
    assert driver.running() == {"r"}
    driver.step(2, Finished(action_id="r", outcome=DONE))
    assert driver.running() == {"more"}
    driver.step(3, TrajectoryEnded(trajectory="t1"))
    assert placed(driver)[3:] == ["t3"], "what the reward holds is not the trajectories'"


def test_a_fresh_grade_of_an_action_in_a_trajectory_starts_while_trajectories_wait(driver: CoreDriver) -> None:
    driver.step(0, *(reward(f"a{n}", 45, trajectory=f"t{n}") for n in range(3)))
    driver.step(1, reward("grade", 10, parent="a0"))
    assert driver.running() == {"a0", "a1", "grade"}


def test_rewards_keep_their_order_in_the_reserve_and_one_that_is_too_large_for_it_holds_none_up(
    driver: CoreDriver,
) -> None:
    driver.step(0, *(opened(f"t{n}", 45) for n in range(3)))
    driver.step(1, reward("first", 6), reward("large", 30), reward("second", 5), reward("third", 4))
    assert driver.running() == {"first"}, "the third would pass the second"
    driver.step(2, Finished(action_id="first", outcome=DONE))
    assert driver.running() == {"second", "third"}
    driver.step(3, TrajectoryEnded(trajectory="t0"), TrajectoryEnded(trajectory="t2"))
    assert driver.running() == {"large", "second", "third"}


def test_a_trajectory_larger_than_the_rest_is_the_first_of_its_node_and_rewards_do_not_starve_it(
    driver: CoreDriver,
) -> None:
    driver.step(0, opened("t", 40), opened("huge", 97), opened("late", 10))
    assert placed(driver) == ["t"]
    driver.step(1, reward("r", 10), reward("little", 3))
    assert driver.running() == {"little"}, "no more than what the huge one leaves"
    driver.step(2, TrajectoryEnded(trajectory="t"))
    assert placed(driver) == ["t", "huge"]
    driver.step(3, TrajectoryEnded(trajectory="huge"))
    assert placed(driver) == ["t", "huge", "late"] and driver.running() == {"little", "r"}


def test_without_a_reserve_a_reward_waits_behind_the_trajectory_that_came_first(drive: Drive) -> None:
    whole = spec(node(memory_bytes=100))
    driver = drive(replace(whole, scheduler=replace(whole.scheduler, memory_reserve=0.0)))
    driver.step(0, opened("t", 60), opened("u", 60))
    driver.step(1, reward("r", 10))
    assert not driver.running()
    driver.step(2, TrajectoryEnded(trajectory="u"))
    assert driver.running() == {"r"}
