"""The tries of one action, and what was asked for behind it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from manager.errors import Reason
from manager.function import RetrySpec
from tests.gateway.conftest import FUNCTIONS, GatewayBench, RunningGateway, serving, until
from tests.gateway.invocations.test_restart import ended

HEADERS = {"X-Trajectory-Id": "t"}


async def submitted(gateway: RunningGateway, body: dict[str, object], function: str = "echo") -> str:
    answer = await gateway.invoke(body, mode="async", function=function, headers=HEADERS)
    return str(answer.json()["id"])


def executed(gateway: RunningGateway) -> list[str]:
    return [action_id for verb, action_id in gateway.runtime.seen if verb == "execute"]


async def test_a_functions_own_retries_run_before_what_is_behind_it(gateway: RunningGateway) -> None:
    first = await submitted(gateway, {"reason": "handler_error", "held": True}, "retried")
    behind = await submitted(gateway, {"n": 1})
    for attempt in (first, f"{first}.2", f"{first}.3"):
        await gateway.executing(attempt)
        gateway.runtime.finish(attempt)
    assert (await ended(gateway, behind))["state"] == "succeeded"
    assert executed(gateway) == [first, f"{first}.2", f"{first}.3", behind]


async def test_a_cancel_between_two_tries_ends_it_and_lets_the_next_one_run(tmp_path: Path) -> None:
    rare = RetrySpec(max_attempts=3, backoff_s=30.0, jitter="none", on=(Reason.HANDLER_ERROR,))
    functions = {"rare": replace(FUNCTIONS["retried"], name="rare", retry=rare)}
    async with serving(GatewayBench(tmp_path, functions=functions)) as gateway:
        first = await submitted(gateway, {"reason": "handler_error"}, "rare")
        behind = await submitted(gateway, {"n": 1})
        await until(lambda: gateway.app.invocations.living[0].record.attempt == 2)
        assert executed(gateway) == [first]
        await gateway.http.post(f"/v1/invocations/{first}/cancel")
        assert (await ended(gateway, first))["state"] == "cancelled"
        assert (await ended(gateway, behind))["state"] == "succeeded"
