"""A call becomes an action, with its size, its batch and its chunk of devices; what is left open is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager.action import (
    PRIOR_BATCH_MARGINAL,
    SIZE_MAX,
    Action,
    Amdahl,
    Chunk,
    Kin,
    UnitSet,
    Work,
    power_at_least,
    size_at,
)
from manager.assembly import STEP_BIAS, build_core
from manager.config import ManagerSpec, NodeSpec, SchedulerSpec
from manager.errors import InvalidInput, Unsatisfiable
from manager.formulation import check_satisfiable, formulate
from manager.function import DurationSpec, FunctionSpec, ModelAction, ModelSpec, PytestSpec, SandboxSpec
from manager.learning import History
from manager.resources.pools import ConcurrencySpec, QuotaSpec
from manager.scheduler.adaptive import AdaptivePolicy
from manager.scheduler.policy import PolicySpec
from manager.simulation.simulate import Size, simulate
from manager.simulation.workloads import CODING_BURST, coding
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
    assert form(replace(wide, pytest=PytestSpec(max_workers=3)), {"workers": 5}).cost["cpu"].maximum == 3


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


INPUT = {
    "max_tokens": 64,
    "ratio": 0.5,
    "text": "héllo",
    "tests": ["a", "b", "c"],
    "token_ids": [[1, 2, 3], [4], []],
    "messages": [{"role": "user", "content": "four"}, {"role": "assistant"}, {"role": "user", "content": "sixsix"}],
    "options": {"steps": 7},
    "none": [],
    "on": True,
    "least": -1,
    "most": 10**400,
    "odd": float("nan"),
}


@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("max_tokens", 64.0),
        ("ratio", 0.5),
        ("text", 5.0),
        ("tests", 3.0),
        ("token_ids", 4.0),
        ("messages", 3.0),
        ("messages.content", 10.0),
        ("options.steps", 7.0),
        ("none", 0.0),
    ],
)
def test_numbers_texts_and_lists_have_a_size(path: str, size: float) -> None:
    assert size_at(INPUT, path) == size


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("a", "b")), inner),
    max_leaves=8,
)


@given(values, st.sampled_from(("a", "b", "a.b", "a.a.b")))
def test_any_input_has_a_size_within_bounds_or_none(value: object, path: str) -> None:
    size = size_at(value, path)
    assert size is None or 0 <= size <= SIZE_MAX


seconds = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12)

marginals = st.floats(0.0, 1.0)


@given(seconds, marginals)
def test_a_batch_takes_no_less_than_its_longest_and_no_more_than_all_in_turn(
    alone_s: list[float], marginal: float
) -> None:
    took_s = Work.of(alone_s).seconds(marginal)
    assert max(alone_s) <= took_s <= sum(alone_s) * (1 + 1e-9)


@given(st.floats(0.01, 100.0), st.integers(1, 64), marginals)
def test_members_alike_each_add_the_marginal(alone_s: float, members: int, marginal: float) -> None:
    work = Work.of([alone_s] * members)
    assert work.seconds(marginal) == pytest.approx(alone_s * (1 + marginal * (members - 1)))
    assert work.size == pytest.approx(members)


def test_a_chunk_knows_its_devices_and_what_lies_in_it() -> None:
    chunk = Chunk(4, 4)
    assert (chunk.end, list(chunk.devices)) == (8, [4, 5, 6, 7])
    assert chunk.contains(Chunk(6, 2)) and chunk.contains(chunk)
    assert not chunk.contains(Chunk(6, 4)) and not Chunk(6, 2).contains(chunk)
    assert chunk.meets(Chunk(0, 8)) and not chunk.meets(Chunk(0, 4))
    assert chunk.moved(-4) == Chunk(0, 4)


def test_it_is_made_of_parts_and_a_part_that_is_taken_leaves_its_buddies() -> None:
    chunk = Chunk(8, 8)
    assert list(chunk.parts(4)) == [Chunk(8, 4), Chunk(12, 4)]
    assert list(chunk.parts(16)) == []
    assert list(chunk.without(Chunk(10, 1))) == [Chunk(12, 4), Chunk(8, 2), Chunk(11, 1)]
    assert list(chunk.without(chunk)) == []


def test_a_count_of_devices_takes_the_next_power_of_two() -> None:
    assert [power_at_least(count) for count in (1, 2, 3, 5, 8)] == [1, 2, 4, 8, 8]


NODE = NodeSpec(name="n1", numa=((0, 1),), memory_bytes=2**30)


def adaptive_of(objective: str, **options: float) -> AdaptivePolicy:
    policies = {"cpu": PolicySpec(name="adaptive", options=options), "default": PolicySpec(name="price")}
    scheduler = SchedulerSpec(policies=policies, objective=objective)  # type: ignore[arg-type]
    policy = build_core(ManagerSpec(nodes=(NODE,), scheduler=scheduler)).state.policies["cpu"]
    assert isinstance(policy, AdaptivePolicy)
    return policy


def test_an_objective_chooses_what_the_options_leave_open() -> None:
    assert adaptive_of("act").bias == AdaptivePolicy().bias
    assert adaptive_of("step").bias == STEP_BIAS
    assert adaptive_of("step", bias=0.0).bias == 0.0


@pytest.mark.parametrize("seed", [1, 2])
def test_the_objective_step_ends_a_batch_sooner_that_is_all_there(seed: int) -> None:
    work, size = coding(48, seed, CODING_BURST), Size(nodes=1, cores=48)
    spec = size.spec(work, "adaptive", strict=False)
    step = replace(spec, scheduler=replace(spec.scheduler, objective="step"))
    sooner, later = (simulate(work, "adaptive", size, base=base).makespan_s for base in (step, spec))
    assert sooner < 0.97 * later
