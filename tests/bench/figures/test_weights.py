"""Shares of tasks, measured from what was played."""

from __future__ import annotations

import pytest

from bench.figures.weights import CORES, HEAVY, LIGHT, QUEUES, play_weighted, queue_row, share_of
from manager.action import UnitSet
from manager.simulation.simulator import LeaseAudit, SimulatedAction, SimulationRun
from manager.simulation.workloads import TracedTrajectory, TraceStep, Workload


def ran(trajectory: str, began_s: float, ended_s: float, units: int) -> SimulatedAction:
    return SimulatedAction(
        trajectory=trajectory,
        number=0,
        function="f",
        submitted_s=0.0,
        queue_s=began_s,
        overhead_s=0.0,
        execution_s=ended_s - began_s,
        units=units,
        unit_s=units * (ended_s - began_s),
    )


def test_the_error_is_what_the_worse_served_task_lacks_while_both_wait() -> None:
    records = [
        ran("heavy-0", 0.0, 4.0, 3),
        ran("heavy-1", 4.0, 8.0, 3),  # the last to start of its task: from here on only the other waits
        ran("light-0", 0.0, 6.0, 2),
        ran("light-1", 6.0, 99.0, 9),
    ]
    run = SimulationRun(records=records, trajectories=4, makespan_s=99.0, ledger=LeaseAudit())
    row = share_of(run, due=0.75, units=1)
    assert row["watched_s"] == 4.0
    assert row["share"] == pytest.approx(12 / 20)
    assert row["error"] == pytest.approx(0.2)
    assert share_of(run, due=0.5, units=1)["error"] == pytest.approx(0.2)


def test_a_played_action_has_the_units_that_it_held_over_time() -> None:
    step = TraceStep(think_s=0.0, function="f", cost={"cpu": UnitSet.fixed(4)}, t_ori_s=2.5)
    work = Workload(
        name="one", trajectories=tuple(TracedTrajectory(id=t, task=t, steps=(step,)) for t in (HEAVY, LIGHT))
    )
    assert [one.unit_s for one in play_weighted(work, CORES, {HEAVY: 2.0, LIGHT: 1.0}).records] == [10.0, 10.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUEUES)
def test_each_task_gets_what_its_weight_gives_it_while_both_wait(name: str) -> None:
    assert queue_row(name, seed=1)["error"] <= 0.1
