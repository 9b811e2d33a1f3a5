"""The queue: order of service, bounds, deadlines, fair stamps, and the turns of trajectories."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from manager.action import Action, Outcome, State
from manager.config import TaskSpec
from manager.core import queue as queue_module
from manager.core.queue import Bounds, FairShare, Queue, Waiting
from manager.errors import CapacityExceeded, QuotaExceeded, Reason
from manager.events import CancelRequested, Execute, Finished, Submitted, Tick, TrajectoryEnded
from tests.manager.conftest import DONE, CoreDriver, Drive, action, cause, spec


def queue(
    total: int = 100, *, tasks: dict[str, TaskSpec] | None = None, functions: dict[str, int] | None = None
) -> Queue:
    return Queue(Bounds(total=total, tasks=tasks or {}, functions=functions or {}), services={})


def admit(waiting: Queue, submitted: Action, stamp: float = 0.0, seq: int = 1, now_s: float = 0.0) -> Waiting:
    entry = Waiting(submitted, (stamp, seq, 0), seq)
    waiting.admit(entry, now_s)
    waiting.offer(entry)
    return entry


@pytest.mark.slow
def test_a_group_is_served_by_stamp_then_submission_whatever_comes_and_goes() -> None:
    chance = random.Random(1)
    waiting = queue(1000)
    entries = [admit(waiting, action(f"a{seq}"), chance.randint(0, 9), seq) for seq in range(500)]
    gone = set(chance.sample(range(500), 400))
    for index in sorted(gone, key=lambda index: chance.random()):
        waiting.leave([entries[index]])
        waiting.check()
    (group,) = waiting.groups()
    left = sorted((entry for entry in entries if entry.seq not in gone), key=lambda entry: entry.order)
    assert list(group) == left
    assert [item[2] for item in group.items()] == left
    assert group.keyed[None] == group.live == len(left)


@pytest.mark.slow
def test_a_group_lies_in_the_order_of_expected_seconds_too_whatever_comes_and_goes() -> None:
    chance = random.Random(2)
    waiting = queue(1000)
    lengths = (None, 0.5, 1.0, 3.0, 80.0)
    entries = [admit(waiting, action(f"a{seq}", t_ori_s=chance.choice(lengths)), seq=seq) for seq in range(100)]
    (group,) = waiting.groups()
    assert group.seconds > 0, "asked for once, the order is kept"
    entries += [admit(waiting, action(f"a{seq}", t_ori_s=chance.choice(lengths)), seq=seq) for seq in range(100, 400)]
    gone = set(chance.sample(range(400), 350))
    for index in sorted(gone, key=lambda index: chance.random()):
        waiting.leave([entries[index]])
        waiting.check()
    left = [entry for entry in entries if entry.seq not in gone]
    left.sort(key=lambda entry: (1.0 if entry.action.t_ori_s is None else entry.action.t_ori_s, entry.seq))
    assert [item[2] for item in group.shortest()] == left


def test_an_action_that_is_queued_again_finds_its_old_place() -> None:
    """The mark of its first time may still lie there, with the same place in both orders."""
    waiting = queue()
    first, again, last = (admit(waiting, action(name), seq=seq) for seq, name in enumerate("abc"))
    (group,) = waiting.groups()
    assert [item[2].id for item in group.shortest()] == ["a", "b", "c"]
    waiting.leave([again])
    twice = Waiting(again.action, again.key, again.seq)
    waiting.admit(twice, 0.0)
    waiting.offer(twice)
    assert list(group) == [first, twice, last] == [item[2] for item in group.shortest()]
    waiting.check()


def test_what_was_offered_and_what_was_withdrawn_is_kept_for_the_next_pass() -> None:
    waiting = queue()
    starts, gives_up = admit(waiting, action("a"), seq=1), admit(waiting, action("b"), seq=2)
    (group,) = waiting.groups()
    assert waiting.arrived == {group: 2}
    waiting.leave([starts])
    assert not waiting.forsaken, "it starts on what it had reserved"
    waiting.withdraw(gives_up)
    assert waiting.forsaken == {group}


def test_the_bound_of_a_function_is_told_before_that_of_its_task_and_of_the_queue() -> None:
    waiting = queue(2, tasks={"default": TaskSpec(max_queued=1)}, functions={"f": 1})
    admit(waiting, action("a"))
    of_function = waiting.refusal(action("b"))
    of_task = waiting.refusal(action("b", function="g"))
    assert isinstance(of_function, QuotaExceeded) and "function f" in of_function.message
    assert isinstance(of_task, QuotaExceeded) and "task default" in of_task.message
    admit(waiting, action("c", task="other", function="g"), seq=2)
    full = waiting.refusal(action("d", task="other", function="h"))
    assert isinstance(full, CapacityExceeded) and full.invocation_id == "d"


def test_patience_ends_in_the_order_of_deadlines_and_who_left_is_forgotten() -> None:
    waiting = queue()
    patient = admit(waiting, action("patient", queue_timeout_s=9.0), seq=1)
    hasty = admit(waiting, action("hasty", queue_timeout_s=2.0), seq=2)
    gone = admit(waiting, action("gone", queue_timeout_s=1.0), seq=3)
    waiting.leave([gone])
    assert waiting.next_deadline_s() == 2.0
    assert waiting.expired(5.0) == [hasty]
    waiting.leave([hasty])
    assert waiting.next_deadline_s() == 9.0
    assert waiting.expired(9.0) == [patient]


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
    assert fair.charge(action("a", {"cpu": 3}), "cpu") == 3 * queue_module.UNKNOWN_DURATION_S


def test_names_that_callers_invent_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "FLOWS_MAX", 10)
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
    driver.step(6, Finished(action_id="a.2", outcome=DONE))
    for now_s, name in ((7, "b"), (8, "c"), (9, "d")):
        driver.step(now_s, Tick())
        assert driver.running() == {name}
        driver.step(now_s + 0.5, Finished(action_id=name, outcome=DONE))


def test_it_asks_to_be_woken_at_the_next_try_and_says_what_is_waited_for(driver: CoreDriver) -> None:
    assert driver.core.state.queue.next_release_s() == 5
    assert cause(driver, "a.2").text == "its next try, in 3 s"


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
