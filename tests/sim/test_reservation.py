"""With reservation no action starts later than under strict first come first served, on the same decisions.

Where an action may run is one of these decisions: its trajectory lives on a node, or the nodes are as good as one for
it. Were it free to choose, an action that starts earlier could take the room of a wider one on another node.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from manager.action import Action, Outcome, State, UnitSet
from manager.assembly import build_core
from manager.config import ManagerSpec, NodeSpec, SchedulerSpec
from manager.events import Event, Execute, Finished, Submitted, Tick, TrajectoryOpened, WakeAt
from manager.resources.pools import ConcurrencySpec, QuotaSpec
from manager.scheduler.policy import PolicySpec

CORES = (4, 3, 3)
SPEC = ManagerSpec(
    nodes=tuple(
        NodeSpec(name=f"n{index}", numa=(tuple(range(cores)),), memory_bytes=64) for index, cores in enumerate(CORES)
    ),
    resources={"search": QuotaSpec(limit=2, period_s=3.0), "parser": ConcurrencySpec(limit=2)},
    scheduler=SchedulerSpec(policies={"default": PolicySpec(name="fixed")}),
)

COSTS: list[dict[str, int]] = [
    {"cpu": 1},
    {"cpu": 3},
    {"search": 1},
    {"parser": 1},
    {"search": 1, "cpu": 2},
    {"parser": 1, "cpu": 1},
    {"parser": 2},
]

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
    strict = starts(replace(SPEC, scheduler=replace(SPEC.scheduler, strict=True)), jobs, pinned=pinned)
    reserved = starts(SPEC, jobs, pinned=pinned)
    assert reserved.keys() == strict.keys() == {str(index) for index in range(len(jobs))}
    later = {action_id: (at_s, strict[action_id]) for action_id, at_s in reserved.items() if at_s > strict[action_id]}
    assert not later, f"started at, and in strict order: {later}"


def jobs_of(costs: list[dict[str, int]]) -> st.SearchStrategy[Jobs]:
    return st.lists(st.tuples(st.integers(0, 12), st.sampled_from(costs), st.integers(1, 9)), min_size=1, max_size=25)


@given(jobs_of(COSTS))
def test_no_action_of_a_trajectory_starts_later_than_under_strict_order(jobs: Jobs) -> None:
    check(jobs, pinned=True)


@given(jobs_of(ANYWHERE))
def test_no_action_of_one_core_starts_later_than_under_strict_order_wherever_it_may_run(jobs: Jobs) -> None:
    check(jobs, pinned=False)


def test_trajectories_live_on_all_nodes() -> None:
    """What the first property is about: more than one node has something to do."""
    core = build_core(SPEC)
    core.step([TrajectoryOpened(trajectory=f"t{index}", memory_bytes=2) for index in range(6)], 0.0)
    assert {trajectory.node for trajectory in core.state.trajectories} == {node.name for node in SPEC.nodes}
