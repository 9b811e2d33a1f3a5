"""The turn of a trajectory between two tries of one of its actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from manager.action import Action, Outcome, State
from manager.config import ManagerSpec
from manager.core.state import cause_of
from manager.errors import Reason
from manager.events import CancelRequested, Execute, Finished, Submitted, Tick, TrajectoryEnded
from tests.manager.conftest import DONE, CoreDriver, action, spec

Drive = Callable[[ManagerSpec], CoreDriver]
FAILED = Outcome(state=State.FAILED, reason=Reason.HANDLER_ERROR)


def second_try(of: Action, at_s: float) -> Submitted:
    again = replace(of, id=f"{of.id}.2", attempt=2, submitted_s=at_s)
    return Submitted(action=again, not_before_s=at_s)


@pytest.fixture
def driver(drive: Drive) -> CoreDriver:
    """A core in which ``a`` of trajectory t has failed, with ``b`` and ``c`` behind it, and is tried again at 5 s."""
    driver = drive(spec())
    first = action("a", trajectory="t")
    driver.step(0, *(Submitted(action=each) for each in (first, action("b", trajectory="t"))))
    driver.step(1, Submitted(action=action("c", trajectory="t")))
    driver.core.apply([Finished(action_id="a", outcome=FAILED)], 2)
    driver.core.apply([second_try(first, 5)], 2)
    driver.step(2)
    del driver.started["a"]
    return driver


def test_what_waits_behind_an_action_runs_after_its_last_try(driver: CoreDriver) -> None:
    assert driver.running() == set()
    driver.step(4.9, Tick(), Submitted(action=action("d", trajectory="t")))
    assert driver.running() == set()
    driver.step(5, Tick())
    assert driver.running() == {"a.2"}
    assert driver.started["a.2"].queue_s == 0, "the time between two tries is no waiting for units"
    driver.step(6, Finished(action_id="a.2", outcome=DONE, attempt=2))
    for now_s, name in ((7, "b"), (8, "c"), (9, "d")):
        driver.step(now_s, Tick())
        assert driver.running() == {name}
        driver.step(now_s + 0.5, Finished(action_id=name, outcome=DONE))


def test_it_asks_to_be_woken_at_the_next_try_and_says_what_is_waited_for(driver: CoreDriver) -> None:
    assert driver.core.state.queue.next_release_s() == 5
    waiting = driver.core.state.queue.get("a.2")
    assert waiting is not None
    assert cause_of(driver.core.state, waiting).text == "its next try, in 3 s"


def test_it_holds_nothing_between_two_tries(driver: CoreDriver) -> None:
    driver.step(3, Submitted(action=action("wide", {"cpu": 4})))
    assert driver.running() == {"wide"}


def test_a_cancel_between_two_tries_passes_the_turn_on(driver: CoreDriver) -> None:
    driver.step(3, CancelRequested(action_id="a.2"))
    driver.step(3, Tick())
    assert driver.running() == {"b"}


def test_the_end_of_the_trajectory_between_two_tries_ends_all(driver: CoreDriver) -> None:
    driver.step(3, TrajectoryEnded(trajectory="t"))
    assert set(driver.settled) >= {"a.2", "b", "c"}
    assert driver.core.state.trajectories.get("t") is None


def test_the_patience_of_the_next_try_begins_when_it_may_start(drive: Drive) -> None:
    driver = drive(spec())
    late = action("a.2", attempt=2, queue_timeout_s=2.0, submitted_s=5.0)
    driver.step(0, Submitted(action=action("all", {"cpu": 4})), Submitted(action=late, not_before_s=5.0))
    driver.step(6.9, Tick())
    assert "a.2" not in driver.settled
    driver.step(7, Tick())
    assert driver.settled["a.2"].outcome.reason is Reason.QUEUE_TIMEOUT


def test_what_waited_too_long_may_be_tried_again_before_what_is_behind_it(drive: Drive) -> None:
    driver = drive(spec())
    driver.step(0, Submitted(action=action("all", {"cpu": 4})))
    first = action("a", trajectory="t", queue_timeout_s=1.0)
    driver.step(0, Submitted(action=first), Submitted(action=action("b", trajectory="t")))
    driver.step(1, Finished(action_id="all", outcome=DONE))
    assert driver.settled["a"].outcome.reason is Reason.QUEUE_TIMEOUT
    commands = driver.core.apply([second_try(first, 1)], 1)
    assert not [each for each in commands if isinstance(each, Execute)]
    driver.step(1, Tick())
    assert driver.running() == {"a.2"}
