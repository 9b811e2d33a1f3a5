"""Tiny random checkpoints of every supported family, written by transformers itself."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

#: Divides by 8 wherever a DoP cuts; fewer key-value heads than 8, so that some ranks share one.
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
AUTO: dict[str, Any] = {
    "lm": AutoModelForCausalLM,
    "score": AutoModelForSequenceClassification,
    "steps": AutoModelForTokenClassification,
}

#: Sequences of several lengths, none with an end token in it.
IDS = [[7, 3, 99, 12], [5, 5, 201, 34, 77, 140, 8, 9, 250], [255], [17, 90, 91, 92, 93, 4]]


def write(directory: Path, family: str, head: str, seed: int = 0, **shape: object) -> Path:
    """A random model with weights large enough for differences to show."""
    target = directory / f"{family}-{head}-{seed}"
    config: Any = AutoConfig.for_model(family, **{**SHAPE, **shape}, num_labels=1)
    torch.manual_seed(seed)
    model: Any = AUTO[head].from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(target)
    return target


@lru_cache(maxsize=32)
def plain(path: Path, head: str) -> Any:
    """The same checkpoint by plain transformers."""
    return AUTO[head].from_pretrained(path).eval()


def plain_table(path: Path, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of the next token after each one: [position, vocabulary]."""
    with torch.no_grad():
        return torch.as_tensor(plain(path, "lm")(torch.tensor([ids])).logits[0].log_softmax(-1))


def plain_logprobs(path: Path, ids: list[int]) -> list[float]:
    table = plain_table(path, ids)
    return [float(table[position, token]) for position, token in enumerate(ids[1:])]


def plain_score(path: Path, ids: list[int]) -> float:
    with torch.no_grad():
        return float(plain(path, "score")(torch.tensor([ids])).logits[0, 0])
