"""Replicas: what is worth a copy in free memory of idle devices, so that the next to ask for it starts warm there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from manager.resources.chunk import Chunk
from manager.resources.residency import Residency, ResidentCopy

#: Uses in the last seconds, smoothed as `Demand` does, below which a service is not in use: one, a dozen seconds ago.
LEAST_RECENT = 0.1


def replicas(residency: Residency, recent: Callable[[str], float], free: Iterable[Chunk]) -> Iterator[ResidentCopy]:
    """Copies for which there is room in ``free`` chunks, the services most in use first, each at its present width.

    Lazy: who takes one makes it resident before asking for the next. Nothing is evicted, and room is left for every
    service that is nowhere: where not all of them fit, copies would have it that those to come evict each other.
    """
    spare_bytes = residency.spare_bytes()
    widths = residency.widths()
    used = [(recent(service), service) for service in widths if residency.is_replicable(service)]
    chunks = tuple(free)
    for uses, service in sorted(used, key=lambda one: (-one[0], one[1])):
        if uses < LEAST_RECENT:
            return
        size = widths[service]
        for first, count in chunks:
            for start in range(first, first + count, size) if count >= size else ():
                copy = ResidentCopy(service, (start, size))
                need_bytes = size * residency.size_bytes(copy)
                if copy not in residency and need_bytes <= spare_bytes and _fits(residency, copy):
                    spare_bytes -= need_bytes
                    yield copy


def _fits(residency: Residency, copy: ResidentCopy) -> bool:
    size_bytes = residency.size_bytes(copy)
    return all(residency.room_bytes(device) >= size_bytes for device in copy.devices)
