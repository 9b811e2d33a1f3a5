"""What pausing running actions would gain in overload: a study beside the production path (docs/decisions/pausing.md).

``python -m bench.pausing [--seeds 11,12,13] [--json]`` plays the five overloads of ``bench.figures`` in a small model
of one pool of cores: the rule for crowds without pausing, and the same rule where an action with less work left takes
the cores of one with more, whose processes are frozen meanwhile. The core is not asked, so nothing here is a promise;
beside it stands what ``adaptive`` reaches on the real core.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from bench.figures.regimes import ADAPTIVE, FCFS, OVERLOADS
from bench.figures.simulated import SEEDS, Contender, Row, medians, row_of, shown, side_by_side, trajectory_tail_of
from bench.report import BenchReport, median, parser
from manager.scheduler.adaptive import AdaptivePolicy
from manager.scheduler.durations import shape_of
from manager.scheduler.price import cheapest
from manager.scheduler.shares import member, water_fill
from manager.simulation.lease_audit import LeaseAudit
from manager.simulation.simulate import Size
from manager.simulation.simulator import Physics, SimulatedAction, SimulationRun
from manager.simulation.trace import TraceStep
from manager.simulation.workloads import Workload

#: Work below which an action has ended, in seconds on one core.
ROUNDING_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRule:
    """How the model decides."""

    #: Whether a running action may be frozen for one with less work left.
    pauses: bool
    #: Seconds that an action stands still each time that it is frozen and goes on.
    pause_s: float = 0.05
    #: Deviation of the logarithm of what is expected of a duration; 0: it is known.
    error: float = 0.0
    crowd: AdaptivePolicy = field(default_factory=AdaptivePolicy)


@dataclass(slots=True, eq=False)
class PausedAction:
    """An action of the model, from its submission to its end."""

    trajectory: int
    number: int
    step: TraceStep
    submitted_s: float
    #: What is expected of its work at one core over what it is.
    misjudged: float
    left: float = 1.0
    units: int = 0
    workers: int = 0
    started_s: float | None = None
    #: Until when it stands still, for having been frozen or resized.
    still_s: float = 0.0
    pauses: int = 0

    @property
    def elastic(self) -> bool:
        return self.step.key is not None

    @property
    def frozen(self) -> bool:
        return self.started_s is not None and self.units == 0

    @property
    def expected_s(self) -> float:
        """Seconds at one core that it is expected to have left; overdue, it is about to end."""
        return self.misjudged * self.step.t_ori_s * self.left

    def seconds(self, units: int) -> float:
        """Seconds of the whole work on so many cores."""
        if self.step.elasticity is None or not self.elastic:
            return self.step.t_ori_s
        alone_s = self.step.t_ori_s / (self.step.elasticity.efficiency(units) * units)
        return alone_s + Physics().worker_cost_s * self.workers / units

    @property
    def ends_s(self) -> float:
        return self.still_s + self.left * self.seconds(self.units)


class PauseModel:
    """One pool of cores, a workload and a rule."""

    def __init__(self, workload: Workload, cores: int, rule: PauseRule, seed: int = 0) -> None:
        self._workload = workload
        self._cores = cores
        self._rule = rule
        self._chance = random.Random(seed)
        self._now_s = 0.0
        self._jobs: list[PausedAction] = []
        self._arrivals: list[tuple[float, int, int]] = []
        self._records: list[SimulatedAction] = []
        self.pauses = 0
        self.most_frozen = 0

    def run(self) -> SimulationRun:
        """Play to the end."""
        for index, trajectory in enumerate(self._workload.trajectories):
            if trajectory.steps:
                heapq.heappush(self._arrivals, (trajectory.arrival_s + trajectory.steps[0].think_s, index, 0))
        while self._arrivals or self._jobs:
            self._advance()
            self._assign()
        return SimulationRun(
            records=self._records,
            trajectories=len(self._workload.trajectories),
            makespan_s=self._now_s,
            ledger=LeaseAudit(),
        )

    def _advance(self) -> None:
        """Go to the next arrival or end, and take all of that instant."""
        running = [job for job in self._jobs if job.units]
        next_s = min((job.ends_s for job in running), default=math.inf)
        if self._arrivals:
            next_s = min(next_s, self._arrivals[0][0])
        assert next_s < math.inf, "something waits on an idle pool"
        before_s, self._now_s = self._now_s, max(self._now_s, next_s)
        for job in running:
            worked_s = self._now_s - max(before_s, job.still_s)
            if worked_s > 0:
                job.left -= worked_s / job.seconds(job.units)
                job.still_s = self._now_s
            if job.left * job.step.t_ori_s <= ROUNDING_S:
                self._end(job)
        while self._arrivals and self._arrivals[0][0] <= self._now_s:
            _, index, number = heapq.heappop(self._arrivals)
            step = self._workload.trajectories[index].steps[number]
            misjudged = math.exp(self._chance.gauss(0.0, self._rule.error))
            self._jobs.append(PausedAction(index, number, step, self._now_s, misjudged))

    def _end(self, job: PausedAction) -> None:
        self._jobs.remove(job)
        assert job.started_s is not None
        trajectory = self._workload.trajectories[job.trajectory]
        self._records.append(
            SimulatedAction(
                trajectory=trajectory.id,
                number=job.number,
                function=job.step.function,
                submitted_s=job.submitted_s,
                queue_s=job.started_s - job.submitted_s,
                overhead_s=0.0,
                execution_s=self._now_s - job.started_s,
                units=job.units,
                unit_s=0.0,
            )
        )
        if job.number + 1 < len(trajectory.steps):
            next_s = self._now_s + trajectory.steps[job.number + 1].think_s
            heapq.heappush(self._arrivals, (next_s, job.trajectory, job.number + 1))

    # -- decisions

    def _assign(self) -> None:
        """Give every action its cores from now on."""
        waiting = sum(1 for job in self._jobs if job.elastic and not job.units)
        crowded = waiting >= self._rule.crowd.crowd or len(self._jobs) > self._cores
        given = self._in_turn(waiting) if crowded else dict.fromkeys(self._jobs, 1)
        if len(given) == len(self._jobs):
            given = self._shared(given)
        for job in self._jobs:
            self._give(job, given.get(job, 0))
        self.most_frozen = max(self.most_frozen, sum(1 for job in self._jobs if job.frozen))

    def _in_turn(self, waiting: int) -> dict[PausedAction, int]:
        """Cores by turn: those whose time has come, then by expected work left; without pausing those that run first.

        Where nothing is paused short rigid actions take cores above the minimum of the widest, as in `CrowdPass`.
        """
        work_s = sum(job.expected_s for job in self._jobs)
        aged_s = self._rule.crowd.crowd_age * work_s / self._cores
        price = self._rule.crowd.crowd_price * waiting / self._cores
        given: dict[PausedAction, int] = {}
        free = self._cores
        for job in sorted(self._jobs, key=lambda job: self._turn(job, aged_s)):
            if free == 0 and not job.elastic:
                free += self._narrow(given)
            if free:
                given[job] = min(free, job.units) if job.units else self._width(job, price, free)
                free -= given[job]
        return given

    def _turn(self, job: PausedAction, aged_s: float) -> tuple[bool, bool, float]:
        keeps = bool(job.units) and not self._rule.pauses
        aged = self._now_s - job.submitted_s >= aged_s
        return (not keeps, not aged, job.submitted_s if aged else job.expected_s)

    def _narrow(self, given: dict[PausedAction, int]) -> int:
        """Take a core from the widest; nothing where all have one."""
        widest = max(given, key=lambda job: given[job])
        if given[widest] < 2:
            return 0
        given[widest] -= 1
        return 1

    def _width(self, job: PausedAction, price: float, free: int) -> int:
        if not job.elastic:
            return 1
        most = min(free, job.workers) if job.workers else free
        return cheapest(shape_of(job.step.cost["cpu"], job.step.elasticity), 1.0, price, most)[0]

    def _shared(self, given: dict[PausedAction, int]) -> dict[PausedAction, int]:
        """Where everybody runs, what is left goes where it adds most, as far as there are workers."""
        elastic = [job for job in given if job.elastic]
        units = self._cores - (len(given) - len(elastic))
        gain = self._rule.crowd.least_gain
        members = [
            member(job.step.cost["cpu"], job.step.elasticity, job.workers or job.step.cost["cpu"].maximum, gain)
            for job in elastic
        ]
        shares = water_fill(members, units, [1.0] * len(members))
        for job, share in zip(elastic, shares, strict=True):
            grows = share >= self._rule.crowd.grow_ratio * given[job]
            given[job] = share if grows or share < given[job] or not job.units else given[job]
        return given

    def _give(self, job: PausedAction, units: int) -> None:
        """Start, freeze, let go on or resize an action."""
        if units == job.units:
            return
        if job.started_s is None:
            job.started_s = job.still_s = self._now_s
            job.workers = self._workers(job, units)
        elif units == 0 or job.units == 0:
            self.pauses += units == 0
            job.still_s = max(job.still_s, self._now_s) + (self._rule.pause_s if units else 0.0)
        else:
            job.still_s = max(job.still_s, self._now_s) + Physics().resize_cost_s
        job.units = units

    def _workers(self, job: PausedAction, units: int) -> int:
        if not job.elastic:
            return 0
        affordable = int(self._rule.crowd.worker_budget * job.step.t_ori_s / Physics().worker_cost_s)
        return min(job.step.cost["cpu"].maximum, max(units, affordable))


#: The rules that are compared.
KEEPS = PauseRule(pauses=False)
RULES = {
    "no pauses": KEEPS,
    "pauses": PauseRule(pauses=True),
    "pauses, half a second each": PauseRule(pauses=True, pause_s=0.5),
    "no pauses, durations misjudged": replace(KEEPS, error=0.5),
    "pauses, durations misjudged": PauseRule(pauses=True, error=0.5),
}


def play(workload: Workload, cores: int, rule: PauseRule, seed: int) -> Row:
    """One rule on one workload, with how much was frozen."""
    model = PauseModel(workload, cores, rule, seed)
    run = model.run()
    tail = trajectory_tail_of(run)
    frozen = {"pauses": float(model.pauses), "most_frozen": float(model.most_frozen)}
    return {**row_of(run), "trajectory_p99": tail["trajectory_p99"], **frozen}


def real(workload: Workload, size: Size, policy: str) -> Row:
    """A policy on the real core."""
    run = Contender(policy=policy).play(workload, size)
    return {**row_of(run), "trajectory_p99": trajectory_tail_of(run)["trajectory_p99"]}


def overload_rows(name: str, seeds: Sequence[int]) -> dict[str, Row]:
    """Medians over the seeds, by rule and policy."""
    make, size = OVERLOADS[name]
    plays: list[Callable[[], Row]] = []
    for rule in RULES.values():
        plays += [partial(lambda seed, rule: play(make(seed), size.cores, rule, seed), seed, rule) for seed in seeds]
    for policy in (ADAPTIVE, FCFS):
        plays += [partial(lambda seed, policy: real(make(seed), size, policy), seed, policy) for seed in seeds]
    rows = side_by_side(plays)
    names = [*RULES, f"{ADAPTIVE}, on the core", f"{FCFS}, on the core"]
    return {each: medians(rows[len(seeds) * at : len(seeds) * (at + 1)]) for at, each in enumerate(names)}


def _without(rule: str) -> str:
    """The name of the rule without pauses that differs in nothing else."""
    same = replace(RULES[rule], pauses=False, pause_s=KEEPS.pause_s)
    return next(name for name, one in RULES.items() if one == same)


def pausing_figures(report: BenchReport, seeds: Sequence[int], overloads: Iterable[str] = OVERLOADS) -> None:
    """What pausing gains over the same rule without it, in each overload.

    Each rule is paired with the one that differs in nothing but that it never pauses.
    """
    rows: dict[str, Row] = {}
    gains: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for name in overloads:
        of = overload_rows(name, seeds)
        rows.update({f"{name}, {rule}": row for rule, row in of.items()})
        for rule in (rule for rule in RULES if RULES[rule].pauses):
            beside = of[_without(rule)]
            gains[rule] |= {f"{name}, {key}": of[rule][key] / beside[key] for key in ("mean", "trajectory_p99")}
    report.figure("pausing_s", shown(rows))
    report.figure("pausing_over_the_same_without", {rule: dict(of) for rule, of in gains.items()})
    means = {rule: median([value for key, value in of.items() if key.endswith("mean")]) for rule, of in gains.items()}
    report.figure("pausing_mean_over_the_same_without", dict(means))
    frozen = max(row["most_frozen"] for row in rows.values() if "most_frozen" in row)
    report.figure("most_frozen_gib_at_4_each", frozen * 4.0)


def main(argv: Sequence[str] | None = None) -> int:
    flags = parser("pausing")
    flags.add_argument("--seeds", default="", help="comma-separated, instead of the built-in ones")
    options = flags.parse_args(argv)
    seeds = tuple(int(seed) for seed in options.seeds.split(",") if seed) or SEEDS
    report = BenchReport("pausing")
    pausing_figures(report, seeds[:1] if options.quick else seeds, list(OVERLOADS)[:1] if options.quick else OVERLOADS)
    report.note("a model of one pool of cores; memory, caches, clocks and sockets of what is frozen are not in it")
    return report.print(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
