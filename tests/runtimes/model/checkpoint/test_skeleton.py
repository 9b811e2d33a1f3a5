"""Models without weights: each has the dtype that it was asked for, whatever else is made at the time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.model

from runtimes.model.checkpoint import Head
from runtimes.model.weights import build_skeleton  # torch may be absent

SHAPE = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 24,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.slow
def test_models_that_are_made_at_once_keep_their_dtypes() -> None:
    """transformers sets the default dtype of all threads meanwhile."""

    def made(dtype: str) -> tuple[str, set[str]]:
        model = build_skeleton(SHAPE, Head.LM, dtype, Path("checkpoint"))
        return dtype, {str(value.dtype).removeprefix("torch.") for value in model.parameters()}

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(made, ["float32", "bfloat16", "float16"] * 12))
    assert [dtypes for _, dtypes in found] == [{dtype} for dtype, _ in found]
    assert torch.get_default_dtype() == torch.float32
