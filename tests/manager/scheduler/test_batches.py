"""What joins a batch is priced with it, and asked about no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from manager.action import Action, Chunk, UnitSet
from manager.scheduler.policy import PoolView
from manager.scheduler.price import PricePolicy
from tests.manager.scheduler.world import check_sums, devices, running, teacher


def requests(count: int, *, marginal: float = 1.0, tokens: int = 10) -> list[Action]:
    return [
        replace(teacher(f"q{index}", "s"), batch_tokens=tokens, batch_marginal=marginal, cost={"gpu": UnitSet.fixed(1)})
        for index in range(count)
    ]


def view(waiting: Sequence[Action], *, tokens: int = 100, ends_in_s: float, free: int = 2) -> PoolView:
    """Some cold devices, and a busy one that is warm for s."""
    busy = [replace(running(teacher("r", "s"), 1, ends_in_s=ends_in_s), chunk=Chunk(7, 1))]
    shown = devices([(index, 1) for index in range(free)], waiting, busy, resident={"s": ((7, 1),)}, restore_s=2.0)
    assert shown.chunks is not None
    return replace(shown, chunks=replace(shown.chunks, batch_tokens=lambda service: tokens))


def test_queue_mates_are_one_start() -> None:
    shown = view(requests(4), ends_in_s=100.0)
    decision = PricePolicy().decide(shown)
    check_sums(shown, decision)
    assert [start.action_id for start in decision.starts] == ["q0"]
    assert decision.holds == []


def test_beyond_the_tokens_of_a_batch_the_next_one_begins() -> None:
    decision = PricePolicy().decide(view(requests(4), tokens=20, ends_in_s=100.0))
    assert [start.action_id for start in decision.starts] == ["q0", "q2"]


@pytest.mark.parametrize("tokens", [0, 10])
def test_where_nothing_batches_each_is_asked_about(tokens: int) -> None:
    decision = PricePolicy().decide(view(requests(2), tokens=tokens, ends_in_s=100.0))
    assert [start.action_id for start in decision.starts] == ["q0", "q1"]


def test_a_batch_that_waits_for_a_warm_chunk_says_so_for_all_its_members() -> None:
    decision = PricePolicy().decide(view(requests(3), ends_in_s=0.1))
    assert [hold.action_id for hold in decision.holds] == ["q0", "q1", "q2"]
    assert len({hold.waits_for for hold in decision.holds}) == 1


@pytest.mark.parametrize(("marginal", "starts"), [(1.0, ["other"]), (0.0, [])])
def test_what_waits_behind_a_batch_waits_as_long_as_the_batch_takes(marginal: float, starts: list[str]) -> None:
    shown = view(requests(6, marginal=marginal), ends_in_s=0.1, free=1)
    other = replace(teacher("other", "s", t_ori_s=1.2), cost={"gpu": UnitSet.fixed(1)})
    shown = replace(shown, eligible=[*shown.eligible, other], backlog=7)
    decision = PricePolicy().decide(shown)
    assert [start.action_id for start in decision.starts] == starts, "six seconds are longer than a restore, one is not"


def test_what_may_take_other_counts_is_asked_about_on_its_own() -> None:
    wide = replace(requests(1)[0], id="wide", cost={"gpu": UnitSet.of((1, 2))})
    decision = PricePolicy().decide(view([*requests(2), wide], ends_in_s=100.0))
    assert [start.action_id for start in decision.starts] == ["q0", "wide"]
