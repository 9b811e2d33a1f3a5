"""A model function that comes with a configuration, on the real model runtime: the scheduler knows its size."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
import yaml

from gateway.app import gateway
from gateway.config.load import GatewayConfig
from gateway.config.schema import DevicesConfig, NodeConfig, SandboxConfig, ServerConfig
from runtimes.model.request import ModelSettings
from runtimes.sandbox.provider import ProviderSettings
from tangram.client.requests import Bearer

pytest.importorskip("torch")
from tests.runtimes.model import checkpoints  # it imports torch

ANSWER_S = 60.0


@pytest.mark.slow
async def test_a_model_that_is_applied_while_the_gateway_runs_is_weighed_by_the_scheduler(tmp_path: Path) -> None:
    checkpoint = checkpoints.write(tmp_path, "llama", "score")
    config = GatewayConfig(
        server=ServerConfig(state_dir=tmp_path / "state", port=0, grpc_port=0),
        sandbox=SandboxConfig(provider=ProviderSettings(kind="process")),
        node=NodeConfig(devices=DevicesConfig(kind="cpu", count=1, memory_bytes=64 * 2**20)),
        models=ModelSettings(host_bytes=64 * 2**20),
    )
    model = {"runtime": "model", "model": {"path": str(checkpoint), "action": "score"}}
    async with gateway(config, paths=[checkpoint]) as app:
        serving = asyncio.create_task(app.serve())
        try:
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{app.http_port}", auth=Bearer(None), timeout=ANSWER_S
            ) as client:
                applied = await client.put("/v1/config", content=yaml.safe_dump({"functions": {"judge": model}}))
                assert applied.status_code == 200, applied.text
                answer = await client.post("/v1/functions/judge/invocations", json={"token_ids": [[7, 3, 99]]})
                assert answer.status_code == 200, answer.text
                assert len(answer.json()["result"]["scores"]) == 1
                gpu = (await client.get("/v1/resources")).json()["pools"]["gpu"]
                devices, (service,) = gpu["devices"], gpu["services"].values()
                assert service["bytes_by_dop"]["1"] == devices[0]["used_bytes"]
                assumed_s = service["bytes_by_dop"]["1"] / ModelSettings().restore_bytes_per_s
                assert service["restore_s_by_dop"]["1"] not in (0.0, assumed_s), "the core knows what was measured"
                assert [device["resident"][0]["dop"] for device in devices] == [1]
                assert 0 < devices[0]["used_bytes"] <= 64 * 2**20
        finally:
            app.stop()
            await asyncio.wait_for(serving, ANSWER_S)
