"""The backend: what the engine asks of a device, on the host or on CUDA: memory, fenced copies, collectives."""

from __future__ import annotations

import ctypes
import datetime
import mmap
import threading
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed

from runtimes.model.checkpoint.layout import CopyRange

#: torch leaves these untyped.
_dist: Any = torch.distributed
_cuda: Any = torch.cuda

#: Most bytes of one part of a copy on the host: so few that no thread waits long for the last one of another.
HOST_PART_BYTES = 4 * 2**20
#: Parts of a gentle copy under way at once on CUDA: what else goes to the device waits behind no more than these.
GENTLE_PARTS = 2


class Dropped(Exception):
    """The restore was given up: its place in the arena went to another service."""


class Transfer(Protocol):
    """A copy under way."""

    def wait(self, end: int) -> None:
        """Let the computation go on only when the slot's first ``end`` bytes have arrived; raises Dropped."""
        ...

    def finish(self) -> None:
        """Block, idly, until every byte has arrived; raises Dropped."""
        ...

    def drop(self) -> None:
        """Write nothing more: when this returns, a later copy to the same place is not disturbed. Idempotent."""
        ...


class DeviceBackend(Protocol):
    """One device. Copies begin in the order in which they are asked for."""

    #: As torch calls it.
    name: str

    def enter_thread(self) -> None:
        """To be called by every thread that works for the device."""
        ...

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Uninitialised bytes on the device."""
        ...

    def pin(self, data: torch.Tensor) -> None:
        """Lock host memory so that copies from it are asynchronous; raises RuntimeError."""
        ...

    def unpin(self, data: torch.Tensor) -> None:
        """Undo `pin`."""
        ...

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, copies: Sequence[CopyRange], *, gentle: bool
    ) -> Transfer:
        """Begin to make ``copies`` from pinned ``source`` to ``target``, in order; returns at once.

        A ``gentle`` copy leaves the way to the device free for a computation beside it.
        """
        ...

    def group(self, store: Any, rank: int, size: int, timeout_s: float) -> Any:
        """The raw process group of one chunk, which meets at ``store``."""
        ...

    def trim(self) -> None:
        """Give memory that no tensor holds back to the device."""
        ...

    def survives(self, error: Exception) -> bool:
        """Return whether the process may go on with the device after ``error``."""
        ...

    def close(self) -> None: ...


def make_backend(device: str, copy_bytes: int, threads: int) -> DeviceBackend:
    """The backend of a device as torch calls it, with parts of ``copy_bytes`` at most; ``threads`` copy on the host."""
    return Host(copy_bytes, threads) if device == "cpu" else Cuda(device, copy_bytes)


class Watermark:
    """How far a copy has got, for those who wait for it. Parts may get there out of order."""

    def __init__(self, parts: Sequence[CopyRange]) -> None:
        self._ends = [part.target + part.size_bytes for part in parts]
        self._passed = [False] * len(parts)
        #: Parts that are through without a gap before them.
        self._count = 0
        self._moved = threading.Condition()
        #: Why no more will come.
        self.error: Exception | None = None

    def part_of(self, end: int) -> int:
        """The part that brings the byte before ``end``."""
        return min(bisect_left(self._ends, end), len(self._ends) - 1)

    def reach(self, part: int) -> None:
        with self._moved:
            self._passed[part] = True
            while self._count < len(self._passed) and self._passed[self._count]:
                self._count += 1
            self._moved.notify_all()

    def fail(self, error: Exception) -> None:
        """Tell everyone who waits for what has not come that it never will."""
        with self._moved:
            self.error = self.error or error
            self._moved.notify_all()

    def has(self, part: int) -> bool:
        """Return whether ``part`` and all before it are copied."""
        return self._count > part

    def wait(self, part: int) -> None:
        """Block until ``part`` and all before it are copied; raises what the copy failed with."""
        if self.has(part):
            return
        with self._moved:
            self._moved.wait_for(lambda: self.has(part) or self.error is not None)
            if self.error is not None and not self.has(part):
                raise self.error


class Host:
    """The host as a device: a few threads that copy."""

    name = "cpu"

    def __init__(self, copy_bytes: int, threads: int) -> None:
        self._part_bytes = min(copy_bytes, HOST_PART_BYTES)
        #: The thread that waits for the bytes is one more.
        self._copiers_max = max(threads - 1, 1)
        self._copiers = ThreadPoolExecutor(self._copiers_max, thread_name_prefix="copier")

    def enter_thread(self) -> None:
        """Every thread may work for the host."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Return anonymous memory, in huge pages if the kernel gives them: a restore touches every page of its slot."""
        memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def pin(self, data: torch.Tensor) -> None:
        """Nothing to do: a copy on the host needs no locked pages."""

    def unpin(self, data: torch.Tensor) -> None:
        """Nothing to do: a copy on the host needs no locked pages."""

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, copies: Sequence[CopyRange], *, gentle: bool
    ) -> Transfer:
        transfer = HostTransfer(source, target, _cut(copies, self._part_bytes))
        for _ in range(1 if gentle else self._copiers_max):
            self._copiers.submit(transfer.carry)
        return transfer

    def group(self, store: Any, rank: int, size: int, timeout_s: float) -> Any:
        return _dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=timeout_s))

    def trim(self) -> None:
        """The allocator keeps nothing worth mentioning."""

    def survives(self, error: Exception) -> bool:
        """An exception leaves nothing behind on the host."""
        return True

    def close(self) -> None:
        self._copiers.shutdown()


