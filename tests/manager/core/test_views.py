"""Views: the queue in pages of bounded size, and what a task used in the units of the resources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from manager.config import ManagerSpec
from manager.core.core import Core
from manager.core.views import queue_view, tasks_view, trajectories_view
from manager.errors import InvalidInput
from manager.events import CancelRequested, Finished, NodeLost, Submitted, TrajectoryEnded, TrajectoryOpened
from manager.resources.pools import ConcurrencySpec, QuotaSpec
from tests.manager.conftest import DONE, CoreDriver, action, node, spec


def page(core: Core, limit: int, cursor: str | None = None) -> tuple[list[str], str | None]:
    view = queue_view(core, limit, cursor)
    rows, next_cursor = view["queue"], view["next_cursor"]
    assert isinstance(rows, list)
    assert next_cursor is None or isinstance(next_cursor, str)
    return [row["id"] for row in rows], next_cursor


def pages(core: Core, limit: int) -> Iterator[list[str]]:
    ids, cursor = page(core, limit)
    yield ids
    while cursor is not None:
        ids, cursor = page(core, limit, cursor)
        yield ids


def test_the_pages_of_the_queue_hold_every_action_once_in_order_of_service(
    drive: Callable[[ManagerSpec], CoreDriver],
) -> None:
    driver = drive(spec(node(cores=1)))
    driver.step(0.0, *(Submitted(action=action(f"a{n}", task=f"t{n % 3}")) for n in range(10)))
    whole, _ = page(driver.core, 1000)
    assert len(whole) == 9 and queue_view(driver.core, 1, None)["waiting"] == 9
    for limit in (1, 2, 4, 9, 10):
        found = list(pages(driver.core, limit))
        assert [each for ids in found for each in ids] == whole
        assert max(map(len, found)) <= limit


def test_a_cursor_stays_good_when_the_action_that_it_names_has_left(drive: Callable[[ManagerSpec], CoreDriver]) -> None:
    driver = drive(spec(node(cores=1)))
    driver.step(0.0, *(Submitted(action=action(f"a{n}")) for n in range(6)))
    first, cursor = page(driver.core, 2)
    driver.step(1.0, *(CancelRequested(action_id=each) for each in first))
    assert page(driver.core, 10, cursor)[0] == ["a3", "a4", "a5"]


@pytest.mark.parametrize("cursor", ["", "x", "00", "ff" * 31, "a b", "ü", "0" * 10_000])
def test_a_cursor_of_something_else_is_refused(drive: Callable[[ManagerSpec], CoreDriver], cursor: str) -> None:
    with pytest.raises(InvalidInput, match="no next_cursor"):
        queue_view(drive(spec()).core, 10, cursor)


def test_what_a_task_used_is_told_in_the_units_of_the_resources(drive: Callable[[ManagerSpec], CoreDriver]) -> None:
    made = replace(
        spec(node(devices=1)),
        resources={"search": QuotaSpec(limit=9, period_s=1.0), "parser": ConcurrencySpec(limit=2)},
    )
    driver = drive(made)
    costs = [{"cpu": 2}, {"gpu": 1}, {"search": 3}, {"parser": 1}, {"cpu": 1, "parser": 2}]
    for n, cost in enumerate(costs):
        driver.step(10.0 * n, Submitted(action=action(f"a{n}", cost, task="rl", submitted_s=10.0 * n)))
        driver.step(10.0 * n + 2.0, Finished(action_id=f"a{n}", outcome=DONE))
    (row,) = [view for view in tasks_view(driver.core) if view["task"] == "rl"]
    assert (row["core_s"], row["gpu_s"]) == (6.0, 2.0)
    assert (row["quota_units"], row["slot_s"]) == ({"search": 3.0}, {"parser": 6.0})
    assert row["act_s"] == 10.0
    driver.step(99.0, NodeLost(node="n0"))
    (row,) = [view for view in tasks_view(driver.core) if view["task"] == "rl"]
    assert row["core_s"] == 6.0
    (other,) = [view for view in tasks_view(driver.core) if view["task"] == "default"]
    assert (other["core_s"], other["quota_units"]) == (0.0, {})


def test_trajectories_come_in_pages_by_name(drive: Callable[[ManagerSpec], CoreDriver]) -> None:
    driver = drive(spec())
    for name in ("c", "a", "e", "b", "d"):
        driver.step(0.0, TrajectoryOpened(trajectory=name))
    seen: list[str] = []
    cursor: str | None = None
    while True:
        view = trajectories_view(driver.core, 2, cursor)
        rows = view["trajectories"]
        assert isinstance(rows, list) and len(rows) <= 2
        seen += [row["trajectory"] for row in rows]
        following = view["next_cursor"]
        if following is None:
            break
        assert isinstance(following, str)
        cursor = following
        driver.step(1.0, TrajectoryEnded(trajectory=cursor))  # what it names may have left
    assert seen == ["a", "b", "c", "d", "e"]
