"""The trace: what trajectories did, one JSON line each, to be played again with other policies and sizes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from manager.action import Amdahl, EfficiencyTable, Elasticity, UnitSet
from manager.errors import InvalidInput

#: Names of a trace line; others are refused, so that a misspelt one is not silently ignored.
LINE_KEYS = frozenset({"id", "task", "arrival_s", "memory_bytes", "steps"})
STEP_KEYS = frozenset(
    {
        "think_s",
        "function",
        "cost",
        "key",
        "t_ori_s",
        "serial_fraction",
        "efficiency",
        "service",
        "malleable",
        "profile_key",
        "size",
        "batch_tokens",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStep:
    """One action of a trajectory as it really is; what the scheduler knows of it is decided by the simulator."""

    #: Seconds between the end of the step before (or the arrival) and this one: the model generates.
    think_s: float
    function: str
    cost: Mapping[str, UnitSet]
    #: Resource kind whose amount changes the duration; None for a rigid action.
    key: str | None = None
    #: Seconds with one unit of the key resource.
    t_ori_s: float
    elasticity: Elasticity | None = None
    #: Model service that it needs, for GPU actions.
    service: str | None = None
    #: Whether its units may change while it runs; by default where the key is ``cpu``.
    malleable: bool = False
    #: The caller's key for learning, for example the suite.
    profile_key: str = ""
    #: The size of its input, by which its duration may be learned; None where it has none.
    size: float | None = None
    #: What it adds to a batch of its service; 0 where it runs alone.
    batch_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTrajectory:
    """One rollout: when it starts, what it holds, and its steps in order."""

    id: str
    task: str = "default"
    arrival_s: float = 0.0
    memory_bytes: int = 0
    steps: tuple[TraceStep, ...] = field(default=())


def read_trace(lines: Iterable[str]) -> list[TracedTrajectory]:
    """Trajectories from JSON lines, blank ones left out; raises InvalidInput that names the line and the key."""
    trajectories: list[TracedTrajectory] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            trajectory = _trajectory(_Reader.parse(line, f"line {number}"))
            if trajectory.id in seen:
                raise InvalidInput(f"line {number}: id {trajectory.id!r} appears twice", component="trace")
            seen.add(trajectory.id)
            trajectories.append(trajectory)
    return trajectories


def write_trace(trajectories: Iterable[TracedTrajectory]) -> Iterator[str]:
    """One JSON line for each trajectory, without line ends; `read_trace` gives the same trajectories back."""
    for trajectory in trajectories:
        line = {
            "id": trajectory.id,
            "task": trajectory.task,
            "arrival_s": trajectory.arrival_s,
            "memory_bytes": trajectory.memory_bytes,
            "steps": [_step_json(step) for step in trajectory.steps],
        }
        yield json.dumps(line, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class _Reader:
    """A JSON object and where it was found: every complaint names its place."""

    where: str
    values: Mapping[str, object]

    @classmethod
    def parse(cls, line: str, where: str) -> _Reader:
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InvalidInput(f"{where}: not JSON: {error}", component="trace") from error
        return cls.of(value, where)

    @classmethod
    def of(cls, value: object, where: str) -> _Reader:
        if not isinstance(value, dict):
            raise InvalidInput(f"{where}: an object is needed, not {type(value).__name__}", component="trace")
        return cls(where, value)

    def known(self, keys: frozenset[str]) -> None:
        unknown = sorted(set(self.values) - keys)
        if unknown:
            raise self.wrong(unknown[0], f"unknown; known are {', '.join(sorted(keys))}")

    def wrong(self, key: str, message: str) -> InvalidInput:
        return InvalidInput(f"{self.where}: {key}: {message}", component="trace", detail={"path": key})

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, f"a text is needed, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise self.wrong(key, f"a number of at least 0 is needed, not {value!r}")
        if positive and value == 0:
            raise self.wrong(key, "must be above 0")
        return float(value)

    def items(self, key: str) -> list[object]:
        value = self.values.get(key, [])
        if not isinstance(value, list):
            raise self.wrong(key, "a list is needed")
        return value


def _trajectory(line: _Reader) -> TracedTrajectory:
    line.known(LINE_KEYS)
    steps = [
        _step(_Reader.of(value, f"{line.where}: steps[{index}]")) for index, value in enumerate(line.items("steps"))
    ]
    return TracedTrajectory(
        id=line.text("id"),
        task=line.text("task", "default"),
        arrival_s=line.number("arrival_s", 0.0),
        memory_bytes=int(line.number("memory_bytes", 0)),
        steps=tuple(steps),
    )


def _step(step: _Reader) -> TraceStep:
    step.known(STEP_KEYS)
    cost = parse_cost(step.values.get("cost", {}), f"{step.where}: cost")
    key = step.text("key") if step.values.get("key") is not None else None
    if key is not None and key not in cost:
        raise step.wrong("key", f"{key!r} is not in cost")
    malleable = step.values.get("malleable", key == "cpu")
    if not isinstance(malleable, bool):
        raise step.wrong("malleable", "true or false is needed")
    return TraceStep(
        think_s=step.number("think_s", 0.0),
        function=step.text("function"),
        cost=cost,
        key=key,
        t_ori_s=step.number("t_ori_s", positive=True),
        elasticity=parse_elasticity(step.values, step.where) if key is not None else None,
        service=step.text("service") if step.values.get("service") is not None else None,
        malleable=malleable,
        profile_key=step.text("profile_key", ""),
        size=step.number("size") if step.values.get("size") is not None else None,
        batch_tokens=int(step.number("batch_tokens", 0)),
    )


def parse_cost(value: object, where: str) -> dict[str, UnitSet]:
    """Unit sets by kind from ``{"cpu": {"min", "max"} | {"choices": [...]} | n}``; raises InvalidInput."""
    reader = _Reader.of(value, where)
    return {kind: _unit_set(units, f"{where}: {kind}") for kind, units in reader.values.items()}


def parse_elasticity(values: Mapping[str, object], where: str) -> Elasticity | None:
    """The elasticity of an object that holds ``serial_fraction`` or ``efficiency``; None without either."""
    reader = _Reader(where, values)
    if values.get("serial_fraction") is not None:
        serial = reader.number("serial_fraction")
        if serial > 2:
            raise reader.wrong("serial_fraction", f"must be in [0, 2], not {serial}")
        return Amdahl(serial)
    if values.get("efficiency") is None:
        return None
    table = _Reader.of(values["efficiency"], f"{where}: efficiency")
    try:
        points = sorted((int(units), table.number(units, positive=True)) for units in table.values)
    except ValueError as error:
        raise reader.wrong("efficiency", "its keys are unit counts") from error
    if not points:
        raise reader.wrong("efficiency", "is empty")
    return EfficiencyTable(tuple(points))


def _unit_set(value: object, where: str) -> UnitSet:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return UnitSet.fixed(value)
    if isinstance(value, dict) and set(value) == {"min", "max"}:
        least, most = value["min"], value["max"]
        if isinstance(least, int) and isinstance(most, int) and 0 < least <= most:
            return UnitSet.span(least, most)
    if isinstance(value, dict) and set(value) == {"choices"} and isinstance(value["choices"], list):
        choices = value["choices"]
        if choices and all(isinstance(count, int) and count > 0 for count in choices):
            return UnitSet.of(tuple(choices))
    raise InvalidInput(
        f'{where}: units are n, {{"min", "max"}} or {{"choices": [...]}}, not {value!r}', component="trace"
    )


def cost_json(cost: Mapping[str, UnitSet]) -> dict[str, object]:
    """The inverse of `parse_cost`."""
    return {kind: _units_json(units) for kind, units in cost.items()}


def _units_json(units: UnitSet) -> object:
    if not units.elastic:
        return units.minimum
    return {"min": units.minimum, "max": units.maximum} if units.choices is None else {"choices": list(units.choices)}


def _step_json(step: TraceStep) -> dict[str, object]:
    line: dict[str, object] = {
        "think_s": step.think_s,
        "function": step.function,
        "cost": cost_json(step.cost),
        "t_ori_s": step.t_ori_s,
    }
    if step.key is not None:
        line |= {"key": step.key, "malleable": step.malleable}
    if isinstance(step.elasticity, Amdahl):
        line["serial_fraction"] = step.elasticity.serial_fraction
    elif isinstance(step.elasticity, EfficiencyTable):
        line["efficiency"] = {str(units): efficiency for units, efficiency in step.elasticity.points}
    if step.service is not None:
        line["service"] = step.service
    if step.profile_key:
        line["profile_key"] = step.profile_key
    if step.size is not None:
        line["size"] = step.size
    if step.batch_tokens:
        line["batch_tokens"] = step.batch_tokens
    return line
