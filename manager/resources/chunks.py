"""The free chunks of a pool of devices, split and merged as buddies (paper, GPU Manager via EOE)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from manager.chunk import Chunk, power_at_least


def split(start: int, count: int) -> Iterator[Chunk]:
    """Yield the fewest aligned chunks that make up the interval; ``start`` is aligned for the largest."""
    assert count >= 0, f"{count} devices"
    while count:
        size = 1 << (count.bit_length() - 1)
        yield Chunk(start, size)
        start, count = start + size, count - size


class Chunks:
    """The free chunks of some regions (nodes) in one index space; a chunk never crosses a region.

    A region of 6 devices is a chunk of 4 and one of 2: buddies merge only while they stay inside it.
    """

    def __init__(self) -> None:
        self._free: set[Chunk] = set()
        self._ends: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self.total = 0
        self.free_units = 0

    def add_region(self, start: int, count: int) -> None:
        """Add devices [start, start + count); ``start`` is a multiple of the power of two not below ``count``."""
        assert start % power_at_least(count) == 0, f"region [{start}, {start + count}) is not aligned"
        for device in range(start, start + count):
            self._start_of[device] = start
        self._ends[start] = start + count
        self._free.update(split(start, count))
        self.total += count
        self.free_units += count

    def remove_region(self, start: int) -> None:
        """Remove a region of which nothing is allocated."""
        end = self._ends.pop(start)
        gone = {chunk for chunk in self._free if start <= chunk.start < end}
        assert sum(size for _, size in gone) == end - start, f"region [{start}, {end}) is in use"
        self._free -= gone
        self.total -= end - start
        self.free_units -= end - start
        for device in range(start, end):
            del self._start_of[device]

    @property
    def free(self) -> tuple[Chunk, ...]:
        """Free chunks, merged as far as possible, ascending."""
        return tuple(sorted(self._free))

    def host(self, chunk: Chunk) -> Chunk | None:
        """Return the free chunk that contains ``chunk``; None if it is not free or not aligned."""
        start, size = chunk
        if size <= 0 or size & (size - 1) or start % size:
            return None
        while size <= self.total:
            if (start, size) in self._free:
                return Chunk(start, size)
            size *= 2
            start -= start % size
        return None

    def allocate(self, chunk: Chunk) -> None:
        """Take a free aligned chunk, splitting the one that holds it."""
        found = self.host(chunk)
        assert found is not None, f"chunk {chunk} is not free: {self.free}"
        self._free.remove(found)
        self._free.update(found.without(chunk))
        self.free_units -= chunk.size

    def release(self, chunk: Chunk) -> None:
        """Give a chunk back and merge it with its buddies."""
        start, size = chunk
        self.free_units += size
        region = self._start_of[start]
        end = self._ends[region]
        while (buddy := Chunk(start ^ size, size)) in self._free and region <= min(start, buddy.start):
            if min(start, buddy.start) + 2 * size > end:
                break
            self._free.remove(buddy)
            start, size = min(start, buddy.start), 2 * size
        self._free.add(Chunk(start, size))

    def check(self, held: Iterable[Chunk]) -> None:
        """Assert that free and held chunks cover every device exactly once."""
        devices = [device for chunk in (*self._free, *held) for device in chunk.devices]
        assert sorted(devices) == sorted(self._start_of), f"free {self.free}, held {sorted(held)}"
