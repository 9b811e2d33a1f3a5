"""What of a node's attempts of before a gateway has the node asked for at its return."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.invocations.invocations import LiveInvocation
from gateway.invocations.record import Mode, Record
from gateway.invocations.restart import Reattachment
from manager.action import State
from manager.function import FunctionSpec
from runtimes.node.remote import RemoteNode
from tests.runtimes.node.handlers.test_store import function as handler
from tests.runtimes.node.machine import Machine, MachineEnvironments

HANDLER = handler(Path("/f"))
COMMAND = FunctionSpec(name="shell", runtime="exec")
MODEL = FunctionSpec(name="judge", runtime="model")


def running(function: FunctionSpec, trajectory: str | None = None, *, begun: bool) -> LiveInvocation:
    """Return what a gateway before has leased on the node, and may have begun."""
    kept = Record(
        seq=1,
        id="a",
        function=function.name,
        task="default",
        trajectory=trajectory,
        parent=None,
        mode=Mode.ASYNC,
        accepted_s=1.0,
        input=b"{}",
        detached=True,
        state=State.RUNNING,
        overhead_s=0.0 if begun else None,
        node="n1",
    )
    return LiveInvocation(record=kept, function=function)


@pytest.mark.parametrize("trajectory", [None, "t"])
async def test_commands_and_handlers_go_on_at_a_node_without_a_gateway_and_models_do_not(
    trajectory: str | None,
) -> None:
    node = RemoteNode("n1")
    attempts = Reattachment(MachineEnvironments(Machine()), lambda: {"n1": node})
    holds = {
        function.runtime: attempts.may_hold(running(function, trajectory, begun=True))
        for function in (HANDLER, COMMAND, MODEL)
    }
    assert holds == {"handler": True, "exec": True, "model": False}
