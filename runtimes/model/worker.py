"""The process of one device."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from manager.errors import Reason, Unsupported
from runtimes.model.arena import (
    Arena,
    DoesNotFit,
    Fences,
    SlotKey,
    bind,
)
from runtimes.model.checkpoint import Layout, Shard, shard
from runtimes.model.compute import BoundModel, RankGroup, Team, compute, install, is_out_of_memory, stage
from runtimes.model.processes import (
    Attach,
    Detach,
    Done,
    Ended,
    Evict,
    Failed,
    Hello,
    ImageRef,
    MessagePipe,
    Placed,
    Progress,
    Request,
    Resident,
    Restore,
    RunBatch,
    Usage,
)
from runtimes.model.weights import (
    DeviceBackend,
    Dropped,
    Image,
    Transfer,
    build_skeleton,
    make_backend,
    place_buffers,
)

#: The position, the result and the use so far of a sequence that has ended.
OnEnded = Callable[[int, object, Usage], None]
#: Seconds that a run waits for its image, which was announced before it on the same pipe (pinning takes seconds).
ATTACH_S = 120.0
#: Seconds between two signs of life of a running computation.
PULSE_S = 0.2


@dataclass(slots=True)
class LoadedService:
    """A service in the arena, arrived or arriving."""

    place: Placed
    offset: int
    shard: Shard
    transfer: Transfer
    began_s: float = field(default_factory=time.perf_counter)


@dataclass(slots=True)
class Skeleton:
    """A model without memory of its own, for one rank of one DoP of one image."""

    model: Any
    fences: Fences
    team: Team
    #: The buffers as built, on the host: a parked service keeps nothing on the device.
    buffers: Mapping[str, torch.Tensor]
    layout: Layout
    bound: LoadedService | None = None
    #: Where in the arena its parameters point; a service that comes back to the same place finds them there.
    offset: int | None = None
    parked: bool = True

    def park(self) -> None:
        """Let go of the device: the arena's views are forgotten with the service, the buffers fall back to the host."""
        self.bound, self.parked = None, True
        place_buffers(self.model, self.buffers, "cpu")


