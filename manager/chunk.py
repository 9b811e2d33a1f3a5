"""The chunk: consecutive devices; what serves an action is an aligned power of two of them (paper, GPU Manager)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Chunk(NamedTuple):
    """The devices [start, start + size)."""

    start: int
    size: int

    @property
    def end(self) -> int:
        """The first device beyond it."""
        return self.start + self.size

    @property
    def devices(self) -> range:
        return range(self.start, self.start + self.size)

    def contains(self, other: Chunk) -> bool:
        return self.start <= other.start and other.end <= self.end

    def meets(self, other: Chunk) -> bool:
        """Return whether the two have a device in common."""
        return self.start < other.end and other.start < self.end

    def parts(self, size: int) -> Iterator[Chunk]:
        """Yield the chunks of ``size`` that it is made of, ascending; none if it is smaller."""
        for start in range(self.start, self.start + self.size - size + 1, size):
            yield Chunk(start, size)

    def without(self, part: Chunk) -> Iterator[Chunk]:
        """Yield the buddies that are left when ``part``, which it contains, is taken; the largest first."""
        start, size = self
        while size > part.size:
            size //= 2
            upper = start + size
            if part.start >= upper:
                yield Chunk(start, size)
                start = upper
            else:
                yield Chunk(upper, size)

    def moved(self, devices: int) -> Chunk:
        """Return the same chunk, counted from elsewhere."""
        return Chunk(self.start + devices, self.size)


def power_at_least(count: int) -> int:
    """Return the least power of two not below ``count``: the size of the smallest chunk that holds as many."""
    return 1 << max(0, count - 1).bit_length()


def outside(free: Iterable[Chunk], kept: Iterable[Chunk]) -> list[Chunk]:
    """Return what is left of free chunks when the places in ``kept`` are taken away; buddies again."""
    left = list(free)
    for place in kept:
        whole = next((chunk for chunk in left if chunk.contains(place)), None)
        left = [chunk for chunk in left if not chunk.meets(place)] + ([*whole.without(place)] if whole else [])
    return left
