"""Executors: local, of a fleet, and scripted; every end has a type, every phase a deadline."""

from __future__ import annotations

import asyncio
import os

import pytest

from manager.action import Action, Chunk, Lease, Outcome, State
from manager.errors import EXHAUSTED, ActionFailed, InvalidInput, NotFound, Reason
from manager.executor import Call
from manager.function import FunctionSpec
from runtimes.executor import Deadlines, LocalExecutor
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


@pytest.mark.promise("A full disk or too few descriptors are never the fault of the work.")
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


@pytest.mark.promise("Making a sandbox ready has a bound of its own, five minutes.")
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
