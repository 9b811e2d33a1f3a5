"""Two ends of a stream in memory, which can be cut between any two frames."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from manager.clock import Clock
from runtimes.node.protocol import LinkSettings, NodeLink, Pulse
from tangram.frames import HEADER

#: Bytes beyond which who writes is told to wait.
HIGH_BYTES = 64 * 2**10
#: Beats that no test waits for.
CALM = LinkSettings(beat_s=3600.0, silent_s=7200.0)
#: Those that the present test has made.
ENDS: list[NodeLink] = []


class MemoryTransport(asyncio.Transport):
    """One end: what is written arrives at the other end in the next turn of the loop, frame by frame."""

    def __init__(self, protocol: NodeLink, on_frame: Callable[[int], bool]) -> None:
        super().__init__({"peername": "memory"})
        self.protocol = protocol
        self.peer: MemoryTransport | None = None
        #: Told the kind of each frame; says whether it arrives. One that does not is the last.
        self._on_frame = on_frame
        self._unframed = bytearray()
        self._loop = asyncio.get_running_loop()
        self._closing = False
        #: While set, nothing is taken from what is written.
        self.stuck = False
        self.held = bytearray()
        self._paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing:
            return
        if self.stuck:
            self.held += data
            if len(self.held) > HIGH_BYTES and not self._paused:
                self._paused = True
                self.protocol.pause_writing()
            return
        self._unframed += data
        while len(self._unframed) >= HEADER.size and not self._closing:
            size_bytes, kind = HEADER.unpack_from(self._unframed)
            end = HEADER.size + size_bytes
            if len(self._unframed) < end:
                break
            frame = bytes(self._unframed[:end])
            del self._unframed[:end]
            if not self._on_frame(kind):
                self.abort()
                return
            self._loop.call_soon(self._arrive, frame)

    def release(self) -> None:
        """Take what is written again, what was held first."""
        self.stuck = False
        held, self.held = bytes(self.held), bytearray()
        if self._paused:
            self._paused = False
            self.protocol.resume_writing()
        self.write(held)

    def _arrive(self, frame: bytes) -> None:
        if self.peer is not None and not self.peer._closing:
            self.peer.protocol.data_received(frame)

    def get_write_buffer_size(self) -> int:
        return len(self.held)

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._loop.call_soon(self.protocol.connection_lost, None)
        if self.peer is not None:
            self._loop.call_soon(self.peer.close)


def pair(
    on_frame: Callable[[int], bool] = lambda kind: True,
    settings: LinkSettings = CALM,
    clock: Clock | None = None,
    pulse: Pulse | None = None,
) -> tuple[NodeLink, NodeLink]:
    """Return the two ends of a link; ``on_frame`` is told every frame of both, and says whether it arrives."""
    ends = [_end(on_frame, settings, clock, pulse) for _ in range(2)]
    ends[0][1].peer, ends[1][1].peer = ends[1][1], ends[0][1]
    return ends[0][0], ends[1][0]


def _end(
    on_frame: Callable[[int], bool], settings: LinkSettings, clock: Clock | None, pulse: Pulse | None = None
) -> tuple[NodeLink, MemoryTransport]:
    link = NodeLink(settings, clock=clock, pulse=pulse)
    transport = MemoryTransport(link, on_frame)
    link.connection_made(transport)
    ENDS.append(link)
    return link, transport


async def close_all() -> None:
    """Close every link of the present test."""
    for link in ENDS:
        link.close("the end of the test")
    for link in ENDS:
        await link.wait_closed()
    ENDS.clear()
