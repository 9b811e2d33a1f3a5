"""A tiny language model, pre-trained on the grammar until some of its programs are right."""

from __future__ import annotations

import random

import torch
from programs import TASKS, any_program, prompt_of, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LENGTH, BATCH = 14, 64
#: Share of programs that do what their prompt asks, of the text that the student learns from.
RIGHT = 0.3
#: It is trained until so many of its programs are right, and at most so many steps.
ENOUGH, MOST_STEPS = 0.2, 400


def student(seed: int) -> tuple[LlamaForCausalLM, float]:
    """Return a student that writes the grammar, and the share of its programs that are right: 10 to 30 %."""
    model = _model(seed)
    share = _train(model, random.Random(seed), RIGHT, tuple(TASKS), enough=ENOUGH)
    return model, share


def teacher(seed: int, tasks: tuple[str, ...]) -> LlamaForCausalLM:
    """Return a teacher that knows the tasks of its domain."""
    model = _model(seed)
    _train(model, random.Random(seed), 1.0, tasks, enough=1.1, most_steps=150)
    return model


def right_share(model: LlamaForCausalLM, tasks: tuple[str, ...], each: int = 32) -> float:
    """Return the share of drawn programs that are the ones asked for, word by word."""
    model.eval()
    words = tokenizer()
    prompts = [prompt_of(task) for task in tasks for _ in range(each)]
    given = words(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.no_grad():
        drawn = model.generate(**given, do_sample=True, max_new_tokens=LENGTH, pad_token_id=words.pad_token_id)
    texts = words.batch_decode(drawn[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
    wanted = [TASKS[task] for task in tasks for _ in range(each)]
    return sum(text == right for text, right in zip(texts, wanted, strict=True)) / len(wanted)


def _model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    words = tokenizer()
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            pad_token_id=words.pad_token_id,
            bos_token_id=words.bos_token_id,
            eos_token_id=words.eos_token_id,
        )
    )


def _train(
    model: LlamaForCausalLM,
    draw: random.Random,
    right: float,
    tasks: tuple[str, ...],
    *,
    enough: float,
    most_steps: int = MOST_STEPS,
) -> float:
    words = tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    share = 0.0
    for step in range(1, most_steps + 1):
        chosen = [draw.choice(tasks) for _ in range(BATCH)]
        texts = [
            f"{prompt_of(task)} {TASKS[task] if draw.random() < right else any_program(draw)} {words.eos_token}"
            for task in chosen
        ]
        batch = _batch(words, texts)
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
        if step % 50 == 0 and step >= 150:
            share = right_share(model, tasks)
            model.train()
            if share >= enough:
                break
    model.eval()
    return share


def _batch(words: PreTrainedTokenizerFast, texts: list[str]) -> dict[str, torch.Tensor]:
    batch = words(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    # Of the prompt only what a program is: the tasks are drawn evenly.
    return {**batch, "labels": labels}
