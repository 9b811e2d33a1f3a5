"""What was changed of a function, for anybody's eyes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from gateway.registry import KEPT, Revisions
from manager.function import FunctionSpec, SandboxSpec
from tests.gateway.conftest import RunningGateway, function


def spec(revision: str, **changed: object) -> FunctionSpec:
    return replace(function("f"), revision=revision, **changed)  # type: ignore[arg-type]  # a test's keywords


@pytest.fixture
def revisions() -> Revisions:
    return Revisions({"f": spec("a", timeout_s=1.0)}, lambda: 1000.0)


def test_a_change_tells_what_each_key_was_and_is(revisions: Revisions) -> None:
    boxed = SandboxSpec(memory_bytes=2**20, env={"TOKEN": "secret", "WORD": "${secret:word}"})
    revisions.switched({"f": spec("b", timeout_s=2.0, sandbox=boxed)})
    (change,) = revisions.of("f")
    assert (change.was, change.now, change.at.timestamp()) == ("a", "b", 1000.0)
    assert (change.values["timeout_s"].was, change.values["timeout_s"].now) == ("1.0", "2.0")
    assert (change.values["sandbox.memory_bytes"].was, change.values["sandbox.memory_bytes"].now) == ("", "1048576")
    assert "revision" not in change.values and change.values["sandbox.env.TOKEN"].now == "[secret]"
    assert change.values["sandbox.env.WORD"].now == "${secret:word}"


def test_only_the_source_of_a_handler_is_a_change_without_values(revisions: Revisions) -> None:
    revisions.switched({"f": spec("b", timeout_s=1.0)})
    revisions.switched({"f": spec("b", timeout_s=1.0)})
    (change,) = revisions.of("f")
    assert change.values == {}


def test_few_changes_are_kept_and_none_of_what_is_gone(revisions: Revisions) -> None:
    for number in range(KEPT + 5):
        revisions.switched({"f": spec(str(number))})
    assert [change.now for change in revisions.of("f")] == [str(KEPT + 4 - each) for each in range(KEPT)]
    revisions.switched({})
    assert revisions.of("f") == ()


async def test_a_function_tells_its_changes_and_a_list_does_not(gateway: RunningGateway) -> None:
    async def put(timeout: str) -> None:
        definition: Mapping[str, object] = {"runtime": "exec", "cost": {"cpu": 1}, "timeout": timeout}
        answer = await gateway.http.put("/v1/functions/mine", json={"definition": definition})
        assert answer.status_code == 200, answer.text

    await put("10s")
    assert "changes" not in (await gateway.http.get("/v1/functions/mine")).json()
    await put("20s")
    (change,) = (await gateway.http.get("/v1/functions/mine")).json()["changes"]
    assert change["values"] == {"timeout_s": {"was": "10.0", "now": "20.0"}} and change["was"] != change["now"]
    listed = (await gateway.http.get("/v1/functions")).json()["functions"]
    assert all("changes" not in each for each in listed)
