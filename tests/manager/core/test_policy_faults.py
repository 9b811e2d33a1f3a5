"""A policy that fails: its pool is served by another, and nothing else notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from manager.assembly import build_core
from manager.events import Finished, Submitted
from manager.scheduler.fixed import FixedPolicy
from manager.scheduler.policy import Decision, PoolView, ResizeChoice, Start
from tests.manager.conftest import DONE, CoreDriver, action, node, spec


@dataclass(frozen=True)
class Failing:
    """Decides what it is told to, whatever the view."""

    how: Callable[[PoolView], Decision]
    name: str = "failing"

    def decide(self, view: PoolView) -> Decision:
        return self.how(view)


def crash(view: PoolView) -> Decision:
    raise ZeroDivisionError("no queue is that long")


FAULTS = {
    "raises": (crash, "it raised ZeroDivisionError"),
    "starts a stranger": (
        lambda view: Decision(starts=[Start(action_id="nobody", units=1)]),
        "names neither a candidate",
    ),
    "starts too wide": (lambda view: Decision(starts=[Start(action_id="a0", units=64)]), "is not in the unit set"),
    "resizes a stranger": (
        lambda view: Decision(resizes=[ResizeChoice(action_id="nobody", units=1)]),
        "names no running action",
    ),
    "breaks off halfway": (
        lambda view: Decision(starts=[Start(action_id="a0", units=1), Start(action_id="nobody", units=1)]),
        "names neither a candidate",
    ),
}


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize(("how", "story"), FAULTS.values(), ids=FAULTS)
def test_a_policy_that_fails_is_replaced_on_its_pool_and_everything_runs(
    kind: str, how: Callable[[PoolView], Decision], story: str
) -> None:
    core = build_core(spec(node(cores=2, devices=2)), policies={"default": FixedPolicy(), kind: Failing(how)})
    driver = CoreDriver(core, checked=False)
    other = "gpu" if kind == "cpu" else "cpu"
    events = [Submitted(action=action(f"a{index}", {kind: 1})) for index in range(4)]
    driver.step(0, *events, Submitted(action=action("other", {other: 1})))
    assert driver.running() == {"a0", "a1", "other"}, "units stay idle"
    for instant, ended in enumerate(["a0", "a1"], start=1):
        driver.step(instant, Finished(action_id=ended, outcome=DONE))
    assert driver.running() == {"a2", "a3", "other"}
    (pool,) = core.state.faults
    assert pool.startswith(kind)
    assert story in core.state.faults[pool]
    assert "policy failing" in core.state.faults[pool]
    core.state.faults.clear()
    core.check()
