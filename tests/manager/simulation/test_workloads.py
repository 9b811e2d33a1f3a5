"""Presets: the same seed gives the same workload, another seed another one."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from manager.function import ModelAction, ModelSpec
from manager.simulation.workloads import BATCH_TOKENS, CODING_BURST, PRESETS, Coding, coding, mopd


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_seed_is_a_workload(preset: str) -> None:
    make = PRESETS[preset]
    assert make(20, 5) == make(20, 5)
    assert make(20, 5).trajectories != make(20, 6).trajectories
    assert len(make(20, 5).trajectories) == 20


def test_rewards_have_the_stated_median() -> None:
    rewards = [trajectory.steps[-1].t_ori_s for trajectory in coding(2000, 1).trajectories]
    assert statistics.median(rewards) == pytest.approx(80.0, rel=0.1)


def test_a_burst_asks_for_all_rewards_within_seconds() -> None:
    ready = [
        trajectory.arrival_s + sum(step.think_s for step in trajectory.steps)
        for trajectory in coding(200, 1, CODING_BURST).trajectories
    ]
    assert max(ready) - min(ready) < 5.0


def test_suites_repeat_where_tasks_do() -> None:
    keys = {trajectory.steps[-1].profile_key for trajectory in coding(64, 1, Coding(suites=4)).trajectories}
    assert len(keys) == 4


def test_a_batch_is_as_large_as_a_gateways_own() -> None:
    assert ModelSpec(path=Path("m"), action=ModelAction.SCORE).batch_tokens == BATCH_TOKENS
    assert {service.batch_tokens for service in mopd(1, 1).services.values()} == {BATCH_TOKENS}


def test_every_teacher_that_is_asked_exists() -> None:
    workload = mopd(200, 1)
    assert {step.service for trajectory in workload.trajectories for step in trajectory.steps} <= set(workload.services)
