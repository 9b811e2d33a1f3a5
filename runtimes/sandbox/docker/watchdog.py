"""The watchdog of an engine: blocking calls to it in threads, given up if it falls silent.

A request may take its time (a pull, a commit, a creation under load), but a living engine answers a ping meanwhile. One
that does not is asked nothing more until it answers again: callers are refused at once instead of queueing up.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import structlog

from manager.errors import CapacityExceeded

logger = structlog.get_logger("sandbox.engine")

COMPONENT = "sandbox.container"
T = TypeVar("T")


class EngineWatchdog:
    """At most ``threads`` calls at a time, none of which outlasts the engine's answers by more than ``silence_s``."""

    def __init__(self, ping: Callable[[float], bool], *, threads: int, silence_s: float) -> None:
        #: Blocking: whether the engine answers within so many seconds.
        self._ping = ping
        self._step_s = silence_s / 2
        self._threads = DaemonThreads(threads, "docker")
        self._pinging = DaemonThreads(1, "docker-ping")
        self._asking: asyncio.Task[None] | None = None
        self._reviving: asyncio.Task[None] | None = None
        self._silent = False

    @property
    def silent(self) -> bool:
        """Whether it did not answer the last ping."""
        return self._silent

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread; raises what it raises, and CapacityExceeded if the engine is or falls silent.

        Given up or cancelled, work that has begun goes on unseen, and work that waits for a thread is dropped.
        """
        if self._silent:
            raise self._refusal()
        future = asyncio.wrap_future(self._threads.submit(work))
        future.add_done_callback(_seen)
        try:
            while not (await asyncio.wait([future], timeout=self._step_s))[0]:
                if not await self._answers() and not future.done():
                    raise self._refusal()
        finally:
            future.cancel()
        return future.result()

    async def look(self) -> bool:
        """Return whether it answers now, which one that refuses connections does not; no call is refused for it."""
        if self._silent:
            return False
        return await asyncio.wrap_future(self._pinging.submit(lambda: self._ping(self._step_s)))

    async def close(self) -> None:
        """Wait for what runs, as long as the engine answers."""
        tasks = [task for task in (self._asking, self._reviving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        patience_s = 0.0 if self._silent else 2 * self._step_s
        for threads in (self._pinging, self._threads):
            await asyncio.to_thread(threads.close, patience_s)

    # --- inside

    def _refusal(self) -> CapacityExceeded:
        message = "the Docker engine does not answer"
        return CapacityExceeded(message, component=COMPONENT, retry_after_s=self._step_s)

    async def _answers(self) -> bool:
        """Return whether it answers; it is asked once for all who wait."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.shield(self._asking)
        return not self._silent

    async def _ask(self) -> None:
        answers = await asyncio.wrap_future(self._pinging.submit(lambda: self._ping(self._step_s)))
        if answers and self._silent:
            logger.info("the engine answers again")
        elif not answers and not self._silent:
            logger.warning("the engine does not answer", within_s=self._step_s)
        self._silent = not answers
        if self._silent and (self._reviving is None or self._reviving.done()):
            self._reviving = asyncio.create_task(self._revive())

    async def _revive(self) -> None:
        while self._silent:
            await asyncio.sleep(self._step_s)
            await self._ask()


class DaemonThreads:
    """Threads for blocking calls. An executor's hold up the end of the program until the last call returns."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Return the future result of ``work``, which is dropped if that is cancelled before a thread is free."""
        future: Future[T] = Future()
        self._waiting.put((future, work))
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._limit:
            thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def close(self, within_s: float) -> None:
        """Drop what waits, and give what runs so many seconds. Blocks."""
        while not self._waiting.empty():
            item = self._waiting.get()
            if item is not None:
                item[0].cancel()
        for _ in self._threads:
            self._waiting.put(None)
        deadline_s = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _serve(self) -> None:
        while (item := self._next()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001  # whoever asked is told
                    future.set_exception(error)

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            self._idle.release()
            return self._waiting.get()


def _seen(future: asyncio.Future[T]) -> None:
    """Mark a failure as seen: a caller that gave up does not come back for it."""
    if not future.cancelled():
        future.exception()
