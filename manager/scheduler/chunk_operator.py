"""The DP operator of buddy chunks: powers of two that split but never glue across nodes (docs/SCHEDULING.md R9)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkOperator:
    """Free chunks as an operator.

    A set of power-of-two requests fits into buddy chunks iff for every level L the requests of at least L,
    counted in chunks of L, are no more than the free chunks of at least L, counted the same way: with nodes
    of eight devices, four nested inequalities, one axis each.
    """

    #: Sizes of the free chunks, merged as far as possible.
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, free: Iterable[tuple[int, int]]) -> ChunkOperator:
        """From chunks as (start, size)."""
        return cls(tuple(size for _, size in free))

    @property
    def levels(self) -> tuple[int, ...]:
        """The sizes that a request can have: 1, 2, 4 ... up to the largest free chunk."""
        largest = max(self.sizes, default=1)
        return tuple(1 << level for level in range(largest.bit_length()))

    @property
    def capacity(self) -> tuple[int, ...]:
        return tuple(sum(size // level for size in self.sizes if size >= level) for level in self.levels)

    def demand(self, units: int) -> tuple[int, ...]:
        """A request that is no power of two takes the next one; one above every free chunk never fits."""
        size = chunk_size(units)
        levels = self.levels
        if size > levels[-1]:
            return tuple(count + 1 for count in self.capacity)
        return tuple(size // level if level <= size else 0 for level in levels)


def chunk_size(units: int) -> int:
    """The size of the smallest chunk that holds ``units`` devices."""
    return 1 << (units - 1).bit_length()


def take(free: list[tuple[int, int]], chunk: tuple[int, int]) -> None:
    """Remove ``chunk`` from the free chunks in place, splitting the one that contains it into buddies."""
    start, size = chunk
    whole = next(c for c in free if c[0] <= start and start + size <= c[0] + c[1])
    free.remove(whole)
    low, length = whole
    while length > size:
        length //= 2
        if start >= low + length:
            free.append((low, length))
            low += length
        else:
            free.append((low + length, length))


def best_fit(free: Iterable[tuple[int, int]], size: int) -> tuple[int, int] | None:
    """A place for ``size`` devices in the smallest free chunk that holds it, the lowest such; None where none."""
    fitting = [chunk for chunk in free if chunk[1] >= size]
    if not fitting:
        return None
    start, _ = min(fitting, key=lambda chunk: (chunk[1], chunk[0]))
    return start, size


def warm_fit(free: Iterable[tuple[int, int]], size: int, warm: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """The place among ``warm`` chunks of exactly ``size`` that is wholly free, in the smallest free chunk."""
    chunks = list(free)
    fits = [
        (outer[1], place)
        for place in warm
        if place[1] == size
        for outer in chunks
        if outer[0] <= place[0] and place[0] + size <= outer[0] + outer[1]
    ]
    return min(fits)[1] if fits else None
