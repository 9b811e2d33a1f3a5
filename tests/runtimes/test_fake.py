"""The scripted runtime does what its script says."""

from __future__ import annotations

import pytest

from manager.action import Action, Lease
from manager.errors import ActionFailed, Reason
from manager.executor import Call
from manager.function import FunctionSpec
from runtimes.runtime import Execution
from runtimes.testing import ScriptedRuntime, ScriptStep
from tests.runtimes.test_local import Lines


def execution(action_id: str, log: Lines) -> Execution:
    function = FunctionSpec(name="f", runtime="exec")
    return Execution(
        action=Action(id=action_id, function="f"),
        lease=Lease(action_id=action_id, node="n"),
        call=Call(function=function, input={}, log=log),
    )


async def test_each_action_gets_its_step_and_its_log() -> None:
    log = Lines()
    runtime = ScriptedRuntime(lambda run: ScriptStep(result=run.action.id, log="hello\n"))
    assert (await runtime.execute(execution("a", log))).value == "a"
    assert log.text == "hello\n"
    assert runtime.seen == [("execute", "a"), ("end", "a")]


async def test_a_scripted_failure_is_raised_with_its_reason() -> None:
    runtime = ScriptedRuntime(ScriptStep(reason=Reason.UPSTREAM, message="no answer"))
    with pytest.raises(ActionFailed, match="no answer") as caught:
        await runtime.execute(execution("a", Lines()))
    assert caught.value.reason is Reason.UPSTREAM
