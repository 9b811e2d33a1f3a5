"""Frameworks, as they are on the registry, with their plugs of `tangram.adapters`; real gateways, real sandboxes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.facades.client_environments import ClientEnvironment
from tests.e2e.gateway import GatewayProcess

pytestmark = [pytest.mark.network, pytest.mark.slow]
#: Where deepagents 0.7's own base class and LangChain's suite of it disagree: paths of a glob, writing over a file.
THEIR_OWN_QUARREL = {
    "test_glob",
    "test_glob_basic_pattern",
    "test_glob_hidden_files_explicitly",
    "test_glob_recursive_pattern",
    "test_glob_with_character_class",
    "test_glob_with_directories",
    "test_glob_with_question_mark",
    "test_write_existing_file_fails",
}


@pytest.fixture
def plug(boxes: GatewayProcess, client: Callable[[str], ClientEnvironment], distribution: Path) -> Callable[..., Any]:
    """Run a client's script against the gateway, with our distribution beside its framework."""

    async def run(environment: str, script: str, *arguments: str) -> Any:
        return await client(environment).run(script, boxes.url, *arguments, PYTHONPATH=str(distribution))

    return run


async def test_mini_swe_agent_works_to_its_submission(plug: Callable[..., Any]) -> None:
    told = await plug("mini_swe", "mini_swe_agent")
    for number, agent in enumerate(told["agents"]):
        assert agent == ["Submitted", f"{number}\n", ["out\nerr\n", "", "\ufffd("], [0, 7, 137], True, True]
    assert told["late"] == ["begun\n", -1, "TimeoutExpired", True]
    assert told["again"] == {"output": "/tmp\n", "returncode": 0, "exception_info": ""}
    assert told["cwd"] == "/tmp\n"
    assert (told["ended"], told["refused"], told["unknown"]) == ("trajectory_ended", "not_found", True)


@pytest.mark.far
async def test_inspects_own_checks_hold_and_an_evaluation_finds_the_plug(
    plug: Callable[..., Any], boxes: GatewayProcess
) -> None:
    told = await plug("inspect", "inspect_checks", "boxes")
    # A process sandbox shows the host's /etc read-only: nobody can be added to it.
    host = {"test_exec_as_user"} if "process" in boxes.directory.name else set()
    assert set(told["failed"]) <= host, told["failed"]
    assert told["passed"] >= 43
    assert told["eval"] == ["success", 1.0]


async def test_deepagents_passes_the_public_suite_of_sandboxes(plug: Callable[..., Any]) -> None:
    told = await plug("deepagents", "deepagents_suite")
    names = {each.partition(": ")[0].removeprefix("TestTangram::") for each in told["failed"]}
    assert names <= THEIR_OWN_QUARREL, told["failed"]
    assert told["passed"] >= 79


async def test_an_episode_of_skyrl_gym_keeps_one_sandbox(plug: Callable[..., Any]) -> None:
    told = await plug("skyrl", "skyrl_episode")
    assert told["turns"] == ["", "kept\n[exit status 3]", "a\n[ended: it took too long]", "kept\nkept"]
    assert told["call"][0] == 8
    assert told["call"][1] == "There is no function 'shell'; there are: double."
    assert told["call"][2].startswith("The arguments are no JSON")
    assert (told["anew"], told["ended"]) == ("True", "trajectory_ended")


@pytest.mark.far
async def test_nemo_gym_finds_its_provider_by_the_entry_point(plug: Callable[..., Any]) -> None:
    told = await plug("nemo_gym", "nemo_gym_sandbox")
    assert told["exec"] == ["text", "err\n", 3, None]
    assert (told["mode"], told["download"], told["status"]) == ("ran\n", "text", "running")
    assert told["late"] == ["timeout", -1]
    assert told["refused"]


@pytest.mark.far
async def test_verls_rollouts_have_a_sandbox_each_and_its_reward_loader_finds_ours(plug: Callable[..., Any]) -> None:
    told = await plug("verl", "verl_rollout")
    assert told["turns"] == [["", "kept", "[exit status 3]", "a\n[ended: it took too long]"], [""]]
    assert told["steps"] == {"3": 1}, "the trainer tells its step to the loop, and the sandbox counts for it"
    assert told["failed"] in ("invalid_input", "unsupported"), "an image that is not allowed, or no images at all"
    assert told["scores"] == [1.0, 0.0]


@pytest.mark.far
async def test_harbors_oracle_gets_the_reward_that_its_verifier_writes(
    plug: Callable[..., Any], boxes: GatewayProcess
) -> None:
    if "process" in boxes.directory.name:
        pytest.skip("Harbor's tasks are images, and process sandboxes have none")
    told = await plug("harbor", "harbor_trials")
    assert told["trials"] == {"good": [{"reward": 1.0}, None], "bad": [{"reward": 0.0}, None]}, told["said"]


@pytest.mark.far
async def test_verls_reward_loop_has_the_rewards_that_functions_give_and_raises_what_is_no_reward(
    plug: Callable[..., Any], tmp_path: Path
) -> None:
    told = await plug("verl", "verl_rewards", str(tmp_path))
    assert told["judged"] == {"sums": [1.0, 0.0, 1.0, 1.0], "places": [2, -1, 0, 2], "acc": [1.0, 0.0, 1.0, 1.0]}
    assert told["tested"] == [1.0, 0.0]
    assert told["worth"] == [-1.0] * 4, "what a failure is worth is said by the user"
    ends = {name: (told[name]["raised"], told[name]["reason"]) for name in ("broken", "nothing", "unknown", "lost")}
    reasons = {"broken": "handler_error", "nothing": "no_reward", "unknown": "not_found", "lost": "handler_error"}
    assert ends == {name: ("InfrastructureFailed", reason) for name, reason in reasons.items()}
