"""One pool's turn: actions that are alike start in one go, and nobody can tell."""

from __future__ import annotations

from manager.action import ANYWHERE, NodeChoice
from manager.assembly import build_core
from manager.events import Execute, Submitted
from manager.scheduler.policy import Decision, PoolView, Start
from tests.manager.conftest import CoreDriver, action, node, spec


class StartsOldestHere:
    """Starts the oldest on one node, whoever's candidate it is; elsewhere every candidate."""

    name = "starts oldest here"

    def decide(self, view: PoolView) -> Decision:
        if view.name == "cpu:n0":
            return Decision(starts=[Start(action_id=min(one.id for one in view.eligible), units=1)])
        return Decision(starts=[Start(action_id=one.action.id, units=1) for one in view.candidates])


def test_one_that_has_started_elsewhere_keeps_none_of_those_alike_from_starting() -> None:
    driver = CoreDriver(
        build_core(spec(node("n0", cores=1), node("n1", cores=4)), policies={"cpu": StartsOldestHere()})
    )
    driver.step(0, *(Submitted(action=action(f"a{number}")) for number in range(5)))
    started = {name: execute.lease.node for name, execute in driver.started.items()}
    assert started == {"a0": "n0", "a1": "n1", "a2": "n1", "a4": "n1"}


def test_alike_actions_are_leased_what_they_would_be_leased_one_by_one() -> None:
    """Where they may run sets every other one apart: it is the only node that there is."""
    leases = []
    for apart in (ANYWHERE, NodeChoice(node="n0")):
        core = build_core(spec(node("n0", cores=6)))
        placements = (ANYWHERE, apart)
        events = [Submitted(action=action(f"a{n}", placement=placements[n % 2])) for n in range(9)]
        commands = core.step([*events], 0.0)
        leases.append([command.lease for command in commands if isinstance(command, Execute)])
        core.check()
    assert leases[0] == leases[1] and len(leases[0]) == 6
