"""The process of one device: one thread reads, one attaches, restores and evicts, and the main thread computes."""

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
    Ended,
    Evict,
    Failed,
    Hello,
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
        number, asked = runs.get()
        assert isinstance(asked, RunBatch)
        _answer(pipe, engine, number, lambda n=number, a=asked: _run(pipe, engine, n, a))  # type: ignore[misc]


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
        number, asked = controls.get()
        _answer(pipe, engine, number, lambda a=asked: (_control(engine, a), Usage()))  # type: ignore[misc]


def _control(engine: DeviceEngine, asked: object) -> object:
    match asked:
        case Attach():
            engine.attach(asked.image)
        case Detach():
            engine.detach(asked.image_id)
        case Evict():
            engine.evict(asked.services)
        case Restore():
            return _restore(engine, asked)
        case _:
            raise TypeError(f"a worker does not know {asked!r}")
    return None


def _restore(engine: DeviceEngine, asked: Restore) -> bool:
    """Return whether the service is in place. One that does not fit evicts nothing."""
    try:
        loaded, _, _ = engine.restore(asked.place, gentle=True)
        loaded.transfer.finish()
        engine.make_ready(asked.place)
    except (DoesNotFit, Dropped):
        return False
    return True


def _run(pipe: MessagePipe, engine: DeviceEngine, number: int, asked: RunBatch) -> tuple[object, Usage]:
    def ended(position: int, result: object, usage: Usage) -> None:
        pipe.send(Ended(request=number, position=position, value=result, usage=usage))

    results, usage = engine.run(
        asked,
        restored=lambda: pipe.send(Progress(request=number, what="restored")),
        progress=lambda: pipe.send(Progress(request=number, what="batch")),
        ended=ended if asked.place.rank == 0 and len(asked.items) > 1 else None,
    )
    return (results if asked.place.rank == 0 else None), usage


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
