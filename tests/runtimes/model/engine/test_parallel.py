"""Every degree of parallelism computes what plain transformers computes, in real processes over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.model

from manager.function import ModelAction
from runtimes.model.runtime import ModelRuntime
from tests.runtimes.model.asking import execution, function
from tests.runtimes.model.checkpoints import FAMILIES, IDS, plain_logprobs, plain_score, write
from tests.runtimes.model.conftest import Write


async def ask(runtime: ModelRuntime, asked: object, chunk: tuple[int, int]) -> dict[str, object]:
    value = (await runtime.execute(execution(asked, {"token_ids": IDS}, chunk))).value  # type: ignore[arg-type]
    assert isinstance(value, dict)
    return value


@pytest.mark.promise("A restored model computes what transformers does, at every degree of parallelism.")
@pytest.mark.parametrize("family", FAMILIES)
async def test_every_dop_agrees_with_transformers(family: str, checkpoint: Write, runtime: ModelRuntime) -> None:
    teacher = function(checkpoint(family, "lm"), ModelAction.LOGPROBS, (1, 2, 4, 8))
    reward = function(checkpoint(family, "score"), ModelAction.SCORE, (1, 2, 4, 8))
    await runtime.prepare(teacher)
    await runtime.prepare(reward)
    for dop in (2, 4, 8):
        chunk = (8 - dop, dop)
        rows = (await ask(runtime, teacher, chunk))["logprobs"]
        scores = (await ask(runtime, reward, chunk))["scores"]
        assert isinstance(rows, list)
        for ids, row in zip(IDS, rows, strict=True):
            assert row == pytest.approx(plain_logprobs(teacher.model.path, ids), abs=1e-5)  # type: ignore[union-attr]
        assert scores == pytest.approx([plain_score(reward.model.path, ids) for ids in IDS], abs=1e-5)  # type: ignore[union-attr]


async def test_biases_are_added_once_and_a_single_head_serves_every_rank(tmp_path: Path, runtime: ModelRuntime) -> None:
    path = write(tmp_path, "llama", "lm", attention_bias=True, mlp_bias=True, num_key_value_heads=1)
    rows = (await ask(runtime, function(path, ModelAction.LOGPROBS, (4,)), (0, 4)))["logprobs"]
    assert isinstance(rows, list)
    for ids, row in zip(IDS, rows, strict=True):
        assert row == pytest.approx(plain_logprobs(path, ids), abs=1e-5)


async def test_generation_and_embedding_do_not_depend_on_the_dop(checkpoint: Write, runtime: ModelRuntime) -> None:
    judge = function(checkpoint("llama", "lm"), ModelAction.GENERATE, (1, 4), max_new_tokens=6)
    embed = function(checkpoint("llama", "lm"), ModelAction.EMBED, (1, 4))
    alone, together = [await ask(runtime, judge, (0, dop)) for dop in (1, 4)]
    assert alone["token_ids"] == together["token_ids"]
    one, four = [(await ask(runtime, embed, (0, dop)))["embeddings"] for dop in (1, 4)]
    assert isinstance(one, list)
    assert isinstance(four, list)
    for left, right in zip(one, four, strict=True):
        assert left == pytest.approx(right, abs=1e-5)
