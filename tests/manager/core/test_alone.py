"""Actions that wait alone: they start without a policy's turn, and exactly as with one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from manager.action import Outcome, State, UnitSet
from manager.assembly import build_core
from manager.config import TaskSpec
from manager.core.core import Core
from manager.events import Command, Event, Execute, Finished, Submitted, Tick
from manager.scheduler.policy import Decision, Policy, PolicySpec, PoolView, PromptPolicy, Start
from manager.scheduler.registry import make_policy
from tests.manager.conftest import CoreDriver, action, node, spec

NODES = (node("n0", cores=2), node("n1", cores=4), node("n2", cores=3))


def submit(id: str, cost: Mapping[str, UnitSet | int] | None = None, **fields: object) -> Submitted:
    return Submitted(action=action(id, cost, **fields))


class AlwaysAsked:
    """Decides as another policy does, and does not say that it is prompt."""

    name = "always asked"

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def decide(self, view: PoolView) -> Decision:
        return self._policy.decide(view)


class CountsTurns(PromptPolicy):
    """Starts every candidate at its minimum and counts how often it was asked."""

    name = "counts turns"

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, view: PoolView) -> Decision:
        self.asked += 1
        starts = [(one.action.id, one.action.cost["cpu"].minimum) for one in view.candidates]
        return Decision(starts=[Start(action_id=id, units=units) for id, units in starts])


def counted() -> tuple[CountsTurns, CoreDriver]:
    policy = CountsTurns()
    return policy, CoreDriver(build_core(spec(node(cores=4)), policies={"cpu": policy}))


def test_one_that_waits_alone_starts_without_a_turn_of_its_pool() -> None:
    policy, driver = counted()
    driver.step(0, submit("a", {"cpu": 2}, trajectory="t"))
    driver.step(1, submit("b", {"cpu": 2}, trajectory="u"))
    assert driver.running() == {"a", "b"} and policy.asked == 0
    driver.core.check()


def test_two_that_wait_for_one_pool_have_a_turn() -> None:
    policy, driver = counted()
    driver.step(0, submit("a", trajectory="t"), submit("b", trajectory="u"))
    assert driver.running() == {"a", "b"} and policy.asked == 1


def test_a_choice_of_units_has_a_turn() -> None:
    policy, driver = counted()
    driver.step(0, submit("a", {"cpu": UnitSet.span(1, 3)}, key="cpu", trajectory="t"))
    assert driver.running() == {"a"} and policy.asked == 1


def test_one_that_is_resizable_beside_it_has_a_turn() -> None:
    policy, driver = counted()
    driver.step(0, submit("wide", {"cpu": UnitSet.span(1, 3)}, key="cpu", malleable=True, trajectory="t"))
    driver.step(1, submit("a", trajectory="u"))
    assert driver.running() == {"wide", "a"} and policy.asked == 2


def test_what_does_not_fit_waits() -> None:
    _, driver = counted()
    driver.step(0, submit("a", {"cpu": 3}, trajectory="t"))
    driver.step(1, submit("b", {"cpu": 2}, trajectory="u"))
    assert driver.running() == {"a"}


def test_a_cap_holds_for_one_that_waits_alone() -> None:
    config = replace(spec(node(cores=4)), tasks={"default": TaskSpec(caps={"cpu": 1})})
    driver = CoreDriver(build_core(config))
    driver.step(0, submit("a", trajectory="t"))
    driver.step(1, submit("b", trajectory="u"))
    assert driver.running() == {"a"}


@pytest.mark.parametrize("name", ["adaptive", "price", "paper", "fixed"])
@pytest.mark.parametrize("seed", range(2))
def test_nobody_can_tell_whether_the_policy_was_asked(name: str, seed: int) -> None:
    policy = make_policy(PolicySpec(name=name))
    asked = {"cpu": policy} if seed % 2 else {"cpu": policy, "default": policy}
    kept = {kind: AlwaysAsked(one) for kind, one in asked.items()}
    played = [play(build_core(spec(*NODES), policies=policies), seed) for policies in (asked, kept)]
    assert played[0] == played[1] and any(isinstance(command, Execute) for command in played[0])


def play(core: Core, seed: int) -> list[Command]:
    """Return the commands of some hundred steps under a load that comes and goes."""
    rng = random.Random(seed)
    said: list[Command] = []
    running: list[Execute] = []
    for number in range(300):
        events: list[Event] = [Tick()]
        for other in range(rng.choice((0, 0, 1, 1, 1, 4) if number < 250 else (0,))):
            units = rng.choice((UnitSet.fixed(1), UnitSet.fixed(1), UnitSet.fixed(2), UnitSet.span(1, 2)))
            key = "cpu" if units.elastic else None
            name = f"a{number}.{other}"
            malleable = key is not None and rng.random() < 0.5
            trajectory = f"t{rng.randrange(9)}" if rng.random() < 0.8 else None
            events.append(
                submit(name, {"cpu": units}, key=key, malleable=malleable, trajectory=trajectory, t_ori_s=1.5)
            )
        for one in [one for one in running if rng.random() < 0.5]:
            running.remove(one)
            done = Outcome(state=State.SUCCEEDED, execution_s=0.5)
            events.append(Finished(action_id=one.action.id, outcome=done))
        commands = core.step(events, float(number))
        running += [command for command in commands if isinstance(command, Execute)]
        said += commands
        core.check()
    return said
