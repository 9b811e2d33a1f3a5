"""What was accepted before the loss of its sandbox was told ends with it; what comes after begins anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.gateway.conftest import FUNCTIONS, GatewayBench, RunningGateway, serving, until
from tests.gateway.invocations.test_restart import crash, ended

HEADERS = {"X-Trajectory-Id": "t"}
SAFE = replace(FUNCTIONS["shell"], name="safe", idempotent=True)
LOST = ("failed", "environment_lost")


async def submitted(gateway: RunningGateway, command: str, function: str = "shell") -> str:
    answer = await gateway.invoke({"command": command}, mode="async", function=function, headers=HEADERS)
    return str(answer.json()["id"])


async def end_of(gateway: RunningGateway, invocation_id: str) -> tuple[Any, Any]:
    record = await ended(gateway, invocation_id)
    return record["state"], record["reason"]


async def test_all_that_waited_for_a_lost_sandbox_is_told_and_later_work_begins_anew(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path, functions={"safe": SAFE})) as gateway:
        running = await submitted(gateway, "touch made; until [ -e never ]; do sleep 0.01; done")
        behind = [await submitted(gateway, "ls", function) for function in ("shell", "safe", "shell")]
        outside = (await gateway.invoke({}, mode="async", headers=HEADERS)).json()["id"]
        await until(lambda: gateway.app.invocations.living[0].record.begun)
        sandbox = gateway.app.runtimes.environments.get("t")
        assert sandbox is not None
        await sandbox.condemn("by a test")
        assert [await end_of(gateway, each) for each in (running, *behind)] == [LOST] * 4
        assert (await end_of(gateway, outside))[0] == "succeeded", "it needs no sandbox"
        again = await ended(gateway, await submitted(gateway, "ls"))
        assert (again["state"], again["result"]["stdout"]) == ("succeeded", "")  # type: ignore[index]


async def test_a_sandbox_that_died_with_its_gateway_or_under_a_read_is_lost_for_all(tmp_path: Path) -> None:
    async with serving(GatewayBench(tmp_path / "first", functions={"safe": SAFE})) as first:
        await ended(first, await submitted(first, "touch made"))
        held = await submitted(first, "until [ -e never ]; do sleep 0.01; done")
        behind = [await submitted(first, "ls", function) for function in ("shell", "safe")]
        await until(lambda: first.app.invocations.living[0].record.begun)
        await first.app.store.commit()
        bench = replace(crash(tmp_path / "first", tmp_path / "second"), functions={"safe": SAFE})
        await first.http.post(f"/v1/invocations/{held}/cancel")
    async with serving(bench) as second:
        assert await end_of(second, held) == ("lost", "gateway_restart")
        assert [await end_of(second, each) for each in behind] == [LOST] * 2
        made = await ended(second, await submitted(second, "touch made"))
        assert made["state"] == "succeeded"
        sandbox = second.app.runtimes.environments.get("t")
        assert sandbox is not None
        await sandbox.condemn("by a test")
        for asked in ({"path": "made"}, {"path": ".", "list": "true"}):
            read = await second.http.get("/v1/trajectories/t/files", params=asked)
            assert (read.status_code, read.json()["code"]) == (409, "conflict"), read.text
            assert "its files and processes are lost" in read.json()["detail"], read.text
        written = await second.http.put("/v1/trajectories/t/files", params={"path": "new"}, content=b"new")
        assert (written.status_code, written.json()["code"]) == (409, "conflict"), written.text
        assert await end_of(second, await submitted(second, "ls", "safe")) == LOST
        assert (await end_of(second, await submitted(second, "ls", "safe")))[0] == "succeeded"
