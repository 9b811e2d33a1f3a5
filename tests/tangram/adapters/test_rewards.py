"""Rewards for trainers that call a Python function: a number, or an error; never a reward that nobody gave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import pytest

from tangram import AsyncClient
from tangram.adapters import CommandTimedOut, InfrastructureFailed, areal, rewards, slime, trl, verl_reward
from tangram.adapters.rewards import GatewayRewards, bare
from tangram.testing import ScriptedCall, ScriptedFailure, ScriptedGateway, refusal


def judge(call: ScriptedCall) -> object:
    """A number for a right answer; what goes wrong is in the answer itself."""
    response = call.input["response"]
    if response in ("timeout", "environment_lost", "handler_error"):
        raise ScriptedFailure(response)
    return {"reward": float(response == str(call.input["label"]))} if response != "silent" else {"reward": None}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedGateway]:
    """A gateway whose functions judge, as the one that every adapter of this process finds."""
    gateway = ScriptedGateway({"judge": judge, "other": {"score": 0.5}})
    monkeypatch.setattr(rewards, "shared_client", lambda server, token: AsyncClient(transport=gateway))
    yield gateway


def answers(*responses: str) -> list[dict[str, Any]]:
    return [{"prompt": "p", "response": each, "label": "4"} for each in responses]


@pytest.mark.parametrize(
    ("response", "kind", "reason"),
    [
        ("timeout", CommandTimedOut, "timeout"),
        ("environment_lost", InfrastructureFailed, "environment_lost"),
        ("handler_error", InfrastructureFailed, "handler_error"),
        ("silent", InfrastructureFailed, "no_reward"),
    ],
)
async def test_a_failure_is_no_reward_unless_its_reason_is_named(
    scripted: ScriptedGateway, response: str, kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind):
        await GatewayRewards("judge").scores(answers("4", response))
    named = GatewayRewards("judge", failed_as={reason: -1.0})
    assert await named.scores(answers("4", response)) == [1.0, -1.0]
    with pytest.raises(kind):
        await GatewayRewards("judge", failed_as={"quota": 0.0}).scores(answers(response))


async def test_a_refused_call_is_an_error_and_a_repeated_one_runs_once(scripted: ScriptedGateway) -> None:
    scripted.trouble(refusal(422, "invalid_input"))
    with pytest.raises(InfrastructureFailed) as caught:
        await GatewayRewards("judge").scores(answers("4"))
    assert caught.value.reason == "invalid_input"
    for _ in range(2):
        assert await GatewayRewards("judge").scores(answers("4", "5"), key="step-1") == [1.0, 0.0]
    assert len(scripted.calls) == 2


@pytest.mark.parametrize(
    ("result", "number"),
    [(1, 1.0), ({"reward": 0.25}, 0.25), ({"score": 2}, 2.0), (True, None), ("1", None), (None, None), ({}, None)],
)
def test_a_reward_is_a_finite_number(result: object, number: float | None) -> None:
    assert bare(result) == number
    assert bare(float("nan")) is None and bare({"reward": float("inf")}) is None


async def test_trl_calls_it_with_columns_and_gets_none_for_what_it_does_not_concern(scripted: ScriptedGateway) -> None:
    plain = trl.reward("judge")
    assert plain.__name__ == "judge"
    told = await plain(prompts=["a", "b"], completions=["4", [{"role": "assistant", "content": "5"}]], label=["4", "5"])
    assert told == [1.0, 1.0]
    odd = trl.reward(
        "judge",
        lambda prompt, completion, row: {"response": completion, "label": row["want"]} if row["want"] else None,
        name="odd",
    )
    extras = {"want": ["4", None, "4"], "trainer_state": object(), "completion_ids": [[1], [2], [3]]}
    assert await odd(prompts=["p"] * 3, completions=["4", "4", "5"], **extras) == [1.0, None, 0.0]
    assert odd.__name__ == "odd"


@dataclass
class TrainerState:
    """What TRL tells of its trainer, as far as it is of interest."""

    global_step: Any


@pytest.mark.parametrize(
    ("told", "step"), [(7, "7"), (numpy.int64(8), "8"), (None, None), (-1, None), (True, None), (1.5, None)]
)
async def test_a_step_that_a_trainer_tells_of_is_that_of_its_rewards(
    scripted: ScriptedGateway, told: object, step: str | None
) -> None:
    judged = {"prompts": ["p"], "completions": ["4"], "label": ["4"], "trainer_state": TrainerState(told)}
    await trl.reward("judge", task="t")(**judged)
    await trl.reward("judge", task="t", counts=False)(**judged)
    await verl_reward.compute_score("x", "4", "4", {"global_steps": told}, function="judge", task="t")
    await verl_reward.compute_score("x", "4", "4", function="judge", task="t")
    assert [call.headers.get("x-step") for call in scripted.calls] == [step, None, step, None]


@dataclass
class Sample:
    """What slime's sample has of interest."""

    response: str
    prompt: str = "p"
    label: str = "4"
    metadata: dict[str, Any] = field(default_factory=dict)


