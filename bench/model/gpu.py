"""Sections of `scripts/gpu-check` that are no tests: one JSON object on the last line, and a status.

python -m bench.model.gpu correct cuda
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed
import transformers

from bench.model.architectures import IDS, classes, item_of, plain_numbers, write
from bench.model.checkpoints import SHAPES, write_checkpoint
from bench.model.one_device import OneDevice
from manager.function import ModelAction
from runtimes.model.checkpoint import Head
from runtimes.model.compute import is_out_of_memory
from runtimes.model.engine import nvml
from runtimes.model.processes import Generated, WorkItem
from runtimes.model.request import Sampling
from runtimes.model.weights import make_backend

GIB = 2**30
#: Largest difference from transformers on the same device by dtype: its kernels differ with the shape of a batch.
LIMITS = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.03}
FAMILIES = ("llama", "qwen3", "gemma2", "qwen3_moe", "bert")
_dist: Any = torch.distributed


def machine(device: str, directory: Path) -> tuple[bool, Mapping[str, object]]:
    """What the machine is: the card, the driver's figures, versions, and room on disks and in memory."""
    smi = shutil.which("nvidia-smi")
    query = ["--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,mig.mode.current", "--format=csv,noheader"]
    told = subprocess.run([smi, *query], capture_output=True, text=True, check=False).stdout.strip() if smi else ""
    gpus = nvml().gpus()
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "free_gib": {place: round(shutil.disk_usage(place).free / GIB, 1) for place in ("/dev/shm", "/tmp", ".")},
        "nvidia_smi": told,
        "nvml": [{"name": gpu.name, "memory_gib": gpu.memory_bytes / GIB, "divided": gpu.divided} for gpu in gpus],
        "nvml_used_bytes": [nvml().used_bytes(gpu.uuid) for gpu in gpus],
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    return device == "cpu" or bool(gpus), found


def correct(device: str, directory: Path) -> tuple[bool, Mapping[str, object]]:
    """Every action in every dtype against transformers on the same device, one sequence at a time."""
    found: dict[str, object] = {}
    right = True
    for dtype, limit in LIMITS.items():
        for kind in FAMILIES:
            for head in Head:
                if kind not in classes(head) or (kind == "bert" and head is Head.LM):
                    continue
                name = f"{kind}/{head}/{dtype}"
                try:
                    found[name] = _difference(directory / dtype, device, kind, head, dtype)
                except Exception as error:  # noqa: BLE001  # told, and the next
                    found[name] = f"{type(error).__name__}: {error}"[:300]
                right = right and isinstance(found[name], float) and float(str(found[name])) <= limit
                print(name, found[name], flush=True)
    return right, {"differences": found, "limits": LIMITS}


def _difference(directory: Path, device: str, kind: str, head: Head, dtype: str) -> float:
    directory.mkdir(exist_ok=True)
    name = classes(head)[kind]
    path = write(directory, kind, name)
    model: Any = getattr(transformers, name).from_pretrained(path, dtype=getattr(torch, dtype)).eval().to(device)
    one = OneDevice(make_backend(_torch_name(device), 4096, 1))
    try:
        place = one.place(path, head, dtype)
        results: list[Any] = one.run(place, [item_of(head, ids) for ids in IDS], 1000)
        apart = 0.0
        for ids, result in zip(IDS, results, strict=True):
            expected = torch.tensor(plain_numbers(model, head, ids))
            apart = max(apart, float((torch.tensor(result).flatten() - expected).abs().max()))
        if head is Head.LM:
            sampling = Sampling(max_new_tokens=4)
            items = [WorkItem(ids=tuple(ids), action=ModelAction.GENERATE, sampling=sampling) for ids in IDS]
            together = one.run(place, items, 1000)
            alone = [one.run(place, [item], 1000)[0] for item in items]
            made = [each.ids for each in together if isinstance(each, Generated)]
            if dtype == "float32" and made != [each.ids for each in alone if isinstance(each, Generated)]:
                return float("inf")
        return apart
    finally:
        one.close()
        shutil.rmtree(path)


def collectives(device: str, directory: Path) -> tuple[bool, Mapping[str, object]]:
    """One rank through every call that a chunk of several makes."""
    backend = make_backend(_torch_name(device), 4096, 1)
    began = time.perf_counter()
    group = backend.group(_dist.FileStore(str(directory / "store"), 1), 0, 1, 20.0)
    value = torch.arange(4.0, device=device)
    for operation in (_dist.ReduceOp.SUM, _dist.ReduceOp.MAX):
        options = _dist.AllreduceOptions()
        options.reduceOp = operation
        group.allreduce([value], options).wait()
    parts = [torch.empty_like(value)]
    group.allgather([parts], [value]).wait()
    right = parts[0].tolist() == [0.0, 1.0, 2.0, 3.0]
    return right, {"right": right, "seconds": time.perf_counter() - began, "group": type(group).__name__}


