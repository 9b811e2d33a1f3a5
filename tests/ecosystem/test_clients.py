"""Frameworks and clients, as they are on the registry, against real gateways and real sandboxes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from manager.errors import Reason
from runtimes.runtime import Execution
from runtimes.testing import ScriptStep
from tests.e2e.gateway import GatewayProcess
from tests.ecosystem.environments import ClientEnvironment
from tests.gateway.conftest import RunningGateway, step_of, until
from tests.gateway.facades.test_sandboxfusion import OPEN, PROGRAMS
from tests.gateway.facades.world import doors

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
#: Longer than one try of the wrapper waits, shorter than its four; and longer than these.
SLOW_S, NEVER_S = 2.5, 60.0
TOKEN = "s3cret"


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


@pytest.mark.promise("verl's reward loop has the rewards that functions gave, and raises where there is none.")
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


async def test_areals_wrapper_has_every_reward_and_raises_what_is_no_reward(
    tmp_path: Path, client: Callable[[str], ClientEnvironment], distribution: Path
) -> None:
    ran: Counter[str] = Counter()

    def script(execution: Execution) -> ScriptStep:
        given = execution.call.input
        response = str(given["response"])
        ran[response] += 1
        if response == "fails":
            return ScriptStep(reason=Reason.HANDLER_ERROR, message="as asked")
        takes_s = {"slow": SLOW_S, "never": NEVER_S}.get(response, 0.0)
        return ScriptStep(result={"reward": float(response == given["label"])}, duration_s=takes_s)

    async with doors(tmp_path, {}, script, auth="token", token="s3cret") as running:
        url = f"http://127.0.0.1:{running.app.http_port}"
        told = await client("areal").run("areal_rewards", url, "s3cret", PYTHONPATH=str(distribution))
    assert told["wrapped"] == [1.0, 0.0]
    assert told["slow"] == 1.0
    assert told["never"] == ["InfrastructureFailed", "not_ended"], "four tries of 1.5 s, and no reward of 0"
    assert told["fails"] == ["InfrastructureFailed", "handler_error"]
    assert told["many"] == 1.0
    assert told["instead"] == [1.0, ["InfrastructureFailed", "handler_error"]]
    assert (ran["slow"], ran["never"]) == (2, 1), "tries join one invocation; GatewayReward asked for the other"


async def test_mini_swe_agents_own_docker_environment_works_to_its_submission(
    boxes: GatewayProcess, client: Callable[[str], ClientEnvironment]
) -> None:
    host = f"unix://{boxes.directory / 'docker.sock'}"
    told = await client("mini_swe").run("mini_swe_docker", "tangram-base:bookworm", "1", DOCKER_HOST=host)
    assert told["end"] == ["Submitted", "1\n"]
    assert told["outputs"][0] in ("cat\nerr\n", "err\ncat\n"), (
        "two pipes of the docker CLI, in the order that it reads them"
    )
    assert told["codes"] == [0, 7, 137]
    assert told["late"] == ["begun\n", -1, "TimeoutExpired"]
    assert told["after"] == "/tmp\n"


async def test_the_sdk_of_mcp_is_served_in_both_eras_and_leaves_nothing(
    tmp_path: Path, client: Callable[[str], ClientEnvironment]
) -> None:
    tools = {"mcp": {"functions": ["shell", "echo"]}}
    async with doors(tmp_path, tools, step_of, auth="token", token="s3cret") as running:
        told = await client("mcp").run("tools/mcp_sdk", f"http://127.0.0.1:{running.app.http_port}/mcp", "s3cret")
        await until(lambda: not running.app.invocations.living)
        assert await running.app.engine.end_trajectory("pinned")
        assert running.app.engine.trajectories(10, None)["trajectories"] == []
    assert (told["version"], told["tools"]) == ("2025-11-25", ["shell", "echo"])
    assert told["kept"] == [False, "kept\n[exit code 3]", 3]
    assert told["failed"] == [True, True]
    assert told["unknown"] == -32602
    assert told["after"] == {"a": 1}
    assert told["client"] == ["2025-11-25", "kept\n"], "led to a session, in which its sandbox lives on"
    assert told["pinned"] == ["2026-07-28", "kept\n"]
    assert told["many"] == 1


async def test_langchains_adapters_make_them_tools_of_their_own(
    tmp_path: Path, client: Callable[[str], ClientEnvironment]
) -> None:
    tools = {"mcp": {"functions": ["shell", "echo"]}}
    async with doors(tmp_path, tools, step_of, auth="token", token="s3cret") as running:
        url = f"http://127.0.0.1:{running.app.http_port}/mcp"
        told = await client("langchain").run("tools/langchain_tools", url, "s3cret")
        await until(lambda: not running.app.invocations.living)
        left: Any = running.app.engine.trajectories(50, None)["trajectories"]
    assert (told["tools"], told["asks"]) == (["echo", "shell"], "string")
    assert told["kept"] == ["success", "kept\n[exit code 3]", 3]
    assert (told["failed"], told["refused"]) == (["error", True], "error"), "the model reads both, and goes on"
    assert told["apart"] == "", "a session for each call"
    assert (told["pinned"], told["many"]) == ("kept\n", ["kept\n"])
    assert {each["trajectory"] for each in left} == {"pinned", *(f"t{number}" for number in range(8))}


async def test_openrlhf_gets_every_reward_and_tries_again_what_failed(
    tmp_path: Path, client: Callable[[str], ClientEnvironment]
) -> None:
    seen = 0

    def script(execution: Execution) -> ScriptStep:
        nonlocal seen
        seen += 1
        given = execution.call.input
        if seen % 3 == 0:
            return ScriptStep(reason=Reason.HANDLER_ERROR, message="every third time")
        return ScriptStep(result=float(given["response"] == given["label"]))

    count = 128
    async with doors(tmp_path, {"rewards": {}}, script, auth="token", token="s3cret") as running:
        url = f"http://127.0.0.1:{running.app.http_port}/~s3cret/rm/reward"
        rewards = await client("rewards").run("openrlhf_rewards", url, str(count))
        assert not running.app.invocations.living
    assert rewards == [[float(i % 2 == 0)] for i in range(count)]
    assert seen > count


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway with the door open; nothing is left when the test has ended."""
    functions = {"programs": PROGRAMS}
    async with doors(tmp_path, OPEN, lambda _: ScriptStep(), functions, auth="token", token=TOKEN) as running:
        yield running
        await until(lambda: not running.app.invocations.living)
        assert (await running.http.get("/v1/trajectories")).json()["trajectories"] == []


