"""Turns in a crowd: the shortest first, the aged before them, and never a unit that is not there."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from manager.action import Action, UnitSet
from manager.scheduler.adaptive import AdaptivePolicy
from manager.scheduler.policy import CrowdView, Decision, WaitingView
from tests.manager.scheduler.test_policies import actions
from tests.manager.scheduler.world import check_sums, crowd_of, pool, running, shell, suite

#: Everything waits in a crowd; what waits for an age goes first.
CROWDED = AdaptivePolicy(crowd=1)


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
    decision = CROWDED.decide(view)
    check_sums(view, decision)
    assert decision == CROWDED.decide(view), "the same view gives the same decision"


def test_the_shortest_start_first_and_narrower_the_more_wait() -> None:
    waiting = [suite(f"a{index}", 100.0 - index) for index in range(40)]
    decision = AdaptivePolicy().decide(pool(16, waiting, crowd=True))
    shortest = [f"a{index}" for index in reversed(range(40))]
    assert started(decision) == shortest[: len(decision.starts)] and decision.starts
    few = AdaptivePolicy().decide(pool(16, waiting[:14], crowd=True))
    assert few.starts[0].units > decision.starts[0].units


def test_below_a_crowd_nothing_changes() -> None:
    waiting = [suite(f"a{index}", 100.0 - index) for index in range(13)]
    assert AdaptivePolicy().decide(pool(16, waiting, crowd=True)) == AdaptivePolicy().decide(pool(16, waiting))


def test_who_has_waited_as_long_as_all_of_it_takes_goes_first_at_its_minimum() -> None:
    waiting = [suite("long", 500.0), *(suite(f"a{index}", 10.0, submitted_s=99.0) for index in range(20))]
    view = pool(10, waiting, crowd=True)  # 700 core-seconds on 10 cores: 70 s, half as much again
    assert "long" not in started(AdaptivePolicy().decide(replace(view, now_s=100.0)))
    aged = AdaptivePolicy().decide(replace(view, now_s=106.0)).starts[0]
    assert (aged.action_id, aged.units) == ("long", 1) and aged.workers > 1, "it may grow when the crowd has gone"


def test_short_commands_and_the_aged_take_units_back_and_suites_do_not() -> None:
    busy = [running(suite("r0"), 8), running(suite("r1"), 8)]
    suites = [suite(f"a{index}") for index in range(20)]
    nothing = CROWDED.decide(pool(16, suites, busy, crowd=True))
    assert not nothing.starts and not nothing.resizes
    decision = CROWDED.decide(pool(16, [*suites, shell("s")], busy, crowd=True))
    assert started(decision) == ["s"] and [resize.units for resize in decision.resizes] == [7]


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


def test_a_candidate_that_a_cap_keeps_narrow_starts_narrow() -> None:
    waiting = [suite(f"a{index}") for index in range(14)]
    view = pool(64, waiting, crowd=True)
    capped = [WaitingView(action=action, limit=1) for action in waiting]
    assert {start.units for start in AdaptivePolicy().decide(replace(view, candidates=capped)).starts} == {1}
