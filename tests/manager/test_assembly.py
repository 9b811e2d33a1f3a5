"""What a configuration leaves open is chosen for its objective."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manager.assembly import STEP_BIAS, build_core
from manager.config import ManagerSpec, NodeSpec, SchedulerSpec
from manager.scheduler.adaptive import AdaptivePolicy
from manager.scheduler.policy import PolicySpec
from manager.simulation.simulate import Size, simulate
from manager.simulation.workloads import CODING_BURST, coding

NODE = NodeSpec(name="n1", numa=((0, 1),), memory_bytes=2**30)


def adaptive_of(objective: str, **options: float) -> AdaptivePolicy:
    policies = {"cpu": PolicySpec(name="adaptive", options=options), "default": PolicySpec(name="price")}
    scheduler = SchedulerSpec(policies=policies, objective=objective)  # type: ignore[arg-type]
    policy = build_core(ManagerSpec(nodes=(NODE,), scheduler=scheduler)).state.policies["cpu"]
    assert isinstance(policy, AdaptivePolicy)
    return policy


def test_an_objective_chooses_what_the_options_leave_open() -> None:
    assert adaptive_of("act").bias == AdaptivePolicy().bias
    assert adaptive_of("step").bias == STEP_BIAS
    assert adaptive_of("step", bias=0.0).bias == 0.0


@pytest.mark.parametrize("seed", [1, 2])
def test_the_objective_step_ends_a_batch_sooner_that_is_all_there(seed: int) -> None:
    work, size = coding(48, seed, CODING_BURST), Size(nodes=1, cores=48)
    spec = size.spec(work, "adaptive", strict=False)
    step = replace(spec, scheduler=replace(spec.scheduler, objective="step"))
    sooner, later = (simulate(work, "adaptive", size, base=base).makespan_s for base in (step, spec))
    assert sooner < 0.97 * later
