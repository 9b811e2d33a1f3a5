"""A tiny language model, pre-trained on the grammar until some of its programs are right."""

from __future__ import annotations

import random
from copy import deepcopy

import torch
from programs import TASKS, any_program, does, prompt_of, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LENGTH, BATCH, RATE = 14, 64, 3e-3
#: Share of programs that do what their prompt asks, of the text that the student learns from.
RIGHT = 0.3
#: The share of its programs that pass when the student is ready, and the shares between which it must lie.
ENOUGH, BAND = 0.2, (0.1, 0.3)
#: Its share is measured after so many steps each, on so many programs for each task; at most so many steps are made.
EVERY, EACH, MOST_STEPS = 10, 64, 400


def student(seed: int) -> tuple[LlamaForCausalLM, float]:
    """Return a student that writes the grammar, and the share of its programs that pass: 10 to 30 %.

    It is the first that has enough. Where the share goes past the band from one measurement to the next, it is the last
    one that lay within.
    """
    model, tasks = _model(seed), tuple(TASKS)
    draw, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters(), lr=RATE)
    kept, kept_share = None, 0.0
    for _ in range(MOST_STEPS // EVERY):
        _train(model, optimizer, draw, RIGHT, tasks, EVERY)
        share = right_share(model, tasks, EACH)
        if BAND[0] <= share <= BAND[1]:
            kept, kept_share = deepcopy(model.state_dict()), share
        if share >= ENOUGH:
            break
    if kept is None:
        raise RuntimeError(f"no measurement lay within {BAND}; the last was {share:.3f}")
    model.load_state_dict(kept)
    return model, kept_share


def teacher(seed: int, tasks: tuple[str, ...]) -> LlamaForCausalLM:
    """Return a teacher that knows the tasks of its domain."""
    model = _model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    _train(model, optimizer, random.Random(seed), 1.0, tasks, 150)
    return model


def right_share(model: LlamaForCausalLM, tasks: tuple[str, ...], each: int) -> float:
    """Return the share of drawn programs that pass the tests of their task."""
    model.eval()
    words = tokenizer()
    prompts = [prompt_of(task) for task in tasks for _ in range(each)]
    given = words(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.no_grad():
        drawn = model.generate(**given, do_sample=True, max_new_tokens=LENGTH, pad_token_id=words.pad_token_id)
    texts = words.batch_decode(drawn[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
    wanted = [task for task in tasks for _ in range(each)]
    return sum(does(text, task) for text, task in zip(texts, wanted, strict=True)) / len(wanted)


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
    optimizer: torch.optim.Optimizer,
    draw: random.Random,
    right: float,
    tasks: tuple[str, ...],
    steps: int,
) -> None:
    words = tokenizer()
    model.train()
    for _ in range(steps):
        chosen = [draw.choice(tasks) for _ in range(BATCH)]
        texts = [
            f"{prompt_of(task)} {TASKS[task] if draw.random() < right else any_program(draw)} {words.eos_token}"
            for task in chosen
        ]
        batch = _batch(words, texts)
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    model.eval()


def _batch(words: PreTrainedTokenizerFast, texts: list[str]) -> dict[str, torch.Tensor]:
    batch = words(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    # Of the prompt only what a program is: the tasks are drawn evenly.
    return {**batch, "labels": labels}
