"""The forecast: a pool's places as they will be, played forward in a copy that a look ahead may change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from manager.resources.chunk import Chunk, Chunks, power_at_least
from manager.scheduler.chunk_operator import best_fit, take, warm_fit
from manager.scheduler.policy import ChunkView


class Forecast:
    """Free and resident chunks after some ends and starts that have not happened yet."""

    def __init__(self, chunks: Chunks, seen: ChunkView) -> None:
        """``chunks`` is changed from now on: it must be a copy. ``seen`` is how the pool looks now."""
        self._chunks = chunks
        self._seen = seen
        self._resident = dict(seen.resident)

    @property
    def free(self) -> int:
        return self._chunks.free_units

    def end(self, chunk: Chunk) -> None:
        """What computes on ``chunk`` is over."""
        self._chunks.release(chunk)

    def start(self, service: str, units: int, wish: Chunk | None) -> tuple[Chunk, float] | None:
        """Place an action, on the chunk that its policy wished for: where, and the seconds of the restore.

        None where the place is not free: the policy's wish rests on more than a forecast knows.
        """
        size, free = power_at_least(units), self._chunks.free
        warm = self._resident.get(service, ())
        chunk = wish or warm_fit(free, size, warm) or best_fit(free, size)
        if chunk is None or chunk[1] != size or self._chunks.host(chunk) is None:
            return None
        self._chunks.allocate(chunk)
        if not service or chunk in warm:
            return chunk, 0.0
        self._resident[service] = tuple(sorted((*warm, chunk)))
        return chunk, self._seen.restore_s(service, size)

    def fitting(self, minima: Iterable[int]) -> int:
        """How many actions could start together at their minimum, first come first served."""
        free = list(self._chunks.free)
        count = 0
        for units in minima:
            place = best_fit(free, power_at_least(units))
            if place is None:
                break
            take(free, place)
            count += 1
        return count

    def view(self) -> ChunkView:
        """As the policy sees it; what would be evicted is judged by what is resident now."""
        return replace(self._seen, free=self._chunks.free, resident=dict(self._resident))
