"""The nine verbs that every adapter is made of, and adapters whose frameworks are missing."""

from __future__ import annotations

import base64
import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from tangram import AsyncClient, Client
from tangram.adapters import AsyncSandboxProvider, InfrastructureFailed, SandboxProvider
from tangram.testing import Answer, ScriptedCall, ScriptedFailure, ScriptedGateway, broken, json_answer, refusal
from tangram.types import Problem, Reason

EXTRAS = {
    "mini_swe": "mini-swe",
    "inspect": "inspect",
    "deepagents": "deepagents",
    "skyrl": "skyrl",
    "nemo_gym": "nemo-gym",
    "verl": "verl",
    "harbor": "harbor",
}


def ended(
    stdout: str = "", *, exit_code: int | None = 0, signal: int | None = None, **more: object
) -> dict[str, object]:
    """What an exec function returns."""
    streams = {"stdout": stdout, "stderr": "", "stdout_truncated": False, "stderr_truncated": False}
    return {"exit_code": exit_code, "signal": signal, "duration_s": 0.0, **streams, **more}


@pytest.fixture
def scripted() -> ScriptedGateway:
    return ScriptedGateway({"shell": ended("said\n"), "pytest_reward": {"reward": 1.0, "note": "", "tests": {}}})


@pytest.fixture
def provider(scripted: ScriptedGateway) -> Iterator[SandboxProvider]:
    with Client(transport=scripted) as client, SandboxProvider(client=client, task="t") as provider:
        yield provider


def test_a_step_of_the_task_goes_with_what_counts_for_it(scripted: ScriptedGateway, provider: SandboxProvider) -> None:
    box = provider.open(step=7)
    provider.run(box, "true")
    provider.grade({}, sandbox=box)
    provider.invoke("pytest_reward", {}, step=8)
    provider.grade({}, step=9)
    provider.invoke("pytest_reward", {})
    assert b'"step":7' in next(each.content for each in scripted.requests if each.method == "PUT")
    assert [call.headers.get("x-step") for call in scripted.calls] == ["7", "7", "8", "9", None]


async def test_both_forms_do_the_same(
    scripted: ScriptedGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tangram.client.requests.drawn_name", lambda: "drawn")
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "run.sh").write_text("true")
    (tmp_path / "in" / "deep" / "run.sh").chmod(0o755)
    asking = AsyncClient(transport=scripted)
    async with AsyncSandboxProvider(client=asking, task="t") as waiting:
        box = await waiting.open(image="swebench/x", env={"A": "b"}, memory="1Gi")
        assert (await waiting.run(box, ["echo", "said"], merge=True, timeout_s=5)).output == "said\n"
        await waiting.write(box, "a", "text", mode=0o600)
        assert await waiting.read(box, "a") == b"text"
        await waiting.upload_tree(box, tmp_path / "in", "/tree")
        await waiting.download_tree(box, "/tree", tmp_path / "out")
        assert (await waiting.grade({"suite": "s"}, sandbox=box)).score() == 1.0
        assert (await waiting.invoke("pytest_reward", {}))["reward"] == 1.0
        chosen = scripted.trajectories[box].sandbox
        assert chosen is not None and (chosen.image, chosen.env, chosen.memory) == ("swebench/x", {"A": "b"}, "1Gi")
        await waiting.end(box)
        await waiting.end(box)
    await asking.close()
    awaited = [(request.method, request.url.path.replace(box, "BOX"), request.content) for request in scripted.requests]
    assert (tmp_path / "out" / "deep" / "run.sh").stat().st_mode & 0o777 == 0o755
    scripted.requests.clear()
    with Client(transport=scripted) as client, SandboxProvider(client=client, task="t") as blocking:
        box = blocking.open(image="swebench/x", env={"A": "b"}, memory="1Gi")
        blocking.run(box, ["echo", "said"], merge=True, timeout_s=5)
        blocking.write(box, "a", "text", mode=0o600)
        assert blocking.read(box, "a") == b"text"
        blocking.upload_tree(box, tmp_path / "in", "/tree")
        blocking.download_tree(box, "/tree", tmp_path / "out")
        blocking.grade({"suite": "s"}, sandbox=box)
        blocking.invoke("pytest_reward", {})
        blocking.end(box)
    assert [(each.method, each.url.path.replace(box, "BOX"), each.content) for each in scripted.requests] == awaited
    assert {call.task for call in scripted.calls} == {"t"}
    assert scripted.trajectories == {}


