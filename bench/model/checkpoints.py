"""Random checkpoints for the model bench: tiny ones of every family, and one of a real size."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

from runtimes.model.checkpoint import Head
from runtimes.model.weights import build_skeleton

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")

#: Divides by 8 wherever a DoP cuts, with fewer key-value heads than 8.
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}

#: Shapes of the timed model, by size. ``600m`` and ``8b`` are those of Qwen3-0.6B and Qwen3-8B.
SHAPES: dict[str, dict[str, Any]] = {
    "toy": TINY,
    "tiny": {
        **TINY,
        "vocab_size": 8192,
        "hidden_size": 384,
        "intermediate_size": 1152,
        "num_hidden_layers": 8,
        "head_dim": 48,
    },
    "small": {
        **TINY,
        "vocab_size": 16384,
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 12,
        "head_dim": 96,
    },
    "600m": {
        **TINY,
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
    },
    "8b": {
        **TINY,
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
    },
}

_NAMES = {"float32": "F32", "bfloat16": "BF16"}


def write_checkpoint(
    directory: Path, family: str, head: Head, shape: dict[str, Any], *, dtype: str, device: str, seed: int
) -> Path:
    """A random checkpoint in safetensors, written without ever holding the whole model."""
    target = directory / f"{family}-{head}-{seed}"
    target.mkdir()
    config = {**shape, "model_type": family, "dtype": dtype, "num_labels": 1, "tie_word_embeddings": False}
    skeleton = build_skeleton(config, head, dtype, target)
    (target / "config.json").write_text(json.dumps({**config, "architectures": [type(skeleton).__name__]}))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, parameter in skeleton.named_parameters():
        size = parameter.numel() * parameter.element_size()
        entry = {"dtype": _NAMES[dtype], "shape": list(parameter.shape), "data_offsets": [end, end + size]}
        header[name], end = entry, end + size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    draw = torch.Generator(device).manual_seed(seed)
    with (target / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        for name, parameter in skeleton.named_parameters():
            values = torch.randn(parameter.shape, device=device, generator=draw) * 0.02
            values = values + 1 if name.endswith("norm.weight") else values
            stream.write(values.to(getattr(torch, dtype)).cpu().flatten().view(torch.uint8).numpy().data)
    return target
