"""The model bench: restore, swap, overlap and prefetch on one device, and exactness on every family and DoP.

    python -m bench.model --device cpu --quick --json
    python -m bench.model --device cuda --json          # a random 8B checkpoint in bfloat16

The limits of the two devices differ where the hardware does: a host has no copy engine, so that on ``cpu`` a restore
and a computation can at best take turns on the same cores, and the limits say that they lose nothing by overlapping.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from bench.model_checkpoints import SHAPES, write_checkpoint
from bench.model_exactness import differences
from bench.model_ipc import store_copies
from bench.report import Report, parser
from manager.function import ModelAction
from runtimes.model.checkpoint import open_checkpoint
from runtimes.model.engine import DeviceEngine
from runtimes.model.image import build_layout, fill
from runtimes.model.layout import Layout
from runtimes.model.skeleton import Head
from runtimes.model.work import ImageRef, Item, Placed, Run

GIB = 2**30


class Bench:
    """One device with two models of the same size: a language model and a reward model."""

    def __init__(self, device: str, size: str, rounds: int, directory: Path, report: Report) -> None:
        self.cuda = device == "cuda"
        self.device = "cuda:0" if self.cuda else "cpu"
        self.rounds, self.report = rounds, report
        self.shape = SHAPES[size]
        dtype = "bfloat16" if self.cuda else "float32"
        self.paths = {
            head: write_checkpoint(directory, "qwen3", head, self.shape, dtype=dtype, device=self.device, seed=seed)
            for seed, head in enumerate((Head.LM, Head.SCORE))
        }
        self.images = {head: self._image(head) for head in self.paths}
        arena = 2 * max(image.layout.size_bytes for image in self.images.values()) + 2**20
        self.engine = DeviceEngine(
            self.device, arena, copy_bytes=64 * 2**20, threads=torch.get_num_threads(), collective_s=30
        )
        for head, image in self.images.items():
            took = self.timed(lambda image=image: self.engine.attach(image))  # type: ignore[misc]
            report.figure(f"attach_{head}_s", took)
        tokens = torch.randint(1, self.shape["vocab_size"], (8, 512 if self.cuda else 64)).tolist()
        self.ids = [tuple(row) for row in tokens]

    def _image(self, head: Head) -> ImageRef:
        checkpoint = open_checkpoint(self.paths[head])
        layout = build_layout(checkpoint, head)
        descriptor = os.memfd_create("bench")
        os.ftruncate(descriptor, layout.size_bytes)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.report.figure(f"read_{head}_s", self.timed(lambda: fill(checkpoint, layout, path, 8)))
        return ImageRef(id=str(head), path=path, layout=layout)

    # -- measuring

    def timed(self, act: Callable[[], object]) -> float:
        """Seconds of one act, the device idle before and after."""
        gc.collect()
        self._settle()
        began = time.perf_counter()
        act()
        self._settle()
        return time.perf_counter() - began

    def _settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    # -- acts

    def place(self, head: Head) -> Placed:
        return Placed(service=str(head), image_id=str(head), dop=1, rank=0, start=0)

    def restore(self, head: Head) -> None:
        self.engine.restore(self.place(head))[0].transfer.finish()

    def restore_and_bind(self, head: Head) -> None:
        seat = self.engine.restore(self.place(head))[0]
        seat.transfer.finish()
        self.engine.bind(self.engine.skeleton(seat.place), seat)

    def compute(self, head: Head) -> list[object]:
        action = ModelAction.LOGPROBS if head is Head.LM else ModelAction.SCORE
        asked = Run(
            place=self.place(head),
            items=tuple(Item(ids=ids, action=action) for ids in self.ids),
            budget_tokens=len(self.ids) * len(self.ids[0]),
        )
        return self.engine.run(asked, restored=lambda: None, progress=lambda: None)[0]

    # -- measurements

    def restores(self) -> float:
        """Restore against the plain copy of as many bytes, in turns; returns the seconds of a restore."""
        layout = self.images[Head.LM].layout
        plain_s, restore_s, evict_s = [], [], []
        copy = self._plain_copy(layout)
        for _ in range(self.rounds + 1):
            plain_s.append(self.timed(copy))
            evict_s.append(self.timed(self.engine.evict))
            restore_s.append(self.timed(lambda: self.restore(Head.LM)))
            self.compute(Head.LM)
        plain, restore = statistics.median(plain_s[1:]), statistics.median(restore_s[1:])
        self.report.figure("model_bytes", layout.size_bytes)
        self.report.figure("plain_copy_gib_per_s", layout.size_bytes / plain / GIB)
        self.report.figure("restore_gib_per_s", layout.size_bytes / restore / GIB)
        self.report.figure("restore_s", restore)
        if self.cuda:
            self.report.check("restore_over_h2d_ceiling", plain / restore, 0.90, "higher")
        else:
            self.report.check("restore_over_memcpy", restore / plain, 1.25, "lower")
        self.report.check("evict_ms", statistics.median(evict_s[1:]) * 1e3, 1.0, "lower")
        return restore

    def _plain_copy(self, layout: Layout) -> Callable[[], object]:
        """The ceiling: one copy of the same bytes, from pinned memory on CUDA."""
        source = torch.empty(layout.size_bytes, dtype=torch.uint8, pin_memory=self.cuda).fill_(1)
        target = torch.empty(layout.size_bytes, dtype=torch.uint8, device=self.device).fill_(0)
        return lambda: target.copy_(source, non_blocking=True)

    def loading(self) -> None:
        """`from_pretrained`, its weights really materialised, against restore and bind. The page cache is warm."""
        from transformers import AutoModelForCausalLM

        def load() -> None:
            model: Any = AutoModelForCausalLM.from_pretrained(self.paths[Head.LM], **_device_map(self.cuda))
            if not self.cuda:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()  # it maps lazily: touch every byte
            elif next(model.parameters()).device.type == "cpu":
                model.to(self.device)

        loaded_s, bound_s = [], []
        for _ in range(self.rounds):
            loaded_s.append(self.timed(load))
            self.engine.evict()
            bound_s.append(self.timed(lambda: self.restore_and_bind(Head.LM)))
        loaded, bound = statistics.median(loaded_s), statistics.median(bound_s)
        self.report.figure("from_pretrained_s", loaded)
        self.report.figure("restore_and_bind_s", bound)
        self.report.check("from_pretrained_over_restore", loaded / bound, 6.0 if self.cuda else 4.0, "higher")
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def swaps(self) -> None:
        """Swap A for B against the restore of B alone, in turns."""
        alone, swap = [], []
        for _ in range(self.rounds + 1):
            self.engine.evict()
            alone.append(self.timed(lambda: self.restore_and_bind(Head.SCORE)))
            self.engine.evict()
            self.restore_and_bind(Head.LM)
            swap.append(self.timed(self._swap))
        ratio = statistics.median(swap[1:]) / statistics.median(alone[1:])
        self.report.check("swap_over_restore", ratio, 1.1, "lower")

    def _swap(self) -> None:
        self.engine.evict([str(Head.LM)])
        self.restore_and_bind(Head.SCORE)

    def overlaps(self, restore_s: float) -> None:
        """A cold action against the longer of restore and compute, and what a prefetch costs a running action."""
        warm, cold, both = [], [], []
        for _ in range(self.rounds + 1):
            self.engine.evict()
            cold.append(self.timed(lambda: self.compute(Head.LM)))
            warm.append(self.timed(lambda: self.compute(Head.LM)))
            both.append(self.timed(self._compute_beside_a_prefetch))
        compute_s, cold_s, both_s = (statistics.median(taken[1:]) for taken in (warm, cold, both))
        longer = max(restore_s, compute_s)
        serial = (restore_s + compute_s) / longer
        self.report.figure("compute_s", compute_s)
        self.report.figure("cold_action_s", cold_s)
        self.report.check(
            "cold_over_max_restore_compute", cold_s / longer, 1.15 if self.cuda else 1.15 * serial, "lower"
        )
        limit = 1.05 if self.cuda else 1.15 * (restore_s + compute_s) / compute_s
        self.report.check("prefetch_slowdown", both_s / compute_s, limit, "lower")

    def _compute_beside_a_prefetch(self) -> None:
        other = threading.Thread(target=lambda: self.engine.restore(self.place(Head.SCORE)))
        other.start()
        self.compute(Head.LM)
        other.join()

    def parking(self) -> None:
        """What a service that was used and evicted keeps on the device, beyond the arena."""
        self.engine.evict()
        self.engine.release_cache()
        before = self._device_bytes()
        for head in self.images:
            self.compute(head)
        self.engine.evict()
        self.engine.release_cache()
        gc.collect()
        self.report.check("parked_bytes", (self._device_bytes() - before) / len(self.images), 0, "lower")

    def _device_bytes(self) -> int:
        """Bytes held on the device: by torch's allocator on CUDA; on ``cpu`` by weights that lie outside the arena."""
        if self.cuda:
            return int(torch.cuda.memory_allocated())
        models = [self.engine.skeleton(self.place(head)).model for head in self.images]
        storages = [weight.untyped_storage() for model in models for weight in model.parameters()]
        distinct = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.device.type == "cpu"}
        return int(sum(distinct.values()) - max(distinct.values(), default=0))


