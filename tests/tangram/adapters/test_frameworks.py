"""Plugs without their frameworks: what is missing is named, and mini-swe-agent's contract on a scripted gateway.

The others are tested with the real packages, in tests/ecosystem.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tangram import Client
from tangram.adapters import InfrastructureFailed, SandboxProvider
from tangram.testing import ScriptedCall, ScriptedFailure, ScriptedGateway
from tests.tangram.adapters.test_provider import ended

EXTRAS = {
    "mini_swe": "mini-swe",
    "inspect": "inspect",
    "deepagents": "deepagents",
    "skyrl": "skyrl",
    "nemo_gym": "nemo-gym",
    "verl": "verl",
    "harbor": "harbor",
}


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
