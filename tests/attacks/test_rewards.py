"""Each way to a reward that was not earned, or out of one that was, fails, and the record says so."""

from __future__ import annotations

import re

import pytest

from bench.attacks.play import EVERY, FRESH, SAME, is_earned, play, playable, small
from bench.attacks.rewards import NOTHING, RewardAttack
from manager.function import FunctionSpec, SandboxSpec
from runtimes.sandbox.command import Command
from runtimes.sandbox.environments import Environments

HELD = [attack for attack in EVERY if attack.held]


def require_playable(attack: RewardAttack, environments: Environments) -> None:
    if not playable(attack, environments.provider):
        pytest.skip("this machine's process sandboxes have no root of their own")


@pytest.mark.parametrize("attack", HELD, ids=lambda attack: attack.name)
async def test_a_reward_is_not_forged_where_the_agent_worked(
    environments: Environments, spec: SandboxSpec, attack: RewardAttack
) -> None:
    require_playable(attack, environments)
    value = await play(attack, environments, small(spec))
    assert is_earned(attack, value["reward"]) and value["valid"], value
    assert re.search(attack.note, str(value["note"])), value["note"]


@pytest.mark.parametrize("attack", [attack for attack in EVERY if attack.fresh], ids=lambda attack: attack.name)
async def test_a_reward_is_not_forged_where_the_agent_never_was(
    environments: Environments, spec: SandboxSpec, attack: RewardAttack
) -> None:
    require_playable(attack, environments)
    value = await play(attack, environments, small(spec), FRESH)
    assert is_earned(attack, value["reward"]) and (value["valid"], value["graded"]) == (True, "fresh"), value
    assert value["note"]


@pytest.mark.parametrize("function", [SAME, FRESH], ids=["same_sandbox", "fresh"])
@pytest.mark.parametrize("cores", [1, 2])
async def test_a_right_solution_has_its_reward(
    environments: Environments, spec: SandboxSpec, function: FunctionSpec, cores: int
) -> None:
    value = await play(NOTHING[cores], environments, small(spec), function, solved=True)
    assert (value["reward"], value["note"]) == (1.0, ""), value
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
