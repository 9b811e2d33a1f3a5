"""Teachers' log-probabilities: every dialect tells the numbers that transformers has for the same checkpoint."""

from __future__ import annotations

import asyncio
import math
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.facades.client_environments import ROOT
from bench.facades.serving import SERVER, ServedDoors, served
from bench.report import BenchReport

#: Sequences, in batches, of so many tokens each; the vocabulary of `scripts.make_checkpoint`.
SEQUENCES, BATCH, LENGTHS, VOCABULARY = 50, 10, (2, 64), 1024
#: How many of the likeliest tokens are asked for besides the actual one.
TOPS = (1, 8)
MAKE_S, STEPS = 300, 40
CONFIG = (
    SERVER
    + """\
  facades: {{models: {{}}}}
sandbox: {{provider: process}}
node: {{devices: {{kind: cpu, count: 1, memory: 64Mi}}}}
models: {{host_memory: 64Mi}}
functions:
  teacher: {{runtime: model, model: {{path: {directory}/teacher, action: logprobs, max_tokens: 64}}, timeout: 1m}}
"""
)
Rows = Sequence[Sequence[int]]
#: What a dialect tells of sequences: for each, the log-probability of each token after its first.
Told = list[list[float]]


async def teachers(report: BenchReport, directory: Path) -> None:
    """Ask in every dialect, and compare each number with transformers' own."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        report.note("log-probabilities were not compared: this environment has no torch, or no transformers")
        return
    await asyncio.to_thread(make_checkpoint, directory)
    draw = random.Random(0)
    rows = [[draw.randrange(3, VOCABULARY) for _ in range(draw.randint(*LENGTHS))] for _ in range(SEQUENCES)]
    actual = await asyncio.to_thread(reference, directory / "teacher", rows)
    async with served(directory, CONFIG) as doors:
        asked: dict[str, Callable[[Rows], Any]] = {"native": partial(native, doors), "sglang": partial(sglang, doors)}
        asked |= {f"openai_prompt_logprobs_{top}": partial(prompt_logprobs, doors, top) for top in TOPS}
        asked |= {"openai_echo": partial(echo, doors), "vllm_generate": partial(vllm, doors)}
        worst: dict[str, float] = {}
        for name, dialect in asked.items():
            told: Told = []
            for first in range(0, SEQUENCES, BATCH):
                told += await dialect(rows[first : first + BATCH])
            worst[name] = largest_difference(told, actual)
    report.figure("logprob_max_abs_diff_by_dialect", {name: float(f"{value:.3g}") for name, value in worst.items()})
    report.figure("logprobs_compared", sum(len(row) - 1 for row in rows) * len(asked))
    report.check("logprob_max_abs_diff", max(worst.values()), limit=1e-4, better="lower")


def make_checkpoint(directory: Path) -> None:
    """Write a small teacher that knows something of Python."""
    made = [sys.executable, "-m", "scripts.make_checkpoint", str(directory), "--only", "teacher", "--steps", str(STEPS)]
    subprocess.run(made, check=True, cwd=ROOT, capture_output=True, timeout=MAKE_S)


def reference(checkpoint: Path, rows: Rows) -> Told:
    """Return the log-softmax of transformers' own model, one sequence at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    model = loaded.eval()
    told: Told = []
    with torch.no_grad():
        for row in rows:
            table = model(torch.tensor([row])).logits[0].float().log_softmax(-1)
            told.append([float(table[place, token]) for place, token in enumerate(row[1:])])
    return told


def largest_difference(told: Told, actual: Told) -> float:
    """Return the largest difference of two numbers; infinite where a number is missing or is none."""
    if [len(row) for row in told] != [len(row) for row in actual]:
        return math.inf
    pairs = [pair for row, right in zip(told, actual, strict=True) for pair in zip(row, right, strict=True)]
    return max(abs(one - other) if math.isfinite(one) else math.inf for one, other in pairs)


async def native(doors: ServedDoors, rows: Rows) -> Told:
    """The gateway's own route."""
    answer = await doors.post("/v1/functions/teacher/invocations", {"token_ids": rows})
    told: Told = answer["result"]["logprobs"]
    return told


async def prompt_logprobs(doors: ServedDoors, top: int, rows: Rows) -> Told:
    """OpenAI's completions with vLLM's ``prompt_logprobs``, as TRL asks: the first key is the actual token."""
    body = {"model": "teacher", "prompt": rows, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top}
    choices = (await doors.post("/openai/v1/completions", body))["choices"]
    return [first_keys(each["prompt_logprobs"], row) for each, row in zip(choices, rows, strict=True)]


async def echo(doors: ServedDoors, rows: Rows) -> Told:
    """OpenAI's completions with ``echo`` and ``logprobs``, as lm-eval asks."""
    body = {"prompt": rows, "max_tokens": 0, "temperature": 0, "echo": True, "logprobs": 1}
    choices = (await doors.post("/models/teacher/v1/completions", body))["choices"]
    return [each["logprobs"]["token_logprobs"][1:] for each in choices]


async def vllm(doors: ServedDoors, rows: Rows) -> Told:
    """vLLM's own route, as prime-rl asks: one sequence a request."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    told: Told = []
    for row in rows:
        body = {"token_ids": row, "sampling_params": sampling}
        answer = await doors.post("/models/teacher/inference/v1/generate", body)
        told.append(first_keys(answer["prompt_logprobs"], row))
    return told


async def sglang(doors: ServedDoors, rows: Rows) -> Told:
    """SGLang's route, as slime asks: each number comes with its token."""
    sampling = {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False}
    body = {"input_ids": rows, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    told: Told = []
    for each, row in zip(await doors.post("/models/teacher/generate", body), rows, strict=True):
        listed = each["meta_info"]["input_token_logprobs"]
        right = [token for _, token, _ in listed] == list(row)
        told.append([value if right else math.nan for value, _, _ in listed[1:]])
    return told


def first_keys(listed: Sequence[Mapping[str, Mapping[str, float]] | None], row: Sequence[int]) -> list[float]:
    """Return the numbers of the first key of each position; not a number where that is another token."""
    told = []
    for about, token in zip(listed[1:], row[1:], strict=True):
        first = next(iter(about)) if about else ""
        told.append(about[first]["logprob"] if about and first == str(token) else math.nan)
    return told
