"""A real run as it is reported: its actions, what was in use, and the same work played with other policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.cli.trace_export import recorded
from manager.errors import CodedError
from manager.simulation.simulate import Row, Size, capacity_of, simulate, with_services
from manager.simulation.workloads import TracedTrajectory, Workload
from tangram import InvocationResult

#: What a run is compared with: name of the policy or baseline, and what it is called.
COMPARED: Mapping[str, str] = {
    "adaptive": "Tangram: adaptive",
    "price": "Tangram: price",
    "paper": "Tangram: paper",
    "fixed:1": "one unit each",
    "k8s/static-gpu": "static pods, one a trajectory, and static services",
}
#: Kinds that the simulator's cluster has; of others (quotas) a trace does not tell the limits.
PLAYED_KINDS = frozenset({"cpu", "gpu"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAction:
    """One action of the run; instants are seconds from the first acceptance."""

    id: str
    function: str
    task: str
    lane: str
    state: str
    reason: str
    accepted_s: float
    queue_s: float
    overhead_s: float
    execution_s: float
    units: Mapping[str, int]

    @property
    def begin_s(self) -> float:
        """When it was leased."""
        return self.accepted_s + self.queue_s

    @property
    def end_s(self) -> float:
        return self.begin_s + self.overhead_s + self.execution_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedRun:
    """The same work under one policy, or why it could not be played."""

    name: str
    row: Row | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """Everything that the page shows."""

    title: str
    server: str
    actions: Sequence[RunAction]
    #: Units of the machine, by kind.
    capacity: Mapping[str, int]
    played: Sequence[PlayedRun]
    #: Kinds of cost that the comparison leaves out.
    left_out: Sequence[str]

    @property
    def span_s(self) -> float:
        """Seconds from the first acceptance to the last end."""
        return max((action.end_s for action in self.actions), default=0.0)

    def in_use(self, kind: str, cells: int) -> list[float]:
        """Return the mean units of a kind in use in each of so many equal parts of the run."""
        cell_s = max(self.span_s, 1e-9) / cells
        used = [0.0] * cells
        for action in self.actions:
            units = action.units.get(kind, 0)
            for at in range(int(action.begin_s / cell_s), cells) if units else ():
                overlap_s = min(action.end_s, (at + 1) * cell_s) - max(action.begin_s, at * cell_s)
                if overlap_s <= 0:
                    break
                used[at] += units * overlap_s / cell_s
        return used


def actions_of(records: Iterable[InvocationResult]) -> list[RunAction]:
    """Return what ended as actions of one run, in order of acceptance; without a trajectory each has its own lane."""
    ended = sorted((each for each in records if each.ended), key=lambda each: each.id)
    first_s = min((each.accepted_at.timestamp() for each in ended), default=0.0)
    return [
        RunAction(
            id=each.id,
            function=each.function,
            task=each.task,
            lane=each.trajectory or each.id,
            state=each.state,
            reason=each.reason or "",
            accepted_s=each.accepted_at.timestamp() - first_s,
            queue_s=each.queue_s,
            overhead_s=each.overhead_s,
            execution_s=each.execution_s,
            units=dict(each.units),
        )
        for each in ended
    ]


def workload_of(
    records: Sequence[InvocationResult], functions: Mapping[str, Mapping[str, Any]]
) -> tuple[Workload, list[str]]:
    """Return what succeeded as a workload of cores and devices, and the kinds of cost that it leaves out."""
    trajectories = recorded(records, functions)
    left_out = {kind for each in trajectories for step in each.steps for kind in step.cost} - PLAYED_KINDS
    played = tuple(_played_kinds(each) for each in trajectories)
    return Workload(name="run", trajectories=played), sorted(left_out)


def play(workload: Workload, nodes: int, cores: int, devices: int) -> list[PlayedRun]:
    """Return the workload under every policy that it is compared with, on a machine of this size."""
    size = Size(nodes=max(1, nodes), cores=cores, gpus=devices)
    whole = with_services(workload)
    found = []
    for policy, name in COMPARED.items():
        try:
            done = simulate(whole, policy, size)
            found.append(PlayedRun(name=name, row=Row.of(policy, done, capacity_of(size.spec(whole, "fixed")))))
        except CodedError as error:
            found.append(PlayedRun(name=name, row=None, problem=error.message))
    return found


def _played_kinds(trajectory: TracedTrajectory) -> TracedTrajectory:
    steps = tuple(
        replace(
            step,
            cost={kind: units for kind, units in step.cost.items() if kind in PLAYED_KINDS},
            key=step.key if step.key in PLAYED_KINDS else None,
            elasticity=step.elasticity if step.key in PLAYED_KINDS else None,
        )
        for step in trajectory.steps
    )
    return replace(trajectory, steps=steps)
