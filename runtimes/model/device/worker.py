"""The process of one device: a reader, a hand for attaching and prefetching, and the main thread, which computes."""

from __future__ import annotations

import os
import queue
import socket
import threading
import traceback
from collections.abc import Callable

from manager.errors import Reason, Unsupported
from runtimes.model.device.arena import DoesNotFit
from runtimes.model.device.backend import Dropped, make_backend
from runtimes.model.device.messages import (
    Attach,
    Detach,
    Done,
    Evict,
    Failed,
    Hello,
    Ping,
    Progress,
    Request,
    Restore,
    RunBatch,
    Usage,
)
from runtimes.model.device.pipe import MessagePipe
from runtimes.model.engine.compute import is_out_of_memory
from runtimes.model.engine.device_engine import DeviceEngine

#: Requests that may wait in one process; the gateway sends one run at a time.
WAITING_MAX = 1024


def serve(
    connection: socket.socket, device: str, arena_bytes: int, copy_bytes: int, threads: int, collective_s: float
) -> None:
    """Serve the device until the gateway goes away; a device that cannot be had is told in the first frame."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo")  # the ranks of a chunk are on one machine
    channel = MessagePipe(connection)
    try:
        backend = make_backend(device, copy_bytes, threads)
        engine = DeviceEngine(backend, arena_bytes, threads=threads, collective_s=collective_s)
    except Exception as error:  # noqa: BLE001  # no driver, no memory, a torch without CUDA: the gateway tells it
        channel.send(Failed(request=0, kind=type(error).__name__, message=f"{device}: {error}"))
        return
    runs: queue.Queue[Request] = queue.Queue(WAITING_MAX)
    errands: queue.Queue[Request] = queue.Queue(WAITING_MAX)
    threading.Thread(target=_read, args=(channel, runs, errands), name="reader", daemon=True).start()
    threading.Thread(target=_run_errands, args=(channel, engine, errands), name="hand", daemon=True).start()
    channel.send(Hello(pid=os.getpid()))
    while True:
        number, asked = runs.get()
        assert isinstance(asked, RunBatch)
        _answer(channel, engine, number, lambda n=number, a=asked: _run(channel, engine, n, a))  # type: ignore[misc]


def _read(channel: MessagePipe, runs: queue.Queue[Request], errands: queue.Queue[Request]) -> None:
    """Sort what arrives; when the gateway is gone the process goes too, whatever it computes."""
    try:
        while True:
            request: Request = channel.receive()  # type: ignore[assignment]  # our own gateway sends nothing else
            (runs if isinstance(request[1], RunBatch) else errands).put(request)
    except (EOFError, OSError):
        os._exit(0)


def _run_errands(channel: MessagePipe, engine: DeviceEngine, errands: queue.Queue[Request]) -> None:
    engine.backend.enter_thread()
    while True:
        number, asked = errands.get()
        _answer(channel, engine, number, lambda a=asked: _errand(engine, a))  # type: ignore[misc]


def _errand(engine: DeviceEngine, asked: object) -> tuple[object, Usage]:
    match asked:
        case Attach():
            engine.attach(asked.image)
        case Detach():
            engine.detach(asked.image_id)
        case Evict():
            return None, Usage(evicted=engine.evict(asked.services))
        case Restore():
            return _restore(engine, asked)
        case Ping():
            pass
        case _:
            raise TypeError(f"a worker does not know {asked!r}")
    return None, Usage()


def _restore(engine: DeviceEngine, asked: Restore) -> tuple[object, Usage]:
    """Whether the service is in place. One that does not fit costs nobody else the place."""
    evicted = engine.evict(asked.evict) if asked.evict else ()
    try:
        seat, cold, _ = engine.restore(asked.place, gentle=True)
        seat.transfer.finish()
        engine.make_ready(asked.place)
    except (DoesNotFit, Dropped):
        return False, Usage(evicted=evicted)
    return True, Usage(restored=cold, restore_bytes=seat.shard.size_bytes if cold else 0, evicted=evicted)


def _run(channel: MessagePipe, engine: DeviceEngine, number: int, asked: RunBatch) -> tuple[object, Usage]:
    results, usage = engine.run(
        asked,
        restored=lambda: channel.send(Progress(request=number, what="restored")),
        progress=lambda: channel.send(Progress(request=number, what="batch")),
    )
    return (results if asked.place.rank == 0 else None), usage


def _answer(channel: MessagePipe, engine: DeviceEngine, number: int, act: Callable[[], tuple[object, Usage]]) -> None:
    """Do it and say how it went. Whatever goes wrong crosses the pipe; the process lives on."""
    try:
        value, usage = act()
    except Exception as error:  # noqa: BLE001  # every failure of a model is an answer
        channel.send(_failure(engine, number, error))
    else:
        channel.send(Done(request=number, value=value, usage=usage, resident=engine.resident()))


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
