"""Views: the queue in pages of bounded size, what each action waits for, and what a task used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from manager.action import UnitSet
from manager.config import TaskSpec
from manager.core.core import Core
from manager.core.outside import OutsideWait
from manager.core.state import Cause, counted_causes
from manager.core.views import CELLS_MAX, queue_view, resources_view, summary, tasks_view, trajectories_view
from manager.errors import InvalidInput
from manager.events import (
    CancelRequested,
    Finished,
    NodeClosed,
    NodeLost,
    NodeOpened,
    Reconfigured,
    Submitted,
    TrajectoryEnded,
    TrajectoryOpened,
)
from manager.resources.pools import ConcurrencySpec, QuotaSpec
from tests.manager.conftest import DONE, CoreDriver, Drive, action, cause, node, spec, submits

Rows = list[dict[str, object]]


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


def test_what_waits_outside_the_queue_is_told_with_it(drive: Drive) -> None:
    driver = drive(spec(node(cores=1)))
    driver.step(0.0, *submits(*(action(f"a{n}") for n in range(3))))
    core = driver.core
    told = Cause(kind="image", text="image big:1")

    def wait(number: int) -> OutsideWait:
        return OutsideWait(
            id=f"o{number}", function="(opening)", task="rl", since_s=float(number), what="big:1", why=lambda: told
        )

    waits = [wait(number) for number in range(3)]
    for each in waits:
        core.outside.enter(each)
    driver.step(9.0)
    for limit in (1, 2, 3, 5):
        assert [each for ids in pages(core, limit) for each in ids] == ["a1", "a2", "o0", "o1", "o2"], limit
    view = queue_view(core, 9, None)
    assert view["waiting"] == summary(core)["waiting"] == 5
    assert [(row["age_s"], row["waits_for"]) for row in cast(Rows, view["queue"])[2:]] == [
        (9.0, "image big:1"),
        (8.0, "image big:1"),
        (7.0, "image big:1"),
    ]
    (first, _) = cast(Rows, view["causes"])
    assert (first["count"], first["oldest_s"], first["task"]) == (3, 9.0, "rl")
    assert {each["task"]: each["queued"] for each in tasks_view(core)} == {"default": 2, "rl": 3}
    for each in waits:
        core.outside.leave(each)
        core.outside.leave(each)
    assert queue_view(core, 9, None)["waiting"] == 2


def test_the_pages_of_the_queue_hold_every_action_once_in_order_of_service(
    drive: Drive,
) -> None:
    driver = drive(spec(node(cores=1)))
    driver.step(0.0, *(Submitted(action=action(f"a{n}", task=f"t{n % 3}")) for n in range(10)))
    whole, _ = page(driver.core, 1000)
    assert len(whole) == 9 and queue_view(driver.core, 1, None)["waiting"] == 9
    for limit in (1, 2, 4, 9, 10):
        found = list(pages(driver.core, limit))
        assert [each for ids in found for each in ids] == whole
        assert max(map(len, found)) <= limit


def test_a_cursor_stays_good_when_the_action_that_it_names_has_left(drive: Drive) -> None:
    driver = drive(spec(node(cores=1)))
    driver.step(0.0, *(Submitted(action=action(f"a{n}")) for n in range(6)))
    first, cursor = page(driver.core, 2)
    driver.step(1.0, *(CancelRequested(action_id=each) for each in first))
    assert page(driver.core, 10, cursor)[0] == ["a3", "a4", "a5"]


@pytest.mark.parametrize("cursor", ["", "x", "00", "ff" * 31, "a b", "ü", "0" * 10_000])
def test_a_cursor_of_something_else_is_refused(drive: Drive, cursor: str) -> None:
    with pytest.raises(InvalidInput, match="no next_cursor"):
        queue_view(drive(spec()).core, 10, cursor)


def test_what_a_task_used_is_told_in_the_units_of_the_resources(drive: Drive) -> None:
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


def test_trajectories_come_in_pages_by_name(drive: Drive) -> None:
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


def test_only_what_is_missing_is_told(drive: Drive) -> None:
    driver = drive(spec(node(cores=2, memory_bytes=1000)))
    driver.step(0.0, *submits(action("a", {"cpu": 2}), action("b", {"cpu": 1}, memory_bytes=400)))
    found = cause(driver, "b")
    assert (found.kind, found.pool, found.need, found.free) == ("units", "cpu:n0", 1, 0)
    assert found.text == "1 of cpu", "its memory is free"


def test_memory_is_told_where_cores_are_free(drive: Drive) -> None:
    driver = drive(spec(node(cores=4, memory_bytes=1000)))
    driver.step(0.0, *submits(action("a", memory_bytes=900), action("b", memory_bytes=400)))
    found = cause(driver, "b")
    assert (found.kind, found.pool, found.need, found.free) == ("memory", "node:n0", 400, 100)


@pytest.mark.parametrize("fields", [{}, {"trajectory": "t"}, {"cost": {}}])
def test_the_reason_of_a_closed_node_is_told_and_not_its_memory(drive: Drive, fields: dict[str, Any]) -> None:
    driver = drive(spec(node("n0", memory_bytes=1000), node("n1", memory_bytes=1000)))
    driver.step(0.0, NodeClosed(node="n0", why="unfit: no engine", finishing=True))
    driver.step(0.0, NodeClosed(node="n1", why="silent"))
    driver.step(0.0, *submits(action("a", memory_bytes=400, **fields)))
    told = "an open node: n0 is closed: unfit: no engine (and 1 more)"
    assert (cause(driver, "a").kind, cause(driver, "a").text) == ("node", told)
    assert [(each.cause.text, each.count) for each in counted_causes(driver.core.state)] == [(told, 1)]
    driver.step(1.0, NodeOpened(node="n1"))
    assert driver.running() == {"a"}


def test_a_quota_tells_when_units_return(drive: Drive) -> None:
    driver = drive(spec())
    quota = QuotaSpec(limit=1, period_s=10.0)
    driver.step(0.0, Reconfigured(resources={"search": quota}))
    driver.step(0.0, *submits(action("a", {"search": 1})))
    driver.step(1.0, Finished(action_id="a", outcome=DONE))
    driver.step(4.0, *submits(action("b", {"search": 1})))
    found = cause(driver, "b")
    assert (found.kind, found.pool) == ("quota", "search")
    assert found.until_s == pytest.approx(7.0)


def test_a_cap_of_the_task_is_told_before_the_pool(drive: Drive) -> None:
    driver = drive(spec(node(cores=4)))
    driver.step(0.0, Reconfigured(tasks={"rl": TaskSpec(caps={"cpu": 1})}))
    driver.step(0.0, *submits(action("a", task="rl"), action("b", task="rl")))
    found = cause(driver, "b")
    assert (found.kind, found.need, found.free) == ("task_cap", 1, 0)


def test_what_is_free_but_kept_for_an_earlier_one_is_a_turn(drive: Drive) -> None:
    driver = drive(spec(node(cores=2)))
    driver.step(0.0, *submits(action("a"), action("wide", {"cpu": 2}), action("late")))
    assert cause(driver, "wide").kind == "units"
    assert cause(driver, "late").kind == "turn"


def test_the_queue_is_counted_by_cause_and_sums_to_what_waits(drive: Drive) -> None:
    driver = drive(spec(node(cores=1)))
    driver.step(0.0, *submits(*(action(f"a{n}", task="rl") for n in range(5))))
    driver.step(2.0, *submits(action("t0", trajectory="t", task="eval"), action("t1", trajectory="t", task="eval")))
    driver.step(5.0)
    counts = {(each.cause.kind, each.task): each for each in counted_causes(driver.core.state)}
    assert {key: each.count for key, each in counts.items()} == {
        ("units", "rl"): 4,
        ("units", "eval"): 1,
        ("trajectory", "eval"): 1,
    }
    assert counts["units", "rl"].oldest_s == 5.0
    view = queue_view(driver.core, 2, None)
    causes = view["causes"]
    assert isinstance(causes, list)
    assert sum(each["count"] for each in causes) == view["waiting"] == 6


def test_holders_say_who_holds_what_since_when(drive: Drive) -> None:
    driver = drive(spec(node(cores=2)))
    driver.step(1.0, *submits(action("a", {"cpu": 2}, task="rl", trajectory="t")))
    driver.step(4.0)
    pools = resources_view(driver.core)["pools"]
    assert isinstance(pools, dict)
    holder = pools["cpu:n0"]["holders"]["a"]
    assert holder == {"function": "f", "task": "rl", "trajectory": "t", "running_s": 3.0}


def test_a_glance_shows_each_unit_of_a_small_pool_and_sums_of_a_large_one(drive: Drive) -> None:
    small = drive(spec(node(cores=4)))
    small.step(0.0, *submits(action("a", {"cpu": UnitSet.fixed(3)}), action("b")))
    cells = pool_of(small, "cpu:n0")["cells"]
    assert isinstance(cells, list)
    assert sorted(cells) == [[0, 3, "a", "f"], [3, 1, "b", "f"]]
    large = drive(spec(node(cores=CELLS_MAX + 1)))
    large.step(0.0, *submits(action("a", {"cpu": 3}), action("b")))
    assert pool_of(large, "cpu:n0")["by_function"] == [("f", 4)]


def pool_of(driver: CoreDriver, name: str) -> dict[str, object]:
    pools = summary(driver.core)["pools"]
    assert isinstance(pools, dict)
    found = pools[name]
    assert isinstance(found, dict)
    return found
