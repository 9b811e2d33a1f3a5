"""What the policies promise, on one pool at a time, and what is kept for them of waiting and running actions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.action import Action, Chunk, UnitSet
from manager.config import ManagerSpec, SchedulerSpec
from manager.errors import InvalidConfig
from manager.events import Finished, Submitted, Tick
from manager.function import settings_of
from manager.scheduler.adaptive import AdaptivePolicy
from manager.scheduler.fixed import FixedPolicy
from manager.scheduler.paper import CompletionHeap, PaperPolicy
from manager.scheduler.policy import Decision, Policy, PolicySpec, PoolView, RunningSet, RunningView, WaitingView
from manager.scheduler.price import Backfill, PricePolicy
from manager.scheduler.registry import POLICIES, make_policy
from tests.manager.conftest import DONE, CoreDriver, action, node, spec
from tests.manager.scheduler.world import check_sums, devices, pool, running, shell, suite, teacher

COMPARED: list[Policy] = [PaperPolicy(), PricePolicy(), AdaptivePolicy()]


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


@pytest.mark.parametrize("policy", COMPARED, ids=lambda policy: policy.name)
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


@pytest.mark.parametrize("policy", COMPARED, ids=lambda policy: policy.name)
@given(waiting=actions("w").filter(bool), total=st.integers(1, 64))
def test_an_idle_pool_starts_something(policy: Policy, waiting: list[Action], total: int) -> None:
    assert policy.decide(pool(total, waiting, utilisation=0.0)).starts


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


def test_adaptive_starts_more_workers_than_it_gives_cores_where_they_pay() -> None:
    for t_ori_s, pays in ((100.0, True), (1.0, False)):
        waiting = [suite(f"a{index}", t_ori_s=t_ori_s) for index in range(8)]
        starts = AdaptivePolicy().decide(pool(32, waiting, worker_cost_s=0.3)).starts
        assert all((start.units < start.workers) is pays and start.workers <= 32 for start in starts)


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


def test_a_restore_is_shared_by_all_that_wait_for_the_service() -> None:
    """Two devices are warm together; copies of one device each serve more, if there are enough to serve."""

    def width(count: int) -> int:
        waiting = [teacher(f"t{index}", "s", 4.0) for index in range(count)]
        view = devices([(0, 2)], waiting, resident={"s": ((0, 2),)}, restore_s=4.0)
        return PricePolicy().decide(view).starts[0].units

    assert (width(1), width(60)) == (2, 1)


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


def test_what_ends_before_the_shadow_time_passes_and_the_rest_takes_extra_units() -> None:
    beside = Backfill.behind(6, 1, [(5.0, 2), (9.0, 4), (20.0, 1)])
    assert (beside.shadow_s, beside.extra) == (9.0, 1)
    assert beside.take(3, 9.0)
    assert not beside.take(2, 9.1)
    assert beside.take(1, 1000.0)
    assert not beside.take(1, 1000.0), "the extra unit was given twice"


def test_nothing_passes_where_nobody_knows_what_makes_room() -> None:
    beside = Backfill.behind(6, 1, [(5.0, 2)])
    assert not beside.take(1, 0.1)


def test_whatever_passes_the_shadow_time_stays() -> None:
    chance = random.Random(1)
    for _ in range(500):
        running = [(chance.uniform(0, 10), chance.randint(1, 4)) for _ in range(chance.randint(1, 12))]
        free = chance.randint(0, 6)
        wanted = chance.randint(1, free + sum(units for _, units in running))
        beside = Backfill.behind(wanted, free, running)
        left = free
        for _ in range(10):
            units, seconds = chance.randint(1, 3), chance.uniform(0, 12)
            if units <= left and beside.take(units, seconds):
                left -= units
                running.append((seconds, units))
        assert (
            left + sum(units for ends_s, units in running if ends_s <= beside.shadow_s)
            >= min(wanted, free + sum(units for _, units in running))
            or left >= wanted
        )


def requests(count: int, *, marginal: float = 1.0, tokens: int = 10) -> list[Action]:
    return [
        replace(teacher(f"q{index}", "s"), batch_tokens=tokens, batch_marginal=marginal, cost={"gpu": UnitSet.fixed(1)})
        for index in range(count)
    ]


def device_view(waiting: Sequence[Action], *, tokens: int = 100, ends_in_s: float, free: int = 2) -> PoolView:
    """Some cold devices, and a busy one that is warm for s."""
    busy = [replace(running(teacher("r", "s"), 1, ends_in_s=ends_in_s), chunk=Chunk(7, 1))]
    shown = devices([(index, 1) for index in range(free)], waiting, busy, resident={"s": ((7, 1),)}, restore_s=2.0)
    assert shown.chunks is not None
    return replace(shown, chunks=replace(shown.chunks, batch_tokens=lambda service: tokens))


def test_queue_mates_are_one_start() -> None:
    shown = device_view(requests(4), ends_in_s=100.0)
    decision = PricePolicy().decide(shown)
    check_sums(shown, decision)
    assert [start.action_id for start in decision.starts] == ["q0"]
    assert decision.holds == []


def test_beyond_the_tokens_of_a_batch_the_next_one_begins() -> None:
    decision = PricePolicy().decide(device_view(requests(4), tokens=20, ends_in_s=100.0))
    assert [start.action_id for start in decision.starts] == ["q0", "q2"]


def test_a_batch_that_waits_for_a_warm_chunk_says_so_for_all_its_members() -> None:
    decision = PricePolicy().decide(device_view(requests(3), ends_in_s=0.1))
    assert [hold.action_id for hold in decision.holds] == ["q0", "q1", "q2"]
    assert len({hold.waits_for for hold in decision.holds}) == 1


@pytest.mark.parametrize(("marginal", "starts"), [(1.0, ["other"]), (0.0, [])])
def test_what_waits_behind_a_batch_waits_as_long_as_the_batch_takes(marginal: float, starts: list[str]) -> None:
    shown = device_view(requests(6, marginal=marginal), ends_in_s=0.1, free=1)
    other = replace(teacher("other", "s", t_ori_s=1.2), cost={"gpu": UnitSet.fixed(1)})
    shown = replace(shown, eligible=[*shown.eligible, other], backlog=7)
    decision = PricePolicy().decide(shown)
    assert [start.action_id for start in decision.starts] == starts, "six seconds are longer than a restore, one is not"


def core_view(free: int, *candidates: WaitingView) -> PoolView:
    queued = [candidate.action for candidate in candidates]
    return PoolView(
        name="cpu:n0",
        now_s=0.0,
        total=8,
        free=free,
        running=(),
        candidates=candidates,
        queued=queued,
        backlog=len(queued),
    )


def elastic(id: str, units: UnitSet, limit: int) -> WaitingView:
    return WaitingView(action=action(id, {"cpu": units}, key="cpu"), limit=limit)


def started(policy: FixedPolicy, pool: PoolView) -> dict[str, int]:
    return {start.action_id: start.units for start in policy.decide(pool).starts}


def test_elastic_actions_get_the_dop_clipped_to_their_unit_set() -> None:
    pool = core_view(
        8,
        elastic("a", UnitSet.span(1, 2), 8),
        elastic("b", UnitSet.of((1, 3, 6)), 8),
        elastic("c", UnitSet.span(1, 8), 8),
    )
    assert started(FixedPolicy(dop=4), pool) == {"a": 2, "b": 3, "c": 3}


def test_nobody_behind_one_that_does_not_fit_is_started() -> None:
    pool = core_view(
        3, elastic("a", UnitSet.span(2, 8), 3), elastic("b", UnitSet.span(2, 8), 3), elastic("c", UnitSet.span(1, 8), 3)
    )
    assert started(FixedPolicy(dop=2), pool) == {"a": 2}


def test_the_core_leases_what_fixed_asks_for(drive: Callable[[ManagerSpec], CoreDriver]) -> None:
    driver = drive(spec(node(cores=8), dop=3))
    wide = [action(f"a{index}", {"cpu": UnitSet.span(1, 8)}, key="cpu") for index in range(3)]
    driver.step(0.0, *(Submitted(action=one) for one in wide))
    assert [driver.started[one.id].lease.units("cpu") for one in wide] == [3, 3, 2]


def test_an_elastic_action_waits_for_its_dop_and_only_rigid_ones_pass() -> None:
    pool = core_view(
        5,
        elastic("a", UnitSet.span(1, 8), 5),
        elastic("b", UnitSet.span(1, 8), 5),
        WaitingView(action=action("c", {"cpu": 1}), limit=5),
        elastic("d", UnitSet.span(1, 2), 5),
    )
    assert started(FixedPolicy(dop=3), pool) == {"a": 3, "b": 2}
    assert started(FixedPolicy(dop=3, wait_s=9.0), pool) == {"a": 3, "c": 1}
    assert FixedPolicy(dop=3, wait_s=9.0).decide(pool).wake_s == 9.0


def test_after_the_wait_it_takes_what_is_free(drive: Callable[[ManagerSpec], CoreDriver]) -> None:
    policies = {"default": PolicySpec(name="fixed", options={"dop": 3, "wait_s": 5.0})}
    driver = drive(ManagerSpec(nodes=(node(cores=4),), scheduler=SchedulerSpec(policies=policies)))
    driver.step(0.0, *(Submitted(action=elastic(id, UnitSet.span(1, 8), 8).action) for id in "ab"))
    assert set(driver.started) == {"a"}
    driver.step(5.0, Tick())
    assert driver.started["b"].lease.units("cpu") == 1


def test_it_waits_for_nothing_that_a_wide_action_behind_it_keeps(drive: Callable[[ManagerSpec], CoreDriver]) -> None:
    policies = {"default": PolicySpec(name="fixed", options={"dop": 3, "wait_s": 1e9})}
    driver = drive(ManagerSpec(nodes=(node(cores=4),), scheduler=SchedulerSpec(policies=policies)))
    driver.step(0.0, Submitted(action=action("first", {"cpu": 4})))
    waiting = elastic("a", UnitSet.span(1, 4), 4).action, action("wide", {"cpu": 4})
    driver.step(1.0, *(Submitted(action=one) for one in waiting))
    driver.step(2.0, Finished(action_id="first", outcome=DONE))
    assert "a" in driver.started
    driver.step(3.0, Finished(action_id="a", outcome=DONE))
    assert "wide" in driver.started


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_is_made_by_its_name_and_bears_it(name: str) -> None:
    assert make_policy(PolicySpec(name=name)).name == name


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidConfig, match=r"'prize'.*known are .*did you mean price\?"):
        make_policy(PolicySpec(name="prize"))


def test_an_unknown_option_is_refused_with_its_policy() -> None:
    with pytest.raises(InvalidConfig, match=r"policy fixed.*dops"):
        make_policy(PolicySpec(name="fixed", options={"dops": 2}))


@pytest.mark.parametrize(
    ("policy", "option", "value", "wish"),
    [
        ("paper", "depth", 2.5, "a whole number"),
        ("paper", "depth", 0, "at least 1"),
        ("paper", "estimate_window", float("inf"), "a finite number"),
        ("price", "c", 0, "more than 0"),
        ("adaptive", "join_share", 1.5, "at most 1"),
        ("fixed", "resize_interval_s", -1.0, "at least 0"),
    ],
)
def test_an_option_out_of_its_range_is_refused_with_what_is_needed(
    policy: str, option: str, value: float, wish: str
) -> None:
    with pytest.raises(InvalidConfig, match=rf"policy {policy}: option {option} is .* where {wish} is needed"):
        make_policy(PolicySpec(name=policy, options={option: value}))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_default_may_be_written_down_as_the_yaml_reads_it(name: str) -> None:
    policy = make_policy(PolicySpec(name=name))
    written = {option: float(getattr(policy, option)) for option, _, _ in settings_of(type(policy))}
    again = make_policy(PolicySpec(name=name, options=written))
    assert again == policy
    assert repr(again) == repr(policy), "a whole number has become a float"


def test_options_of_the_core_are_none_of_the_policys() -> None:
    policy = make_policy(PolicySpec(name="fixed", options={"dop": 2, "worker_cost_s": 0.1, "resize_interval_s": 1.0}))
    assert policy == make_policy(PolicySpec(name="fixed", options={"dop": 2}))


def drawn(name: str, chance: random.Random) -> RunningView:
    elastic, malleable = chance.random() < 0.6, chance.random() < 0.7
    units = UnitSet.span(2, 9) if elastic else UnitSet.fixed(2)
    action = Action(
        id=name, function="f", cost={"cpu": units}, key="cpu" if elastic else None, malleable=malleable, t_ori_s=1.0
    )
    return running(action, chance.randint(2, 9) if elastic else 2)


@pytest.mark.parametrize("seed", range(10))
def test_what_is_kept_is_what_a_look_at_all_of_them_finds(seed: int) -> None:
    chance = random.Random(seed)
    there: dict[str, RunningView] = {}
    kept = RunningSet("cpu", there.__getitem__)
    for number in range(100):
        name = f"a{number}"
        if there and chance.random() < 0.4:
            kept.remove(gone := chance.choice(list(there)))
            del there[gone]
        elif there and chance.random() < 0.3:
            name = chance.choice(list(there))
            if there[name].action.malleable_in("cpu"):
                there[name] = replace(there[name], units=chance.randint(2, 9))
                kept.note_units(name, there[name].units)
        else:
            there[name] = drawn(name, chance)
            if chance.random() < 0.5:
                kept.add(name, there[name])
            else:
                kept.enter(name, there[name].action)
        malleable = [one for one in there.values() if one.action.malleable_in("cpu")]
        assert len(kept) == len(there)
        assert kept.rigid == sum(one.action.key is None for one in there.values())
        if chance.random() < 0.5:
            continue  # nobody looks at the views
        assert [one.action for one in kept] == [one.action for one in there.values()]
        assert [one.action for one in kept.malleable.values()] == [one.action for one in malleable]
        assert kept.slack == sum(one.units - 2 for one in malleable)
        assert RunningSet.of(there.values(), "cpu").slack == kept.slack and RunningSet.of(kept, "cpu") is kept
        assert [one.action for one in kept[1:4]] == [one.action for one in list(there.values())[1:4]]
