"""Teachers and reward models: four dialects, one set of numbers, and those are transformers' own."""

from __future__ import annotations

import asyncio
import base64
import math
import random
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio

from gateway.app import gateway
from gateway.config.load import GatewayConfig
from gateway.config.schema import DevicesConfig, FacadesSection, ModelsFacade, NodeConfig, SandboxConfig, ServerConfig
from manager.action import UnitSet
from manager.function import FunctionSpec, ModelAction, ModelSpec
from runtimes.model.request import ModelSettings
from runtimes.sandbox.provider import ProviderSettings
from tests.gateway.facades.test_facade import COUNT, SECRETS, SEED, almost

pytest.importorskip("torch")
from tests.runtimes.model import checkpoints  # it imports torch

# One gateway serves all of them: its models are the costly part, and no test changes what another asks.
pytestmark = [
    pytest.mark.model,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("models-facade"),
]
ANSWER_S = 240.0
TOP = 8
IDS = checkpoints.IDS[1]
TOKEN = "s3cret"


@dataclass(frozen=True, slots=True)
class ServedModels:
    """A gateway with a teacher, a judge, an embedder and a writer, and the teacher's checkpoint."""

    http: httpx.AsyncClient
    teacher: Path
    judge: Path
    port: int


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServedModels]:
    directory = tmp_path_factory.mktemp("models")
    lm, score = checkpoints.write(directory, "llama", "lm"), checkpoints.write(directory, "llama", "score")
    paths = {"teacher": (lm, ModelAction.LOGPROBS), "judge": (score, ModelAction.SCORE)}
    paths |= {"embedder": (lm, ModelAction.EMBED), "writer": (lm, ModelAction.GENERATE)}
    config = GatewayConfig(
        functions={name: model_function(name, *given) for name, given in paths.items()},
        server=ServerConfig(
            state_dir=directory / "state",
            port=0,
            grpc_port=0,
            token=TOKEN,
            facades=FacadesSection(models=ModelsFacade(port=0)),
        ),
        sandbox=SandboxConfig(provider=ProviderSettings(kind="process")),
        node=NodeConfig(devices=DevicesConfig(kind="cpu", count=1, memory_bytes=64 * 2**20)),
        models=ModelSettings(host_bytes=64 * 2**20),
    )
    async with gateway(config) as app:
        serving = asyncio.create_task(app.serve())
        address = f"http://127.0.0.1:{app.http_port}"
        headers = {"Authorization": f"Bearer {TOKEN}"}
        try:
            async with httpx.AsyncClient(base_url=address, headers=headers, timeout=ANSWER_S) as client:
                yield ServedModels(client, lm, score, app.facades.ports["models"])
        finally:
            app.stop()
            await asyncio.wait_for(serving, ANSWER_S)


def model_function(name: str, path: Path, action: ModelAction) -> FunctionSpec:
    spec = ModelSpec(path=path, action=action, max_tokens=64, max_new_tokens=16)
    return FunctionSpec(name=name, runtime="model", cost={"gpu": UnitSet.fixed(1)}, model=spec, timeout_s=60.0)


async def ask(served: ServedModels, path: str, body: Mapping[str, object], status: int = 200) -> Any:
    answer = await served.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def recorded(served: ServedModels) -> int:
    """How many invocations the gateway has recorded so far."""
    return len((await served.http.get("/v1/invocations", params={"limit": 1000})).json()["invocations"])


