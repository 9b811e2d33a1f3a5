"""Connections: how many one door has open, and what is said to one too many."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.metrics import Metrics
from manager.errors import CapacityExceeded

#: Seconds that a refused connection may take to read its refusal.
LINGER_S = 1.0
RETRY_AFTER_S = 1.0
#: Refused connections that may linger at a time: they too take descriptors.
LEAVING_MAX = 64
#: Seconds in which resets of calls are counted together.
RESETS_S = 60.0


@dataclass(slots=True)
class Resets:
    """How many calls of one connection were reset lately: making and dropping them costs its peer nothing."""

    limit: int
    #: Seconds on the caller's clock at which the present minute ends.
    until_s: float = 0.0
    count: int = 0

    def exceeded(self, now_s: float, more: int = 1) -> bool:
        """Count ``more`` of them; whether they are too many for this minute."""
        if now_s >= self.until_s:
            self.until_s, self.count = now_s + RESETS_S, 0
        self.count += more
        return self.count > self.limit


@dataclass(slots=True)
class Connections:
    """How many are open, how many may be, and how many were refused."""

    limit: int = 8192
    open: int = 0
    refused: int = 0
    #: Refused ones that are still there.
    leaving: int = 0

    def measured_by(self, metrics: Metrics, door: str) -> None:
        """Show how many are open at a door, and how many it refused."""
        metrics.watch(f"tangram_{door}_connections", f"Connections open at the door {door}", lambda: self.open)
        full = f"Connections refused at the door {door} because too many were open"
        metrics.watch(f"tangram_{door}_connections_refused", full, lambda: self.refused, counter=True)

    def enter(self, component: str) -> CapacityExceeded | None:
        """One more is open from now on, until `leave`; or why it may not be."""
        if self.open < self.limit:
            self.open += 1
            return None
        self.refused += 1
        message = f"{self.limit} connections are open already (server.connections_max, and the machine's open files)"
        return CapacityExceeded(message, component=component, retry_after_s=RETRY_AFTER_S)

    @contextmanager
    def refusing(self) -> Iterator[bool]:
        """Hold a refused connection within the block; yield whether it may stay until it has read its refusal."""
        self.leaving += 1
        try:
            yield self.leaving <= LEAVING_MAX
        finally:
            self.leaving -= 1

    def leave(self) -> None:
        """One that had entered is closed."""
        self.open -= 1


async def ended_chore(task: asyncio.Task[None]) -> None:
    """Cancel a chore, and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def address_of(listener: socket.socket) -> str:
    """Return where a socket listens, as people write it."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