def memory(device: str, directory: Path) -> tuple[bool, Mapping[str, object]]:
    """A batch that no memory is left for fails as that, and the next one is computed as before."""
    shape = {**SHAPES["toy"], "vocab_size": 131072, "max_position_embeddings": 4096}
    path = write_checkpoint(directory, "qwen3", Head.LM, shape, dtype="float32", device=device, seed=1)
    arena = 256 * 2**20
    if device == "cuda":
        arena = int(torch.cuda.mem_get_info()[0] - 1.2 * GIB)
    one = OneDevice(make_backend(_torch_name(device), 64 * 2**20, 1), arena)
    place = one.place(path, "lm")
    short = [WorkItem(ids=tuple(ids), action=ModelAction.LOGPROBS) for ids in IDS]
    before = one.run(place, short, 1000)
    told = ""
    if device == "cuda":  # a host has no such bound
        long = [WorkItem(ids=tuple(range(1, 2050)), action=ModelAction.LOGPROBS, top=1)]
        try:
            one.run(place, long * 4, 16384)
        except Exception as error:  # noqa: BLE001  # its kind is what is looked at
            told = f"{type(error).__name__}: {error}"[:300]
            if not is_out_of_memory(error):
                return False, {"told": told}
        one.engine.release_cache()
    right = one.run(place, short, 1000) == before and (bool(told) or device == "cpu")
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    one.close()
    return right, {"told": told, "arena_bytes": arena, "peak_bytes": peak, "right": right}


def rate(device: str, directory: Path) -> tuple[bool, Mapping[str, object]]:
    """Tokens a second of logprobs and generate beside plain transformers, on a model of a fair size."""
    size, tokens = ("600m", 512) if device == "cuda" else ("toy", 64)
    dtype = "bfloat16" if device == "cuda" else "float32"
    path = write_checkpoint(directory, "qwen3", Head.LM, SHAPES[size], dtype=dtype, device=device, seed=1)
    untyped: Any = transformers.AutoModelForCausalLM
    model = untyped.from_pretrained(path, dtype=getattr(torch, dtype)).eval().to(device)
    one = OneDevice(make_backend(_torch_name(device), 64 * 2**20, 1), 2 * GIB if device == "cuda" else 64 * 2**20)
    place = one.place(path, "lm")
    limit = min(tokens, SHAPES[size]["max_position_embeddings"] - 40)
    rows = torch.randint(1, SHAPES[size]["vocab_size"], (16, limit), device=device)
    items = [WorkItem(ids=tuple(row), action=ModelAction.LOGPROBS) for row in rows.tolist()]

    def plain() -> object:
        with torch.inference_mode():
            table = model(rows).logits.float().log_softmax(-1)
            return table[:, :-1].gather(2, rows[:, 1:, None]).cpu()

    new = 32
    sampling = Sampling(max_new_tokens=new)
    prompts = [WorkItem(ids=tuple(row[:8]), action=ModelAction.GENERATE, sampling=sampling) for row in rows.tolist()]
    heat = Sampling(max_new_tokens=new, temperature=1.0, top_p=0.9)
    heated = [WorkItem(ids=item.ids, action=ModelAction.GENERATE, sampling=heat) for item in prompts]
    options: Any = transformers.GenerationConfig
    limits = options(max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)

    def continued() -> object:
        return model.generate(rows[:, :8], attention_mask=torch.ones_like(rows[:, :8]), generation_config=limits).cpu()

    count, written = rows.numel(), len(prompts) * new
    found = {
        "size": size,
        "dtype": dtype,
        "logprobs_tokens_per_s": count / _best(lambda: one.run(place, items, count)),
        "transformers_logprobs_tokens_per_s": count / _best(plain),
        "generate_tokens_per_s": written / _best(lambda: one.run(place, prompts, 16384)),
        "sample_tokens_per_s": written / _best(lambda: one.run(place, heated, 16384)),
        "transformers_generate_tokens_per_s": written / _best(continued),
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }
    one.close()
    return True, found


def _best(act: Callable[[], object]) -> float:
    """Seconds of the fastest of three runs, after one to warm up."""
    taken = []
    for _ in range(4):
        began = time.perf_counter()
        act()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _torch_name(device: str) -> str:
    return "cuda:0" if device == "cuda" else "cpu"


SECTIONS = {each.__name__: each for each in (machine, correct, collectives, memory, rate)}


def main() -> int:
    """Play one section."""
    name, device = sys.argv[1:3]
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // 2, 1))
    with tempfile.TemporaryDirectory() as directory:
        right, found = SECTIONS[name](device, Path(directory))
    print(json.dumps({"section": name, "device": device, "right": right, **found}, default=str))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