async def test_four_dialects_tell_transformers_numbers(served: ServedModels) -> None:
    table = checkpoints.plain_table(served.teacher, IDS)
    actual = [float(table[place, token]) for place, token in enumerate(IDS[1:])]
    asked = {"prompt": [IDS], "max_tokens": 1, "temperature": 1.0}
    trl = await ask(served, "/openai/v1/completions", {"model": "teacher", **asked, "prompt_logprobs": TOP})
    lm_eval = await ask(served, "/models/teacher/v1/completions", {**asked, "echo": True, "logprobs": 1})
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    prime = await ask(served, "/models/teacher/inference/v1/generate", {"token_ids": IDS, "sampling_params": sampling})
    slime_sampling = {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False}
    slime = await ask(
        served,
        "/models/teacher/generate",
        {"input_ids": IDS, "sampling_params": slime_sampling, "return_logprob": True, "logprob_start_len": 0},
    )
    rows = trl["choices"][0]["prompt_logprobs"]
    assert rows[0] is None and prime["prompt_logprobs"][0] is None
    by_dialect = {
        "trl": [row[str(token)]["logprob"] for row, token in zip(rows[1:], IDS[1:], strict=True)],
        "prime-rl": [next(iter(row.values()))["logprob"] for row in prime["prompt_logprobs"][1:]],
        "lm-eval": lm_eval["choices"][0]["logprobs"]["token_logprobs"][1:],
        "slime": [value for value, _, _ in slime["meta_info"]["input_token_logprobs"][1:]],
    }
    for told in by_dialect.values():
        assert told == pytest.approx(actual, abs=1e-4)
    for place, (row, token) in enumerate(zip(rows[1:], IDS[1:], strict=True)):
        best = table[place].topk(TOP).indices.tolist()
        assert next(iter(row)) == str(token), "the actual token comes first"
        assert set(row) == {str(each) for each in (*best, token)}
        ranks = {int(each): about["rank"] for each, about in row.items()}
        assert sorted(ranks, key=ranks.__getitem__)[:TOP] == best
    assert [token for _, token, _ in slime["meta_info"]["input_token_logprobs"]] == IDS
    assert slime["meta_info"]["input_token_logprobs"][0][0] is None
    assert trl["usage"] == {"prompt_tokens": len(IDS), "completion_tokens": 0, "total_tokens": len(IDS)}


async def test_a_batch_is_answered_in_its_order_by_one_action(served: ServedModels) -> None:
    before = await recorded(served)
    body = {"model": "teacher", "prompt": checkpoints.IDS, "max_tokens": 1, "prompt_logprobs": 1}
    answer = await ask(served, "/openai/v1/completions", body)
    assert [each["index"] for each in answer["choices"]] == [0, 1, 2, 3]
    assert [len(each["prompt_logprobs"]) for each in answer["choices"]] == [len(ids) for ids in checkpoints.IDS]
    both = {"input_ids": checkpoints.IDS[:2], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    told = await ask(served, "/models/teacher/generate", {**both, "sampling_params": {"max_new_tokens": 0}})
    assert [len(each["meta_info"]["input_top_logprobs"]) for each in told] == [4, 9]
    assert await recorded(served) - before == 2


async def test_a_port_of_its_own_serves_the_routes_at_the_root(served: ServedModels) -> None:
    await ask(served, "/models/judge/classify", {"input_ids": IDS})  # its models are prepared
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}", timeout=ANSWER_S) as client:
        headers = {"X-API-Key": TOKEN}
        assert (await client.get("/health", headers=headers)).status_code == 200
        models = (await client.get("/v1/models", headers=headers)).json()
        assert {each["id"] for each in models["data"]} == {"teacher", "judge", "embedder", "writer"}
        fixed = (await client.get(f"/models/~{TOKEN}/judge/v1/models")).json()
        assert [(each["id"], each["max_model_len"]) for each in fixed["data"]] == [("judge", 64)]
        info = (await client.get("/models/writer/get_model_info", headers=headers)).json()
        assert info == {"model_path": "writer", "is_generation": True}


async def test_a_score_is_the_heads_own_value_or_its_activation(served: ServedModels) -> None:
    raw = checkpoints.plain_score(served.judge, IDS)
    body = {"model": "judge", "input": [IDS]}
    bare = await ask(served, "/openai/classify", {**body, "use_activation": False})
    active = await ask(served, "/openai/classify", body)
    assert bare["data"][0]["probs"] == [pytest.approx(raw, abs=1e-4)]
    assert active["data"][0]["probs"] == [pytest.approx(1 / (1 + math.exp(-raw)), abs=1e-4)]
    assert (bare["data"][0]["num_classes"], bare["usage"]["prompt_tokens"]) == (1, len(IDS))
    sglang = await ask(served, "/models/judge/classify", {"input_ids": IDS})
    assert sglang["embedding"] == [pytest.approx(raw, abs=1e-4)]


async def test_embeddings_come_as_numbers_and_as_bytes(served: ServedModels) -> None:
    body = {"model": "embedder", "input": [IDS, [5, 6]]}
    floats = (await ask(served, "/openai/v1/embeddings", body))["data"]
    packed = (await ask(served, "/openai/v1/embeddings", {**body, "encoding_format": "base64"}))["data"]
    for one, other in zip(floats, packed, strict=True):
        data = base64.b64decode(other["embedding"])
        assert list(struct.unpack(f"<{len(data) // 4}f", data)) == pytest.approx(one["embedding"], abs=1e-6)


