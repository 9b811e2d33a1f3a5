"""A machine alone on which no sandbox can be made says why and is closed: what has not begun waits, and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.cluster import cluster
from runtimes.sandbox.process import ProcessProvider
from tests.gateway.conftest import GatewayBench, RunningGateway, function, serving, until


@dataclass
class EngineWords:
    """What a provider's engine is said to suffer from."""

    trouble: str = ""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> EngineWords:
    made = EngineWords("its engine is gone: start it")

    async def found(provider: ProcessProvider) -> str:
        return made.trouble

    monkeypatch.setattr(ProcessProvider, "trouble", found)
    monkeypatch.setattr(cluster, "LOOK_S", 0.001)
    return made


@pytest.fixture
async def gateway(tmp_path: Path, engine: EngineWords) -> AsyncIterator[RunningGateway]:
    """A gateway whose machine is closed; ``free`` needs nothing of it."""
    async with serving(GatewayBench(tmp_path, functions={"free": function("free", cost={})})) as made:
        await until(lambda: bool(made.app.machines.warnings()))
        yield made


async def test_a_machine_whose_engine_is_gone_says_so_with_the_remedy_until_it_is_back(
    gateway: RunningGateway, engine: EngineWords
) -> None:
    (node,) = (await gateway.http.get("/v1/nodes")).json()["nodes"]
    assert (node["state"], node["why"], node["since_s"] >= 0) == ("unfit", engine.trouble, True)
    ready = await gateway.http.get("/readyz")
    assert ready.status_code == 200, "what needs no sandbox goes on"
    assert ready.json()["warnings"] == [f"nothing new can begin on this machine: {engine.trouble}"]
    engine.trouble = ""
    await until(lambda: not gateway.app.machines.warnings())
    (node,) = (await gateway.http.get("/v1/nodes")).json()["nodes"]
    assert (node["state"], node["why"], node["since_s"]) == ("ready", "", 0.0)


@pytest.mark.promise("Work that has not begun waits for an engine that is away, and then goes on by itself.")
async def test_what_has_not_begun_waits_for_the_engine_and_says_so_and_what_needs_none_goes_on(
    gateway: RunningGateway, engine: EngineWords
) -> None:
    submitted = await gateway.invoke({}, mode="async")
    calls = [
        asyncio.create_task(gateway.invoke({})),
        asyncio.create_task(gateway.invoke({}, headers={"X-Trajectory-Id": "t"})),
    ]
    await until(lambda: gateway.app.engine.queue()["waiting"] == 3)
    assert (await gateway.invoke({}, function="free")).status_code == 200
    late = await gateway.invoke({}, function="impatient")
    assert (late.status_code, late.json()["code"]) == (408, "queue_timeout")
    queue = (await gateway.http.get("/v1/queue")).json()
    closed = f"an open node: local is closed: unfit: {engine.trouble}"
    causes = [each["cause"] for each in queue["causes"]]
    assert {(cause["kind"], cause["text"], cause["pool"]) for cause in causes} == {("node", closed, "node:local")}
    assert not any(call.done() for call in calls)
    engine.trouble = ""
    assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200, 200]
    ended = await gateway.http.get(f"/v1/invocations/{submitted.json()['id']}", params={"wait": "10s"})
    assert ended.json()["state"] == "succeeded"
