"""The DP operator of buddy chunks: powers of two that split but never glue across nodes (docs/SCHEDULING.md R9)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from manager.chunk import Chunk, power_at_least


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
    def of(cls, free: Iterable[Chunk]) -> ChunkOperator:
        return cls(tuple(chunk.size for chunk in free))

    @property
    def levels(self) -> tuple[int, ...]:
        """The sizes that a request can have: 1, 2, 4 ... up to the largest free chunk."""
        largest = max(self.sizes, default=1)
        return tuple(1 << level for level in range(largest.bit_length()))

    @property
    def capacity(self) -> tuple[int, ...]:
        return tuple(sum(size // level for size in self.sizes if size >= level) for level in self.levels)

    @property
    def interchangeable(self) -> bool:
        """Never: devices that are free apart do not make a chunk, and then they have one axis as cores do."""
        return False

    def demand(self, units: int) -> tuple[int, ...]:
        """A request that is no power of two takes the next one; one above every free chunk never fits."""
        size = power_at_least(units)
        levels = self.levels
        if size > levels[-1]:
            return tuple(count + 1 for count in self.capacity)
        return tuple(size // level if level <= size else 0 for level in levels)


def take(free: list[Chunk], chunk: Chunk) -> None:
    """Remove ``chunk`` from the free chunks in place, splitting the one that contains it into buddies."""
    whole = next(one for one in free if one.contains(chunk))
    free.remove(whole)
    free.extend(whole.without(chunk))


def best_fit(free: Iterable[Chunk], size: int) -> Chunk | None:
    """Return a place for ``size`` devices in the smallest free chunk that holds it, the lowest such; None if none."""
    fitting = [chunk for chunk in free if chunk.size >= size]
    if not fitting:
        return None
    return Chunk(min(fitting, key=lambda chunk: (chunk.size, chunk.start)).start, size)


def warm_fit(free: Iterable[Chunk], size: int, warm: Iterable[Chunk]) -> Chunk | None:
    """Return the place among ``warm`` chunks of exactly ``size`` that is wholly free, in the smallest free chunk."""
    chunks = list(free)
    fits = [(outer.size, place) for place in warm if place.size == size for outer in chunks if outer.contains(place)]
    return min(fits)[1] if fits else None