def url(running: RunningGateway) -> str:
    return f"http://127.0.0.1:{running.app.http_port}/sandboxfusion/~{TOKEN}"


async def test_verls_scorer_finds_no_wrong_verdict_with_64_at_once(
    door: RunningGateway, client: Callable[[str], ClientEnvironment], tmp_path: Path
) -> None:
    programs = [
        {
            "program": f"n = int(input())\nprint(n * {i})\nassert {i} % 4",
            "stdin": "3",
            "expected": f"{3 * i + (i % 5 == 0)}\n",
        }
        for i in range(128)
    ]
    file = tmp_path / "programs.json"
    file.write_text(json.dumps(programs))
    told = await client("sandboxfusion").run("verl_scorer", f"{url(door)}/run_code", str(file), "64", "10")
    right = [float(i % 4 != 0 and i % 5 != 0) for i in range(128)]
    assert [each["score"] for each in told["scores"]] == right
    assert {each["error"] for each in told["scores"]} == {None}


async def test_the_package_reads_every_answer(door: RunningGateway, client: Callable[[str], ClientEnvironment]) -> None:
    told = await client("sandboxfusion").run("sandbox_fusion_package", url(door))
    assert [told[name]["status"] for name in ("good", "bad", "slow", "files", "async")] == [
        "Success",
        "Failed",
        "Failed",
        "Success",
        "Success",
    ]
    assert told["slow"]["run_result"]["status"] == "TimeLimitExceeded"
    assert told["files"]["files"] == {"b": "AP8="}
    assert told["many"] == ["7\n"] * 16
