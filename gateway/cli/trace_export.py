"""What really happened, as a trace: recorded invocations become trajectories to be played with other sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from manager.action import Amdahl, EfficiencyTable, Elasticity
from manager.learning import PRIOR_SERIAL_FRACTION
from manager.simulation.workloads import TracedTrajectory, TraceStep, parse_cost
from tangram import InvocationResult

#: Durations below this are noise; a trace needs positive ones.
SHORTEST_S = 1e-4


def recorded(records: Iterable[InvocationResult], functions: Mapping[str, Mapping[str, Any]]) -> list[TracedTrajectory]:
    """Trajectories from succeeded invocations and the functions' descriptions; times count from the first arrival.

    An invocation without a trajectory is one of its own. Think times are the pauses between an end and the next
    acceptance. T_ori is inferred from the granted units by the function's elasticity (Amdahl's law where learned); a
    batch is shared out evenly among its members, so that together they take as long again.
    Invocations of functions that are no longer registered are left out.
    """
    lanes: dict[str, list[InvocationResult]] = {}
    for record in records:
        timed = record.accepted_at is not None and record.ended_at is not None
        if record.state == "succeeded" and timed and record.function in functions:
            lanes.setdefault(record.trajectory or record.id, []).append(record)
    for lane in lanes.values():
        lane.sort(key=lambda record: (_accepted_s(record), record.id))
    first_s = min((_accepted_s(lane[0]) for lane in lanes.values()), default=0.0)
    made = [_trajectory(name, lane, functions, first_s) for name, lane in lanes.items()]
    return sorted(made, key=lambda trajectory: (trajectory.arrival_s, trajectory.id))


def _trajectory(
    name: str, lane: list[InvocationResult], functions: Mapping[str, Mapping[str, Any]], first_s: float
) -> TracedTrajectory:
    steps = []
    free_s = _accepted_s(lane[0])
    for record in lane:
        think_s = max(0.0, _accepted_s(record) - free_s)
        assert record.ended_at is not None
        free_s = record.ended_at.timestamp()
        steps.append(_step(record, functions[record.function], think_s))
    memory = max((_memory_bytes(functions[record.function]) for record in lane), default=0)
    return TracedTrajectory(
        id=name,
        task=lane[0].task,
        arrival_s=round(_accepted_s(lane[0]) - first_s, 6),
        memory_bytes=memory,
        steps=tuple(steps),
    )


def _step(record: InvocationResult, function: Mapping[str, Any], think_s: float) -> TraceStep:
    cost = parse_cost(function.get("cost") or {}, f"function {record.function}: cost")
    key = function.get("key")
    elasticity = _elasticity(function) if key is not None else None
    members = max(1.0, record.usage.get("batch", 1.0))
    earlier_s = sum(each.execution_ms or 0.0 for each in record.attempts) / 1000
    duration_s = max(SHORTEST_S, (record.execution_s - earlier_s) / members)
    units = record.units.get(key, 1) if key is not None else 1
    work_s = duration_s if elasticity is None else duration_s * elasticity.efficiency(units) * units
    return TraceStep(
        think_s=round(think_s, 6),
        function=record.function,
        cost=cost,
        key=key,
        t_ori_s=round(max(SHORTEST_S, work_s), 6),
        elasticity=elasticity,
        service=record.function if function.get("model") is not None else None,
        malleable=function.get("runtime") == "pytest" and key == "cpu",
        size=record.usage.get("size"),
        batch_tokens=int(record.usage.get("tokens", 0.0) / members) if function.get("model") is not None else 0,
    )


def _elasticity(function: Mapping[str, Any]) -> Elasticity:
    declared = function.get("elasticity")
    if isinstance(declared, Mapping) and "points" in declared:
        return EfficiencyTable(tuple((int(units), float(share)) for units, share in declared["points"]))
    if isinstance(declared, Mapping) and "serial_fraction" in declared:
        return Amdahl(float(declared["serial_fraction"]))
    return Amdahl(PRIOR_SERIAL_FRACTION)


def _memory_bytes(function: Mapping[str, Any]) -> int:
    sandbox = function.get("sandbox")
    return int(sandbox.get("memory_bytes", 0)) if isinstance(sandbox, Mapping) else 0


def _accepted_s(record: InvocationResult) -> float:
    assert record.accepted_at is not None
    return record.accepted_at.timestamp()
