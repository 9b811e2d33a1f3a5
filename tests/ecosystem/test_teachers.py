"""TRL's teacher client and the OpenAI SDK, as they are on the registry, against models in shared slots."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
from gateway.app import gateway
from gateway.config.load import GatewayConfig
from gateway.config.schema import DevicesConfig, FacadesSection, ModelsFacade, NodeConfig, SandboxConfig, ServerConfig
from manager.function import ModelAction
from runtimes.model.request import ModelSettings
from runtimes.sandbox.provider import ProviderSettings
from tests.ecosystem.environments import ROOT, ClientEnvironment
from tests.gateway.facades.test_models import ANSWER_S, TOKEN, model_function
from tests.runtimes.model import checkpoints

pytestmark = [pytest.mark.network, pytest.mark.model, pytest.mark.slow]
TOP = 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trained teacher with a tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("trained")
    command = [sys.executable, "-m", "scripts.make_checkpoint", str(directory), "--only", "teacher", "--steps", "5"]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, timeout=120)
    return directory / "teacher"


async def test_two_teachers_answer_trl_and_a_writer_the_openai_sdk(
    trained: Path, tmp_path: Path, client: Callable[[str], ClientEnvironment]
) -> None:
    paths = {name: checkpoints.write(tmp_path, "llama", "lm", seed) for seed, name in enumerate(("one", "two"))}
    functions = {name: model_function(name, path, ModelAction.LOGPROBS) for name, path in paths.items()}
    functions["writer"] = model_function("writer", trained, ModelAction.GENERATE)
    functions["embedder"] = model_function("embedder", trained, ModelAction.EMBED)
    config = GatewayConfig(
        functions=functions,
        server=ServerConfig(
            state_dir=tmp_path / "state",
            port=0,
            grpc_port=0,
            token=TOKEN,
            facades=FacadesSection(models=ModelsFacade()),
        ),
        sandbox=SandboxConfig(provider=ProviderSettings(kind="process")),
        node=NodeConfig(devices=DevicesConfig(kind="cpu", count=1, memory_bytes=64 * 2**20)),
        models=ModelSettings(host_bytes=64 * 2**20),
    )
    async with gateway(config) as app:
        serving = asyncio.create_task(app.serve())
        url = f"http://127.0.0.1:{app.http_port}"
        told = await client("models").run("teacher_clients", url, TOKEN, json.dumps(checkpoints.IDS))
        app.stop()
        await asyncio.wait_for(serving, ANSWER_S)
    for name, path in paths.items():
        assert told[name]["model"] == name
        for index, ids in enumerate(checkpoints.IDS):
            table = checkpoints.plain_table(path, ids)
            actual = [number for (number,) in told[name]["actual_logprobs"][index]]
            assert actual == pytest.approx(checkpoints.plain_logprobs(path, ids), abs=1e-4)
            for place, likeliest in enumerate(told[name]["logprob_token_ids"][index]):
                assert likeliest == table[place].topk(TOP).indices.tolist()
    assert told["models"] == ["embedder", "one", "two", "writer"]
    assert told["chat"][0] == "assistant" and told["chat"][2] > 0
    assert (told["stream"], told["text"], told["embedding"], told["missing"]) == (True, 1, 2, 404)