class DeviceEngine:
    """Everything that one device does. `run` belongs to one thread; the rest may be called from another meanwhile."""

    def __init__(self, backend: DeviceBackend, arena_bytes: int, *, threads: int, collective_s: float) -> None:
        self.backend = backend
        self._collective_s = collective_s
        torch.set_num_threads(threads)
        self._arena = Arena(arena_bytes, backend)
        self._images: dict[str, Image | Exception] = {}
        self._changed = threading.Condition()
        self._loaded: dict[SlotKey, LoadedService] = {}
        self._skeletons: dict[tuple[str, int, int], Skeleton] = {}
        self._building = threading.Lock()
        self._computing = False
        self._groups: dict[tuple[int, int], tuple[str, RankGroup]] = {}
        self._cores: tuple[int, ...] = ()

    # -- images

    def attach(self, reference: ImageRef) -> None:
        """Map (and on CUDA pin) an image; a failure is kept for the run that needs it. Idempotent."""
        if isinstance(self._images.get(reference.id), Image):
            return
        created: Image | Exception
        try:
            created = Image(reference.path, reference.layout, self.backend)
        except (OSError, RuntimeError) as error:
            created = error
        with self._changed:
            self._images[reference.id] = created
            self._changed.notify_all()

    def detach(self, image_id: str) -> None:
        """Unmap an image and forget its skeletons. Slots restored from it stay until they are evicted."""
        with self._changed:
            image = self._images.pop(image_id, None)
            if isinstance(image, Image):
                image.close()

    # -- residency

    def resident(self) -> tuple[Resident, ...]:
        with self._changed:
            return tuple(
                Resident(service=key[0], dop=key[1], start=key[2], size_bytes=loaded.shard.size_bytes)
                for key, loaded in self._loaded.items()
            )

    def evict(self, services: Sequence[str] | None = None) -> tuple[str, ...]:
        """Release the idle slots of these services (of all if None); nothing is written back."""
        with self._changed:
            victims = [key for key in self._arena.slots.idle() if services is None or key[0] in services]
            for key in victims:
                self._drop(key)
            return tuple(sorted({key[0] for key in victims}))

    def restore(self, place: Placed, *, gentle: bool = False) -> tuple[LoadedService, bool, tuple[str, ...]]:
        """Load a service: (it, whether a copy was begun, evicted services). Return while the bytes still travel.

        A ``gentle`` restore evicts nothing, and leaves room on the way to the device for what computes beside it.
        Raises DoesNotFit if what may not be evicted leaves no room.
        """
        image = self._await_image(place.image_id)
        key = (place.service, place.dop, place.start)
        with self._changed:
            loaded = self._loaded.get(key)
            if loaded is not None and loaded.place == place:
                return loaded, False, ()
            if self._arena.slots.is_pinned(key):
                raise DoesNotFit(f"{place.service} computes with other weights")
            self._drop(key)
            part = shard(image.layout, place.rank, place.dop)
            offset, evicted = self._arena.slots.allocate(key, part.size_bytes, evict_idle=not gentle)
            for other in evicted:
                self._drop(other)
            loaded = LoadedService(place, offset, part, self._arena.restore(image.bytes, part, offset, gentle=gentle))
            self._loaded[key] = loaded
            return loaded, True, tuple(other[0] for other in evicted)

    # -- the act

    def run(
        self, batch: RunBatch, restored: Callable[[], None], progress: Callable[[], None], ended: OnEnded | None = None
    ) -> tuple[list[object], Usage]:
        """Restore if needed, then compute; the copy of a layer overlaps the compute of the ones before it.

        ``restored`` is called (from any thread) when the last weight has arrived, ``progress`` as work is done,
        ``ended`` with each generated sequence as it ends.
        """
        self._computing = True
        try:
            return self._run(batch, restored, progress, ended or (lambda position, result, usage: None))
        finally:
            self._computing = False

    def _run(
        self, request: RunBatch, restored: Callable[[], None], progress: Callable[[], None], ended: OnEnded
    ) -> tuple[list[object], Usage]:
        began = time.perf_counter()
        evicted = self.evict(request.evict) if request.evict else ()
        evict_s = time.perf_counter() - began
        key = (request.place.service, request.place.dop, request.place.start)
        self._await_image(request.place.image_id, progress)
        skeleton = self.skeleton(request.place)
        # What is small goes to the device first: behind the weights it would wait for the last of them.
        batches = stage(skeleton.model, request.items, request.budget_tokens, self.backend.name)
        self._unpark(skeleton)
        loaded, cold, displaced = self._pin(request.place, key)
        notice = _ArrivalNotice(loaded, restored, self.backend.enter_thread)

        def used() -> Usage:
            arrived_s = notice.arrived_s or time.perf_counter()
            return Usage(
                restored=cold,
                restore_s=arrived_s - loaded.began_s if cold else 0.0,
                restore_bytes=loaded.shard.size_bytes if cold else 0,
                compute_s=time.perf_counter() - (arrived_s if cold else began),
                evict_s=evict_s,
                tokens=sum(len(item.ids) for item in request.items),
                evicted=(*evicted, *displaced),
            )

        try:
            skeleton.team.group = self._group(request)
            self.bind(skeleton, loaded)
            self._use_cores(request.cores)
            skeleton.fences.beat = pulse = _Pulse(progress)
            bound = self._bound(skeleton, loaded)
            results = compute(bound, batches, pulse, lambda position, result: ended(position, result, used()))
        finally:
            notice.join()
            with self._changed:
                self._arena.slots.unpin(key)
        return results, used()

    def release_cache(self) -> None:
        """Evict everything idle and return the allocator's spare blocks, after memory ran out."""
        with self._changed:
            self.evict()
            for skeleton in self._skeletons.values():
                if skeleton.bound is None:
                    skeleton.park()
        self.backend.trim()

    def _bound(self, skeleton: Skeleton, loaded: LoadedService) -> BoundModel:
        end = loaded.shard.size_bytes
        return BoundModel(
            model=skeleton.model,
            group=skeleton.team.group,
            device=self.backend.name,
            arrived=lambda: loaded.transfer.wait(end),
            pooling=skeleton.layout.pooling,
        )

    def _pin(self, place: Placed, key: SlotKey) -> tuple[LoadedService, bool, tuple[str, ...]]:
        with self._changed:
            result = self.restore(place)
            self._arena.slots.pin(key)
            return result

    def _drop(self, key: SlotKey) -> None:
        """Forget a loaded service and park the model that is bound to it."""
        self._arena.slots.evict(key)
        loaded = self._loaded.pop(key, None)
        if loaded is None:
            return
        loaded.transfer.drop()
        for skeleton in self._skeletons.values():
            if skeleton.bound is loaded:
                skeleton.park()

    def _await_image(self, image_id: str, beat: Callable[[], None] | None = None) -> Image:
        """The image, once it is attached; ``beat`` is called while it is not: pinning a large one takes long."""
        deadline_s = time.perf_counter() + ATTACH_S
        with self._changed:
            while image_id not in self._images:
                if time.perf_counter() > deadline_s:
                    raise TimeoutError(f"the image {image_id} was not attached within {ATTACH_S:.0f} s")
                self._changed.wait(PULSE_S)
                if beat is not None:
                    beat()
            image = self._images[image_id]
        if isinstance(image, Exception):
            raise image
        return image

    def make_ready(self, place: Placed) -> None:
        """Build the model of a service that was restored without computing, unless something computes.

        Not beside it: that would slow it down, and transformers changes torch's default dtype of all threads meanwhile.
        """
        with self._building:
            if not self._computing:
                self._built(place)

    def skeleton(self, place: Placed) -> Skeleton:
        """The model of one rank, built without memory at its first use."""
        with self._building:
            return self._built(place)

    def _built(self, place: Placed) -> Skeleton:
        key = (place.image_id, place.dop, place.rank)
        if key in self._skeletons:
            return self._skeletons[key]
        layout = self._await_image(place.image_id).layout
        model: Any = build_skeleton(layout.config, layout.head, layout.dtype, Path(place.image_id))
        team = Team()
        install(model, layout, team, place.rank, place.dop)
        part = shard(layout, place.rank, place.dop)
        buffers = {name: buffer for name, buffer in model.named_buffers() if name not in part.views}
        result = Skeleton(model, Fences(model, part, layout.tied), team, buffers, layout)
        with self._changed:
            kept = {k: v for k, v in self._skeletons.items() if k[0] in self._images}
            self._skeletons = {**kept, key: result}
        return result

    def bind(self, skeleton: Skeleton, loaded: LoadedService) -> None:
        """Point the model's parameters at the loaded service; a no-op if they do already."""
        with self._changed:
            if skeleton.bound is not loaded:
                if skeleton.offset != loaded.offset:
                    bind(skeleton.model, self._arena, loaded.shard, loaded.offset, skeleton.layout.tied)
                    skeleton.offset = loaded.offset
                self._unpark(skeleton)
                skeleton.bound = loaded
                skeleton.fences.transfer = loaded.transfer

    def _unpark(self, skeleton: Skeleton) -> None:
        """Bring the buffers to the device if they are on the host."""
        with self._changed:
            if skeleton.parked:
                place_buffers(skeleton.model, skeleton.buffers, self.backend.name)
                skeleton.parked = False

    def _group(self, request: RunBatch) -> RankGroup:
        """The chunk's group, kept across swaps and met anew when any of its processes is new."""
        place = request.place
        if place.dop == 1:
            return RankGroup(0, 1)
        chunk = (place.start, place.dop)
        name, group = self._groups.get(chunk, ("", None))
        if group is None or name != request.group:
            group = RankGroup.join(Path(request.group), place.rank, place.dop, self.backend, self._collective_s)
            self._groups[chunk] = (request.group, group)
        return group

    def _use_cores(self, cores: tuple[int, ...]) -> None:
        """Compute on the granted cores only (``cpu`` devices): affinity of every thread, and as many threads."""
        if self.backend.name != "cpu" or cores == self._cores or not cores:
            return
        torch.set_num_threads(len(cores))
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)
        self._cores = cores