class HostTransfer:
    """Parts that free threads take one by one."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, parts: Sequence[CopyRange]) -> None:
        self._parts = parts
        #: A reference keeps both in memory.
        self._held = source, target
        self._from, self._to = source.data_ptr(), target.data_ptr()
        self._arrived = Watermark(parts)
        self._left = iter(range(len(parts)))
        self._taking = threading.Condition()
        self._carried = 0

    def carry(self) -> None:
        """One thread's share: part after part while any is left."""
        while self._carry_one():
            pass

    def wait(self, end: int) -> None:
        """Copy parts in the waiting thread too."""
        part = self._arrived.part_of(end)
        while not self._arrived.has(part) and self._carry_one():
            pass
        self._arrived.wait(part)

    def finish(self) -> None:
        self._arrived.wait(len(self._parts) - 1)

    def drop(self) -> None:
        self._arrived.fail(Dropped())
        with self._taking:
            self._taking.wait_for(lambda: not self._carried)

    def _carry_one(self) -> bool:
        """Copy the next part; return False if none is left."""
        number = self._take()
        if number is None:
            return False
        part = self._parts[number]
        ctypes.memmove(self._to + part.target, self._from + part.source, part.size_bytes)
        self._put(number)
        return True

    def _take(self) -> int | None:
        with self._taking:
            number = next(self._left, None) if self._arrived.error is None else None
            self._carried += number is not None
            return number

    def _put(self, number: int) -> None:
        self._arrived.reach(number)
        with self._taking:
            self._carried -= 1
            self._taking.notify_all()


