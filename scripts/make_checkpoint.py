#!/usr/bin/env python3
"""Make tiny real checkpoints: a reward model that knows Python source from scrambled source, and a teacher.

Both are trained for seconds on the standard library's own sources, so that their rankings mean something:
``reward`` is a Qwen3 sequence classifier trained on pairs (source, scrambled source), ``teacher`` a Llama causal
language model with a chat template. Each directory is an ordinary Hugging Face checkpoint, tokenizer included.

    python scripts/make_checkpoint.py models            # models/reward and models/teacher
    python scripts/make_checkpoint.py models --only reward --steps 400
"""

from __future__ import annotations

import argparse
import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as functional
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

VOCABULARY = 1024
WINDOW = 32
BATCH = 16

#: Divisible by 8 wherever a degree of parallelism cuts.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant: {% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", choices=("reward", "teacher"))
    parser.add_argument("--steps", type=int, default=150, help="training steps of each model")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # so small a model only loses by sharing its work out
    corpus = Corpus(standard_library())
    makers = {"reward": train_reward, "teacher": train_teacher}
    for name in [options.only] if options.only else makers:
        torch.manual_seed(options.seed)
        model, story = makers[name](corpus, random.Random(options.seed), options.steps)
        target = options.directory / name
        model.save_pretrained(target)
        corpus.tokenizer.save_pretrained(target)
        print(f"{target}: {story}")


def standard_library(limit: int = 48) -> list[str]:
    """Sources of the standard library, the same ones on every run of one Python."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(root.glob("*.py")) if 4_000 < file.stat().st_size < 60_000]
    return [file.read_text(encoding="utf-8", errors="replace") for file in files[:limit]]


class Corpus:
    """Tokenised sources, from which windows are drawn."""

    def __init__(self, sources: list[str]) -> None:
        self.tokenizer = train_tokenizer(sources)
        self._ids = [self.tokenizer(source, verbose=False)["input_ids"] for source in sources]

    def windows(self, draw: random.Random) -> torch.Tensor:
        """[BATCH, WINDOW] token ids."""
        rows = []
        for _ in range(BATCH):
            source = draw.choice(self._ids)
            start = draw.randrange(len(source) - WINDOW)
            rows.append(source[start : start + WINDOW])
        return torch.tensor(rows)

    def scramble(self, row: torch.Tensor, draw: random.Random) -> torch.Tensor:
        """The same characters in another order, cut to as many tokens."""
        text = list(self.tokenizer.decode(row))
        draw.shuffle(text)
        ids = self.tokenizer("".join(text))["input_ids"]
        return torch.tensor((ids * WINDOW)[:WINDOW])


def train_tokenizer(sources: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCABULARY` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(sources, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )


def train_reward(corpus: Corpus, draw: random.Random, steps: int) -> tuple[Any, str]:
    """Pairwise: a window of source must score above the same window with its characters scrambled."""
    model = Qwen3ForSequenceClassification(Qwen3Config(**SHAPE, num_labels=1))
    right = 0.5
    for loss_of in _steps(model, steps):
        real = corpus.windows(draw)
        scrambled = torch.stack([corpus.scramble(row, draw) for row in real])
        good, bad = model(input_ids=torch.cat([real, scrambled])).logits[:, 0].chunk(2)
        right = 0.95 * right + 0.05 * (good > bad).float().mean().item()
        loss_of(-functional.logsigmoid(good - bad).mean())
    return model.eval(), f"source scores above scrambled source in {right:.0%} of the last training pairs"


def train_teacher(corpus: Corpus, draw: random.Random, steps: int) -> tuple[Any, str]:
    """Plain next-token prediction."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    smooth = 0.0
    for loss_of in _steps(model, steps):
        rows = corpus.windows(draw)
        loss = model(input_ids=rows, labels=rows).loss
        smooth = 0.95 * smooth + 0.05 * loss.item() if smooth else loss.item()
        loss_of(loss)
    return model.eval(), f"{smooth:.2f} nats a token at the end of training"


def _steps(model: Any, steps: int) -> Iterator[Any]:
    """So many optimisation steps: each yields a function that takes the loss."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)

    def descend(loss: torch.Tensor) -> None:
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

    model.train()
    for _ in range(steps):
        yield descend


if __name__ == "__main__":
    main()
