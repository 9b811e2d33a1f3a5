"""Remote rewards and retrieval: the bare answer, in the words of each trainer, and never a reward that is none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from manager.errors import Reason
from runtimes.runtime import Execution
from runtimes.testing import ScriptStep
from tests.gateway.conftest import until
from tests.gateway.facades.world import doors

OPEN: Mapping[str, object] = {"rewards": {}}
SLIME = {"prompt": "1+1=", "response": "2", "label": "2"}
OPENRLHF = {"query": ["1+1=2"], "prompts": ["1+1="], "labels": ["2"]}


def graded(execution: Execution) -> ScriptStep:
    """A reward of one for the right answer."""
    given = execution.call.input
    return ScriptStep(result=1.0 if given["response"] == given["label"] else 0.0)


def saying(result: object) -> ScriptStep:
    return ScriptStep(result=result)


async def test_openrlhf_is_answered_with_a_list_and_its_answer_is_what_follows_the_prompt(tmp_path: Path) -> None:
    async with doors(tmp_path, OPEN, graded) as running:
        body = {"query": ["1+1=2", "2+2=5"], "prompts": ["1+1=", "2+2="], "labels": ["2", "4"]}
        answer = await running.http.post("/rm/reward", json=body)
    assert (answer.status_code, answer.json()) == (200, {"rewards": [1.0, 0.0]})


async def test_an_object_is_passed_on_to_slime_and_split_for_openrlhf(tmp_path: Path) -> None:
    result = {"reward": 0.5, "score": 0.25, "extra_logs": {"length": 3, "words": "no number"}}
    async with doors(tmp_path, OPEN, lambda _: saying(result)) as running:
        slime = await running.http.post("/rm/reward", json=SLIME)
        openrlhf = await running.http.post("/rm/reward", json=OPENRLHF)
    assert slime.json() == result
    assert openrlhf.json() == {"rewards": [0.5], "scores": [0.25], "extra_logs": {"length": [3]}}


async def test_true_and_false_are_numbers_to_a_trainer(tmp_path: Path) -> None:
    results = iter([*(each for each in (True, False, {"reward": True}) for _ in range(2)), {"acc": False}])
    async with doors(tmp_path, OPEN, lambda _: saying(next(results))) as running:
        for text, number in (("1.0", 1.0), ("0.0", 0.0), ('{"reward":1.0}', 1.0)):
            slime = await running.http.post("/rm/reward", json=SLIME)
            openrlhf = await running.http.post("/rm/reward", json=OPENRLHF)
            assert (slime.status_code, slime.text, openrlhf.text) == (200, text, f'{{"rewards":[{number}]}}')
        assert (await running.http.post("/rm/reward", json=SLIME)).text == '{"acc":0.0}', "OpenRLHF reads reward alone"


async def test_what_is_no_reward_is_never_a_success(tmp_path: Path) -> None:
    none: tuple[object, ...] = (
        None,
        float("nan"),
        float("inf"),
        "1",
        {"reward": None},
        {"reward": "x"},
        {},
        {"acc": None},
        {"acc": "1"},
    )
    results = iter(each for each in none for _ in range(2))
    async with doors(tmp_path, OPEN, lambda _: saying(next(results))) as running:
        for each in none:
            slime = await running.http.post("/rm/reward", json=SLIME)
            openrlhf = await running.http.post("/rm/reward", json=OPENRLHF)
            assert (slime.status_code, openrlhf.status_code) == (502, 502), each
            assert slime.json()["error"]["code"] == "no_reward", each


async def test_a_call_that_a_planned_stop_finds_waiting_may_be_sent_again(tmp_path: Path) -> None:
    async with doors(tmp_path, OPEN, lambda _: ScriptStep(held=True)) as running:
        calls = [asyncio.create_task(running.http.post("/rm/reward", json=SLIME)) for _ in range(8)]
        await until(lambda: len(running.app.invocations.living) == len(calls))
        await until(lambda: len(running.runtime.running) == running.app.node.cores)
        begun = len(running.runtime.running)
        running.app.stop()
        statuses = sorted([(await call).status_code for call in calls])
    assert statuses == [502] * begun + [504] * (len(calls) - begun), "what had begun is lost with its gateway"


async def test_a_failed_action_is_no_success_and_names_its_invocation(tmp_path: Path) -> None:
    statuses = {Reason.HANDLER_ERROR: 502, Reason.INVALID_INPUT: 422, Reason.QUOTA: 504}
    reasons = iter(statuses)
    async with doors(tmp_path, OPEN, lambda _: ScriptStep(reason=next(reasons), message="why")) as running:
        for reason, status in statuses.items():
            answer = await running.http.post("/rm/reward", json=SLIME)
            assert answer.status_code == status, reason
            assert "why" in answer.json()["error"]["message"]
            assert answer.json()["error"]["invocation_id"] == answer.headers["x-invocation-id"]


async def test_a_function_that_may_not_run_twice_is_refused_with_the_remedy(tmp_path: Path) -> None:
    async with doors(tmp_path, OPEN, graded) as running:
        answer = await running.http.post("/rm/once", json=SLIME)
    assert answer.status_code == 422
    assert "idempotent: true" in answer.json()["error"]["message"]


async def test_an_option_that_nobody_reads_is_refused_by_name(tmp_path: Path) -> None:
    async with doors(tmp_path, OPEN, graded) as running:
        for body, named in (
            (SLIME | {"temperature": 1}, "temperature"),
            ({"prompt": "x"}, "response"),
            (OPENRLHF | {"extra": 1}, "extra"),
            (OPENRLHF | {"labels": []}, "one length"),
            ({"query": [], "prompts": [], "labels": []}, "query"),
            (OPENRLHF | {"query": "text"}, "query"),
        ):
            answer = await running.http.post("/rm/reward", json=body)
            assert (answer.status_code, named in answer.json()["error"]["message"]) == (422, True), body


FOUND = [[{"document": {"id": "7", "contents": '"t"\nx'}, "score": 0.5}]]


async def test_documents_are_wrapped_only_where_scores_are_asked_for(tmp_path: Path) -> None:
    forms = (FOUND, {"result": FOUND}, [[{"id": "7", "contents": '"t"\nx', "score": 0.5}]])
    results = iter(each for each in forms for _ in range(2))
    async with doors(tmp_path, OPEN, lambda _: saying(next(results))) as running:
        for each in forms:
            bare = await running.http.post(
                "/retrieve/reward", json={"queries": ["q"], "topk": 1, "return_scores": False}
            )
            scored = await running.http.post("/retrieve/reward", json={"query": "q", "topk": 1, "return_scores": True})
            assert bare.json() == {"result": [[{"id": "7", "contents": '"t"\nx'}]]}, each
            assert scored.json() == {"result": FOUND}, each


async def test_what_is_no_list_of_documents_is_a_failure(tmp_path: Path) -> None:
    odd: tuple[object, ...] = (None, [], {"result": 1}, [[{"text": "x"}]], [["x"]])
    results = iter(odd)
    async with doors(tmp_path, OPEN, lambda _: saying(next(results))) as running:
        for each in odd:
            answer = await running.http.post("/retrieve/reward", json={"queries": ["q"]})
            assert answer.status_code == 502, each
