"""The bytes of one transfer: what arrives waits in a bounded window, what leaves waits for room in the other's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from manager.errors import CodedError
from runtimes.node.files.messages import FilesPiece, FilesTaken
from runtimes.node.link import NodeLink
from runtimes.node.wire import ChannelError

#: Bytes of one piece: others have a turn of both loops between two of them.
PIECE_BYTES = 16 * 2**10
#: Bytes that are sent ahead of the other side's word that it has taken some. An action's frame waits behind what of
#: them is still to be taken, of each transfer: milliseconds.
AHEAD_BYTES = 256 * 2**10
#: Bytes that the other side may send ahead. Gateways and nodes of before sent so much.
WINDOW_BYTES = 2**20


class Inflow:
    """The pieces that arrive, in order, for one reader."""

    def __init__(self, transfer: int, link: NodeLink) -> None:
        self._transfer = transfer
        self._link = link
        self._waiting: deque[bytes] = deque()
        self._held_bytes = self._untold_bytes = 0
        self._whole = False
        self._error: CodedError | None = None
        self._changed = asyncio.Event()

    def take(self, data: bytes) -> None:
        """A piece has arrived; raises ChannelError for more than there is room for."""
        self._held_bytes += len(data)
        if self._held_bytes + self._untold_bytes > WINDOW_BYTES:
            raise ChannelError(f"more than {WINDOW_BYTES} bytes of a file were sent ahead")
        if data:
            self._waiting.append(data)
        else:
            self._whole = True
        self._changed.set()

    def fail(self, error: CodedError) -> None:
        """Nothing more comes, and its reader is told why once it has had what came."""
        self._error = self._error or error
        self._changed.set()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the bytes as they come, to the last one; raises what `fail` was given if that did not come."""
        while True:
            while self._waiting:
                data = self._waiting.popleft()
                told = self._tell_taken(len(data))
                yield data
                if told:
                    await asyncio.sleep(0)  # who takes them may not wait: a window of pieces would be one turn
            if self._whole:
                return
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()

    def _tell_taken(self, size_bytes: int) -> bool:
        """Tell of what was taken, a quarter of what is sent ahead at once; return whether it was told."""
        self._held_bytes -= size_bytes
        self._untold_bytes += size_bytes
        if self._untold_bytes < AHEAD_BYTES // 4:
            return False
        self._link.send(FilesTaken(self._transfer, self._untold_bytes))
        self._untold_bytes = 0
        return True


class Outflow:
    """The pieces that leave."""

    def __init__(self, transfer: int, link: NodeLink) -> None:
        self._transfer = transfer
        self._link = link
        #: Bytes that were sent, and not taken as far as is known.
        self._ahead_bytes = 0
        self._piece_bytes = min(PIECE_BYTES, link.settings.frame_max_bytes // 2)
        self._changed = asyncio.Event()

    def taken(self, size_bytes: int) -> None:
        """The other side has room again; raises ChannelError for more than was ever sent."""
        self._ahead_bytes -= size_bytes
        if size_bytes <= 0 or self._ahead_bytes < 0:
            raise ChannelError("more bytes of a file were taken than were sent")
        self._changed.set()

    async def send(self, chunks: AsyncIterator[bytes]) -> None:
        """Send all of it, one piece whenever the link has passed on what it had; raises what ``chunks`` raises."""
        async for chunk in chunks:
            for start in range(0, len(chunk), self._piece_bytes):
                await self._send(chunk[start : start + self._piece_bytes])
        self._link.send(FilesPiece(self._transfer, b""))

    async def _send(self, piece: bytes) -> None:
        while self._ahead_bytes >= AHEAD_BYTES:  # so that it is full: some only tell of so much at once
            self._changed.clear()
            await self._changed.wait()
        self._ahead_bytes += len(piece)
        self._link.send(FilesPiece(self._transfer, piece))
        await self._link.drained()
        await asyncio.sleep(0)  # where there is room, nothing above has waited: a window of pieces would be one turn