class Cuda:
    """A CUDA device: one stream for copies, beside the stream that computes."""

    def __init__(self, name: str, copy_bytes: int, cuda: Any = _cuda) -> None:
        self.name, self._part_bytes, self._cuda = name, copy_bytes, cuda
        cuda.init()  # says plainly why not, where there is no driver or torch was built without CUDA
        self.enter_thread()
        self._stream = cuda.Stream(name)
        self._feeder = ThreadPoolExecutor(1, thread_name_prefix="feeder", initializer=self.enter_thread)

    def enter_thread(self) -> None:
        """CUDA's current device belongs to a thread; a stray one would make a context of half a gigabyte elsewhere."""
        self._cuda.set_device(self.name)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.name)

    def pin(self, data: torch.Tensor) -> None:
        """Registration pins the shared pages for this process's context: no second copy is made."""
        self._check(self._cuda.cudart().cudaHostRegister(data.data_ptr(), data.nbytes, 0), "pin")

    def unpin(self, data: torch.Tensor) -> None:
        self._check(self._cuda.cudart().cudaHostUnregister(data.data_ptr()), "unpin")

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, copies: Sequence[CopyRange], *, gentle: bool
    ) -> Transfer:
        parts = _cut(copies, self._part_bytes)
        transfer = CudaTransfer(self, source, target, parts)
        if gentle:
            self._feeder.submit(transfer.feed, GENTLE_PARTS)
        else:
            transfer.feed(len(parts))
        return transfer

    def send(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Put one copy on the copy stream; the event that marks its end."""
        with self._cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = self._cuda.Event()
            event.record(self._stream)
        return event

    def hold_back(self, event: Any) -> None:
        """Let this thread's computation wait for ``event``, without blocking the thread."""
        self._cuda.current_stream().wait_event(event)

    def group(self, store: Any, rank: int, size: int, timeout_s: float) -> Any:
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        return _dist.ProcessGroupNCCL(store, rank, size, options)

    def trim(self) -> None:
        self._cuda.empty_cache()

    def survives(self, error: Exception) -> bool:
        """Return False for a CUDA error: it may stay with the context."""
        return not isinstance(error, RuntimeError)

    def close(self) -> None:
        self._feeder.shutdown()

    def _check(self, code: Any, what: str) -> None:
        if int(code) != 0:
            detail = self._cuda.cudart().cudaGetErrorString(code)
            raise RuntimeError(f"CUDA refused to {what} an image: {detail} (error {int(code)})")


class CudaTransfer:
    """Events on the copy stream; a wait orders the compute stream behind one of them and blocks no thread for long."""

    def __init__(self, device: Cuda, source: torch.Tensor, target: torch.Tensor, parts: Sequence[CopyRange]) -> None:
        self._device, self._source, self._target, self._parts = device, source, target, parts
        #: What is on the stream: from then on its event can be waited for.
        self._sent = Watermark(parts)
        self._events: list[Any] = []
        self._sending = threading.Lock()
        self._arrived = False

    def feed(self, ahead: int) -> None:
        """Put every part on the stream, never more than ``ahead`` of them at once. Fails to those who wait."""
        try:
            for number in range(len(self._parts)):
                if number >= ahead:
                    self._events[number - ahead].synchronize()
                if not self._send(number):
                    return
        except Exception as error:  # noqa: BLE001  # raised again by whoever waits
            self._sent.fail(error)

    def wait(self, end: int) -> None:
        if not self._arrived:
            part = self._sent.part_of(end)
            self._sent.wait(part)
            self._device.hold_back(self._events[part])

    def finish(self) -> None:
        last = len(self._parts) - 1
        self._sent.wait(last)
        self._events[last].synchronize()
        self._arrived = True

    def drop(self) -> None:
        """Stop sending; parts that are on the stream already come before any later copy."""
        with self._sending:
            self._sent.fail(Dropped())

    def _send(self, number: int) -> bool:
        """Put one part on the stream, unless there is no use for it any more."""
        part = self._parts[number]
        source = self._source[part.source : part.source + part.size_bytes]
        target = self._target[part.target : part.target + part.size_bytes]
        with self._sending:
            if self._sent.error is not None:
                return False
            self._events.append(self._device.send(source, target))
        self._sent.reach(number)
        return True


def _cut(parts: Sequence[CopyRange], size_bytes: int) -> list[CopyRange]:
    """The same ranges in parts of at most ``size_bytes``."""
    return [
        CopyRange(
            source=part.source + start, target=part.target + start, size_bytes=min(size_bytes, part.size_bytes - start)
        )
        for part in parts
        for start in range(0, part.size_bytes, size_bytes)
    ]
