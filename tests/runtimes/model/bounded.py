"""A fork server whose devices refuse large tensors while a test says so, as a device without room for them does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtimes.model import fork_server, worker
from runtimes.model.processes import ForkServer, RunBatch, Usage
from runtimes.model.worker import DeviceEngine, OnEnded

#: Names the file that holds the most bytes of one tensor; without the file there is no bound.
BOUND = "TANGRAM_TEST_TENSOR_BOUND"


class BoundedForkServer(ForkServer):
    """Its processes are those of this module."""

    module = __name__


class BoundedTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Raises what torch raises for host memory that cannot be had, whatever allocator there is."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._size_bytes = size_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.nbytes > self._size_bytes:
                raise RuntimeError(
                    f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {each.nbytes} bytes."
                )
        return made


class BoundedEngine(DeviceEngine):
    """Computes within the bound of the moment."""

    def run(
        self, asked: RunBatch, restored: Callable[[], None], progress: Callable[[], None], ended: OnEnded | None = None
    ) -> tuple[list[object], Usage]:
        file = Path(os.environ[BOUND])
        if not file.exists():
            return super().run(asked, restored, progress, ended)
        with BoundedTensors(int(file.read_text())):
            return super().run(asked, restored, progress, ended)


if __name__ == "__main__":
    vars(worker)["DeviceEngine"] = BoundedEngine  # what `serve` makes, in every process forked from here
    fork_server.main()
