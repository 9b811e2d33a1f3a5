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
    #: Single actions: median and 99th percentile of their ACT.
    action_p50_s: float
    action_p99_s: float
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
            action_p50_s=_rank(acts, 0.5),
            action_p99_s=_rank(acts, 0.99),
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
                "action_p50_s",
                "action_p99_s",
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
            "policies": [row.as_json(self.bound_s) for row in self.rows],
        }
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
        head = [
            "policy",
            "ACT s",
            "queue",
            "overhead",
            "execution",
            "p99 action",
            "makespan",
            "use",
            "resizes",
            "restores",
        ]
        head += ["over bound"] if self.bound is not None else []
        lines = [self._line(row) for row in self.rows]
        widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
        text = [
            "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(pairs))
            for pairs in (list(zip(line, widths, strict=True)) for line in [head, *lines])
        ]
        title = f"{self.workload}: {self.trajectories} trajectories, {self.actions} actions"
        if self.bound_s is not None:
            title += f"; no schedule has a mean ACT below {self.bound_s:.2f} s"
        if self.found is not None:
            text.append(f"{self.found[1]} units of {self.found[0]} are enough: mean ACT {self.found[2]:.2f} s")
        text += [f"{name}: {run.faults.line()}" for name, run in self.runs.items() if run.faults.nodes_lost]
        return "\n".join([title, *text])

    def _line(self, row: Row) -> list[str]:
        use = " ".join(f"{kind} {share:.0%}" for kind, share in row.utilisation.items())
        line = [row.policy]
        line += [f"{value:.2f}" for value in (row.act_s, row.queue_s, row.overhead_s, row.execution_s)]
        line += [f"{row.action_p99_s:.2f}", f"{row.makespan_s:.0f}", use, str(row.resizes), str(row.restores)]
        if self.bound_s is not None:
            line.append(f"{row.act_s / self.bound_s:.2f}x")
        return line


def _rank(ordered: Sequence[float], share: float) -> float:
    """Nearest rank; 0 where there is nothing."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def _rounded(value: object) -> object:
    return round(value, 6) if isinstance(value, float) else value
