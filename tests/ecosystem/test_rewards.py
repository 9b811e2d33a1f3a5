"""OpenRLHF, as it is on the registry, gets its rewards from a handler here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.facades.client_environments import ClientEnvironment
from manager.errors import Reason
from runtimes.runtime import Execution
from runtimes.testing import ScriptStep
from tests.gateway.facades.world import doors

pytestmark = [pytest.mark.network, pytest.mark.slow]


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
