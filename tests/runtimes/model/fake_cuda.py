"""CUDA's part of torch as the backend uses it, on the host: a copy happens when a computation needs it, never before.

So a computation that does not wait for its weights computes with garbage, which on real hardware it would do rarely.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class FakeStream:
    """Work in the order in which it was put here; done when it is waited for."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._work: list[Callable[[], object]] = []
        self._done = 0
        self._moved = threading.Condition()
        #: Most pieces of work that lay here at once.
        self.ahead_max = 0

    def put(self, work: Callable[[], object]) -> int:
        with self._moved:
            self._work.append(work)
            self.ahead_max = max(self.ahead_max, len(self._work) - self._done)
            return len(self._work)

    def run(self, until: int) -> None:
        with self._moved:
            while self._done < until:
                self._work[self._done]()
                self._done += 1
            self._moved.notify_all()

    def finish(self) -> None:
        """Do all that lies here."""
        with self._moved:
            self.run(len(self._work))

    def look_on(self, until: int, within_s: float) -> None:
        """Wait for others to have it run so far."""
        with self._moved:
            self._moved.wait_for(lambda: self._done >= until, within_s)

    def wait_event(self, event: FakeEvent) -> None:
        """What this stream computes later comes after ``event``; the fake's computations happen at once."""
        event.run()


class FakeEvent:
    """A place in a stream. A thread that is blocked by it leaves the work to the computation for ``patience_s``."""

    def __init__(self, patience_s: float) -> None:
        self._stream: FakeStream | None = None
        self._place = 0
        self._patience_s = patience_s

    def record(self, stream: FakeStream) -> None:
        self._stream = stream
        self._place = stream.put(lambda: None)

    def synchronize(self) -> None:
        assert self._stream is not None, "record first"
        self._stream.look_on(self._place, self._patience_s)
        self.run()

    def run(self) -> None:
        assert self._stream is not None, "record first"
        self._stream.run(self._place)


class _On(TorchFunctionMode):
    """Copies within the block go to a stream."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_:
            target, source = args
            assert kwargs == {"non_blocking": True}
            self._stream.put(lambda: target.copy_(source))
            return target
        return func(*args, **(kwargs or {}))


@dataclass
class FakeCudaRuntime:
    """What ``torch.cuda.cudart()`` returns."""

    #: Address -> bytes of what is registered.
    registered: dict[int, int] = field(default_factory=dict)
    #: What every call answers; 0 is success.
    code: int = 0
    #: An error that the next call of torch reports once more.
    pending: bool = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802  # CUDA's name
        self.registered[address] = size
        self.pending = self.code != 0
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # CUDA's name
        del self.registered[address]
        self.pending = self.code != 0
        return self.code

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802  # CUDA's name
        return f"story of {code}"


class FakeCuda:
    """Stands for the module ``torch.cuda``."""

    def __init__(self, patience_s: float = 0.0) -> None:
        self.Stream, self.Event = FakeStream, lambda: FakeEvent(patience_s)
        self.runtime = FakeCudaRuntime()
        self.streams: list[FakeStream] = []
        #: Threads that have said which device is theirs.
        self.entered: dict[str, str] = {}
        self.trims = 0
        self._computing = FakeStream()

    def init(self) -> None:
        """It is always ready."""

    def synchronize(self) -> None:
        if self.runtime.pending:
            self.runtime.pending = False
            raise RuntimeError("CUDA error: of an earlier call")

    def set_device(self, device: str) -> None:
        self.entered[threading.current_thread().name] = device

    def stream(self, stream: FakeStream) -> _On:
        if stream not in self.streams:
            self.streams.append(stream)
        return _On(stream)

    def current_stream(self) -> FakeStream:
        return self._computing

    def cudart(self) -> FakeCudaRuntime:
        return self.runtime

    def empty_cache(self) -> None:
        self.trims += 1
