"""Exactness for the model bench: every family against plain transformers, every DoP against one, in float32."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.model.architectures import plain_numbers
from bench.model.checkpoints import FAMILIES, TINY, write_checkpoint
from manager.action import Chunk, UnitSet
from manager.function import FunctionSpec, ModelAction, ModelSpec
from runtimes.model.checkpoint import Head
from runtimes.model.engine import ModelJob
from runtimes.model.processes import ForkServer
from runtimes.model.request import ModelSettings, parse_input
from runtimes.model.torch_backend import TorchBackend

DOPS = (1, 2, 4, 8)
IDS = [[7, 3, 99, 12], [5, 5, 201, 34, 77, 140, 8, 9, 250], [255, 1], [17, 90, 91, 92, 93, 4]]


@dataclass(frozen=True, slots=True)
class Differences:
    """Largest absolute differences of log-probabilities and scores."""

    family: float  #: of DoP 1 from plain transformers
    dop: float  #: of DoP 2, 4 and 8 from DoP 1


def differences(directory: Path) -> Differences:
    """Over every family, in processes of their own, on eight ``cpu`` devices."""
    return asyncio.run(_differences(directory))


async def _differences(directory: Path) -> Differences:
    settings = ModelSettings(device="cpu", devices=8, device_bytes=64 * 2**20, state_dir=directory / "state")
    fork_server = ForkServer()
    engine = TorchBackend(settings, fork_server, lambda: None)
    family, dop = 0.0, 0.0
    try:
        for name, head in itertools.product(FAMILIES, (Head.LM, Head.SCORE)):
            path = write_checkpoint(directory, name, head, TINY, dtype="float32", device="cpu", seed=3)
            alone, *others = [await _ask(engine, _function(path, head), size) for size in DOPS]
            family = max(family, _largest(alone, plain(path, head)))
            dop = max(dop, *(_largest(alone, other) for other in others))
    finally:
        await engine.close()
        fork_server.close()
    return Differences(family, dop)


def _largest(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def plain(path: Path, head: Head) -> list[float]:
    """Return what transformers computes: log-probabilities of all tokens but the first, or scores."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto: Any = AutoModelForCausalLM if head is Head.LM else AutoModelForSequenceClassification
    model = auto.from_pretrained(path).eval()
    return [value for ids in IDS for value in plain_numbers(model, head, ids)]


async def _ask(engine: TorchBackend, asked: FunctionSpec, dop: int) -> list[float]:
    ask = await engine.admit(asked, parse_input(asked, {"token_ids": IDS}, len(IDS)))
    assert asked.model is not None
    job = ModelJob(service=asked.model.service, chunk=Chunk(0, dop), requests=(ask,))
    value: Any = (await engine.execute(job, lambda: None, lambda *_: None)).values[0]
    return list(value["scores"]) if "scores" in value else [number for row in value["logprobs"] for number in row]


def _function(path: Path, head: Head) -> FunctionSpec:
    action = ModelAction.LOGPROBS if head is Head.LM else ModelAction.SCORE
    return FunctionSpec(
        name=path.name,
        runtime="model",
        cost={"gpu": UnitSet.of(DOPS)},
        key="gpu",
        model=ModelSpec(path=path, action=action),
    )
