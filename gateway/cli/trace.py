"""A workload as JSON lines, one trajectory a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct

from gateway.registry import units_info
from manager.action import Amdahl, EfficiencyTable, Elasticity, UnitSet
from manager.errors import InvalidInput
from manager.simulation.workloads import TracedTrajectory, TraceStep
from tangram.types import UnitsInfo

Count = Annotated[int, Meta(ge=0)]
Units = Annotated[int, Meta(gt=0)]
Seconds = Annotated[float, Meta(ge=0)]
Efficiency = Annotated[float, Meta(gt=0)]


class TraceUnits(UnitsInfo, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Unit counts as they are read: one form, and not empty."""

    def __post_init__(self) -> None:
        if self.choices is UNSET:
            whole = self.min is not UNSET and self.max is not UNSET and 0 < self.min <= self.max
        else:
            whole = self.min is self.max is UNSET and min(self.choices, default=0) > 0
        if not whole:
            raise ValueError('units are n, {"min", "max"} or {"choices": [...]}')


Cost = Mapping[str, Units | TraceUnits]


class StepLine(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A `TraceStep` as its line has it: how elastic it is, is a number or a table."""

    think_s: Seconds = 0.0
    function: str
    cost: Cost = {}
    key: str | None = None
    t_ori_s: Annotated[float, Meta(gt=0)]
    serial_fraction: Annotated[float, Meta(ge=0, le=2)] | None = None
    #: By units.
    efficiency: Annotated[Mapping[Units, Efficiency], Meta(min_length=1)] | None = None
    service: str | None = None
    #: None: where the key is ``cpu``.
    malleable: bool | None = None
    profile_key: str = ""
    size: Seconds | None = None
    batch_tokens: Count = 0
    overhead_s: Seconds = 0.0

    def __post_init__(self) -> None:
        if self.key is not None and self.key not in self.cost:
            raise ValueError(f"key: {self.key!r} is not in cost")

    @classmethod
    def of(cls, step: TraceStep) -> StepLine:
        alike = {each.name: getattr(step, each.name) for each in fields(step) if each.name != "elasticity"}
        curve = step.elasticity
        line = {
            "cost": {kind: units_info(units) for kind, units in step.cost.items()},
            "serial_fraction": curve.serial_fraction if isinstance(curve, Amdahl) else None,
            "efficiency": dict(curve.points) if isinstance(curve, EfficiencyTable) else None,
            "malleable": None if step.key is None else step.malleable,
        }
        return cls(**alike | line)

    def step(self) -> TraceStep:
        alike = {each.name: getattr(self, each.name) for each in fields(TraceStep) if each.name != "elasticity"}
        malleable = self.key == "cpu" if self.malleable is None else self.malleable
        read = {"cost": cost_of(self.cost), "elasticity": self._elasticity(), "malleable": malleable}
        return TraceStep(**alike | read)

    def _elasticity(self) -> Elasticity | None:
        if self.key is None:
            return None
        if self.serial_fraction is not None:
            return Amdahl(self.serial_fraction)
        return None if self.efficiency is None else EfficiencyTable(tuple(sorted(self.efficiency.items())))


class TrajectoryLine(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A `TracedTrajectory` as its line has it."""

    id: str
    task: str = "default"
    arrival_s: Seconds = 0.0
    memory_bytes: Count = 0
    steps: tuple[StepLine, ...] = ()


def cost_of(cost: Cost) -> dict[str, UnitSet]:
    """Return the unit sets of a cost as JSON has it, by kind."""
    return {kind: _unit_set(units) for kind, units in cost.items()}


def _unit_set(units: int | UnitsInfo) -> UnitSet:
    if isinstance(units, int):
        return UnitSet.fixed(units)
    if units.choices is not UNSET:
        return UnitSet.of(units.choices)
    assert units.min is not UNSET and units.max is not UNSET
    return UnitSet.span(units.min, units.max)


def read_trace(lines: Iterable[str]) -> list[TracedTrajectory]:
    """Trajectories from JSON lines, blank ones left out; raises InvalidInput that names the line and the key."""
    read: dict[str, TracedTrajectory] = {}
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=TrajectoryLine)
        except msgspec.DecodeError as error:
            raise InvalidInput(f"line {number}: {error}", component="trace") from error
        if line.id in read:
            raise InvalidInput(f"line {number}: id {line.id!r} appears twice", component="trace")
        steps = tuple(step.step() for step in line.steps)
        read[line.id] = TracedTrajectory(
            id=line.id, task=line.task, arrival_s=line.arrival_s, memory_bytes=line.memory_bytes, steps=steps
        )
    return list(read.values())


def write_trace(trajectories: Iterable[TracedTrajectory]) -> Iterator[str]:
    """One JSON line for each trajectory, without line ends; `read_trace` gives the same trajectories back."""
    for each in trajectories:
        steps = tuple(StepLine.of(step) for step in each.steps)
        line = TrajectoryLine(
            id=each.id, task=each.task, arrival_s=each.arrival_s, memory_bytes=each.memory_bytes, steps=steps
        )
        yield msgspec.json.encode(line).decode()