def test_a_command_that_ended_is_data_whatever_its_status(scripted: ScriptedGateway, provider: SandboxProvider) -> None:
    box = provider.open()
    for told, status in ((ended(exit_code=7), 7), (ended(exit_code=None, signal=9), 137)):
        scripted.functions["shell"] = told
        assert provider.run(box, "x").exit_code == status
    exact = base64.b64encode(b"\xff\n").decode()
    scripted.functions["shell"] = ended("�\n", stdout_base64=exact, stderr_truncated=True)
    odd = provider.run(box, "x")
    assert (odd.stdout, odd.output, odd.truncated) == (b"\xff\n", "�\n", True)


def test_a_command_that_was_ended_for_its_memory_keeps_its_true_status(
    scripted: ScriptedGateway, provider: SandboxProvider
) -> None:
    def hungry(call: ScriptedCall) -> object:
        raise ScriptedFailure("out_of_memory", "no room", ended("half", exit_code=None, signal=9))

    scripted.functions["shell"] = hungry
    told = provider.run(provider.open(), "x")
    assert (told.exit_code, told.out_of_memory, told.output) == (137, True, "half")


@pytest.mark.parametrize(
    "reason", ["environment_lost", "node_lost", "queue_timeout", "gateway_restart", "internal", "out_of_memory"]
)
def test_what_the_command_did_not_do_is_no_exit_status(
    scripted: ScriptedGateway, provider: SandboxProvider, reason: Reason
) -> None:
    def lost(call: ScriptedCall) -> object:
        raise ScriptedFailure(reason, "as scripted")

    scripted.functions |= {"shell": lost, "pytest_reward": lost}
    box = provider.open()
    calls: list[Any] = [
        lambda: provider.run(box, "x"),
        lambda: provider.grade({}),
        lambda: provider.invoke("shell", {}),
    ]
    for call in calls:
        with pytest.raises(InfrastructureFailed) as caught:
            call()
        assert caught.value.reason == reason and caught.value.invocation
        assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (refusal(401, "unauthorized"), "unauthorized"),
        (refusal(422, "invalid_input"), "invalid_input"),
        (refusal(410, "trajectory_ended"), "trajectory_ended"),
        (broken(httpx.ReadError), "connection_failed"),
    ],
)
def test_a_refusal_and_a_broken_connection_are_the_same_error(
    scripted: ScriptedGateway, provider: SandboxProvider, trouble: Answer, reason: str
) -> None:
    box = provider.open()
    scripted.trouble(trouble)
    with pytest.raises(InfrastructureFailed, match=box) as caught:
        provider.run(box, "x")
    assert (caught.value.reason, caught.value.sandbox) == (reason, box)


def test_with_durable_a_lost_answer_is_asked_for_again_and_runs_once(scripted: ScriptedGateway) -> None:
    with Client(transport=scripted) as client, SandboxProvider(client=client, durable=True) as provider:
        box = provider.open()
        scripted.trouble(broken(httpx.ReadError))
        assert provider.run(box, "x").output == "said\n"
        provider.run(box, "x")
        assert len(scripted.calls) == 2, "two commands are two executions"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("not_found", FileNotFoundError),
        ("is_a_directory", IsADirectoryError),
        ("not_a_directory", NotADirectoryError),
        ("permission_denied", PermissionError),
        ("read_only", PermissionError),
    ],
)
def test_errors_of_files_are_pythons_own(
    scripted: ScriptedGateway, provider: SandboxProvider, said: str, kind: type[OSError]
) -> None:
    def refused(request: httpx.Request) -> httpx.Response:
        problem = Problem(
            type="", title="", status=409, code="conflict", detail="no", component="x", errors={"file_error": said}
        )
        return json_answer(problem, 409)

    box = provider.open()
    for call in (lambda: provider.read(box, "a"), lambda: provider.write(box, "a", b"")):
        scripted.trouble(refused)
        with pytest.raises(kind, match="'a'"):
            call()


def test_a_grade_without_a_reward_is_no_reward_of_zero(scripted: ScriptedGateway, provider: SandboxProvider) -> None:
    scripted.functions["pytest_reward"] = {"reward": None, "reason": "the tests are gone", "tests": {}}
    report = provider.grade({})
    with pytest.raises(InfrastructureFailed, match="the tests are gone"):
        report.score()
    with pytest.raises(InfrastructureFailed, match="is its runtime pytest"):
        provider.grade({}, function="shell")


def test_a_sandbox_that_was_not_opened_here_is_refused_and_never_begun(
    scripted: ScriptedGateway, provider: SandboxProvider
) -> None:
    with pytest.raises(InfrastructureFailed, match="was not opened"):
        provider.run("elsewhere", "x")
    box = provider.open("mine")
    assert (box, provider.open("mine"), provider.sandboxes) == ("mine", "mine", ("mine",))
    scripted.end_trajectory("mine")
    with pytest.raises(InfrastructureFailed, match="ended") as caught:
        provider.run("mine", "x")
    assert caught.value.reason == "trajectory_ended"
    assert scripted.calls == []


