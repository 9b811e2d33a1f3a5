"""Policies in simulated worlds: fair shares, reservation, and a wide action among narrow ones."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.action import Action, Amdahl, Outcome, State, UnitSet
from manager.assembly import build_core
from manager.config import ManagerSpec, NodeSpec, SchedulerSpec, TaskSpec
from manager.events import Command, Event, Execute, Finished, Submitted, Tick, TrajectoryOpened, WakeAt
from manager.resources.pools import ConcurrencySpec, QuotaSpec
from manager.scheduler.policy import PolicySpec
from manager.simulation.simulate import preset
from manager.simulation.simulator import Simulation, cluster
from manager.simulation.workloads import TracedTrajectory, TraceStep
from tests.sim.checkers import FairShares

WEIGHTS = {"blue": 1.0, "green": 2.0, "red": 5.0}
CORES = (4, 3, 3)
COSTS: list[dict[str, int]] = [
    {"cpu": 1},
    {"cpu": 3},
    {"search": 1},
    {"parser": 1},
    {"search": 1, "cpu": 2},
    {"parser": 1, "cpu": 1},
    {"parser": 2},
]
UNITS = 16
SPAN_S = 60.0
WIDE_S = 2.0
#: What may wait before it at that load.
BACKLOG_S = 1.0
#: Five mean durations of what runs, the longer ones of which are more of it; the others overtake no more than they say.
AGE_S = {"price": 5.0 * 1.35, "fixed": 0.0, "paper": 0.0}

FAIR = ManagerSpec(
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


@pytest.mark.promise("Tasks share by their weights, to within one action.")
@pytest.mark.parametrize(
    "first", [0, pytest.param(15, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.slow)]
)
def test_no_task_gets_ahead_of_its_share_by_more_than_an_action(first: int) -> None:
    worst = max(share(FAIR, seed).worst for seed in range(first, first + 15))
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
    strict = replace(FAIR, scheduler=replace(FAIR.scheduler, strict=True))
    with pytest.raises(AssertionError, match="is the bound"):
        for seed in range(10):
            share(strict, seed)


RESERVED = ManagerSpec(
    nodes=tuple(
        NodeSpec(name=f"n{index}", numa=(tuple(range(cores)),), memory_bytes=64) for index, cores in enumerate(CORES)
    ),
    resources={"search": QuotaSpec(limit=2, period_s=3.0), "parser": ConcurrencySpec(limit=2)},
    scheduler=SchedulerSpec(policies={"default": PolicySpec(name="fixed")}),
)

#: Of any node, without a trajectory.
ANYWHERE = [cost for cost in COSTS if cost.get("cpu", 1) == 1] + [{"search": 1, "cpu": 1}]

#: (arrival, cost, duration) of each action.
Jobs = list[tuple[int, dict[str, int], int]]


def starts(spec: ManagerSpec, jobs: Jobs, *, pinned: bool) -> dict[str, float]:
    """When each action starts, every job running for its fixed duration; ``pinned``: in a trajectory of its own."""
    core = build_core(spec)
    if pinned:
        core.step(
            [TrajectoryOpened(trajectory=f"t{index}", memory_bytes=2, ttl_s=1e9) for index in range(len(jobs))], 0
        )
    agenda: list[tuple[float, int, Event]] = []
    for index, (arrival_s, cost, _) in enumerate(jobs):
        action = Action(
            id=str(index),
            function="f",
            trajectory=f"t{index}" if pinned else None,
            trajectory_ttl_s=1e9,
            cost={kind: UnitSet.fixed(units) for kind, units in cost.items()},
            submitted_s=float(arrival_s),
            queue_timeout_s=1e9,
        )
        heapq.heappush(agenda, (float(arrival_s), index, Submitted(action=action)))
    started: dict[str, float] = {}
    count = len(jobs)
    wake_s: float | None = None
    while agenda or (wake_s is not None and len(started) < len(jobs)):
        now_s = min(agenda[0][0] if agenda else 1e9, wake_s if wake_s is not None else 1e9)
        events: list[Event] = []
        while agenda and agenda[0][0] <= now_s:
            events.append(heapq.heappop(agenda)[2])
        for command in core.step(events or [Tick()], now_s):
            if isinstance(command, Execute):
                started[command.action.id] = now_s
                count += 1
                outcome = Outcome(state=State.SUCCEEDED)
                ends_s = now_s + jobs[int(command.action.id)][2]
                heapq.heappush(agenda, (ends_s, count, Finished(action_id=command.action.id, outcome=outcome)))
            elif isinstance(command, WakeAt):
                wake_s = command.instant_s
        core.check()
    return started


def check(jobs: Jobs, *, pinned: bool) -> None:
    jobs = sorted(jobs, key=lambda job: job[0])
    strict = starts(replace(RESERVED, scheduler=replace(RESERVED.scheduler, strict=True)), jobs, pinned=pinned)
    reserved = starts(RESERVED, jobs, pinned=pinned)
    assert reserved.keys() == strict.keys() == {str(index) for index in range(len(jobs))}
    later = {action_id: (at_s, strict[action_id]) for action_id, at_s in reserved.items() if at_s > strict[action_id]}
    assert not later, f"started at, and in strict order: {later}"


def jobs_of(costs: list[dict[str, int]]) -> st.SearchStrategy[Jobs]:
    return st.lists(st.tuples(st.integers(0, 12), st.sampled_from(costs), st.integers(1, 9)), min_size=1, max_size=25)


@pytest.mark.promise("No action of a trajectory or of one core starts later than under strict order.")
@given(jobs_of(COSTS))
def test_no_action_of_a_trajectory_starts_later_than_under_strict_order(jobs: Jobs) -> None:
    check(jobs, pinned=True)


@given(jobs_of(ANYWHERE))
def test_no_action_of_one_core_starts_later_than_under_strict_order_wherever_it_may_run(jobs: Jobs) -> None:
    check(jobs, pinned=False)


def test_trajectories_live_on_all_nodes() -> None:
    """What the first property is about: more than one node has something to do."""
    core = build_core(RESERVED)
    core.step([TrajectoryOpened(trajectory=f"t{index}", memory_bytes=2) for index in range(6)], 0.0)
    assert {trajectory.node for trajectory in core.state.trajectories} == {node.name for node in RESERVED.nodes}


def once(name: str, arrival_s: float, kind: str, units: int, seconds: float) -> TracedTrajectory:
    step = TraceStep(think_s=0.0, function="f", cost={kind: UnitSet.fixed(units)}, t_ori_s=seconds)
    return TracedTrajectory(id=name, arrival_s=arrival_s, steps=(step,))


def elastic(one: TracedTrajectory) -> TracedTrajectory:
    """The same work, of up to four cores that may change while it runs."""
    step = replace(
        one.steps[0], cost={"cpu": UnitSet.span(1, 4)}, key="cpu", elasticity=Amdahl(0.05), malleable=True, think_s=0.0
    )
    return replace(one, steps=(step,))


def narrow_ones(kind: str, load: float, seed: int) -> tuple[list[TracedTrajectory], float]:
    """Actions of one unit that ask for ``load`` of all units, and the longest in seconds."""
    chance = random.Random(seed)
    narrow: list[TracedTrajectory] = []
    at_s = longest_s = 0.0
    while at_s < SPAN_S:
        at_s += chance.expovariate(load * UNITS)
        seconds = chance.gammavariate(4.0, 0.25)
        longest_s = max(longest_s, seconds)
        narrow.append(once(f"n{len(narrow)}", at_s, kind, 1, seconds))
    return narrow, longest_s


def waits(trajectories: list[TracedTrajectory], kind: str, policy: str) -> dict[str, float]:
    on_cores = kind == "cpu"
    spec = cluster(nodes=1, cores=UNITS if on_cores else 1, devices=0 if on_cores else UNITS, policy=policy)
    return {record.trajectory: record.queue_s for record in Simulation(spec, trajectories).run().records}


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.7, 0.85])
@pytest.mark.parametrize("policy", sorted(AGE_S))
@pytest.mark.parametrize("seed", [1, 2])
def test_narrow_actions_do_not_keep_a_wide_one_from_its_devices(policy: str, load: float, seed: int) -> None:
    narrow, longest_s = narrow_ones("gpu", load, seed)
    wide = [once(f"wide{index}", 10.0 + 15.0 * index, "gpu", 8, WIDE_S) for index in range(3)]
    waited = waits([*narrow, *wide], "gpu", policy)
    bound_s = AGE_S[policy] + longest_s + BACKLOG_S
    assert max(waited[one.id] for one in wide) <= bound_s, {one.id: waited[one.id] for one in wide}
    # What the reservation costs the others is what their devices do not do meanwhile.
    assert max(waited.values()) <= bound_s + longest_s + WIDE_S


@pytest.mark.slow
@pytest.mark.parametrize("width", [6, 16])
@pytest.mark.parametrize("policy", ["adaptive", "price", "fixed", "paper"])
@pytest.mark.parametrize("seed", [1, 2])
def test_narrow_actions_do_not_keep_a_wide_one_from_its_cores(policy: str, width: int, seed: int) -> None:
    """On cores nothing that would make the oldest wait longer starts before it: the age bound is not used up."""
    narrow, longest_s = narrow_ones("cpu", 0.7, seed)
    narrow = [elastic(one) if index % 4 == 0 else one for index, one in enumerate(narrow)]
    wide = [once(f"wide{index}", 10.0 + 15.0 * index, "cpu", width, WIDE_S) for index in range(3)]
    waited = waits([*narrow, *wide], "cpu", policy)
    # An elastic one that starts with few cores and workers takes longer than with one, by what the workers cost.
    bound_s = longest_s + 2.0
    assert max(waited[one.id] for one in wide) <= bound_s, {one.id: waited[one.id] for one in wide}
    # While all sixteen cores are one's, the others queue up; they are worked off at three tenths of the speed.
    assert max(waited.values()) <= bound_s + 2 * (longest_s + WIDE_S)


@pytest.mark.slow
def test_what_a_wide_action_waits_for_is_not_left_idle() -> None:
    """Short actions go on beside the long ones that it waits for: they would end before these anyway."""
    long = [once(f"long{index}", 0.0, "cpu", 1, 30.0) for index in range(4)]
    short = [once(f"s{index}", 1.0 + 0.1 * index, "cpu", 1, 1.0) for index in range(200)]
    wide = once("wide", 0.5, "cpu", UNITS, 1.0)
    for policy in ("adaptive", "price"):
        waited = waits([*long, *short, wide], "cpu", policy)
        assert waited["wide"] <= 30.0, policy
        assert max(waited[one.id] for one in short) < 1.0, policy
    assert max(waits([*long, *short, wide], "cpu", "fixed").values()) > 20.0, "there was nothing to backfill"
