"""What a gateway decides on a node's attempts of before: only what has begun there is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.cluster.cluster import NodeReattachment
from gateway.invocations.invocations import LiveInvocation
from gateway.invocations.record import Mode, Record
from gateway.invocations.restart import claims_of_try
from manager.action import State
from manager.function import FunctionSpec
from runtimes.node import protocol
from runtimes.node.remote import RemoteNode
from tests.runtimes.node.handlers.test_store import function as handler
from tests.runtimes.node.memory_stream import close_all, pair

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
    )
    return LiveInvocation(record=kept, function=function)


def facts(claim: str, *, begun: bool) -> protocol.AttemptFacts:
    return protocol.AttemptFacts(
        claim=claim, action_id="a", attempt=1, trajectory=None, begun=begun, ended=False, ran_s=0.0
    )


@pytest.mark.parametrize("function", [HANDLER, COMMAND, MODEL], ids=lambda function: function.runtime)
@pytest.mark.parametrize("trajectory", [None, "t"])
@pytest.mark.parametrize("there", ["waits", "begun", "absent"])
@pytest.mark.parametrize("life", ["", "this", "another"])
async def test_what_its_node_says_has_not_begun_has_not_whatever_the_record_fears(
    function: FunctionSpec, trajectory: str | None, there: str, life: str
) -> None:
    invocation, node = running(function, trajectory, begun=True), RemoteNode("n1", epoch=life)
    known = [] if there == "absent" else [facts(claims_of_try(invocation.record), begun=there == "begun")]
    node.attach(pair()[0], protocol.Inventory(epoch="this", attempts=known, trajectories=[]), recovering=True)
    certain = there != "begun" and life == "this" and function is not MODEL
    assert NodeReattachment(node).never_started(invocation) is certain
    await node.close()
    await close_all()


async def test_what_the_record_says_has_not_begun_needs_no_node() -> None:
    node = RemoteNode("n1")
    for function in (HANDLER, COMMAND, MODEL):
        assert NodeReattachment(node).never_started(running(function, begun=False))
    await node.close()
