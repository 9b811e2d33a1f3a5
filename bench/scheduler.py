"""How long a decision takes: the policies at a large queue, and the core's step over a burst.

Times are of this thread on its processor: what else runs on the machine does not count.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence

import numpy as np

from bench.report import BenchReport, median, parser, percentile
from manager.action import Action, Amdahl, UnitSet
from manager.assembly import build_core
from manager.events import Submitted
from manager.scheduler.policy import Decision, Policy, PoolView, RunningView, WaitingView
from manager.scheduler.registry import make_policy
from manager.simulation.cluster import cluster, policies
from manager.simulation.workloads import coding

#: The state that decisions are timed in.
QUEUED = 1536
UNITS = 1280
BURST = 3072


class BenchPool:
    """A pool under load: one thing happens, the policy decides, its decision is carried out."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self._policy = policy
        self._rng = np.random.default_rng(seed)
        self._made = 0
        self.now_s = 0.0
        self.free = UNITS
        self.running: dict[str, RunningView] = {}
        self.queue: dict[str, Action] = {}
        for _ in range(QUEUED):
            self._arrive()

    def _arrive(self) -> None:
        self._made += 1
        elastic = self._rng.random() < 0.5
        action = Action(
            id=f"a{self._made}",
            function="f",
            cost={"cpu": UnitSet.span(1, 32) if elastic else UnitSet.fixed(1)},
            key="cpu" if elastic else None,
            elasticity=Amdahl(round(float(self._rng.uniform(0.02, 0.1)), 3)) if elastic else None,
            t_ori_s=float(self._rng.lognormal(np.log(80 if elastic else 0.5), 0.6)),
            malleable=elastic,
            submitted_s=self.now_s,
        )
        self.queue[action.id] = action

    def next(self) -> float:
        """The next end and an arrival in its place; seconds that the decision took."""
        if self.running:
            ended = min(self.running.values(), key=lambda one: one.ends_in_s or 0.0)
            passed_s = ended.ends_in_s or 0.0
            del self.running[ended.action.id]
            self.free += ended.units
            self.now_s += passed_s
            self.running = {
                key: _moved(one, max(0.0, (one.ends_in_s or 0.0) - passed_s)) for key, one in self.running.items()
            }
        while len(self.queue) < QUEUED:
            self._arrive()
        view = self._view()
        begin = time.thread_time()
        decision = self._policy.decide(view)
        took_s = time.thread_time() - begin
        self._carry_out(decision)
        return took_s

    def _view(self) -> PoolView:
        waiting = list(self.queue.values())
        fitting = waiting[: self.free]
        return PoolView(
            name="cpu:node0",
            now_s=self.now_s,
            total=UNITS,
            free=self.free,
            running=list(self.running.values()),
            candidates=[WaitingView(action=action, limit=max(1, self.free)) for action in fitting],
            queued=waiting,
            backlog=len(waiting),
            eligible=waiting,
            arrival_rate=20.0,
            utilisation=1.0 - self.free / UNITS,
            worker_cost_s=0.3,
        )

    def _carry_out(self, decision: Decision) -> None:
        for resize in decision.resizes:
            one = self.running[resize.action_id]
            self.free -= resize.units - one.units
            left_s = (one.ends_in_s or 0.0) * one.units / resize.units
            self.running[resize.action_id] = _moved(one, left_s, resize.units)
        for start in decision.starts:
            action = self.queue.pop(start.action_id)
            self.free -= start.units
            self.running[action.id] = RunningView(
                action=action,
                units=start.units,
                ends_in_s=action.duration_s(start.units),
                started_s=self.now_s,
                remaining=1.0,
                workers=start.workers,
            )
        assert self.free >= 0, "the policy gave away more than there is"


def _moved(one: RunningView, ends_in_s: float, units: int | None = None) -> RunningView:
    return RunningView(
        action=one.action,
        units=units or one.units,
        ends_in_s=ends_in_s,
        started_s=one.started_s,
        remaining=one.remaining,
        workers=one.workers,
    )


def decision_times_ms(name: str, events: int, seed: int) -> list[float]:
    """Milliseconds of each decision after the pool has filled up."""
    pool = BenchPool(make_policy(policies(name)["cpu" if name == "adaptive" else "default"]), seed)
    for _ in range(events // 4):
        pool.next()
    gc.collect()
    gc.disable()
    try:
        return [1e3 * pool.next() for _ in range(events)]
    finally:
        gc.enable()


def burst_step_ms(seed: int) -> float:
    """Milliseconds of one step over `BURST` submissions to an empty core of 1,280 cores in five nodes."""
    workload = coding(BURST, seed)
    core = build_core(cluster(policy="adaptive"))
    events = [
        Submitted(
            action=Action(
                id=trajectory.id,
                function=trajectory.steps[0].function,
                trajectory=trajectory.id,
                memory_bytes=2**30,
                cost=trajectory.steps[0].cost,
                t_ori_s=trajectory.steps[0].t_ori_s,
            )
        )
        for trajectory in workload.trajectories
    ]
    gc.collect()
    begin = time.thread_time()
    core.step(list(events), 0.0)
    took_s = time.thread_time() - begin
    core.check()
    return 1e3 * took_s


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("scheduler").parse_args(argv)
    report = BenchReport("scheduler")
    events = 100 if options.quick else 1500
    worst = 0.0
    rows: dict[str, dict[str, float]] = {}
    for name in ("price", "adaptive", "paper"):
        times = decision_times_ms(name, events if name != "paper" else events // 10, seed=7)
        rows[name] = {"p50_ms": median(times), "p99_ms": percentile(times, 0.99), "max_ms": max(times)}
        if name != "paper":
            worst = max(worst, rows[name]["p99_ms"])
    report.figure("decisions", {name: dict(row) for name, row in rows.items()})
    report.figure("queued", QUEUED)
    report.figure("units", UNITS)
    report.figure("paper_over_price_p50", rows["paper"]["p50_ms"] / rows["price"]["p50_ms"])
    report.check("decision_p99_ms", worst, limit=0.5, better="lower")
    steps = [burst_step_ms(seed) for seed in range(2 if options.quick else 5)]
    report.check("burst_step_ms", median(steps), limit=50.0, better="lower")
    return report.print(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
