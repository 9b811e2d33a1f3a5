"""Small machines and actions for the tests of the thinking."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from manager.action import Action, Outcome, Settlement, State, UnitSet
from manager.assembly import build_core
from manager.config import ManagerSpec, NodeSpec, SchedulerSpec
from manager.core.core import Core
from manager.core.state import Cause, cause_of
from manager.events import Command, Event, Execute, Finished, Settle, Submitted
from manager.scheduler.policy import PolicySpec

DONE = Outcome(state=State.SUCCEEDED)


def node(
    name: str = "n0", cores: int = 4, memory_bytes: int = 1000, devices: int = 0, device_bytes: int = 100
) -> NodeSpec:
    return NodeSpec(
        name=name,
        numa=(tuple(range(cores)),),
        memory_bytes=memory_bytes,
        devices=devices,
        device_bytes=device_bytes,
    )


def spec(*nodes: NodeSpec, dop: int = 1, strict: bool = False) -> ManagerSpec:
    """Some nodes (one by default) under the policy ``fixed``."""
    policies = {"default": PolicySpec(name="fixed", options={"dop": dop})}
    return ManagerSpec(nodes=nodes or (node(),), scheduler=SchedulerSpec(policies=policies, strict=strict))


def action(id: str, cost: Mapping[str, UnitSet | int] | None = None, **fields: object) -> Action:
    """An action; whole numbers in ``cost`` are fixed unit sets."""
    sets = {
        kind: UnitSet.fixed(units) if isinstance(units, int) else units
        for kind, units in ({"cpu": 1} if cost is None else cost).items()
    }
    base = Action(id=id, function="f", cost=sets)
    return replace(base, **fields)  # type: ignore[arg-type]  # fields of Action, by name


class CoreDriver:
    """A core under test, and what it said."""

    def __init__(self, core: Core, *, checked: bool = True) -> None:
        self.core = core
        self.checked = checked
        self.commands: list[Command] = []
        self.started: dict[str, Execute] = {}
        self.settled: dict[str, Settlement] = {}

    def step(self, now_s: float, *events: Event) -> list[Command]:
        commands = self.core.step(list(events), now_s)
        if self.checked:
            self.core.check()
        self.commands += commands
        for command in commands:
            if isinstance(command, Execute):
                self.started[command.action.id] = command
            elif isinstance(command, Settle):
                self.settled[command.settlement.action.id] = command.settlement
        return commands

    def running(self) -> set[str]:
        return set(self.started) - set(self.settled)

    def homes(self) -> dict[str, str]:
        """Return where the trajectories live that have a place."""
        return {trajectory.name: trajectory.node for trajectory in self.core.state.trajectories if trajectory.node}


def submits(*actions: Action) -> list[Submitted]:
    return [Submitted(action=one) for one in actions]


def submit(id: str, cost: Mapping[str, UnitSet | int] | None = None, **fields: object) -> Submitted:
    return Submitted(action=action(id, cost, **fields))


def finish(id: str, *, execution_s: float = 0.0) -> Finished:
    return Finished(action_id=id, outcome=replace(DONE, execution_s=execution_s))


def cause(driver: CoreDriver, id: str) -> Cause:
    """Return what a waiting action waits for."""
    waiting = driver.core.state.queue.get(id)
    assert waiting is not None, f"{id} does not wait"
    return cause_of(driver.core.state, waiting)


Drive = Callable[[ManagerSpec], CoreDriver]


@pytest.fixture
def drive() -> Drive:
    """A driver of a new core; its invariants are checked after every step."""
    return lambda spec: CoreDriver(build_core(spec))
