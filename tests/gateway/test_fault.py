"""A bug of the scheduler is no silence: callers are told, accepted work is kept, and the process ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.app import gateway
from manager.errors import CodedError
from runtimes.testing import ScriptedRuntime
from tests.gateway.conftest import DEADLINE_S, GatewayBench, scripted_runtimes, serving, step_of, until


async def test_after_a_bug_callers_are_answered_the_process_fails_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = GatewayBench(tmp_path)

    runtimes = scripted_runtimes(ScriptedRuntime(step_of), bench.directory)
    async with asyncio.timeout(DEADLINE_S), gateway(bench.config(), make=runtimes) as app:
        serving_task = asyncio.create_task(app.serve())
        await until(lambda: all(app.registry.readiness(each).status == "ready" for each in app.config.functions))
        schedule = app.engine._core.schedule

        def bug(now_s: float) -> object:
            assert not app.invocations.living, "a bug"  # what was prepared may still be told to the scheduler
            return schedule(now_s)

        monkeypatch.setattr(app.engine._core, "schedule", bug)
        head = "POST /v1/functions/echo/invocations{} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        accepted = await ask_port(app.http_port, head.format("?mode=async"))
        with pytest.raises(CodedError, match="the scheduler failed: AssertionError"):
            await serving_task
    assert b" 202 " in accepted.partition(b"\r\n")[0]
    async with serving(GatewayBench(tmp_path)) as second:
        (record,) = (await second.http.get("/v1/invocations")).json()["invocations"]
        ended = (await second.http.get(f"/v1/invocations/{record['id']}?wait=5s")).json()
        assert ended["state"] == "succeeded"


async def ask_port(port: int, head: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((head + "Content-Length: 2\r\nConnection: close\r\n\r\n").encode() + b"{}")
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer
