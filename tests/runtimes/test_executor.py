"""Executors: local, of a fleet, and scripted; every end has a type, every phase a deadline."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection

import pytest

from manager.action import Action, Chunk, Lease, Outcome, State
from manager.errors import EXHAUSTED, ActionFailed, InvalidInput, NotFound, Reason
from manager.executor import Call
from manager.function import FunctionSpec
from runtimes.executor import Deadlines, FleetExecutor, LocalExecutor
from runtimes.runtime import Execution
from runtimes.testing import ScriptedRuntime, ScriptStep

FUNCTION = FunctionSpec(name="f", runtime="exec")


class Lines:
    """A log in memory."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, stream: str, data: str) -> None:
        self.text += data

    def omit(self, size_bytes: int) -> None:
        pass


def call(function: FunctionSpec = FUNCTION) -> Call:
    return Call(function=function, input={}, log=Lines())


async def outcome_of(step: ScriptStep, *, timeout_s: float = 60.0, deadlines: Deadlines | None = None) -> Outcome:
    runtime = ScriptedRuntime(step)
    executor = LocalExecutor({"exec": runtime}, deadlines=deadlines)
    action = Action(id="a", function="f", timeout_s=timeout_s)
    try:
        async with asyncio.timeout(60):
            return await executor.execute(action, Lease(action_id="a", node="n"), call())
    finally:
        await executor.close()


async def test_a_result_and_its_usage_come_back() -> None:
    outcome = await outcome_of(ScriptStep(result={"x": 1}, usage={"cpu_s": 2.0}))
    assert (outcome.state, outcome.result, outcome.usage) == (State.SUCCEEDED, {"x": 1}, {"cpu_s": 2.0})


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (Reason.HANDLER_ERROR, State.FAILED),
        (Reason.TIMEOUT, State.TIMED_OUT),
        (Reason.NODE_LOST, State.LOST),
        (Reason.CANCELLED, State.CANCELLED),
    ],
)
async def test_a_failure_keeps_its_reason_and_partial_result(reason: Reason, state: State) -> None:
    outcome = await outcome_of(ScriptStep(reason=reason, result={"partial": True}))
    assert (outcome.state, outcome.reason, outcome.result) == (state, reason, {"partial": True})


async def test_other_errors_are_mapped_and_bugs_are_internal() -> None:
    assert (await outcome_of(ScriptStep(error=InvalidInput("no")))).reason is Reason.INVALID_INPUT
    assert (await outcome_of(ScriptStep(error=NotFound("gone")))).reason is Reason.INTERNAL
    assert "ZeroDivisionError" in (await outcome_of(ScriptStep(error=ZeroDivisionError()))).message


@pytest.mark.parametrize("error", [OSError(number, os.strerror(number)) for number in EXHAUSTED] + [MemoryError()])
async def test_a_machine_that_runs_short_is_never_the_fault_of_the_work(error: Exception) -> None:
    outcome = await outcome_of(ScriptStep(error=error))
    assert (outcome.state, outcome.reason) == (State.FAILED, Reason.ENVIRONMENT_LOST)
    assert "ran short" in outcome.message


async def test_the_timeout_runs_from_the_beginning_of_the_work() -> None:
    outcome = await outcome_of(ScriptStep(overhead_s=0.05, hangs=True), timeout_s=0.02)
    assert (outcome.state, outcome.reason) == (State.TIMED_OUT, Reason.TIMEOUT)
    assert "timeout" in outcome.message
    assert outcome.execution_s >= 0.02


async def test_work_that_never_gets_ready_has_a_deadline_of_its_own() -> None:
    outcome = await outcome_of(ScriptStep(overhead_s=60), deadlines=Deadlines(prepare_s=0.02))
    assert "not ready" in outcome.message
    assert outcome.execution_s == 0.0


async def test_work_that_outlives_its_kill_is_left_behind() -> None:
    step = ScriptStep(hangs=True, ignores_kill=True)
    outcome = await outcome_of(step, timeout_s=0.01, deadlines=Deadlines(kill_s=0.01))
    assert outcome.reason is Reason.TIMEOUT


async def test_cancelling_kills_before_it_returns() -> None:
    runtime = ScriptedRuntime(ScriptStep(hangs=True))
    executor = LocalExecutor({"exec": runtime})
    action = Action(id="a", function="f")
    task = asyncio.create_task(executor.execute(action, Lease(action_id="a", node="n"), call()))
    async with asyncio.timeout(60):
        await runtime.begun("a")
    task.cancel()
    outcome = await task
    assert (outcome.state, outcome.execution_s > 0) == (State.CANCELLED, True)
    assert runtime.seen[-2:] == [("kill", "a"), ("end", "a")]


async def test_a_resize_reaches_a_running_action_only() -> None:
    runtime = ScriptedRuntime(ScriptStep(held=True))
    executor = LocalExecutor({"exec": runtime})
    action, lease = Action(id="a", function="f"), Lease(action_id="a", node="n")
    await executor.resize(action, lease)
    task = asyncio.create_task(executor.execute(action, lease, call()))
    async with asyncio.timeout(60):
        await runtime.begun("a")
    await executor.resize(action, lease)
    runtime.finish("a")
    assert (await task).state is State.SUCCEEDED
    await executor.resize(action, lease)
    assert [verb for verb, _ in runtime.seen].count("resize") == 1


async def test_a_runtime_that_is_not_here_is_a_typed_failure() -> None:
    executor = LocalExecutor({})
    outcome = await executor.execute(Action(id="a", function="f"), Lease(action_id="a", node="n"), call())
    assert outcome.reason is Reason.INTERNAL
    assert "exec" in outcome.message


