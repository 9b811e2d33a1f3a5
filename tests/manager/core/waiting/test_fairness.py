"""Stamps of start-time fair queuing."""

from __future__ import annotations

import pytest

from manager.core import queue
from manager.core.queue import FairShare
from tests.manager.conftest import action


def test_a_task_with_twice_the_weight_is_stamped_half_as_far_ahead() -> None:
    fair = FairShare(frozenset())
    light = [fair.stamp(action(f"l{index}", task="light", t_ori_s=4.0), 1.0) for index in range(3)]
    heavy = [fair.stamp(action(f"h{index}", task="heavy", t_ori_s=4.0), 2.0) for index in range(3)]
    assert light == [0.0, 4.0, 8.0]
    assert heavy == [0.0, 2.0, 4.0]


def test_stamps_of_a_task_never_go_back_where_two_actions_share_a_resource() -> None:
    fair = FairShare(frozenset())
    long = action("long", {"cpu": 2, "parser": 1}, t_ori_s=50.0)
    first = [fair.stamp(long, 1.0) for _ in range(2)]
    assert first == [0.0, 100.0]
    assert fair.stamp(action("parser", {"parser": 1}, t_ori_s=1.0), 1.0) >= first[-1]
    assert fair.stamp(action("elsewhere", {"search": 1}, t_ori_s=1.0), 1.0) == 0.0


def test_who_comes_late_is_stamped_now_and_not_for_the_past() -> None:
    fair = FairShare(frozenset())
    busy = [action(f"b{index}", task="busy", t_ori_s=10.0) for index in range(5)]
    stamps = [fair.stamp(one, 1.0) for one in busy]
    for started in busy[:3]:
        fair.starts([started])
    assert fair.stamp(action("l", task="late"), 1.0) == stamps[3]


def test_what_overtakes_the_queue_does_not_move_its_clock() -> None:
    fair = FairShare(frozenset())
    backlog = [action(f"b{index}", task="busy", t_ori_s=10.0) for index in range(5)]
    stamps = [fair.stamp(one, 1.0) for one in backlog]
    fair.starts([backlog[4]])
    assert fair.stamp(action("l", task="late"), 1.0) == stamps[0]


def test_where_nothing_waits_nobody_is_ahead() -> None:
    fair = FairShare(frozenset())
    busy = [action(f"b{index}", task="busy", t_ori_s=10.0) for index in range(3)]
    latest = [fair.stamp(one, 1.0) for one in busy][-1]
    for started in busy:
        fair.starts([started])
    assert fair.stamp(action("l", task="late"), 1.0) == latest


def test_quota_is_charged_by_unit_and_cores_by_the_second() -> None:
    fair = FairShare(frozenset({"search"}))
    both = action("a", {"search": 3, "cpu": 2}, t_ori_s=7.0)
    assert (fair.charge(both, "search"), fair.charge(both, "cpu")) == (3.0, 14.0)


def test_what_was_really_used_replaces_the_guess() -> None:
    fair = FairShare(frozenset())
    guessed = action("a", t_ori_s=1.0)
    fair.stamp(guessed, 1.0)
    fair.correct(guessed, 1.0, {"cpu": 31.0})
    assert fair.stamp(action("b"), 1.0) == 31.0


def test_an_unknown_duration_is_charged_a_little() -> None:
    fair = FairShare(frozenset())
    assert fair.charge(action("a", {"cpu": 3}), "cpu") == 3 * queue.UNKNOWN_DURATION_S


def test_names_that_callers_invent_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "FLOWS_MAX", 10)
    fair = FairShare(frozenset())
    fair.stamp(action("kept", task="kept", t_ori_s=5.0), 1.0)
    for index in range(100):
        fair.stamp(action(f"a{index}", task=f"t{index}"), 1.0)
        if index % 5 == 0:
            fair.stamp(action("again", task="kept", t_ori_s=5.0), 1.0)
    assert fair.stamp(action("kept", task="kept"), 1.0) == 5.0 * 21
    assert len(fair) == 10


