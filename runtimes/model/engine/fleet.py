"""The devices' processes and the chunks made of them: a job on a chunk, crashes and stuck ranks, what is resident."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from manager.action import Chunk
from manager.errors import ActionFailed, Reason
from runtimes.model.device.devices import Device
from runtimes.model.device.messages import (
    Attach,
    Detach,
    Done,
    Ended,
    Evict,
    ImageRef,
    Placed,
    Resident,
    Restore,
    RunBatch,
    Usage,
)
from runtimes.model.device.process import ForkServer, Gone, ModelProcess, RequestRefused
from runtimes.model.settings import ModelSettings

_COMPONENT = "model.fleet"


class ChunkBroken(Exception):
    """A rank died, was stuck, or left its peers alone: the chunk's processes have been replaced."""


@dataclass(slots=True)
class SwapCounts:
    """What one device did since the start, and does now."""

    executions: int = 0
    #: Executions that had to restore their service first.
    swaps: int = 0
    #: The service that computes, and its chunk.
    running: tuple[str, Chunk] | None = None


class Fleet:
    """One process for each device. A chunk is used by one job at a time."""

    def __init__(
        self,
        devices: Sequence[Device],
        fork_server: ForkServer,
        settings: ModelSettings,
        rendezvous_dir: Path,
        on_residency: Callable[[], None],
    ) -> None:
        self.devices = devices
        self._settings = settings
        self._rendezvous_dir = rendezvous_dir
        self._on_residency = on_residency
        self.workers = [self._worker(device, fork_server) for device in devices]
        self._turns = [asyncio.Lock() for _ in devices]
        self._resident: list[tuple[Resident, ...]] = [() for _ in devices]
        self.counts = [SwapCounts() for _ in devices]

    # -- work

    async def run(
        self,
        chunk: Chunk,
        image: ImageRef,
        run: RunBatch,
        restored: Callable[[], None],
        ended: Callable[[Ended], None] | None = None,
    ) -> tuple[list[object], list[Usage]]:
        """Run on every rank; the first rank's results, and each rank's usage. ``ended`` is told what ends before.

        Raises RequestRefused (the model refused, every rank lives), or ChunkBroken after replacing the processes.
        ``run.place`` is completed for each rank. Cancelling waits ``kill_grace_s``, then kills.
        """
        self._check(chunk)
        async with AsyncExitStack() as turns:
            for index in chunk.devices:
                await turns.enter_async_context(self._turns[index])
                turns.enter_context(self._running(index, run.place.service, chunk))
            await self._attach(chunk, image)
            counted = _Countdown(chunk.size, restored)
            group = self._group(chunk)
            ranks = [
                asyncio.create_task(
                    self._ask(
                        index,
                        replace(run, place=_placed(run.place, rank, chunk), group=group),
                        counted.one,
                        ended=ended,
                    )
                )
                for rank, index in enumerate(chunk.devices)
            ]
            try:
                done = await self._together(chunk, ranks)
            except asyncio.CancelledError:
                await self._stop(chunk, ranks)
                raise
        for index, rank in zip(chunk.devices, done, strict=True):
            self.counts[index].executions += 1
            self.counts[index].swaps += rank.usage.restored
        results = done[0].value
        assert isinstance(results, list)
        return results, [rank.usage for rank in done]

    async def restore(self, chunk: Chunk, image: ImageRef, place: Placed) -> bool:
        """Restore without computing; return False if it does not fit or a process was lost.

        A slow rank is waited for, not killed: it computes for another action.
        """
        self._check(chunk)
        await self._attach(chunk, image)
        asked = (
            self._ask(index, Restore(place=_placed(place, rank, chunk)), None, patient=True)
            for rank, index in enumerate(chunk.devices)
        )
        answers = await asyncio.gather(*asked, return_exceptions=True)
        placed = [isinstance(answer, Done) and answer.value is True for answer in answers]
        if any(placed) and not all(placed):
            await self.evict(chunk, (place.service,))  # part of a model is of no use
        return all(placed)

    async def evict(self, chunk: Chunk, services: tuple[str, ...]) -> None:
        """Release the services' slots on the chunk's live devices."""
        alive = [index for index in chunk.devices if self.workers[index].alive]
        asked = (self._ask(index, Evict(services=services), None) for index in alive)
        await asyncio.gather(*asked, return_exceptions=True)

    async def abort(self, chunk: Chunk) -> None:
        """Replace the chunk's processes: kill them now, start them when they are needed."""
        for index in chunk.devices:
            self.workers[index].kill()
        await asyncio.gather(*(self.workers[i].gone(self._settings.start_s) for i in chunk.devices))
        for index in chunk.devices:
            self._resident[index] = ()
        self._on_residency()

    async def start(self) -> None:
        """Start every device's process."""
        await asyncio.gather(*(worker.start() for worker in self.workers))

    def forget_image(self, image_id: str) -> None:
        """Let every process unmap a dropped image."""
        for worker in self.workers:
            if image_id in worker.attached:
                worker.attached.discard(image_id)
                worker.tell(Detach(image_id=image_id))

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self.workers))

    # -- views

    def residency(self) -> Mapping[str, tuple[Chunk, ...]]:
        """Service -> chunks on which every rank holds it."""
        held = {
            (slot.service, slot.dop, slot.start, index) for index, slots in enumerate(self._resident) for slot in slots
        }
        found: dict[str, list[Chunk]] = {}
        for service, dop, start, index in sorted(held):
            if index == start and all((service, dop, start, peer) in held for peer in range(start, start + dop)):
                found.setdefault(service, []).append(Chunk(start, dop))
        return {service: tuple(chunks) for service, chunks in found.items()}

    def slots(self, index: int) -> tuple[Resident, ...]:
        """What device ``index`` last reported."""
        return self._resident[index]

    # -- parts

    async def _ask(
        self,
        index: int,
        message: object,
        on_progress: Callable[[str], None] | None,
        *,
        patient: bool = False,
        ended: Callable[[Ended], None] | None = None,
    ) -> Done:
        """Ask one device, keep what it reports as resident. With ``patient`` a silent one is not taken for stuck."""
        worker = self.workers[index]
        stuck_s = None if patient else self._settings.stuck_s
        try:
            done = await worker.ask(message, stuck_s=stuck_s, on_progress=on_progress, on_ended=ended)
        except RequestRefused as refused:
            self._report(index, refused.failed.resident)
            raise
        except Gone:
            self._report(index, ())
            raise
        self._report(index, done.resident)
        return done

    @contextmanager
    def _running(self, index: int, service: str, chunk: Chunk) -> Iterator[None]:
        self.counts[index].running = service, chunk
        try:
            yield
        finally:
            self.counts[index].running = None

    def _report(self, index: int, resident: tuple[Resident, ...] | None) -> None:
        if resident is not None and resident != self._resident[index]:
            self._resident[index] = resident
            self._on_residency()

    async def _attach(self, chunk: Chunk, image: ImageRef) -> None:
        """Announce the image to every process of the chunk that has not heard of it; pinning goes on meanwhile."""
        await asyncio.gather(*(self.workers[index].start() for index in chunk.devices))
        for index in chunk.devices:
            worker = self.workers[index]
            if image.id not in worker.attached:
                worker.attached.add(image.id)
                worker.tell(Attach(image=image))

    async def _together(self, chunk: Chunk, ranks: Sequence[asyncio.Task[Done]]) -> list[Done]:
        """Every rank's answer. One that fails leaves its peers waiting in a collective: they are given
        ``kill_grace_s``, then the whole chunk is replaced."""
        await asyncio.wait(ranks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error for rank in ranks if rank.done() and (error := rank.exception()) is not None]
        if not errors:
            return [rank.result() for rank in ranks]
        if len(ranks) > 1:
            await self._stop(chunk, ranks)
        first = next((error for error in errors if isinstance(error, RequestRefused)), errors[0])
        broken = first.failed.broken if isinstance(first, RequestRefused) else isinstance(first, Gone)
        if len(ranks) == 1 and broken:
            await self.abort(chunk)  # one that was stuck is still dying: the next try must not be given to it
        sound = len(ranks) == 1 and not broken
        if isinstance(first, RequestRefused) and (sound or first.failed.reason is Reason.OUT_OF_MEMORY):
            raise first
        if isinstance(first, Gone | RequestRefused):
            raise ChunkBroken(str(first)) from first
        raise first

    async def _stop(self, chunk: Chunk, ranks: Sequence[asyncio.Task[Done]]) -> None:
        """Let the ranks end by themselves for a moment, then replace the chunk's processes."""
        _, late = await asyncio.wait(ranks, timeout=self._settings.kill_grace_s)
        failed = any(rank.done() and not rank.cancelled() and rank.exception() is not None for rank in ranks)
        if late or failed:
            await self.abort(chunk)
        await asyncio.gather(*ranks, return_exceptions=True)

    def _group(self, chunk: Chunk) -> str:
        """The rendezvous file of this very set of processes: a new process means a new file."""
        incarnations = "-".join(str(self.workers[index].incarnation) for index in chunk.devices)
        return str(self._rendezvous_dir / f"{chunk.start}-{chunk.size}-{incarnations}")

    def _check(self, chunk: Chunk) -> None:
        if chunk.start < 0 or chunk.size < 1 or chunk.end > len(self.devices) or chunk.start % chunk.size:
            raise ActionFailed(
                Reason.INTERNAL, f"no such chunk {chunk} among {len(self.devices)} devices", component=_COMPONENT
            )

    def _worker(self, device: Device, fork_server: ForkServer) -> ModelProcess:
        options: dict[str, object] = {
            "device": device.torch_name,
            "arena_bytes": device.arena_bytes,
            "copy_bytes": self._settings.copy_bytes,
            "threads": self._settings.device_threads,
            "collective_s": self._settings.collective_s,
        }
        return ModelProcess(
            fork_server, "worker", options, environment=device.environment, start_s=self._settings.start_s
        )


class _Countdown:
    """Calls back once every rank has its weights."""

    def __init__(self, ranks: int, reached: Callable[[], None]) -> None:
        self._left, self._reached = ranks, reached

    def one(self, what: str) -> None:
        if what == "restored":
            self._left -= 1
            if self._left == 0:
                self._reached()


def _placed(place: Placed, rank: int, chunk: Chunk) -> Placed:
    start, dop = chunk
    return replace(place, dop=dop, rank=rank, start=start)