#: Path, body, status, and what the message names.
REFUSED: tuple[tuple[str, dict[str, object], int, str], ...] = (
    ("/openai/v1/completions", {"model": "nowhere", "prompt": [1], "prompt_logprobs": 1}, 404, "nowhere"),
    ("/openai/v1/completions", {"prompt": [1], "prompt_logprobs": 1}, 400, "model"),
    ("/openai/v1/completions", {"model": "judge", "prompt": [1], "prompt_logprobs": 1}, 400, "score"),
    ("/openai/v1/completions", {"model": "teacher", "prompt": [1], "logit_bias": {}}, 400, "logit_bias"),
    ("/models/teacher/v1/completions", {"prompt": [1], "prompt_logprobs": 1, "stop": "x"}, 400, "stop"),
    ("/models/teacher/v1/completions", {"prompt": [1], "prompt_logprobs": 1, "n": 2}, 400, "n"),
    ("/models/teacher/v1/completions", {"prompt": [1], "prompt_logprobs": 1, "max_tokens": 2}, 400, "max_tokens"),
    ("/models/teacher/v1/completions", {"prompt": [1], "prompt_logprobs": 1, "temperature": 0.9}, 400, "temperature"),
    ("/models/teacher/v1/completions", {"prompt": [1], "prompt_logprobs": 129}, 400, "prompt_logprobs"),
    ("/models/teacher/v1/completions", {"prompt": [], "prompt_logprobs": 1}, 400, "prompt"),
    ("/models/teacher/v1/completions", {"prompt": [3] * 65, "prompt_logprobs": 1}, 400, "64"),
    ("/models/teacher/v1/completions", {"prompt": [999], "prompt_logprobs": 1}, 400, "vocabulary"),
    ("/models/teacher/generate", {"input_ids": [1]}, 400, "return_logprob"),
    ("/models/teacher/generate", {"return_logprob": True}, 400, "input_ids"),
    ("/models/embedder/v1/embeddings", {"input": [1], "dimensions": 3}, 400, "dimensions"),
    ("/models/embedder/v1/embeddings", {"input": [1], "encoding_format": "hex"}, 400, "hex"),
    ("/models/writer/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0]"),
    ("/openai/v1/responses", {}, 404, "/v1/responses"),
    ("/models/embedder/pooling", {"input": [1]}, 404, "/pooling"),
)


async def test_what_is_not_served_is_refused_by_name(served: ServedModels) -> None:
    for path, body, status, named in REFUSED:
        error = (await ask(served, path, body, status))["error"]
        assert named in error["message"], (path, body)
        assert error["code"] == status
    async with httpx.AsyncClient(base_url=served.http.base_url) as stranger:
        answer = await stranger.get("/openai/v1/models")
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "AuthenticationError")


JUDGED = {"max_tokens": 1, "prompt_logprobs": 1}
FUZZED: Mapping[str, Mapping[str, object]] = {
    "/openai/v1/completions": {"model": "teacher", "prompt": [IDS], "max_tokens": 1, "prompt_logprobs": 1},
    "/openai/v1/embeddings": {"model": "embedder", "input": [IDS]},
    "/models/judge/classify": {"input": [IDS]},
    "/models/teacher/inference/v1/generate": {"token_ids": IDS, "sampling_params": JUDGED},
    "/models/teacher/generate": {
        "input_ids": IDS, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0,
    },
}  # fmt: skip


@pytest.mark.parametrize("path", FUZZED)
@pytest.mark.slow
async def test_odd_bodies_end_in_the_dialects_error_and_leave_nothing(served: ServedModels, path: str) -> None:
    chance, body = random.Random(SEED), FUZZED[path]
    await ask(served, path, body)
    wholes = (b"", b"{", b"[" * 100_000, b'{"a":' * 300 + b"1" + b"}" * 300, b"\xff\xfe", b"null", b"1")
    odd = [orjson.dumps(almost(body, chance)) for _ in range(COUNT)]
    for data in (*wholes, *odd, *(chance.randbytes(chance.randrange(1, 300)) for _ in range(COUNT))):
        answer = await served.http.post(path, content=data)
        assert answer.status_code != 500, (data[:200], answer.text)
        assert answer.headers["content-type"].startswith("application/json"), data[:200]
        told = answer.json()
        assert told, data[:200]
        if not answer.is_success:  # a success holds what the model said
            assert not [word for word in SECRETS if word in answer.text], (data[:200], answer.text)
    for state in ("queued", "running"):
        living = await served.http.get("/v1/invocations", params={"state": state})
        assert living.json()["invocations"] == []
