"""boto3 and the AWS command line, as they are on the registry, invoke functions; five tries run a call once."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.facades.client_environments import ClientEnvironment
from runtimes.fake import ScriptStep
from runtimes.runtime import Execution
from tests.gateway.conftest import function, step_of, until
from tests.gateway.facades.world import doors

pytestmark = [pytest.mark.network, pytest.mark.slow]
#: Longer than boto3's patience in the test, shorter than all its tries.
SLOW_S = 2.5


async def test_boto3_is_served_and_its_tries_join_one_invocation(
    tmp_path: Path, client: Callable[[str], ClientEnvironment]
) -> None:
    slow: list[str] = []

    def script(execution: Execution) -> ScriptStep:
        if execution.call.function.name == "slow":
            slow.append(execution.action.id)
            return replace(step_of(execution), duration_s=SLOW_S)
        return step_of(execution)

    functions = {"slow": function("slow"), "again": function("again", idempotent=True, max_queued=4)}
    async with doors(tmp_path, {"lambda": {}}, script, functions, auth="token", token="s3cret") as running:
        address = f"http://127.0.0.1:{running.app.http_port}/lambda"
        told = await client("lambda").run("boto3_lambda", address, "s3cret")
        await until(lambda: not running.app.invocations.living)
    assert told["invoke"][:3] == [200, {"a": 1, "log": "said\n"}, "$LATEST"]
    assert base64.b64decode(told["invoke"][3]) == b"said\n"
    assert told["arn"] == {"b": 2}
    assert told["failed"] == [200, "Unhandled", ["errorMessage", "errorType", "stackTrace"]]
    assert (told["event"], told["dry"], told["large"]) == (202, 204, True)
    assert (told["missing"], told["streaming"]) == ("ResourceNotFoundException", "UnsupportedOperationException")
    assert {"echo", "slow", "again"} <= set(told["functions"])
    assert told["events"] == 200, "with four places in the queue"
    assert told["slow"] == {"n": 1}
    assert len(slow) == 1


async def test_the_aws_command_line_is_served(tmp_path: Path, client: Callable[[str], ClientEnvironment]) -> None:
    async with doors(tmp_path / "gateway", {"lambda": {}}, step_of, auth="token", token="s3cret") as running:
        address = f"http://127.0.0.1:{running.app.http_port}/lambda"
        told = await client("awscli").run("aws_command", address, "s3cret", str(tmp_path))
        await until(lambda: not running.app.invocations.living)
    assert told["invoke"] == [0, 200, {"a": 1}]
    assert told["failed"] == [0, "Unhandled"]
    assert told["event"] == [0, 202]
    assert told["missing"] == [255, True]
    assert {"echo", "reward", "once"} <= set(told["functions"])
    assert told["function"] == "Active"
    refused, complaint = told["refused"]
    assert refused and "/2015-03-31/functions/{name}/configuration" in complaint, "what is not served is told by name"
