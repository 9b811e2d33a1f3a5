"""Each way to a reward that was not earned, or out of one that was, fails, and the record says so."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from bench.attacks.play import EVERY, FRESH, SAME, SaidLog, is_earned, play, playable, small
from bench.attacks.rewards import NOTHING, PROJECT, RewardAttack
from bench.attacks.variants import PLANTED, SAID, STYLES, Variant, untrue, variants
from manager.function import FunctionSpec, SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.environments import Environments

#: Of what `python -m bench.attacks` draws; another seed draws others.
SEED, VARIANTS = 31, 60


def turns(things: Iterable[RewardAttack | Variant], first: int = 0) -> list[Any]:
    """Return each with one kind of sandboxes, in turn: `python -m bench.attacks` plays all in both."""
    places: list[tuple[str, Any]] = [("process", ()), ("container", pytest.mark.docker)]
    return [
        pytest.param(places[(number + first) % 2][0], each, marks=places[(number + first) % 2][1], id=each.name)
        for number, each in enumerate(things)
    ]


def require_playable(attack: RewardAttack, environments: Environments) -> None:
    if not playable(attack, environments.provider):
        pytest.skip("this machine's process sandboxes have no root of their own")


@pytest.mark.promise("An agent cannot turn its 0.0 into no reward by its files, disk, memory or names.")
@pytest.mark.promise("Processes and files of an agent forge no reward in its own sandbox.")
@pytest.mark.parametrize(("provider", "attack"), turns(each for each in EVERY if each.held), indirect=["provider"])
async def test_a_reward_is_not_forged_where_the_agent_worked(
    environments: Environments, spec: SandboxSpec, attack: RewardAttack
) -> None:
    require_playable(attack, environments)
    value = await play(attack, environments, small(spec))
    assert is_earned(attack, value["reward"]) and value["valid"], value
    assert re.search(attack.note, str(value["note"])), value["note"]


@pytest.mark.promise("Root inside cannot take the runner's limits away.")
@pytest.mark.promise(
    "With `grade: fresh` the suite runs in an unused sandbox, and the agent's sandbox does not change."
)
@pytest.mark.parametrize(
    ("provider", "attack"), turns((each for each in EVERY if each.fresh), 1), indirect=["provider"]
)
async def test_a_reward_is_not_forged_where_the_agent_never_was(
    environments: Environments, spec: SandboxSpec, attack: RewardAttack
) -> None:
    require_playable(attack, environments)
    value = await play(attack, environments, small(spec), FRESH)
    assert is_earned(attack, value["reward"]) and (value["valid"], value["graded"]) == (True, "fresh"), value
    assert value["note"]


@pytest.mark.promise(
    "No variant of an attack on the start, on imports or on options forges a reward or an entry of `checked`."
)
@pytest.mark.parametrize(("provider", "variant"), turns(variants(SEED, VARIANTS, SAME)), indirect=["provider"])
async def test_no_variant_of_an_attack_forges_a_reward_or_what_is_checked(
    environments: Environments, spec: SandboxSpec, variant: Variant
) -> None:
    require_playable(variant.attack, environments)
    log = SaidLog()
    value = await play(variant.attack, environments, small(spec), variant.function, log=log)
    assert (value["reward"], value["valid"], untrue(value, log.said)) == (0.0, True, []), (value, log.said)
    assert value["note"]


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("style", list(STYLES))
async def test_what_a_variant_plants_forges_the_report_where_it_is_let_in(
    environments: Environments, spec: SandboxSpec, style: str, cores: int
) -> None:
    """Else the attacks would say nothing: here the tree's own conftest counts."""
    files = {"calc.py": PROJECT["calc.py"], "conftest.py": PLANTED}
    tests = {"tests/test_calc.py": STYLES[style].format(asks="")}
    attack = RewardAttack(name="let_in", files=files, tests=tests, given=True, cores=cores)
    assert SAME.pytest is not None
    function, log = replace(SAME, pytest=replace(SAME.pytest, args=(*SAME.pytest.args, "-s"))), SaidLog()
    value = await play(attack, environments, small(spec), function, log=log)
    assert (value["reward"], f"{SAID}inside" in log.said) == (1.0, True), log.said
    assert "solution_apart" not in value["checked"]  # type: ignore[operator]


@pytest.mark.promise("A right solution has its reward.")
@pytest.mark.parametrize("function", [SAME, FRESH], ids=["same_sandbox", "fresh"])
@pytest.mark.parametrize("cores", [1, 2])
async def test_a_right_solution_has_its_reward(
    environments: Environments, spec: SandboxSpec, function: FunctionSpec, cores: int
) -> None:
    value = await play(NOTHING[cores], environments, small(spec), function, solved=True)
    assert (value["reward"], value["note"]) == (1.0, ""), value
    # Not that the solution is apart: the test imports it.
    checked = {"clean_start", "report_whole", "swept"}
    if function is FRESH:
        checked |= {"tests_given", "tree_options_ignored"}
        if environments.provider.info.limits["users_separate"]:
            checked.add("tests_locked")
    assert set(value["checked"]) == checked  # type: ignore[call-overload]


async def test_a_fresh_grade_leaves_the_trajectory_as_it_was(environments: Environments, spec: SandboxSpec) -> None:
    sandbox = await environments.ensure("t", small(spec))
    left = "echo $$ > pid; exec sleep 600"
    await sandbox.run(Command(shell=f"setsid sh -c '{left}' >/dev/null 2>&1 & until [ -s pid ]; do sleep 0.01; done"))
    value = await play(NOTHING[1], environments, small(spec), FRESH, trajectory="t", solved=True)
    assert value["reward"] == 1.0
    seen = await sandbox.run(Command(shell="kill -0 $(cat pid) && ls -A . tests"))
    assert (seen.exit_code, seen.stdout.split()) == (0, b".: calc.py pid tests tests: test_calc.py".split()), seen


async def test_tests_behind_a_link_are_not_called_locked(environments: Environments, spec: SandboxSpec) -> None:
    linked = RewardAttack(name="linked", acts=("mkdir elsewhere; rm -rf tests; ln -s elsewhere tests",), given=True)
    value = await play(linked, environments, small(spec))
    assert value["reward"] == 0.0
    assert "tests_given" in value["checked"] and "tests_locked" not in value["checked"]  # type: ignore[operator]
