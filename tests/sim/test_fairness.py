"""Tasks share by their weights: the seeded checker of the bound, and its opposite, strict order."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest

from manager.action import Action, Outcome, State, UnitSet
from manager.assembly import build_core
from manager.config import ManagerSpec, NodeSpec, SchedulerSpec, TaskSpec
from manager.events import Command, Event, Execute, Finished, Submitted
from manager.scheduler.policy import PolicySpec
from manager.simulation.simulate import preset
from manager.simulation.simulator import Simulation, cluster
from tests.sim.checkers import FairShares

WEIGHTS = {"blue": 1.0, "green": 2.0, "red": 5.0}

SPEC = ManagerSpec(
    nodes=(NodeSpec(name="n", numa=(tuple(range(4)),), memory_bytes=1),),
    tasks={name: TaskSpec(weight=weight) for name, weight in WEIGHTS.items()},
    scheduler=SchedulerSpec(policies={"default": PolicySpec(name="fixed")}),
)


def share(spec: ManagerSpec, seed: int) -> FairShares:
    """Three tasks that come in bursts of their own and together want more than there is."""
    chance = random.Random(seed)
    core, checker = build_core(spec), FairShares("cpu", WEIGHTS)
    agenda: list[tuple[float, int, Event]] = []
    for index in range(150):
        task = chance.choice(sorted(WEIGHTS))
        at_s = chance.choice((0.0, 5.0, 20.0)) + chance.uniform(0.0, 10.0)
        action = Action(
            id=str(index),
            function="f",
            task=task,
            cost={"cpu": UnitSet.fixed(chance.randint(1, 3))},
            t_ori_s=chance.choice((0.2, 1.0, 4.0)),
            submitted_s=at_s,
            queue_timeout_s=1e9,
        )
        heapq.heappush(agenda, (at_s, index, Submitted(action=action)))
    count = len(agenda)
    while agenda:
        now_s, _, event = heapq.heappop(agenda)
        commands: list[Command] = core.step([event], now_s)
        checker.see(now_s, event, commands)
        for command in commands:
            if isinstance(command, Execute):
                count += 1
                ran_s = command.action.t_ori_s or 0.0
                finished = Finished(
                    action_id=command.action.id, outcome=Outcome(state=State.SUCCEEDED, execution_s=ran_s)
                )
                heapq.heappush(agenda, (now_s + ran_s, count, finished))
    core.check()
    assert core.settled == 150
    return checker


@pytest.mark.parametrize(
    "first", [0, pytest.param(15, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.slow)]
)
def test_no_task_gets_ahead_of_its_share_by_more_than_an_action(first: int) -> None:
    worst = max(share(SPEC, seed).worst for seed in range(first, first + 15))
    assert worst > 0.1, "the tasks never competed"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["adaptive", "price", "paper", "fixed"])
def test_a_few_trajectories_of_weight_are_served_before_a_backlog_of_many(policy: str) -> None:
    """Mixed loads on too few cores: the waiting of the weighty task is a fraction of the other's.

    Whatever a policy lets pass, the task of a tenth of the actions and ten times the weight is entitled to more than
    it asks for, so it should hardly notice the others.
    """
    heavy, light = preset("ai-coding", 8, 1).trajectories, preset("ai-coding", 80, 2).trajectories
    mixed = [replace(one, task="heavy", id=f"heavy/{one.id}") for one in heavy]
    mixed += [replace(one, task="light", id=f"light/{one.id}") for one in light]
    spec = cluster(nodes=1, cores=16, policy=policy)
    tasks = {"heavy": TaskSpec(weight=10.0, max_queued=1000), "light": TaskSpec(max_queued=1000)}
    records = Simulation(replace(spec, tasks=tasks), mixed).run().records
    waited = {
        task: sum(record.queue_s for record in records if record.trajectory.startswith(task)) / count
        for task, count in (("heavy", len(heavy)), ("light", len(light)))
    }
    assert waited["light"] > 30.0, "nobody had to wait"
    assert waited["heavy"] < 0.3 * waited["light"], waited


def test_the_bound_is_broken_where_order_alone_counts() -> None:
    strict = replace(SPEC, scheduler=replace(SPEC.scheduler, strict=True))
    with pytest.raises(AssertionError, match="is the bound"):
        for seed in range(10):
            share(strict, seed)
