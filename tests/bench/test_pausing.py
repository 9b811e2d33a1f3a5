"""The study of pausing: its model keeps work, and pauses only where it is told to."""

from __future__ import annotations

import pytest

from bench.pausing import RULES, PauseModel, PauseRule, play, real
from manager.action import UnitSet
from manager.simulation.simulate import Size
from manager.simulation.trace import TracedTrajectory, TraceStep
from manager.simulation.workloads import CODING_BURST, Workload, coding


def one(name: str, arrival_s: float, seconds: float) -> TracedTrajectory:
    """A trajectory of one rigid action on one core."""
    step = TraceStep(think_s=0.0, function="f", cost={"cpu": UnitSet.fixed(1)}, t_ori_s=seconds)
    return TracedTrajectory(id=name, arrival_s=arrival_s, steps=(step,))


@pytest.mark.parametrize(
    ("rule", "ends"),
    [
        (PauseRule(pauses=False), {"long": 10.0, "short": 11.0}),
        (PauseRule(pauses=True, pause_s=0.5), {"short": 3.0, "long": 11.5}),
    ],
)
def test_a_short_action_passes_a_running_one_where_that_is_paused(rule: PauseRule, ends: dict[str, float]) -> None:
    work = Workload(name="two", trajectories=(one("long", 0.0, 10.0), one("short", 2.0, 1.0)))
    run = PauseModel(work, 1, rule).run()
    assert {record.trajectory: record.ended_s for record in run.records} == pytest.approx(ends)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule_ends_all_work_and_counts_what_it_froze(rule: PauseRule) -> None:
    work = coding(40, 1, CODING_BURST)
    model = PauseModel(work, 8, rule, seed=1)
    run = model.run()
    assert len(run.records) == work.actions
    assert run.makespan_s * 8 >= sum(step.t_ori_s for each in work.trajectories for step in each.steps)
    assert (model.pauses > 0) == rule.pauses == (model.most_frozen > 0)


@pytest.mark.slow
def test_without_pausing_the_model_is_close_to_the_core() -> None:
    work = coding(96, 2)
    ours = play(work, 24, RULES["no pauses"], 2)["mean"]
    assert ours == pytest.approx(real(work, Size(nodes=1, cores=24), "adaptive")["mean"], rel=0.1)