def test_closing_ends_every_sandbox_also_behind_one_that_cannot_be_ended(scripted: ScriptedGateway) -> None:
    with Client(transport=scripted) as client:
        provider = SandboxProvider(client=client)
        boxes = [provider.open() for _ in range(3)]
        scripted.trouble(refusal(500, "internal"))
        with pytest.raises(InfrastructureFailed):
            provider.close()
        assert list(scripted.trajectories) == boxes[:1]
        assert provider.sandboxes == ()


def test_trees_from_a_sandbox_cannot_leave_their_directory(
    scripted: ScriptedGateway, provider: SandboxProvider, tmp_path: Path
) -> None:
    box = provider.open()
    scripted.trajectories[box].files["/workspace/../out"] = (b"", "644")
    scripted.trajectories[box].files["/workspace/a/../../out"] = (b"x", "644")
    with pytest.raises(InfrastructureFailed, match="leaves the directory"):
        provider.download_tree(box, "/workspace", tmp_path / "here")
    assert not (tmp_path / "out").exists()
    with pytest.raises(NotADirectoryError):
        provider.upload_tree(box, __file__, "/t")
    with pytest.raises(FileNotFoundError):
        provider.upload_tree(box, tmp_path / "nowhere", "/t")


@pytest.mark.parametrize("adapter", sorted(EXTRAS))
def test_a_framework_that_is_missing_is_named_with_its_extra(adapter: str) -> None:
    with pytest.raises(ImportError, match=rf"pip install 'tangram-client\[{EXTRAS[adapter]}\]'"):
        importlib.import_module(f"tangram.adapters.{adapter}")


class _Submitted(Exception):
    """As mini-swe-agent's: the messages that end the run."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = messages


@pytest.fixture
def mini_swe(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The plug, beside a stand-in of the one class that it needs."""
    package, exceptions = ModuleType("minisweagent"), ModuleType("minisweagent.exceptions")
    exceptions.__dict__["Submitted"] = _Submitted
    monkeypatch.setitem(sys.modules, "minisweagent", package)
    monkeypatch.setitem(sys.modules, "minisweagent.exceptions", exceptions)
    yield importlib.import_module("tangram.adapters.mini_swe")
    sys.modules.pop("tangram.adapters.mini_swe")


def test_a_submission_a_timeout_and_a_lost_box_are_three_things(mini_swe: ModuleType) -> None:
    def shell(call: ScriptedCall) -> object:
        assert call.input["merge"] and call.input["argv"][:2] == ["bash", "-lc"]
        command = call.input["argv"][2]
        if command == "slow":
            raise ScriptedFailure("timeout", "took too long", ended("half", exit_code=None, signal=9))
        if command == "lost":
            raise ScriptedFailure("environment_lost", "the box is gone")
        return ended(command, exit_code=int(call.input["env"]["CODE"]))

    scripted = ScriptedGateway({"shell": shell})
    submit = "\nCOMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\nthe patch"
    with Client(transport=scripted) as client:
        provider = SandboxProvider(client=client)
        env = mini_swe.MiniSweEnvironment(provider=provider, env={"CODE": "3"}, image="swebench/x")
        assert env.execute({"command": submit})["returncode"] == 3, "a failing command submits nothing"
        late = env.execute({"command": "slow"}, timeout=1)
        assert (late["output"], late["returncode"], late["extra"]["exception_type"]) == ("half", -1, "TimeoutExpired")
        with pytest.raises(InfrastructureFailed, match="the box is gone"):
            env.execute({"command": "lost"})
        chosen = scripted.trajectories[env.sandbox].sandbox
        assert chosen is not None and chosen.image == "swebench/x"
        env.cleanup()
        env.cleanup()
        again = mini_swe.MiniSweEnvironment(provider=provider, env={"CODE": "0"})
        with pytest.raises(_Submitted) as caught:
            again.execute({"command": submit})
        assert caught.value.messages[0]["extra"] == {"exit_status": "Submitted", "submission": "the patch"}
        assert again.serialize()["info"]["config"]["environment_type"] == "tangram.adapters.mini_swe.MiniSweEnvironment"
        with pytest.raises(TypeError, match="imagee"):
            mini_swe.MiniSweEnvironment(provider=provider, imagee="x")
        again.cleanup()
    assert scripted.trajectories == {}
