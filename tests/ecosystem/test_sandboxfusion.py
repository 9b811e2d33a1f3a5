"""verl's scorer and the package sandbox-fusion, as they are on the registry, get true verdicts here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from bench.facades.client_environments import ClientEnvironment
from runtimes.testing import ScriptStep
from tests.gateway.conftest import RunningGateway, until
from tests.gateway.facades.test_sandboxfusion import OPEN, PROGRAMS
from tests.gateway.facades.world import doors

pytestmark = [pytest.mark.network, pytest.mark.slow]
TOKEN = "s3cret"


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
