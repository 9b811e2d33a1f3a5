"""AReaL's wrapper of rewards, as it is on the registry, gets them by our plug: no reward of 0 that nobody gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.facades.client_environments import ClientEnvironment
from manager.errors import Reason
from runtimes.runtime import Execution
from runtimes.testing import ScriptStep
from tests.gateway.facades.world import doors

pytestmark = [pytest.mark.network, pytest.mark.slow]
#: Longer than one try of the wrapper waits, shorter than its four; and longer than these.
SLOW_S, NEVER_S = 2.5, 60.0


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
