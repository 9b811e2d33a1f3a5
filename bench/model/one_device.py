"""A device engine in this process, with the images that it needs: for benches and tests of what a device computes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from runtimes.model.checkpoint import Head, open_checkpoint
from runtimes.model.processes import ImageRef, Placed, RunBatch, WorkItem
from runtimes.model.weights import DeviceBackend, build_layout, fill
from runtimes.model.worker import DeviceEngine, OnEnded


class OneDevice:
    """One device and the checkpoints that were placed on it."""

    def __init__(self, backend: DeviceBackend, arena_bytes: int = 64 * 2**20) -> None:
        self.engine = DeviceEngine(backend, arena_bytes, threads=1, collective_s=10)
        self._descriptors: list[int] = []
        self._images: list[str] = []

    def place(self, path: Path, head: str, dtype: str = "", ignore: Sequence[str] = ()) -> Placed:
        """Read a checkpoint into an image; raises what its registration raises."""
        checkpoint = open_checkpoint(path, Head(head))
        layout = build_layout(checkpoint, Head(head), dtype, ignore)
        descriptor = os.memfd_create("image")
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, layout.size_bytes)
        file = f"/proc/{os.getpid()}/fd/{descriptor}"
        fill(checkpoint, layout, file, threads=2)
        name = f"{path}:{head}:{dtype}"
        self.engine.attach(ImageRef(id=name, path=file, layout=layout))
        self._images.append(name)
        return Placed(service=name, image_id=name, dop=1, rank=0, start=0)

    def run(
        self, place: Placed, items: Sequence[WorkItem], budget_tokens: int = 20, ended: OnEnded | None = None
    ) -> list[object]:
        """Return a result for each sequence."""
        asked = RunBatch(place=place, items=tuple(items), budget_tokens=budget_tokens)
        return self.engine.run(asked, restored=lambda: None, progress=lambda: None, ended=ended)[0]

    def close(self) -> None:
        self.engine.evict()
        for image in self._images:
            self.engine.detach(image)
        self.engine.backend.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
