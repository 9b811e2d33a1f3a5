"""Restores under way in a simulation: services that travel to devices, one after the other on each."""

from __future__ import annotations

from dataclasses import dataclass

from manager.chunk import Chunk
from manager.lease import Lease


@dataclass(frozen=True, slots=True)
class PendingRestore:
    """A service on its way."""

    node: str
    service: str
    chunk: Chunk
    arrives_s: float


class PendingRestores:
    """What is under way. The link of a device carries one service at a time, in the order that they were asked for."""

    def __init__(self) -> None:
        self._under_way: list[PendingRestore] = []
        self.count = 0

    def add(self, node: str, service: str, chunk: Chunk, from_s: float, restore_s: float) -> float:
        """Send a service on its way once the link is free, from ``from_s`` on; the instant of its arrival."""
        arrives_s = max(from_s, self.busy_until_s(node, chunk, from_s)) + restore_s
        self._under_way.append(PendingRestore(node, service, chunk, arrives_s))
        self.count += 1
        return arrives_s

    def busy_until_s(self, node: str, chunk: Chunk, now_s: float) -> float:
        """When the links of these devices are free; ``now_s`` where they are."""
        self._under_way = [one for one in self._under_way if one.arrives_s > now_s]
        reaching = [one.arrives_s for one in self._under_way if one.node == node and one.chunk.meets(chunk)]
        return max(reaching, default=now_s)

    def of(self, service: str | None, lease: Lease, now_s: float) -> float:
        """When a leased action's own service arrives, where it is on its way to that very place; else ``now_s``."""
        where = (lease.node, service, lease.chunk)
        mine = (one.arrives_s for one in self._under_way if (one.node, one.service, one.chunk) == where)
        return max(now_s, max(mine, default=now_s))
