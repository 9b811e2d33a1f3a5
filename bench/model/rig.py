"""The rig of the model bench: one device, two models of the same size in host images, and what is done with them."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.model.checkpoints import SHAPES, write_checkpoint
from bench.report import BenchReport
from manager.function import ModelAction
from runtimes.model.checkpoint import Head, open_checkpoint
from runtimes.model.processes import ImageRef, Placed, RunBatch, WorkItem
from runtimes.model.weights import build_layout, fill, make_backend
from runtimes.model.worker import DeviceEngine, LoadedService

#: Cheap rounds are repeated for so long, up to so many times the asked number: a loaded machine needs many.
ROUNDS_S = 4.0
ROUNDS_TIMES = 6
READ_THREADS = 8


class ModelRig:
    """A language model (`Head.LM`) and a reward model (`Head.SCORE`) on one device whose arena holds both."""

    def __init__(self, device: str, size: str, rounds: int, directory: Path, report: BenchReport) -> None:
        self.cuda = device == "cuda"
        self.device = "cuda:0" if self.cuda else "cpu"
        self._rounds, self.report = rounds, report
        self.shape = SHAPES[size]
        self.paths: dict[Head, Path] = {}
        self.images: dict[Head, ImageRef] = {}
        for seed, head in enumerate((Head.SCORE, Head.LM)):
            self._make(directory, head, seed)
        # Only the language model is read again (by transformers): so two checkpoints never fill the disk at once.
        shutil.rmtree(self.paths[Head.SCORE])
        arena = 2 * max(image.layout.size_bytes for image in self.images.values()) + 2**20
        threads = torch.get_num_threads()
        backend = make_backend(self.device, 64 * 2**20, threads)
        self.engine = DeviceEngine(backend, arena, threads=threads, collective_s=30)
        for head, image in self.images.items():
            # On CUDA this registers (pins) the image.
            report.figure(f"attach_{head}_s", self.timed(lambda image=image: self.engine.attach(image)))  # type: ignore[misc]
        tokens = torch.randint(1, self.shape["vocab_size"], (8, 512 if self.cuda else 64)).tolist()
        self.ids = [tuple(row) for row in tokens]

    def _make(self, directory: Path, head: Head, seed: int) -> None:
        """Write a random checkpoint and read it into its image."""
        dtype = "bfloat16" if self.cuda else "float32"
        path = write_checkpoint(directory, "qwen3", head, self.shape, dtype=dtype, device=self.device, seed=seed)
        checkpoint = open_checkpoint(path)
        layout = build_layout(checkpoint, head)
        descriptor = os.memfd_create("bench")
        os.ftruncate(descriptor, layout.size_bytes)
        file = f"/proc/{os.getpid()}/fd/{descriptor}"
        self.report.figure(f"read_{head}_s", self.timed(lambda: fill(checkpoint, layout, file, READ_THREADS)))
        self.paths[head], self.images[head] = path, ImageRef(id=str(head), path=file, layout=layout)

    # -- measuring

    def rounds(self) -> Iterator[int]:
        """A round to warm up (0), then as many as were asked for, and more while they are cheap."""
        began = time.perf_counter()
        number = 0
        while number <= self._rounds or (
            number <= self._rounds * ROUNDS_TIMES and time.perf_counter() - began < ROUNDS_S
        ):
            yield number
            number += 1

    def timed(self, act: Callable[[], object]) -> float:
        """Seconds of one act, the device idle before and after; what it returns is freed outside of them."""
        gc.collect()
        self.settle()
        began = time.perf_counter()
        kept = act()
        self.settle()
        took = time.perf_counter() - began
        del kept
        return took

    def settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    # -- acts

    def place(self, head: Head) -> Placed:
        return Placed(service=str(head), image_id=str(head), dop=1, rank=0, start=0)

    def restore(self, head: Head) -> None:
        """Bring the weights in, and wait for them as a computation would."""
        self._arrive(self.engine.restore(self.place(head))[0])

    def restore_and_bind(self, head: Head) -> None:
        """The same with the model made ready to compute, while the bytes travel."""
        loaded = self.engine.restore(self.place(head))[0]
        self.engine.bind(self.engine.skeleton(loaded.place), loaded)
        self._arrive(loaded)

    def _arrive(self, loaded: LoadedService) -> None:
        loaded.transfer.wait(loaded.shard.size_bytes)
        loaded.transfer.finish()

    def compute(self, head: Head) -> list[object]:
        """Log-probabilities or scores of the rig's sequences; restores the model where it is not resident."""
        action = ModelAction.LOGPROBS if head is Head.LM else ModelAction.SCORE
        asked = RunBatch(
            place=self.place(head),
            items=tuple(WorkItem(ids=ids, action=action) for ids in self.ids),
            budget_tokens=len(self.ids) * len(self.ids[0]),
        )
        return self.engine.run(asked, restored=lambda: None, progress=lambda: None)[0]

    def computed_beside_a_restore(self) -> float:
        """Seconds that the language model computes while the other one is brought in."""
        other = threading.Thread(target=lambda: self.engine.restore(self.place(Head.SCORE), gentle=True))
        gc.collect()
        self.settle()
        other.start()
        began = time.perf_counter()
        self.compute(Head.LM)
        took = time.perf_counter() - began
        other.join()
        self.restore(Head.SCORE)
        return took

    def plain_copy(self, size_bytes: int) -> Callable[[], object]:
        """The ceiling: one copy of as many bytes, from pinned memory on CUDA."""
        source = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self.cuda).fill_(1)
        target = torch.empty(size_bytes, dtype=torch.uint8, device=self.device).fill_(0)
        return lambda: target.copy_(source, non_blocking=True)

    def from_pretrained(self) -> Any:
        """The language model as transformers loads it, every byte of it in place."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(self.paths[Head.LM], **_device_map(self.cuda))
        if not self.cuda:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()  # it maps the file lazily: touch every byte
        elif next(model.parameters()).device.type == "cpu":
            model.to(self.device)
        return model

    def parked_buffer_bytes(self) -> int:
        """Bytes of buffers that models which are not resident keep on a device that is not the host."""
        models = [self.engine.skeleton(self.place(head)).model for head in self.images]
        return sum(buffer.nbytes for model in models for buffer in model.buffers() if buffer.device.type == "cuda")

    def device_bytes(self) -> int:
        """Bytes held on the device: by torch's allocator on CUDA; on ``cpu`` by weights that lie outside the arena."""
        if self.cuda:
            return int(torch.cuda.memory_allocated())
        models = [self.engine.skeleton(self.place(head)).model for head in self.images]
        storages = [weight.untyped_storage() for model in models for weight in model.parameters()]
        distinct = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.device.type == "cpu"}
        return int(sum(distinct.values()) - max(distinct.values(), default=0))


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median of the rounds' own ratios, the warm-up left out: what slows a whole round cancels."""
    return statistics.median(a / b for a, b in zip(above[1:], below[1:], strict=True))


def _device_map(cuda: bool) -> dict[str, object]:
    """``device_map="cuda"`` needs accelerate; without it the model is loaded on the host and moved."""
    from importlib.util import find_spec

    return {"device_map": "cuda"} if cuda and find_spec("accelerate") else {}