class _Pulse:
    """Passes signs of life on, but not all of them."""

    def __init__(self, send: Callable[[], None]) -> None:
        self._send = send
        self._sent_s = time.perf_counter()

    def __call__(self) -> None:
        now_s = time.perf_counter()
        if now_s - self._sent_s >= PULSE_S:
            self._sent_s = now_s
            self._send()


class _ArrivalNotice:
    """Waits in a thread until all weights of a service have arrived, then calls ``restored``."""

    def __init__(self, loaded: LoadedService, restored: Callable[[], None], enter_thread: Callable[[], None]) -> None:
        self._loaded, self._restored, self._enter_thread = loaded, restored, enter_thread
        self.arrived_s = 0.0
        self._thread = threading.Thread(target=self._wait, name="notice", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        self._enter_thread()
        try:
            self._loaded.transfer.finish()
        except Exception:  # noqa: BLE001  # the computation meets the same error, and answers with it
            return
        self.arrived_s = time.perf_counter()
        self._restored()

    def join(self) -> None:
        self._thread.join()


#: Requests that may wait in one process; the gateway sends one run at a time.
WAITING_MAX = 1024


def serve(
    connection: socket.socket, device: str, arena_bytes: int, copy_bytes: int, threads: int, collective_s: float
) -> None:
    """Serve the device until the gateway goes away; a device that cannot be had is told in the first frame."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")  # the ranks of a chunk are on one machine
    pipe = MessagePipe(connection)
    try:
        backend = make_backend(device, copy_bytes, threads)
        engine = DeviceEngine(backend, arena_bytes, threads=threads, collective_s=collective_s)
    except Exception as error:  # noqa: BLE001  # no driver, no memory, a torch without CUDA: the gateway tells it
        pipe.send(Failed(request=0, kind=type(error).__name__, message=f"{device}: {error}"))
        return
    runs: queue.Queue[Request] = queue.Queue(WAITING_MAX)
    controls: queue.Queue[Request] = queue.Queue(WAITING_MAX)
    threading.Thread(target=_read, args=(pipe, runs, controls), name="reader", daemon=True).start()
    threading.Thread(target=_run_controls, args=(pipe, engine, controls), name="controls", daemon=True).start()
    pipe.send(Hello(pid=os.getpid()))
    while True:
        number, request = runs.get()
        assert isinstance(request, RunBatch)
        _answer(pipe, engine, number, lambda n=number, a=request: _run(pipe, engine, n, a))  # type: ignore[misc]


def _read(pipe: MessagePipe, runs: queue.Queue[Request], controls: queue.Queue[Request]) -> None:
    """Sort what arrives; exit at once if the gateway is gone."""
    try:
        while True:
            request: Request = pipe.receive()  # type: ignore[assignment]  # our own gateway sends nothing else
            (runs if isinstance(request[1], RunBatch) else controls).put(request)
    except (EOFError, OSError):
        os._exit(0)


def _run_controls(pipe: MessagePipe, engine: DeviceEngine, controls: queue.Queue[Request]) -> None:
    engine.backend.enter_thread()
    while True:
        number, request = controls.get()
        _answer(pipe, engine, number, lambda a=request: (_control(engine, a), Usage()))  # type: ignore[misc]


def _control(engine: DeviceEngine, request: object) -> object:
    match request:
        case Attach():
            engine.attach(request.image)
        case Detach():
            engine.detach(request.image_id)
        case Evict():
            engine.evict(request.services)
        case Restore():
            return _restore(engine, request)
        case _:
            raise TypeError(f"a worker does not know {request!r}")
    return None


def _restore(engine: DeviceEngine, request: Restore) -> bool:
    """Return whether the service is in place. One that does not fit evicts nothing."""
    try:
        loaded, _, _ = engine.restore(request.place, gentle=True)
        loaded.transfer.finish()
        engine.make_ready(request.place)
    except (DoesNotFit, Dropped):
        return False
    return True


def _run(pipe: MessagePipe, engine: DeviceEngine, number: int, request: RunBatch) -> tuple[object, Usage]:
    def ended(position: int, result: object, usage: Usage) -> None:
        pipe.send(Ended(request=number, position=position, value=result, usage=usage))

    results, usage = engine.run(
        request,
        restored=lambda: pipe.send(Progress(request=number, what="restored")),
        progress=lambda: pipe.send(Progress(request=number, what="batch")),
        ended=ended if request.place.rank == 0 and len(request.items) > 1 else None,
    )
    return (results if request.place.rank == 0 else None), usage


def _answer(pipe: MessagePipe, engine: DeviceEngine, number: int, act: Callable[[], tuple[object, Usage]]) -> None:
    """Do it and say how it went. Whatever goes wrong crosses the pipe; the process lives on."""
    try:
        value, usage = act()
    except Exception as error:  # noqa: BLE001  # every failure of a model is an answer
        pipe.send(_failure(engine, number, error))
    else:
        pipe.send(Done(request=number, value=value, usage=usage, resident=engine.resident()))


def _failure(engine: DeviceEngine, number: int, error: Exception) -> Failed:
    reason = Reason.MODEL_ERROR
    if isinstance(error, DoesNotFit) or is_out_of_memory(error):
        reason = Reason.OUT_OF_MEMORY
        # The traceback's frames hold the tensors of the failed batch.
        traceback.clear_frames(error.__traceback__)
        engine.release_cache()
    message = error.message if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
    return Failed(
        request=number,
        kind=type(error).__name__,
        message=message,
        reason=reason,
        broken=reason is not Reason.OUT_OF_MEMORY and not engine.backend.survives(error),
        resident=engine.resident(),
    )
