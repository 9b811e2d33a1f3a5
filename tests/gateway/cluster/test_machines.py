"""A machine alone says why no sandbox can be made on it, as long as none can."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.cluster import machines
from runtimes.sandbox.process.provider import ProcessProvider
from tests.gateway.conftest import GatewayBench, serving, until


async def test_a_machine_whose_engine_is_gone_says_so_with_the_remedy_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble = "its engine is gone: start it"

    async def found(provider: ProcessProvider) -> str:
        return trouble

    monkeypatch.setattr(ProcessProvider, "trouble", found)
    monkeypatch.setattr(machines, "LOOK_S", 0.001)
    async with serving(GatewayBench(tmp_path)) as gateway:
        await until(lambda: bool(gateway.app.machines.warnings()))
        (node,) = (await gateway.http.get("/v1/nodes")).json()["nodes"]
        assert (node["state"], node["why"], node["since_s"] >= 0) == ("unfit", trouble, True)
        ready = await gateway.http.get("/readyz")
        assert ready.status_code == 200, "what needs no sandbox goes on"
        assert ready.json()["warnings"] == [f"nothing new can begin on this machine: {trouble}"]
        assert (await gateway.invoke({})).status_code == 200
        trouble = ""
        await until(lambda: not gateway.app.machines.warnings())
        (node,) = (await gateway.http.get("/v1/nodes")).json()["nodes"]
        assert (node["state"], node["why"], node["since_s"]) == ("ready", "", 0.0)