async def test_the_end_of_a_trajectory_reaches_every_runtime() -> None:
    runtime = ScriptedRuntime()
    await LocalExecutor({"exec": runtime}).end_trajectory("t")
    assert runtime.seen == [("end_trajectory", "t")]


async def test_a_copy_is_asked_of_a_runtime_that_can_make_it_and_its_failure_is_an_answer() -> None:
    class Broken(ScriptedRuntime):
        """Cannot copy anything."""

        async def replicate(self, function: FunctionSpec, service: str, chunk: Chunk) -> bool:
            raise ActionFailed(Reason.MODEL_ERROR, "no checkpoint", component="fake")

    class Hangs(ScriptedRuntime):
        """Never ends."""

        async def replicate(self, function: FunctionSpec, service: str, chunk: Chunk) -> bool:
            await asyncio.Event().wait()
            return True

    async def answer(runtime: ScriptedRuntime) -> bool:
        executor = LocalExecutor({"exec": runtime}, deadlines=Deadlines(prepare_s=0.02))
        return await executor.replicate(FUNCTION, "judge", "n", Chunk(0, 1))

    able, full = ScriptedRuntime(), ScriptedRuntime()
    full.has_room = False
    assert [await answer(runtime) for runtime in (able, full, Broken(), Hangs())] == [True, False, False, False]
    assert able.seen == [("replicate", "judge")]
    assert not await LocalExecutor({}).replicate(FUNCTION, "judge", "n", Chunk(0, 1))


SHELL, API = FunctionSpec(name="shell", runtime="exec"), FunctionSpec(name="call", runtime="api")


class Unheard:
    """A log that nobody reads."""

    def write(self, stream: str, data: str) -> None: ...
    def omit(self, size_bytes: int) -> None: ...


class Notebook:
    """A machine that writes down what it is asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[tuple[str, str]] = []

    async def execute(self, action: Action, lease: Lease, call: Call) -> Outcome:
        self.asked.append(("execute", action.id))
        return Outcome(state=State.SUCCEEDED, result=self.name)

    async def resize(self, action: Action, lease: Lease) -> None:
        self.asked.append(("resize", action.id))

    async def replicate(self, function: FunctionSpec, service: str, node: str, chunk: Chunk) -> bool:
        return True

    async def open_trajectory(self, trajectory: str, task: str, function: FunctionSpec) -> None:
        self.asked.append(("open", trajectory))

    async def end_trajectory(self, trajectory: str) -> None:
        self.asked.append(("end", trajectory))

    def mark_lost(self, trajectories: Collection[str]) -> None:
        self.asked += [("mark_lost", each) for each in trajectories]


class Estate:
    """A fleet of this machine and another one."""

    def __init__(self) -> None:
        self.here, self.there = Notebook("here"), Notebook("there")
        self.members = {"n1": self.there}
        self.fleet = FleetExecutor(self.here, "local", self.members.get, mark_lost=self.here.mark_lost, lost_max=2)

    async def run(self, node: str, trajectory: str | None = None, function: FunctionSpec = SHELL) -> Outcome:
        action = Action(id="a", function=function.name, trajectory=trajectory)
        call = Call(function=function, input={}, log=Unheard())
        return await self.fleet.execute(action, Lease(action_id="a", node=node), call)


async def test_an_action_runs_on_the_node_of_its_lease_and_one_without_a_node_here() -> None:
    estate = Estate()
    assert [(await estate.run(node)).result for node in ("", "local", "n1")] == ["here", "here", "there"]
    gone = await estate.run("n9")
    assert (gone.state, gone.reason) == (State.LOST, Reason.NODE_LOST)


async def test_a_trajectory_is_ended_where_it_lives_and_what_is_kept_for_it_here_goes_too() -> None:
    estate = Estate()
    await estate.run("n1", "t")
    assert estate.fleet.home("t") == "n1"
    await estate.run("", "t", API)
    await estate.fleet.end_trajectory("t")
    assert estate.there.asked[-1] == estate.here.asked[-1] == ("end", "t")
    assert estate.fleet.home("t") == ""


async def test_a_trajectory_is_opened_where_the_core_has_placed_it() -> None:
    estate = Estate()
    estate.fleet.place_of = {"t": "n1", "u": "local"}.__getitem__
    for name in ("t", "u"):
        await estate.fleet.open_trajectory(name, "task", SHELL)
    assert (estate.there.asked, estate.here.asked) == ([("open", "t")], [("open", "u")])
    assert (estate.fleet.home("t"), estate.fleet.home("u")) == ("n1", "")


async def test_a_loss_is_told_to_the_first_action_that_comes_wherever_it_runs_and_only_to_one_with_a_sandbox() -> None:
    estate, told = Estate(), list[str]()
    estate.fleet.on_told = told.append
    await estate.run("n1", "t")
    estate.fleet.lose(["t", "u"])
    await estate.run("", "t", API)
    assert told == []
    await estate.run("local", "t")
    assert (estate.here.asked[-2:], told) == ([("mark_lost", "t"), ("execute", "a")], ["t"])
    await estate.run("n1", "u")
    await estate.run("n1", "u")
    assert estate.there.asked.count(("mark_lost", "u")) == 1


async def test_losses_that_nobody_comes_for_are_forgotten_beyond_a_bound() -> None:
    estate = Estate()
    estate.fleet.lose(["t", "u", "v"])
    await estate.run("local", "t")
    assert ("mark_lost", "t") not in estate.here.asked


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
