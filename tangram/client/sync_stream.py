"""Calls over one WebSocket, for the synchronous client.

Written by hand, as is its twin `tangram.client.aio_stream`, which does the work, on an event loop in a thread.
"""

from __future__ import annotations

import asyncio
import ssl
import threading

import httpx

from tangram.client.aio_stream import AsyncCallStream
from tangram.client.requests import Bearer
from tangram.stream import StreamAnswer, StreamCall, StreamWait


class CallStream:
    """The stream of calls of one client in one process: it opens when two threads call at once, and again."""

    def __init__(self, server: str, bearer: Bearer, trust: ssl.SSLContext, proxy: httpx.Proxy | None) -> None:
        self._stream = AsyncCallStream(server, bearer, trust, proxy)
        self._lock = threading.Lock()
        #: Where the stream lives, from its first use on.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread

    @property
    def has_opened(self) -> bool:
        """Whether a gateway has opened it, now or before."""
        return self._stream.has_opened

    def enter(self) -> None:
        """One more call is in flight, until `leave`."""
        with self._lock:
            self._stream.enter()

    def leave(self) -> None:
        with self._lock:
            self._stream.leave()

    def carry(self, message: StreamCall | StreamWait) -> StreamAnswer | None:
        """Return the answer to a call; None if it has to go over HTTP. Raises ConnectionFailed."""
        if not self._stream.carries():
            return None
        with self._lock:  # before `close`, or not at all
            answer = asyncio.run_coroutine_threadsafe(self._stream.carry(message), self._living())
        try:
            return answer.result()
        except BaseException:
            answer.cancel()
            raise

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._stream.close(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()

    def _living(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the thread, which is begun if there is none. With the lock."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run, args=(self._loop,), name="tangram-stream", daemon=True)
            self._thread.start()
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(_ends())
    finally:
        loop.close()


async def _ends() -> None:
    """Let calls end, for which threads wait: the stream is closed."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
    await asyncio.sleep(0)  # who waits is told a turn later
