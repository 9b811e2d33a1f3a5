"""A relay between a node and its gateway: the network that a test cuts, blocks in one direction, or slows down."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Literal, TypeVar

Direction = Literal["to the gateway", "to the node"]
#: Pieces of one direction that are under way at most, and bytes of one.
PIECES, PIECE_BYTES = 1024, 64 * 2**10
#: Seconds until a lost packet is sent again.
AGAIN_S = 0.2
START_S = 30.0
_T = TypeVar("_T")


class NodeRelay:
    """Forwards connections to a gateway's door. `cut`, `block` and `slow` spoil that until `mend`."""

    def __init__(self, gateway: str) -> None:
        host, _, port = gateway.rpartition(":")
        self._gateway = (host, int(port))
        self._cut = False
        self._delay_s = self._lost_share = 0.0
        self._chance = random.Random(0)
        #: Pieces that had to be sent again.
        self.lost = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._open: dict[Direction, asyncio.Event] = {}
        self.address = self._do(self._listen())

    def cut(self) -> None:
        """Close every connection, and take none."""
        self._do(self._cut_all())

    def block(self, direction: Direction) -> None:
        """Deliver nothing in one direction; it is delivered once that is mended."""
        self._loop.call_soon_threadsafe(self._open[direction].clear)

    def slow(self, delay_s: float, lost_share: float = 0.0) -> None:
        """Deliver each piece so much later, and of some what a stream sees of a lost packet: it waits to be sent again.

        What comes behind such a piece waits for it.
        """
        self._delay_s, self._lost_share = delay_s, lost_share

    def mend(self) -> None:
        """Deliver everything at once again."""
        self._cut, self._delay_s, self._lost_share = False, 0.0, 0.0
        for passage in self._open.values():
            self._loop.call_soon_threadsafe(passage.set)

    def close(self) -> None:
        """Close everything for good."""
        self._do(self._cut_all())
        self._do(self._stop_listening())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()

    def _do(self, work: Coroutine[object, object, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    async def _listen(self) -> str:
        self._open = {"to the gateway": asyncio.Event(), "to the node": asyncio.Event()}
        for passage in self._open.values():
            passage.set()
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def _stop_listening(self) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _cut_all(self) -> None:
        self._cut = True
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._gateway)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, far_writer, "to the gateway"))
                group.create_task(self._forward(far_reader, writer, "to the node"))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass  # cut, or one side has hung up
        finally:
            for each in writers:
                each.transport.abort()
            self._connections.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES)
        delivering = asyncio.ensure_future(self._deliver(pieces, writer, direction))
        try:
            while data := await reader.read(PIECE_BYTES):
                lost = self._chance.random() < self._lost_share
                self.lost += lost
                await pieces.put((self._loop.time() + self._delay_s + lost * AGAIN_S, data))
            raise ConnectionResetError("one side has hung up")
        finally:
            delivering.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await delivering

    async def _deliver(
        self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        while True:
            due_s, data = await pieces.get()
            await asyncio.sleep(max(0.0, due_s - self._loop.time()))
            await self._open[direction].wait()
            writer.write(data)
            await writer.drain()
