"""Results of simulations: one row a policy, as a table for people and as JSON, the same bytes for the same seed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from manager.simulation.bound import LowerBound
from manager.simulation.simulator import SimulationRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one policy or baseline did. ACTs are sums over a trajectory's actions, averaged over trajectories."""

    policy: str
    act_s: float
    queue_s: float
    overhead_s: float
    execution_s: float
    #: How many it had to serve: a baseline is shown by those of its own kind.
    actions: int
    #: Single actions: median and upper percentiles of their ACT, and the longest that one was queued.
    action_p50_s: float
    action_p99_s: float
    action_p999_s: float
    max_wait_s: float
    makespan_s: float
    utilisation: dict[str, float] = field(default_factory=dict)
    resizes: int = 0
    restores: int = 0
    #: Copies of services made in free memory, and how many of them were used.
    prefetches: int = 0
    prefetch_hits: int = 0
    #: Actions that never ended well (uncontrolled baselines only: our own policies assert that all do).
    failures: int = 0

    @classmethod
    def of(cls, policy: str, run: SimulationRun, capacity: dict[str, int]) -> Row:
        """The row of a run; ``capacity`` is what utilisation is measured against."""
        count = max(1, run.trajectories)
        acts = sorted(record.act_s for record in run.records)
        span_s = max(1e-9, run.makespan_s)
        return cls(
            policy=policy,
            act_s=sum(acts) / count,
            queue_s=sum(record.queue_s for record in run.records) / count,
            overhead_s=sum(record.overhead_s for record in run.records) / count,
            execution_s=sum(record.execution_s for record in run.records) / count,
            actions=len(acts),
            action_p50_s=_rank(acts, 0.5),
            action_p99_s=_rank(acts, 0.99),
            action_p999_s=_rank(acts, 0.999),
            max_wait_s=max((record.queue_s for record in run.records), default=0.0),
            makespan_s=run.makespan_s,
            utilisation={
                kind: run.ledger.used[kind] / (units * span_s) for kind, units in sorted(capacity.items()) if units
            },
            resizes=run.resizes,
            restores=run.restores,
            prefetches=run.replicas,
            prefetch_hits=run.replica_hits,
            failures=run.failures,
        )

    def as_json(self, bound_s: float | None) -> dict[str, object]:
        line: dict[str, object] = {
            name: _rounded(getattr(self, name))
            for name in (
                "policy",
                "act_s",
                "queue_s",
                "overhead_s",
                "execution_s",
                "actions",
                "action_p50_s",
                "action_p99_s",
                "action_p999_s",
                "max_wait_s",
                "makespan_s",
                "resizes",
                "restores",
                "prefetches",
                "prefetch_hits",
                "failures",
            )
        }
        line["utilisation"] = {kind: _rounded(value) for kind, value in self.utilisation.items()}
        if bound_s:
            line["over_bound"] = _rounded(self.act_s / bound_s)
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Several policies on one workload and cluster."""

    workload: str
    trajectories: int
    actions: int
    rows: tuple[Row, ...]
    #: Lower bound on the sum of ACTs, where it was asked for.
    bound: LowerBound | None = None
    #: The fewest units that reach a target, where that was asked for: (kind, units, ACT there).
    found: tuple[str, int, float] | None = None
    #: The row of the best constant DoP, known only afterwards; None where it was not asked for.
    best_fixed: Row | None = None
    runs: dict[str, SimulationRun] = field(default_factory=dict)

    @property
    def bound_s(self) -> float | None:
        """The best bound on the mean ACT of a trajectory."""
        return None if self.bound is None else self.bound.best_s / max(1, self.trajectories)

    def to_json(self) -> str:
        """One object; nothing in it depends on the machine or on the time of day."""
        value: dict[str, object] = {
            "workload": self.workload,
            "trajectories": self.trajectories,
            "actions": self.actions,
            "policies": [row.as_json(self._bound_of(row)) for row in self.rows],
        }
        if self.best_fixed is not None:
            value["best_fixed"] = self.best_fixed.as_json(self.bound_s)
        compared = self.on_the_same()
        if compared:
            value["same_actions"] = [
                {
                    "policy": name,
                    "than": ours,
                    "actions": actions,
                    "act_s": _rounded(mine_s),
                    "than_act_s": _rounded(ours_s),
                }
                for name, ours, actions, mine_s, ours_s in compared
            ]
        if self.bound is not None:
            count = max(1, self.trajectories)
            value["bound"] = {
                "act_s": _rounded(self.bound.best_s / count),
                "infinite_s": _rounded(self.bound.infinite_s / count),
                "area_s": _rounded(self.bound.area_s / count),
                "price_s": _rounded(self.bound.price_s / count),
            }
        faults = {name: run.faults.as_json() for name, run in self.runs.items() if run.faults.nodes_lost}
        if faults:
            value["faults"] = faults
        if self.found is not None:
            value["found"] = {"kind": self.found[0], "units": self.found[1], "act_s": _rounded(self.found[2])}
        return json.dumps(value, sort_keys=True)

    def table(self) -> str:
        """Columns for people, one line a policy."""
        head = ["policy", "ACT s", "queue", "overhead", "execution", "p99 action", "p99.9", "max wait", "makespan"]
        head += ["use", "resizes", "restores", *(["over bound"] if self.bound is not None else [])]
        lines = [self._line(row, row.policy) for row in self.rows]
        if self.best_fixed is not None:
            lines.append(self._line(self.best_fixed, f"best fixed ({self.best_fixed.policy})"))
        widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
        text = [
            "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(pairs))
            for pairs in (list(zip(line, widths, strict=True)) for line in [head, *lines])
        ]
        title = f"{self.workload}: {self.trajectories} trajectories, {self.actions} actions"
        if self.bound_s is not None:
            title += f"; no schedule has a mean ACT below {self.bound_s:.2f} s"
        for name, ours, actions, mine_s, ours_s in self.on_the_same():
            if not actions:
                text.append(f"{name} has nothing to do here: no action needs what it manages")
                continue
            text.append(
                f"{name} is shown by its own {actions} of {self.actions} actions: {mine_s:.2f} s; "
                f"{ours} takes {ours_s:.2f} s on the same"
            )
        if self.found is not None:
            text.append(f"{self.found[1]} units of {self.found[0]} are enough: mean ACT {self.found[2]:.2f} s")
        text += [f"{name}: {run.faults.line()}" for name, run in self.runs.items() if run.faults.nodes_lost]
        return "\n".join([title, *text])

    def _line(self, row: Row, name: str) -> list[str]:
        use = " ".join(f"{kind} {share:.0%}" for kind, share in row.utilisation.items())
        seconds = (row.act_s, row.queue_s, row.overhead_s, row.execution_s)
        tail = (row.action_p99_s, row.action_p999_s, row.max_wait_s)
        line = [name, *(f"{value:.2f}" for value in (*seconds, *tail)), f"{row.makespan_s:.0f}", use]
        line += [str(row.resizes), str(row.restores)]
        if self.bound_s is not None:
            bound_s = self._bound_of(row)
            line.append("-" if bound_s is None else f"{row.act_s / bound_s:.2f}x")
        return line

    def _bound_of(self, row: Row) -> float | None:
        """The bound that a row may be held against: it is on all actions, so none for one that is shown by some."""
        return self.bound_s if row.actions >= self.actions else None

    def on_the_same(self) -> list[tuple[str, str, int, float, float]]:
        """For rows of some actions only: (policy, ours, actions, its mean, that of ours on the same actions).

        Ours is the first row of all actions.
        """
        whole = next((row.policy for row in self.rows if row.actions >= self.actions), None)
        found: list[tuple[str, str, int, float, float]] = []
        for row in self.rows:
            if whole is None or row.actions >= self.actions:
                continue
            part = self.runs[row.policy]
            same = {(record.trajectory, record.number) for record in part.records}
            ours_s = sum(one.act_s for one in self.runs[whole].records if (one.trajectory, one.number) in same)
            found.append((row.policy, whole, row.actions, row.act_s, ours_s / max(1, part.trajectories)))
        return found


def _rank(ordered: Sequence[float], share: float) -> float:
    """Nearest rank; 0 where there is nothing."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def _rounded(value: object) -> object:
    return round(value, 6) if isinstance(value, float) else value
