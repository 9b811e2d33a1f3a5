"""The queue: order of service, bounds, deadlines, and groups that shrink in bulk."""

from __future__ import annotations

import random

import pytest

from manager.action import Action, UnitSet
from manager.config import TaskSpec
from manager.core.queue import Bounds, Queue, Waiting
from manager.errors import CapacityExceeded, QuotaExceeded
from tests.manager.conftest import action


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


def test_those_without_a_choice_of_units_lie_by_themselves_in_order_of_service() -> None:
    """Asked for once, they are kept apart through every coming and going."""
    chance, waiting = random.Random(11), queue(1000)
    rigid, elastic = UnitSet.fixed(1), UnitSet.span(1, 8)

    def admitted(seq: int) -> Waiting:
        grows = chance.random() < 0.8
        given = action(f"a{seq}", cost={"cpu": elastic if grows else rigid}, key="cpu" if grows else None)
        return admit(waiting, given, seq=seq)

    entries = [admitted(seq) for seq in range(100)]
    (group,) = waiting.groups()
    assert [item[2] for item in group.rigid("cpu")] == [one for one in entries if one.action.key is None]
    entries += [admitted(seq) for seq in range(100, 400)]
    gone = set(chance.sample(range(400), 350))
    for index in sorted(gone, key=lambda index: chance.random()):
        waiting.leave([entries[index]])
        waiting.check()
    left = [one for one in entries if one.seq not in gone]
    assert [item[2] for item in group.rigid("cpu")] == [one for one in left if one.action.key is None]
    assert [item[2] for item in group.rigid("gpu")] == left


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


def test_a_group_disappears_with_its_last_action() -> None:
    waiting = queue()
    entry = admit(waiting, action("a"))
    assert [group.live for group in waiting.groups()] == [1]
    waiting.leave([entry])
    assert waiting.groups() == [] and len(waiting) == 0
    waiting.check()


def test_what_comes_to_a_node_joins_those_alike_whatever_came_between() -> None:
    chance = random.Random(3)
    waiting = queue(1000)
    entries: list[Waiting] = []
    for seq in range(300):
        units = UnitSet.fixed(chance.randint(1, 2))
        submitted = action(f"a{seq}", {"cpu": units}, task=chance.choice("xy"), memory_bytes=chance.choice((0, 8)))
        entry = Waiting(submitted, (0.0, seq, 0), seq, child=chance.random() < 0.3)
        waiting.admit(entry, 0.0)
        waiting.offer(entry, chance.choice(("", "n0", "n1")))
        entries.append(entry)
        if chance.random() < 0.6:
            waiting.leave([entries.pop(chance.randrange(len(entries)))])
        waiting.check()
    for entry in entries:
        assert entry.group is not None
        task, demand, memory_bytes, _, _, child, _ = entry.group.signature
        assert (task, demand, child) == (entry.action.task, entry.action.demand, entry.child)
        assert memory_bytes == entry.action.memory_bytes


def test_what_was_offered_and_what_was_withdrawn_is_told_once() -> None:
    waiting = queue()
    starts, gives_up = admit(waiting, action("a"), seq=1), admit(waiting, action("b"), seq=2)
    (group,) = waiting.groups()
    assert waiting.take_arrived() == {group: 2} and waiting.take_arrived() == {}
    waiting.leave([starts])
    assert waiting.take_forsaken() == set(), "it starts on what it had reserved"
    waiting.withdraw(gives_up)
    assert waiting.take_forsaken() == {group} and waiting.take_forsaken() == set()


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


def test_who_leaves_makes_room_for_another() -> None:
    waiting = queue(1)
    entry = admit(waiting, action("a"))
    assert waiting.refusal(action("b")) is not None
    waiting.leave([entry])
    assert waiting.refusal(action("b")) is None


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