def main(argv: Sequence[str] | None = None) -> int:
    command = parser("model")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument("--size", choices=tuple(SHAPES), help="of the timed model; small on cpu, 8b on cuda")
    options = command.parse_args(argv)
    size = options.size or ("8b" if options.device == "cuda" else "tiny" if options.quick else "small")
    report = Report("model")
    report.figure("torch", torch.__version__)
    report.figure("device", torch.cuda.get_device_name() if options.device == "cuda" else "cpu")
    report.figure("size", size)
    directory = Path(tempfile.mkdtemp(prefix="bench-model-"))
    try:
        bench = Bench(options.device, size, 5 if options.quick else 9, directory, report)
        restore_s = bench.restores()
        bench.loading()
        bench.swaps()
        bench.overlaps(restore_s)
        bench.parking()
        report.figure("ipc_store", dict(store_copies(bench.images[Head.LM], bench.device, bench.rounds)))
        files = sum(file.stat().st_size for file in bench.paths[Head.LM].glob("*.safetensors"))
        report.check("host_bytes_over_model", bench.images[Head.LM].layout.size_bytes / files, 1.05, "lower")
        found = differences(directory)
        report.check("family_max_abs_diff", found.family, 1e-5, "lower")
        report.check("dop_max_abs_diff", found.dop, 1e-5, "lower")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if options.device == "cpu":
        report.note("On cpu a copy and a computation share the cores: overlap limits are those of taking turns.")
    return report.print(as_json=options.json)


def _device_map(cuda: bool) -> dict[str, object]:
    """``device_map="cuda"`` needs accelerate; without it the model is loaded on the host and moved."""
    from importlib.util import find_spec

    return {"device_map": "cuda"} if cuda and find_spec("accelerate") else {}


if __name__ == "__main__":
    sys.exit(main())
