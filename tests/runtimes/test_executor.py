"""The executor: deadlines, kills and typed ends; and what each kind of runtime takes and returns."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import orjson
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from manager.action import Action, Chunk, Lease, Outcome, State
from manager.errors import EXHAUSTED, ActionFailed, InvalidInput, NotFound, Reason
from manager.executor import Call
from manager.function import DurationSpec, FunctionSpec, ModelAction, ModelSpec, RequestSpec
from runtimes import runtime
from runtimes.executor import Deadlines, LocalExecutor
from runtimes.kind import Kind
from runtimes.kinds import KINDS, input_schema, result_schema
from runtimes.testing import ScriptedRuntime, ScriptStep
from tests.runtimes.recorder import RecordingLog

FUNCTION = FunctionSpec(name="f", runtime="exec")


def call(function: FunctionSpec = FUNCTION) -> Call:
    return Call(function=function, input={}, log=RecordingLog())


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


def test_deadlines_that_have_come_at_once_are_told_on_a_gateways_loop() -> None:
    step, deadlines = ScriptStep(hangs=True), Deadlines(prepare_s=0.0001)
    assert uvloop.run(outcome_of(step, timeout_s=0.0001, deadlines=deadlines)).reason is Reason.TIMEOUT


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


MODEL = ModelSpec(path=Path("reward"), action=ModelAction.SCORE)

SUITE = FunctionSpec(name="suite", runtime="pytest", duration=DurationSpec(key="repo"))

SEARCH = FunctionSpec(
    name="search", runtime="api", request=RequestSpec(method="GET", url="https://api.test/{lang}?q={query}")
)


@pytest.mark.parametrize(
    ("function", "good", "bad"),
    [
        (FunctionSpec(name="sh", runtime="exec"), {"command": "ls", "cwd": "a"}, {"command": 7}),
        (FunctionSpec(name="sh", runtime="exec"), {"argv": ["ls"]}, {"argv": ["ls"], "command": "ls"}),
        (SUITE, {"repo": "x/y", "fail_to_pass": ["t.py::a"]}, {"fail_to_pas": ["t.py::a"]}),
        (FunctionSpec(name="rm", runtime="model", model=MODEL), {"texts": ["a"]}, {"texts": []}),
        (FunctionSpec(name="rm", runtime="model", model=MODEL), {"token_ids": [[1]]}, {"seed": 1}),
        (SEARCH, {"query": "x", "lang": "en"}, {"query": "x"}),
        (SEARCH, {"query": 1, "lang": "en"}, {"query": "x", "lang": "en", "host": "evil"}),
    ],
)
def test_a_built_in_schema_takes_what_the_runtime_takes(
    function: FunctionSpec, good: dict[str, object], bad: dict[str, object]
) -> None:
    schema = input_schema(function)
    assert schema is not None
    Draft202012Validator.check_schema(schema)
    checker = Draft202012Validator(schema)
    assert checker.is_valid(good)
    assert not checker.is_valid(bad)


def test_a_functions_own_schemas_win_and_a_handler_takes_and_returns_any_value() -> None:
    own = {"type": "object", "required": ["answer"]}
    assert input_schema(FunctionSpec(name="f", runtime="exec", input_schema=own)) == own
    assert input_schema(FunctionSpec(name="f", runtime="handler")) is None
    assert result_schema(FunctionSpec(name="f", runtime="exec", result_schema=own)) == own
    assert result_schema(FunctionSpec(name="f", runtime="handler")) is None


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_schemas_that_are_shown_stand_by_themselves(kind: Kind) -> None:
    for schema in (schema for pair in kind.shown.values() for schema in pair if schema is not None):
        Draft202012Validator.check_schema(schema)
        assert "$ref" not in str(schema)
        assert schema["description"]


@pytest.mark.parametrize("action", ModelAction)
def test_each_action_of_a_model_has_a_result_of_its_own(action: ModelAction) -> None:
    model = FunctionSpec(name="m", runtime="model", model=ModelSpec(path=Path("m"), action=action))
    shown = result_schema(model)
    assert shown is not None
    assert [other for other in ModelAction if KINDS["model"].shown[other][1] == shown] == [action]


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)


@given(VALUES, st.booleans())
def test_a_value_comes_back_as_it_was(value: object, sort_keys: bool) -> None:
    written = runtime.dumps(value, sort_keys=sort_keys)
    assert runtime.loads(written) == value
    assert json.loads(written) == value


@pytest.mark.parametrize("number", [2**53 + 1, 2**63, 2**64 - 1, 2**64, 2**70 + 1, -(2**70), 10**400])
def test_a_whole_number_is_exact_however_large(number: int) -> None:
    assert runtime.loads(f'{{"n":[{number}]}}') == {"n": [number]}
    assert json.loads(runtime.dumps({"b": number, "a": 1}, sort_keys=True)) == {"a": 1, "b": number}
    assert runtime.dumps({"b": number, "a": 1}, sort_keys=True).startswith(b'{"a":')


@pytest.mark.parametrize("text", ['{"a":', "[NaN]", "[1e400]", '"\\ud800"', b'"\xff"', "", "1" * 5000])
def test_what_is_no_json_is_told_with_its_place(text: str | bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError, match="line 1 column"):
        runtime.loads(text)


def test_what_json_cannot_hold_is_refused() -> None:
    for value in ({1, 2}, {"n": 2**70, "s": {1}}):
        with pytest.raises(TypeError):
            runtime.dumps(value)
    with pytest.raises(ValueError, match="JSON compliant"):
        runtime.dumps([2**70, float("nan")])
