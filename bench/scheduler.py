"""What scheduling costs: whole steps of a core under load (`bench.core_steps`), and the policies' decisions alone.

Times are of this thread on its processor: what else runs on the machine does not count. Steps are checked against the
reading of a fixed document in the same run, so that a slow machine does not decide.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence

import numpy as np

from bench.core_steps import LoadedCore, arrivals, burst
from bench.report import BenchReport, median, parser, percentile
from gateway.app import COLLECT_EVERY
from manager.action import Action, Amdahl, UnitSet
from manager.scheduler.policy import Decision, Policy, PoolView, RunningView, WaitingView
from manager.scheduler.registry import make_policy
from manager.simulation.cluster import cluster, policies

#: The state that decisions and steps are timed in, a longer queue, and a burst of new trajectories.
QUEUED = 1536
UNITS = 1280
LONG_QUEUE = 100_000
BURST = 3072
#: Nodes that share the cores, and whether actions belong to trajectories, which are pinned to a node. No machine has so
#: many cores: how one node fares is a figure without a limit.
ONE_NODE = "one_node"
LAYOUTS = {ONE_NODE: (1, False), "any_of_five": (5, False), "pinned_to_five": (5, True)}


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


def steps(report: BenchReport, quick: bool) -> None:
    """Whole steps under load: an end and a submission at 1,536 and at 100,000 queued, in the worst of the layouts."""
    events = 100 if quick else 600
    rows: dict[str, dict[str, float]] = {}
    for name, (nodes, trajectories) in LAYOUTS.items():
        spec = cluster(policy="adaptive", nodes=nodes, cores=UNITS)
        times = []
        for queued in (QUEUED, LONG_QUEUE // (10 if quick else 1)):
            core = LoadedCore(spec, queued, seed=7, trajectories=trajectories)
            core.turn_over(events // 4)
            gc.collect()
            times.append(core.turn_over(events))
            core.check()
        usual, long = times
        rows[name] = {
            "p50_over_json": usual.over_document(0.5),
            "p99_over_json": usual.over_document(0.99),
            "100k_over_1536": long.over_document(0.5) / usual.over_document(0.5),
            "100k_p99_over_json": long.over_document(0.99),
            "p50_ms": 1e3 * median(usual.steps_s),
            "ends_per_s": len(usual.steps_s) / sum(usual.steps_s),
            "json_ms": usual.document_ms,
        }
    report.figure("steps", {name: dict(row) for name, row in rows.items()})
    checked = [row for name, row in rows.items() if name != ONE_NODE]
    worst = {column: max(row[column] for row in checked) for column in checked[0]}
    report.check("step_p50_over_json", worst["p50_over_json"], limit=0.4, better="lower")
    report.check("step_p99_over_json", worst["p99_over_json"], limit=1.0, better="lower")
    report.check("step_100k_over_1536", worst["100k_over_1536"], limit=1.5, better="lower")


def bursts(report: BenchReport, quick: bool) -> None:
    """One step over many new trajectories, and over one."""
    small = [burst(5, UNITS, 1536, seed) for seed in range(2 if quick else 5)]
    large = [burst(2000, 16_000, 16_000, seed) for seed in range(1 if quick else 2)]
    report.figure("burst_step_ms", 1e3 * median([burst(5, UNITS, BURST, seed).steps_s[0] for seed in range(2)]))
    report.figure("burst_16000_s", median([one.steps_s[0] for one in large]))
    report.check("burst_1536_over_json", median([one.over_document(0.5) for one in small]), limit=20, better="lower")
    report.check("burst_16000_over_json", median([one.over_document(0.5) for one in large]), limit=600, better="lower")
    one = arrivals(1000, 50 if quick else 500).over_document(0.5)
    report.check("new_trajectory_over_json", one, limit=0.05, better="lower")


def decisions(report: BenchReport, quick: bool) -> None:
    """The policies alone, on a pool that the bench makes up."""
    events = 100 if quick else 1500
    rows: dict[str, dict[str, float]] = {}
    for name in ("price", "adaptive", "paper"):
        times = decision_times_ms(name, events if name != "paper" else events // 10, seed=7)
        rows[name] = {"p50_ms": median(times), "p99_ms": percentile(times, 0.99), "max_ms": max(times)}
    report.figure("decisions", {name: dict(row) for name, row in rows.items()})
    report.figure("decision_p99_ms", max(rows["price"]["p99_ms"], rows["adaptive"]["p99_ms"]))
    report.figure("paper_over_price_p50", rows["paper"]["p50_ms"] / rows["price"]["p50_ms"])


def main(argv: Sequence[str] | None = None) -> int:
    options = parser("scheduler").parse_args(argv)
    report = BenchReport("scheduler")
    gc.set_threshold(*COLLECT_EVERY)
    report.figure("queued", QUEUED)
    report.figure("units", UNITS)
    decisions(report, options.quick)
    steps(report, options.quick)
    bursts(report, options.quick)
    return report.print(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
