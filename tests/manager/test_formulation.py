"""A call becomes an action."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from manager.action import PRIOR_BATCH_MARGINAL, Action, Amdahl, Kin, UnitSet
from manager.errors import InvalidInput, Unsatisfiable
from manager.formulation import check_satisfiable, formulate
from manager.function import DurationSpec, FunctionSpec, ModelAction, ModelSpec, SandboxSpec
from manager.learning import History
from manager.resources.pools import ConcurrencySpec, QuotaSpec
from tests.manager.conftest import node, spec

TESTS = FunctionSpec(
    name="tests",
    runtime="pytest",
    cost={"cpu": UnitSet.span(1, 8)},
    key="cpu",
    duration=DurationSpec(key="suite", initial_s=30.0),
    sandbox=SandboxSpec(memory_bytes=100),
    timeout_s=60.0,
)


def form(function: FunctionSpec, input: Mapping[str, object], *, timeout_s: float | None = None) -> Action:
    return formulate(
        function, id="i", input=input, trajectory=None, task="t", history=HISTORY, now_s=1.0, timeout_s=timeout_s
    )


HISTORY = History()
for _ in range(20):
    HISTORY.record("tests", "slow", 1, 100.0)


def test_the_callers_key_chooses_what_was_learned() -> None:
    slow, new = form(TESTS, {"suite": "slow"}), form(TESTS, {"suite": "new"})
    assert slow.profile_key == "slow"
    assert slow.t_ori_s == pytest.approx(100.0)
    assert new.t_ori_s == pytest.approx(100.0), "an unknown key takes the function's mean"
    assert form(replace(TESTS, name="unknown"), {}).t_ori_s == 30.0


def test_the_declared_size_is_read_from_the_input_and_foretells_the_duration() -> None:
    sized = replace(TESTS, name="generate", key=None, duration=DurationSpec(size="options.max_tokens"))
    history = History()
    for size in (10, 40, 160, 640) * 4:
        history.record("generate", "", 1, 0.5 + 0.02 * size, size=size)

    def of(input: Mapping[str, object]) -> Action:
        return formulate(sized, id="i", input=input, trajectory=None, task="t", history=history, now_s=0.0)

    short, long = of({"options": {"max_tokens": 20}}), of({"options": {"max_tokens": 600}})
    assert (short.size, long.size) == (20.0, 600.0)
    assert short.t_ori_s == pytest.approx(0.9, rel=0.2) and long.t_ori_s == pytest.approx(12.5, rel=0.2)
    without = of({"options": {"max_tokens": "many"}}), of({"options": {"max_tokens": -3}}), of({})
    assert [each.size for each in without] == [4.0, None, None], "a text has its characters"
    assert without[2].t_ori_s == history.learned("generate").t_ori_s


def test_what_is_declared_is_not_learned() -> None:
    declared = replace(
        TESTS, duration=DurationSpec(profile="declared", key="suite", initial_s=5.0), elasticity=Amdahl(0.5)
    )
    action = form(declared, {"suite": "slow"})
    assert (action.t_ori_s, action.elasticity) == (5.0, Amdahl(0.5))


def test_a_call_takes_no_more_units_than_it_can_use() -> None:
    wide = replace(TESTS, elasticity=Amdahl(0.1))
    assert form(wide, {}).cost["cpu"].maximum == 8
    assert form(wide, {"fail_to_pass": ["test_a.py::test_x"]}).cost["cpu"].maximum == 1
    assert form(wide, {"fail_to_pass": ["a", "b"], "pass_to_pass": ["b", "c"]}).cost["cpu"].maximum == 3
    assert form(wide, {"fail_to_pass": ["a"], "targets": ["tests"]}).cost["cpu"].maximum == 8
    assert form(wide, {"workers": 2}).cost["cpu"].maximum == 2


def test_the_first_run_of_a_function_of_which_nothing_is_known_is_narrow() -> None:
    assert form(replace(TESTS, name="unknown"), {}).cost["cpu"].maximum == 4
    at_least = replace(TESTS, name="unknown", cost={"cpu": UnitSet.span(6, 8)})
    assert form(at_least, {}).cost["cpu"].maximum == 6
    assert form(replace(TESTS, name="unknown", elasticity=Amdahl(0.1)), {}).cost["cpu"].maximum == 8


def test_what_a_further_member_adds_is_carried_whatever_is_declared_of_the_duration() -> None:
    assert form(TESTS, {}).batch_marginal == PRIOR_BATCH_MARGINAL
    history = History()
    for size in (1, 8) * 20:
        history.record("tests", "", 1, 10.0 * (1 + 0.25 * (size - 1)), {Kin("tests"): size})
    declared = replace(TESTS, duration=DurationSpec(profile="declared", initial_s=5.0))
    for function in (TESTS, declared):
        action = formulate(function, id="i", input={}, trajectory=None, task="t", history=history, now_s=1.0)
        assert action.batch_marginal == pytest.approx(0.25)


def test_only_test_runs_over_cores_are_malleable() -> None:
    assert form(TESTS, {}).malleable
    assert not form(replace(TESTS, runtime="exec"), {}).malleable


def test_a_timeout_may_be_shortened_only() -> None:
    assert form(TESTS, {}, timeout_s=5.0).timeout_s == 5.0
    assert form(TESTS, {}, timeout_s=500.0).timeout_s == 60.0
    with pytest.raises(InvalidInput):
        form(TESTS, {}, timeout_s=0.0)


def test_a_learning_key_that_is_no_plain_value_is_refused_with_its_path() -> None:
    with pytest.raises(InvalidInput) as caught:
        form(TESTS, {"suite": ["x"]})
    assert caught.value.detail["path"] == "$.suite"


def test_what_no_node_can_ever_give_is_refused_and_the_largest_is_named() -> None:
    wide = replace(TESTS, cost={"cpu": UnitSet.fixed(64)})
    with pytest.raises(Unsatisfiable, match="largest, big, has 8 cores"):
        check_satisfiable(wide, spec(node("small", cores=2), node("big", cores=8)))
    check_satisfiable(TESTS, spec(node("small", cores=2)))


def test_quotas_and_limits_that_are_too_small_or_unknown_are_refused() -> None:
    machine = replace(
        spec(), resources={"search": QuotaSpec(limit=9, period_s=1, burst=2), "p": ConcurrencySpec(limit=1)}
    )
    for cost in ({"search": 3}, {"p": 2}, {"nothing": 1}):
        sets = {kind: UnitSet.fixed(units) for kind, units in cost.items()}
        with pytest.raises(Unsatisfiable):
            check_satisfiable(replace(TESTS, cost=sets), machine)


def test_messages_add_to_a_batch_what_the_same_text_would() -> None:
    model = ModelSpec(path=Path("m"), action=ModelAction.GENERATE)
    function = replace(TESTS, name="lm", runtime="model", model=model)
    said = "how are you? " * 20
    chat = [{"role": "user", "content": said}, {"role": "assistant", "content": "fine"}]
    texts = form(function, {"texts": [said]}).batch_tokens
    assert texts <= form(function, {"messages": chat}).batch_tokens < texts + 10
    assert (
        form(function, {"messages": [chat, chat]}).batch_tokens == 2 * form(function, {"messages": chat}).batch_tokens
    )
