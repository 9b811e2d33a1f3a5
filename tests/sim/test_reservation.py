"""With reservation no action starts later than under strict first come first served, on the same decisions."""

from __future__ import annotations

import heapq
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from manager.action import Action, UnitSet
from manager.assembly import build_core
from manager.config import ConcurrencySpec, ManagerSpec, NodeSpec, QuotaSpec, SchedulerSpec
from manager.events import Event, Execute, Finished, Submitted, Tick, WakeAt
from manager.outcome import Outcome, State
from manager.scheduler.policy import PolicySpec

SPEC = ManagerSpec(
    nodes=(NodeSpec(name="n", numa=(tuple(range(4)),), memory_bytes=1),),
    quotas={"search": QuotaSpec(limit=2, period_s=3.0)},
    concurrency={"parser": ConcurrencySpec(limit=2)},
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

#: (arrival, cost, duration) of each action.
Jobs = list[tuple[int, dict[str, int], int]]


def starts(spec: ManagerSpec, jobs: Jobs) -> dict[str, float]:
    """When each action starts, every job running for its fixed duration."""
    core = build_core(spec)
    agenda: list[tuple[float, int, Event]] = []
    for index, (arrival_s, cost, _) in enumerate(jobs):
        sets = {kind: UnitSet.fixed(units) for kind, units in cost.items()}
        action = Action(id=str(index), function="f", cost=sets, submitted_s=float(arrival_s), queue_timeout_s=1e9)
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


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from(COSTS), st.integers(1, 9)), min_size=1, max_size=25))
def test_no_action_starts_later_than_under_strict_order(jobs: Jobs) -> None:
    jobs = sorted(jobs, key=lambda job: job[0])
    strict = starts(replace(SPEC, scheduler=replace(SPEC.scheduler, strict=True)), jobs)
    reserved = starts(SPEC, jobs)
    assert reserved.keys() == strict.keys() == {str(index) for index in range(len(jobs))}
    assert all(reserved[action_id] <= strict[action_id] for action_id in reserved)
