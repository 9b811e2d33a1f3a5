"""What the policies promise, on one pool at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.action import Action, Chunk
from manager.scheduler.adaptive import AdaptivePolicy
from manager.scheduler.paper import CompletionHeap, PaperPolicy
from manager.scheduler.policy import Decision, Policy, PolicySpec
from manager.scheduler.price import PricePolicy
from manager.scheduler.registry import make_policy
from tests.manager.scheduler.world import check_sums, devices, pool, running, shell, suite, teacher

POLICIES: list[Policy] = [PaperPolicy(), PricePolicy(), AdaptivePolicy()]


def actions(prefix: str) -> st.SearchStrategy[list[Action]]:
    one = st.builds(
        lambda elastic, seconds, serial: (elastic, seconds, serial),
        st.booleans(),
        st.floats(0.05, 300.0),
        st.floats(0.0, 1.0),
    )
    return st.lists(one, max_size=12).map(
        lambda drawn: [
            suite(f"{prefix}{index}", seconds, serial=serial) if elastic else shell(f"{prefix}{index}", seconds)
            for index, (elastic, seconds, serial) in enumerate(drawn)
        ]
    )


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@given(
    waiting=actions("w"),
    held=actions("r"),
    units=st.lists(st.integers(1, 8), min_size=12, max_size=12),
    spare=st.integers(0, 40),
)
def test_a_decision_never_gives_more_than_there_is(
    policy: Policy, waiting: list[Action], held: list[Action], units: list[int], spare: int
) -> None:
    busy = [
        running(action, count if action.malleable else 1, workers=2 * count)
        for action, count in zip(held, units, strict=False)
    ]
    view = pool(sum(one.units for one in busy) + spare + 1, waiting, busy, worker_cost_s=0.3)
    decision = policy.decide(view)
    check_sums(view, decision)
    assert decision == policy.decide(view), "the same view gives the same decision"


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@given(waiting=actions("w").filter(bool), total=st.integers(1, 64))
def test_an_idle_pool_starts_something(policy: Policy, waiting: list[Action], total: int) -> None:
    assert policy.decide(pool(total, waiting, utilisation=0.0)).starts


@pytest.mark.parametrize("name", ["paper", "price", "adaptive", "fixed"])
def test_every_policy_is_chosen_by_its_exact_name(name: str) -> None:
    assert make_policy(PolicySpec(name=name)).name == name


def test_paper_gives_a_lone_suite_all_that_helps() -> None:
    decision = PaperPolicy().decide(pool(64, [suite("a")]))
    assert [(start.action_id, start.units) for start in decision.starts] == [("a", 32)]


def test_paper_starts_a_prefix_of_the_queue() -> None:
    waiting = [suite(f"a{index}", 40.0 + index) for index in range(6)]
    started = [start.action_id for start in PaperPolicy().decide(pool(8, waiting)).starts]
    assert started == [f"a{index}" for index in range(len(started))] and started


def test_paper_starts_nothing_where_two_cores_soon_are_better_than_one_now() -> None:
    busy = [running(suite("r"), 7, ends_in_s=1.0)]
    view = pool(8, [suite("a")], busy)
    patient = PaperPolicy().decide(view)
    assert not patient.starts and [hold.action_id for hold in patient.holds] == ["a"]
    greedy = PaperPolicy(greedy=1).decide(view)
    assert [(start.action_id, start.units) for start in greedy.starts] == [("a", 1)], "the other reading of the paper"


def test_paper_starts_something_where_nothing_runs_whose_end_would_ask_again() -> None:
    assert PaperPolicy().decide(pool(1, [suite("a"), suite("b")])).starts


def test_the_estimate_lets_each_end_admit_one_action() -> None:
    heap = CompletionHeap([2.0, 5.0])
    # 3 s start at 2; 1 s starts at 5 (both at once: 5 and 5); waits count.
    assert heap.estimate([3.0], [1.0]) == pytest.approx(5.0 + 6.0)
    assert heap.estimate([3.0, 1.0], [1.0]) == pytest.approx(3.0 + 4.0), "depth 2 tries the next larger count"
    assert CompletionHeap([]).estimate([4.0], []) == 4.0
    assert heap.estimate([], []) == 0.0


def test_price_takes_fewer_units_when_more_wait_behind() -> None:
    alone = PricePolicy().decide(pool(32, [suite("a")])).starts[0].units
    crowded = PricePolicy().decide(pool(32, [suite(f"a{index}") for index in range(32)])).starts[0].units
    assert alone == 32 and crowded < alone


def test_price_waits_for_units_that_come_soon() -> None:
    busy = [running(suite("r"), 31, ends_in_s=0.5)]
    decision = PricePolicy().decide(pool(32, [suite("a")], busy))
    assert not decision.starts
    assert decision.holds[0].action_id == "a" and decision.holds[0].until_s == pytest.approx(0.5)


def test_price_does_not_wait_for_units_that_come_late() -> None:
    busy = [running(suite("r"), 28, ends_in_s=500.0)]
    decision = PricePolicy().decide(pool(32, [suite("a")], busy))
    assert [start.units for start in decision.starts] == [4]


@pytest.mark.parametrize("policy", [PricePolicy(), AdaptivePolicy()], ids=lambda policy: policy.name)
def test_short_actions_go_first_until_one_behind_them_is_too_old(policy: Policy) -> None:
    waiting = [suite("long"), *(shell(f"s{index}") for index in range(4))]
    busy = [running(shell(f"r{index}"), 1, ends_in_s=9.0) for index in range(4)]
    young = policy.decide(pool(8, waiting, busy, now_s=1.0))
    assert {start.action_id for start in young.starts} >= {"s0", "s1", "s2", "s3"}
    old = policy.decide(pool(5, waiting, busy, now_s=500.0))
    assert [start.action_id for start in old.starts] == ["long"]


def test_adaptive_makes_room_for_everyone() -> None:
    busy = [running(suite("r0"), 16), running(suite("r1"), 16)]
    view = pool(32, [suite("a"), suite("b")], busy)
    decision = AdaptivePolicy().decide(view)
    check_sums(view, decision)
    assert {start.action_id for start in decision.starts} == {"a", "b"}
    assert all(resize.units < 16 for resize in decision.resizes) and decision.resizes


def test_adaptive_gives_freed_cores_to_running_actions() -> None:
    busy = [running(suite("r0"), 4, workers=32)]
    decision = AdaptivePolicy().decide(pool(32, [], busy))
    assert [(resize.action_id, resize.units) for resize in decision.resizes] == [("r0", 32)]


def test_adaptive_leaves_a_damped_action_alone_and_asks_again() -> None:
    busy = [replace(running(suite("r0"), 4, workers=32), resize_after_s=7.0)]
    decision = AdaptivePolicy().decide(pool(32, [], busy, now_s=5.0))
    assert not decision.resizes and decision.wake_s == 7.0


def test_a_suite_that_gains_nothing_from_width_gets_one_core() -> None:
    decision = AdaptivePolicy().decide(pool(32, [suite("wide"), suite("flat", serial=1.0)]))
    assert {start.action_id: start.units for start in decision.starts}["flat"] == 1


def test_adaptive_starts_more_workers_than_it_gives_cores() -> None:
    waiting = [suite(f"a{index}") for index in range(8)]
    starts = AdaptivePolicy().decide(pool(32, waiting, worker_cost_s=0.3)).starts
    assert all(start.units < start.workers <= 32 for start in starts)


def test_unknown_profiles_share_alike() -> None:
    waiting = [replace(suite(f"a{index}"), elasticity=None, t_ori_s=None) for index in range(4)]
    starts = AdaptivePolicy().decide(pool(16, waiting)).starts
    assert [start.units for start in starts] == [4, 4, 4, 4]


def test_a_warm_free_chunk_is_taken_before_a_cold_one() -> None:
    for policy in (PaperPolicy(), PricePolicy()):
        view = devices([(0, 8), (8, 8)], [teacher("t", "s", 4.0)], resident={"s": ((8, 8),)}, restore_s=4.0)
        starts = policy.decide(view).starts
        assert [start.chunk for start in starts] == [(8, 8)], policy.name


def test_a_busy_warm_chunk_is_worth_waiting_for() -> None:
    busy = [replace(running(teacher("r", "s"), 4, ends_in_s=0.1), chunk=Chunk(0, 4))]
    view = devices([(4, 4)], [teacher("t", "s")], busy, resident={"s": ((0, 4),)}, restore_s=40.0)
    decision = PricePolicy().decide(view)
    assert not decision.starts and decision.holds[0].until_s == pytest.approx(0.1)


def test_a_warm_chunk_is_worth_waiting_for_that_is_wider_than_what_is_free_or_busy_in_part() -> None:
    for units, free in ((8, [(8, 4)]), (4, [(4, 4), (8, 4)])):
        busy = [replace(running(teacher("r", "r"), units, ends_in_s=0.1), chunk=Chunk(0, units))]
        view = devices(free, [teacher("t", "s")], busy, resident={"s": ((0, 8),)}, restore_s=4.0)
        decision = PricePolicy().decide(view)
        assert not decision.starts and decision.holds[0].waits_for == "devices 0..7, warm for s", units


def test_a_wider_warm_chunk_is_worth_waiting_for_only_while_nobody_waits_behind() -> None:
    busy = [replace(running(teacher("r", "s"), 8, ends_in_s=0.5), chunk=Chunk(8, 8))]
    resident = {"s": (Chunk(0, 1), Chunk(8, 8))}

    def decision(*waiting: Action) -> Decision:
        return PricePolicy(c=0.01).decide(devices([(0, 1)], waiting, busy, resident=resident, restore_s=40.0))

    alone = decision(teacher("t", "s", 10.0))
    assert not alone.starts and alone.holds[0].waits_for == "devices 8..15, warm for s"
    crowded = decision(*(teacher(f"t{index}", "s", 10.0) for index in range(3)))
    assert [(start.action_id, start.chunk) for start in crowded.starts] == [("t0", (0, 1))]


def test_under_a_queue_a_dearer_device_is_taken_narrower() -> None:
    resident = {"s": tuple(Chunk(start, size) for size in (1, 8) for start in range(0, 8, size))}
    waiting = [teacher(f"t{index}", "s", 10.0) for index in range(8)]

    def width(factor: float) -> int:
        policy = PricePolicy(device_factor=factor)
        return policy.decide(devices([(0, 8)], waiting, resident=resident, restore_s=40.0)).starts[0].units

    assert (width(0.01), width(4.0)) == (8, 1)


def test_a_hot_service_gets_a_second_copy_when_the_wait_is_long() -> None:
    busy = [replace(running(teacher("r", "s"), 4, ends_in_s=30.0), chunk=Chunk(0, 4))]
    view = devices([(4, 4)], [teacher("t", "s")], busy, resident={"s": ((0, 4),)}, restore_s=1.0)
    assert PricePolicy().decide(view).starts[0].chunk is not None


def test_an_overdue_chunk_is_busy_and_worth_less_the_longer_it_runs() -> None:
    def decision(started_s: float) -> Decision:
        overdue = replace(running(teacher("r", "s"), 4, ends_in_s=0.0), chunk=Chunk(0, 4), started_s=started_s)
        view = devices([(4, 4)], [teacher("t", "s")], [overdue], resident={"s": ((0, 4),)}, restore_s=4.0)
        return PricePolicy().decide(view)

    assert not decision(started_s=0.0).starts
    assert decision(started_s=-60.0).starts[0].chunk == (4, 4)


def test_a_cold_start_spares_the_service_that_is_used_more() -> None:
    resident: dict[str, tuple[Chunk, ...]] = {"hot": (Chunk(0, 8),), "rare": (Chunk(8, 8),)}

    def chosen(recent: dict[str, float]) -> Chunk | None:
        view = devices([(0, 8), (8, 8)], [teacher("t", "new")], resident=resident, recent=recent, capacity=1)
        return PricePolicy().decide(view).starts[0].chunk

    assert chosen({"hot": 9.0, "rare": 0.1}) == (8, 8)
    assert chosen({"hot": 0.1, "rare": 9.0}) == (0, 8), "it is the use that counts"


def test_the_last_copy_is_spared_where_another_service_has_several() -> None:
    resident = {"many": ((0, 8), (16, 8), (24, 8)), "single": ((8, 8),)}
    recent = {"many": 0.5, "single": 0.5}
    view = devices([(0, 8), (8, 8)], [teacher("t", "new")], resident=resident, recent=recent, capacity=1)
    assert PricePolicy().decide(view).starts[0].chunk == (0, 8)


def test_a_service_in_demand_gets_a_second_copy_before_the_wait_is_as_long_as_its_restore() -> None:
    busy = [replace(running(teacher("r", "s"), 4, ends_in_s=0.2), chunk=Chunk(0, 4))]

    def decision(recent: float) -> Decision:
        resident = {"s": ((0, 4),)}
        return PricePolicy().decide(
            devices([(4, 4)], [teacher("t", "s")], busy, resident=resident, restore_s=4.0, recent={"s": recent})
        )

    assert not decision(0.1).starts
    assert decision(9.0).starts[0].chunk == (4, 4), "it will be needed again"


def test_on_devices_shorter_requests_of_a_task_go_first() -> None:
    waiting = [teacher("long", "s", 9.0), teacher("short", "s", 1.0)]
    starts = PricePolicy().decide(devices([(0, 1)], waiting, resident={"s": ((0, 1),)})).starts
    assert [start.action_id for start in starts] == ["short"]
