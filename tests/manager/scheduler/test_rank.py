"""The order of starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from manager.action import Action, SizeLine
from manager.scheduler.rank import TURNS_AHEAD, ranked, shortest_first
from tests.manager.conftest import action
from tests.manager.scheduler.world import teacher

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


@given(st.lists(st.floats(0.1, 9.0), max_size=20))
def test_keys_that_borrow_one_estimate_keep_their_order_however_it_moved(seconds: list[float]) -> None:
    waiting = borrowing(seconds, [None] * len(seconds))
    assert shortest_first(waiting, 99.0, 1e9) == waiting


def test_a_key_of_which_more_is_known_is_compared_by_that() -> None:
    waiting = borrowing([5.0, 4.0, 3.0, 2.0], [None, 2.5, None, 1.0])
    assert [one.id for one in shortest_first(waiting, 99.0, 1e9)] == ["t3", "t1", "t0", "t2"]


def test_one_that_borrowed_is_compared_by_its_own_key_once_something_is_known_of_it() -> None:
    first, second, third = borrowing([5.0, 5.0, 5.0], [None, None, 9.0])
    waiting = [first, second, replace(third, profile_key="k0")]
    assert [one.id for one in shortest_first(waiting, 99.0, 1e9)] == ["t1", "t0", "t2"]


def test_kin_of_other_sizes_go_by_what_was_learned_last() -> None:
    """Twice as much was expected of all when the first came, which is not why it waits for the second."""
    waiting = learned([SizeLine(2.0, 2.0, 1.0, 8.0), SizeLine(1.0, 1.0, 1.0, 8.0)], [2.0, 4.0])
    assert waiting[0].t_ori_s == 6.0 and waiting[1].t_ori_s == 5.0
    assert [one.id for one in shortest_first(waiting, 99.0, 1e9)] == ["t0", "t1"]


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
        found = ranked(waiting, "cpu", 0.0, 5.0, 1e9, turns=lambda: iter(turns))
        return [one.id for one in found.first], [one.id for one in found.rest]

    assert order([*("red",) * (TURNS_AHEAD - 1), "blue"]) == (["early", "ahead"], ["long"])
    assert order([*("red",) * TURNS_AHEAD, "blue"]) == (["early"], ["long", "ahead"])


@given(st.lists(st.floats(0.0, 20.0), max_size=60), st.integers(0, 60), st.booleans())
def test_short_ones_and_the_others_are_read_in_any_order_and_none_is_lost(
    seconds: list[float], drawn: int, others_first: bool
) -> None:
    waiting = [action(f"a{number}", t_ori_s=each) for number, each in enumerate(seconds)]
    found = ranked(waiting, "cpu", 0.0, 5.0, 1e9)
    rest = iter(found.rest)
    early = list(islice(rest, drawn)) if others_first else []
    assert [one.id for one in found.first] == [one.id for one in waiting if (one.t_ori_s or 0.0) <= 5.0]
    assert [one.id for one in [*early, *rest]] == [one.id for one in waiting if (one.t_ori_s or 0.0) > 5.0]
