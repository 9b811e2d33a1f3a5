"""The order of starts, and turns in a crowd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.action import Action, SizeLine, UnitSet
from manager.scheduler.adaptive import AdaptivePolicy
from manager.scheduler.policy import CrowdView, Decision
from manager.scheduler.rank import TURNS_AHEAD, age_bound_s, ranked, shortest_first
from tests.manager.conftest import action
from tests.manager.scheduler.test_policies import actions
from tests.manager.scheduler.world import check_sums, crowd_of, devices, pool, running, shell, suite, teacher

DRAWN = st.lists(
    st.tuples(st.sampled_from(("red", "blue")), st.none() | st.floats(0.1, 9.0), st.floats(0.0, 200.0)), max_size=30
)


def requests(drawn: Sequence[tuple[str, float | None, float]]) -> list[Action]:
    return [
        replace(teacher(f"t{index}", "s"), task=task, t_ori_s=t_ori_s, submitted_s=submitted_s)
        for index, (task, t_ori_s, submitted_s) in enumerate(drawn)
    ]


@given(DRAWN)
def test_each_task_keeps_its_turns_and_uses_them_for_its_shortest(
    drawn: list[tuple[str, float | None, float]],
) -> None:
    waiting = requests(drawn)
    order = shortest_first(waiting, 0.0, 1e9)
    assert [action.task for action in order] == [action.task for action in waiting]
    for task in ("red", "blue"):
        expected = [action.t_ori_s or 1.0 for action in order if action.task == task]
        assert expected == sorted(expected)
    assert sorted(action.id for action in order) == sorted(action.id for action in waiting)


@given(DRAWN)
def test_what_has_waited_too_long_goes_first_and_in_order(drawn: list[tuple[str, float | None, float]]) -> None:
    waiting = requests(drawn)
    aged = [action for action in waiting if action.submitted_s <= 100.0]
    assert shortest_first(waiting, 200.0, 100.0)[: len(aged)] == aged


def test_nothing_known_changes_nothing() -> None:
    waiting = requests([("red", None, 0.0)] * 4)
    assert shortest_first(waiting, 0.0, 1e9) == waiting


def learned(lines: Sequence[SizeLine | None], sizes: Sequence[float | None]) -> list[Action]:
    """Requests in the order of their submission, each with what was known then."""
    return [
        replace(
            teacher(f"t{index}", "s"),
            t_ori_s=None if line is None else line.at(size),
            line=line,
            size=size,
            submitted_s=float(index),
        )
        for index, (line, size) in enumerate(zip(lines, sizes, strict=True))
    ]


@given(st.lists(st.none() | st.floats(0.1, 9.0), max_size=20))
def test_kin_of_which_one_estimate_is_known_keep_their_order_however_it_moved(seconds: list[float | None]) -> None:
    waiting = learned([None if one is None else SizeLine(one) for one in seconds], [None] * len(seconds))
    known = [action for action in waiting if action.line is not None]
    assert [action for action in shortest_first(waiting, 99.0, 1e9) if action.line is not None] == known


def borrowing(seconds: Sequence[float], own: Sequence[float | None]) -> list[Action]:
    """Requests of a key each, which borrow from their function but for those that have an estimate of their own."""
    waiting = learned([SizeLine(one) for one in seconds], [None] * len(seconds))
    return [
        replace(one, profile_key=f"k{index}", borrows=True)
        if mine is None
        else replace(one, profile_key=f"k{index}", line=SizeLine(mine), t_ori_s=mine)
        for index, (one, mine) in enumerate(zip(waiting, own, strict=True))
    ]


def test_a_key_of_which_more_is_known_is_compared_by_that() -> None:
    waiting = borrowing([5.0, 4.0, 3.0, 2.0], [None, 2.5, None, 1.0])
    assert [one.id for one in shortest_first(waiting, 99.0, 1e9)] == ["t3", "t1", "t0", "t2"]


def test_kin_of_other_sizes_go_by_what_was_learned_last() -> None:
    """Twice as much was expected of all when the first came, which is not why it waits for the second."""
    waiting = learned([SizeLine(2.0, 2.0, 1.0, 8.0), SizeLine(1.0, 1.0, 1.0, 8.0)], [2.0, 4.0])
    assert waiting[0].t_ori_s == 6.0 and waiting[1].t_ori_s == 5.0
    assert [one.id for one in shortest_first(waiting, 99.0, 1e9)] == ["t0", "t1"]


def test_one_that_came_before_anything_was_learned_is_compared_by_what_is_known_by_now() -> None:
    waiting = learned([None, SizeLine(0.5), SizeLine(0.4)], [None] * 3)
    assert shortest_first(waiting, 99.0, 1e9) == waiting


@given(st.lists(st.floats(0.1, 9.0), min_size=1, max_size=20), st.integers(1, 16))
def test_an_action_is_overtaken_until_all_that_waits_would_be_worked_off(seconds: list[float], units: int) -> None:
    waiting = [teacher(f"t{index}", "s", t_ori_s) for index, t_ori_s in enumerate(seconds)]
    view = replace(devices([(0, 1)], waiting), total=units)
    mean_s = sum(seconds) / len(seconds)
    assert age_bound_s(view, waiting, 120.0) == pytest.approx(min(120.0, max(mean_s, sum(seconds) / units)))


def test_who_is_expected_to_take_less_than_other_kin_by_now_goes_first() -> None:
    first, second, third = learned([SizeLine(5.0), SizeLine(1.0), SizeLine(3.0)], [None] * 3)
    waiting = [first, second, replace(third, function="other")]
    assert [one.id for one in shortest_first(waiting, 99.0, 1e9)] == ["t0", "t1", "t2"]


def test_the_shortest_of_a_task_take_the_turns_that_it_is_dealt() -> None:
    waiting = requests([("red", 5.0, 0.0), ("red", 1.0, 0.0), ("blue", 3.0, 0.0), ("blue", 2.0, 0.0)])
    turns = ("blue", "elsewhere", "red", "blue", "red")
    assert [one.id for one in shortest_first(waiting, 0.0, 1e9, lambda: iter(turns))] == ["t3", "t1", "t2", "t0"]
    assert [one.id for one in shortest_first(waiting, 0.0, 1e9, lambda: iter(turns[:1]))] == ["t3", "t1", "t0", "t2"]


def test_turns_are_read_no_further_than_several_tasks_want_them() -> None:
    waiting = requests([("red", 5.0, 0.0), ("blue", 3.0, 0.0), ("blue", 2.0, 0.0)])
    turns = iter(["blue", "red", *["red"] * 1000, "blue"])  # most of red's wait for something else
    assert [one.id for one in shortest_first(waiting, 0.0, 1e9, lambda: turns)] == ["t2", "t0", "t1"]
    assert len(list(turns)) == 1001


def test_short_ones_of_a_task_far_ahead_of_its_turn_pass_nobody() -> None:
    waiting = [
        action(id, task=task, t_ori_s=seconds)
        for id, task, seconds in (("long", "red", 60.0), ("early", "red", 1.0), ("ahead", "blue", 1.0))
    ]

    def order(turns: Sequence[str]) -> tuple[list[str], list[str]]:
        view = replace(pool(8, waiting), turns=lambda: iter(turns))
        found = ranked(view, waiting, "cpu", 5.0, 1e9)
        return [one.id for one in found.first], [one.id for one in found.rest]

    assert order([*("red",) * (TURNS_AHEAD - 1), "blue"]) == (["early", "ahead"], ["long"])
    assert order([*("red",) * TURNS_AHEAD, "blue"]) == (["early"], ["long", "ahead"])


@given(st.lists(st.floats(0.0, 20.0), max_size=60), st.integers(0, 60), st.booleans(), st.booleans())
def test_short_ones_and_the_others_are_read_in_any_order_and_none_is_lost(
    seconds: list[float], drawn: int, others_first: bool, told: bool
) -> None:
    waiting = [action(f"a{number}", t_ori_s=each) for number, each in enumerate(seconds)]
    longest_s = max(seconds, default=inf) if told else inf
    found = ranked(replace(pool(8, waiting), longest_s=longest_s), waiting, "cpu", 5.0, 1e9)
    rest = iter(found.rest)
    early = list(islice(rest, drawn)) if others_first else []
    assert [one.id for one in found.first] == [one.id for one in waiting if (one.t_ori_s or 0.0) <= 5.0]
    assert [one.id for one in [*early, *rest]] == [one.id for one in waiting if (one.t_ori_s or 0.0) > 5.0]


def started(decision: Decision) -> list[str]:
    return [start.action_id for start in decision.starts]


@given(
    waiting=actions("w").filter(bool),
    held=actions("r"),
    units=st.lists(st.integers(1, 8), min_size=12, max_size=12),
    wide=st.lists(st.integers(1, 6), min_size=12, max_size=12),
    choices=st.booleans(),
    spare=st.integers(0, 12),
    now_s=st.sampled_from([0.0, 5.0, 1e4]),
)
def test_starts_use_no_unit_that_is_not_free_or_taken_back(
    waiting: list[Action],
    held: list[Action],
    units: list[int],
    wide: list[int],
    choices: bool,
    spare: int,
    now_s: float,
) -> None:
    """Rigid ones too, of more than one core, beside running ones that can only be shrunk as far as their set allows."""
    some = UnitSet.of((1, 2, 4, 8)) if choices else UnitSet.span(1, 32)
    held = [replace(one, cost={"cpu": some}) if one.malleable else one for one in held]
    busy = [
        running(one, some.at_most(count) or 1 if one.malleable else 1, workers=32)
        for one, count in zip(held, units, strict=False)
    ]
    crowd = [
        action if action.malleable else replace(action, cost={"cpu": UnitSet.fixed(least)})
        for action, least in zip(waiting, wide, strict=False)
    ]
    view = pool(sum(one.units for one in busy) + spare + 1, crowd, busy, now_s=now_s, crowd=True)
    decision = AdaptivePolicy().decide(view)
    check_sums(view, decision)
    assert decision == AdaptivePolicy().decide(view), "the same view gives the same decision"


def test_the_shortest_start_first_and_narrower_the_more_wait() -> None:
    waiting = [suite(f"a{index}", 100.0 - index) for index in range(40)]
    decision = AdaptivePolicy().decide(pool(16, waiting, crowd=True))
    shortest = [f"a{index}" for index in reversed(range(40))]
    assert started(decision) == shortest[: len(decision.starts)] and decision.starts
    few = AdaptivePolicy().decide(pool(16, waiting[:4], crowd=True))
    assert few.starts[0].units > decision.starts[0].units


def test_who_has_waited_for_most_of_the_time_that_all_of_it_takes_goes_first_at_its_minimum() -> None:
    waiting = [suite("long", 500.0), *(suite(f"a{index}", 10.0, submitted_s=48.0) for index in range(20))]
    view = pool(10, waiting, crowd=True)  # 700 core-seconds on 10 cores: seven tenths of 70 s
    assert "long" not in started(AdaptivePolicy().decide(replace(view, now_s=48.5)))
    aged = AdaptivePolicy().decide(replace(view, now_s=49.5)).starts[0]
    assert (aged.action_id, aged.units) == ("long", 1) and aged.workers > 1, "it may grow when the crowd has gone"


def test_a_suite_starts_once_its_useful_width_fits_beside_those_with_less_work_left() -> None:
    busy = [running(suite(f"r{index}", 10.0), 4) for index in range(4)]
    assert not AdaptivePolicy().decide(pool(16, [suite("longer", 20.0)], busy, crowd=True)).starts
    assert started(AdaptivePolicy().decide(pool(16, [suite("shorter", 5.0)], busy, crowd=True))) == ["shorter"]
    assert started(AdaptivePolicy().decide(pool(16, [suite("longer", 20.0)], busy[:2], crowd=True))) == ["longer"]


def test_nothing_starts_that_the_view_did_not_show() -> None:
    """The core counts as shown what was looked at in this very view: of a lazy sequence, no more."""
    shown: set[str] = set()
    waiting = [suite(f"a{index}", 100.0 - index) for index in range(30)] + [shell(f"s{index}") for index in range(3)]
    whole = crowd_of(waiting)

    def look(action: Action) -> Action:
        shown.add(action.id)
        return action

    watched = CrowdView(
        elastic=whole.elastic,
        work_s=whole.work_s,
        shortest=lambda: (look(action) for action in whole.shortest()),
    )
    view = replace(pool(8, waiting), candidates=[], crowd=watched)
    assert set(started(AdaptivePolicy().decide(view))) <= shown


def test_a_rigid_action_is_overtaken_for_a_tenth_of_its_time() -> None:
    waiting = [shell("build", 100.0), *(shell(f"s{index}", submitted_s=8.0) for index in range(4))]
    view = replace(pool(1, waiting), has_elastic=False)
    for now_s, first in ((9.0, "s0"), (10.0, "build")):
        assert started(AdaptivePolicy().decide(replace(view, now_s=now_s))) == [first]


def test_a_wide_action_leads_until_the_oldest_has_waited_too_long() -> None:
    waiting = [suite("long", 500.0), replace(shell("wide", 10.0), cost={"cpu": UnitSet.fixed(16)})]
    busy = [running(shell(f"r{index}", 50.0), 1) for index in range(15)]
    view = pool(16, waiting, busy)
    assert not AdaptivePolicy().decide(view).starts, "it would hold a core for longer than the wide one has to wait"
    assert started(AdaptivePolicy().decide(replace(view, now_s=121.0))) == ["long"]