def turns(fair: FairShare, *tasks: str) -> str:
    return " ".join(fair.turns([(task, ("cpu",)) for task in tasks]))


def test_who_passes_others_of_its_task_takes_the_first_turn_and_pays_for_itself() -> None:
    fair = FairShare(frozenset())
    red = [action(f"r{index}", task="red", t_ori_s=seconds) for index, seconds in enumerate((8.0, 8.0, 2.0))]
    blue = [action(f"b{index}", task="blue", t_ori_s=5.0) for index in range(3)]
    for one in (*red, *blue):
        fair.stamp(one, 1.0)
    assert turns(fair, "blue", "red") == "blue red blue red blue red"  # red at 0, 8, 16; blue at 0, 5, 10
    fair.starts([red[2]])  # a charge of 2 where one of 8 was due
    assert turns(fair, "blue", "red") == "blue red blue blue red"  # red at 2, 10
    fair.starts([red[0]])
    fair.starts([red[1]])
    assert turns(fair, "blue", "red") == "blue blue blue"


def test_who_leaves_without_a_start_gives_up_the_last_turn_of_its_task() -> None:
    fair = FairShare(frozenset())
    red = [action(f"r{index}", task="red", t_ori_s=4.0) for index in range(2)]
    blue = action("b", task="blue", t_ori_s=1.0)
    for one in (*red, blue):
        fair.stamp(one, 1.0)
    fair.leaves(red[0], 1.0)
    fair.leaves(red[0], 1.0)
    assert turns(fair, "red", "blue") == "blue red"
    assert turns(fair, "red") == "red"


def test_a_task_owes_nothing_for_what_it_takes_back() -> None:
    fair = FairShare(frozenset())
    ran = action("ran", task="red", t_ori_s=3.0)
    fair.stamp(ran, 1.0)
    fair.starts([ran])
    backlog = [action(f"r{index}", task="red", t_ori_s=100.0) for index in range(9)]
    fair.stamp(action("b", task="blue", t_ori_s=1.0), 1.0)
    for one in backlog:
        fair.stamp(one, 1.0)
    for one in backlog:
        fair.leaves(one, 1.0)
    assert fair.stamp(action("again", task="red"), 1.0) == 3.0


def test_who_comes_after_one_that_left_stays_behind_what_waits() -> None:
    fair = FairShare(frozenset())
    red = [action(f"r{index}", t_ori_s=10.0) for index in range(3)]
    stamps = [fair.stamp(one, 1.0) for one in red]
    fair.leaves(red[0], 1.0)
    assert fair.stamp(action("next", t_ori_s=10.0), 1.0) >= stamps[2]
    fair.leaves(red[2], 1.0)
    assert len(fair) == 1


def test_what_nobody_guessed_is_charged_as_it_was_used() -> None:
    fair = FairShare(frozenset())
    first = action("a", t_ori_s=10.0)
    fair.stamp(first, 1.0)
    fair.starts([first])
    fair.correct(first, 1.0, {"cpu": 4.0})  # lost with its node, and queued again
    fair.correct(first, 1.0, {"cpu": 10.0})
    fair.correct(action("child", t_ori_s=7.0), 1.0, {"cpu": 7.0})
    assert fair.stamp(action("b"), 1.0) == 21.0


def test_a_batch_is_charged_once() -> None:
    fair = FairShare(frozenset())
    batch = [action(f"a{index}", t_ori_s=10.0) for index in range(4)]
    stamps = [fair.stamp(one, 1.0) for one in batch]
    for one in batch:
        fair.starts([one])
    fair.correct(batch[0], 1.0, {"cpu": 12.0})
    for one in batch[1:]:
        fair.correct(one, 1.0, {})
    assert fair.stamp(action("next"), 1.0) == stamps[-1], "and not behind four such durations"
