"""A policy that fails in a gateway: its work is done, and readiness says what should be looked at."""

from __future__ import annotations

from pathlib import Path

from manager.scheduler.policy import Decision, PoolView
from tests.gateway.conftest import GatewayBench, serving


class BrokenEverywhere:
    """A policy that raises."""

    name = "broken"

    def decide(self, view: PoolView) -> Decision:
        raise ZeroDivisionError("a bug")


async def test_a_policy_that_fails_is_a_warning_of_readiness_and_no_failure(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path)) as gateway:
        state = gateway.app.engine._core.state
        state.policies = {**state.policies, "cpu": BrokenEverywhere(), "default": BrokenEverywhere()}
        ended = await gateway.http.post("/v1/functions/echo/invocations", json={"n": 1})
        assert ended.json()["state"] == "succeeded"
        ready = await gateway.http.get("/readyz")
    assert ready.status_code == 200
    (warning,) = ready.json()["warnings"]
    assert "policy broken failed" in warning and "a bug" in warning