async def test_slime_gets_a_number_for_a_sample_and_a_list_for_a_group(
    scripted: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="TANGRAM_REWARD_FUNCTION"):
        await slime.reward(None, Sample("4"))
    monkeypatch.setenv("TANGRAM_REWARD_FUNCTION", "judge")
    assert await slime.reward(None, Sample("4"), evaluation=True) == 1.0
    group = [Sample("5"), Sample("x", metadata={"reward_function": "other"}), Sample("4")]
    assert await slime.reward(None, group) == [0.0, 0.5, 1.0]
    with pytest.raises(CommandTimedOut):
        await slime.reward(None, Sample("timeout"))
    monkeypatch.setenv("TANGRAM_REWARD_FAILED_AS", '{"timeout": 0.0}')
    assert await slime.reward(None, Sample("timeout")) == 0.0


async def test_verl_awaits_a_score_and_fills_the_solution_in(scripted: ScriptedGateway) -> None:
    score = partial(verl_reward.compute_score, function="judge", failed_as={"timeout": -1.0})
    assert await score("math", "4", "4") == 1.0
    assert scripted.calls[-1].input == {"response": "4", "label": "4", "data_source": "math"}
    assert await score("math", "timeout", "4", {"split": "train"}) == -1.0
    row = {"input": {"response": "4", "label": "4", "tests": {"s.py": "# {solution}"}, "targets": ["a {solution}"]}}
    assert await score("code", "x = 1", None, row) == 1.0
    assert scripted.calls[-1].input["tests"] == {"s.py": "# x = 1"}
    assert scripted.calls[-1].input["targets"] == ["a x = 1"]


async def test_areal_awaits_a_reward_where_its_own_wrapper_stood(scripted: ScriptedGateway) -> None:
    asked = areal.GatewayReward("judge", task="t")
    assert await asked("p", "4", [1], [2], answer="4", index=7) == 1.0
    assert scripted.calls[-1].input == {"prompt": "p", "response": "4", "label": "4"}
    with pytest.raises(InfrastructureFailed, match="no reward"):
        await asked("p", "silent", [1], [2], label="4")
    told = areal.GatewayReward("judge", lambda prompt, text, row: {"response": text, "label": row["gold"]})
    assert await told("p", "4", [1], [2], gold=5) == 0.0


def test_areal_asks_from_a_process_of_its_wrapper_and_its_next_try_joins(
    scripted: ScriptedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="TANGRAM_REWARD_FUNCTION"):
        areal.reward("p", "4", [1], [2], solution="4")
    monkeypatch.setenv("TANGRAM_REWARD_FUNCTION", "judge")
    monkeypatch.setenv("TANGRAM_REWARD_FAILED_AS", '{"timeout": 0.25}')
    assert [areal.reward("p", "4", [1], [2], solution="4") for _ in range(2)] == [1.0, 1.0]
    assert areal.reward("p", "timeout", [1], [2]) == 0.25
    assert [call.input["response"] for call in scripted.calls] == ["4", "timeout"], "two tries, one invocation"
