"""Exclusive CPU cores of one node, chosen NUMA-first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Cores:
    """The free cores of a node by NUMA node. A core is free or in exactly one set that `allocate` gave."""

    def __init__(self, numa: Sequence[Sequence[int]]) -> None:
        self._free: list[list[int]] = [sorted(ids, reverse=True) for ids in numa]
        self._numa_of = {core: index for index, ids in enumerate(numa) for core in ids}
        assert len(self._numa_of) == sum(len(ids) for ids in numa), f"a core is listed twice in {numa}"
        self.total = len(self._numa_of)
        self.free = self.total

    def allocate(self, count: int, beside: Sequence[int] = ()) -> tuple[int, ...]:
        """``count`` cores, ascending: from the tightest NUMA node that holds them all, else from the fewest.

        NUMA nodes of the cores in ``beside`` come first: a set that grows stays where it is.
        """
        assert count <= self.free, f"{count} cores wanted, {self.free} free"
        chosen: list[int] = []
        for ids in self._sources(count, beside):
            first = max(0, len(ids) - count + len(chosen))
            chosen += ids[first:]
            del ids[first:]
            if len(chosen) == count:
                break
        self.free -= count
        chosen.sort()
        return tuple(chosen)

    def allocate_each(self, count: int, sets: int) -> list[tuple[int, ...]]:
        """As many sets of ``count`` cores, each as `allocate` gives it after those before."""
        assert count * sets <= self.free, f"{sets} times {count} cores wanted, {self.free} free"
        found: list[tuple[int, ...]] = []
        while len(found) < sets:
            ids = self._tightest(count)
            if ids is None:
                found.append(self.allocate(count))
                continue
            here = min(sets - len(found), len(ids) // count)  # for so long it stays the tightest
            most = len(ids)
            found += [tuple(sorted(ids[most - count * (n + 1) : most - count * n])) for n in range(here)]
            del ids[most - count * here :]
            self.free -= count * here
        return found

    def release(self, cores: Iterable[int]) -> None:
        for core in cores:
            ids = self._free[self._numa_of[core]]
            ids.append(core)
            self.free += 1

    def shrink(self, cores: Sequence[int], count: int) -> tuple[int, ...]:
        """Keep ``count`` of these cores, those of the NUMA nodes that hold most of them; release the others."""
        share: dict[int, int] = {}
        for core in cores:
            share[self._numa_of[core]] = share.get(self._numa_of[core], 0) + 1
        ranked = sorted(cores, key=lambda core: (-share[self._numa_of[core]], self._numa_of[core], core))
        self.release(ranked[count:])
        return tuple(sorted(ranked[:count]))

    def check(self) -> None:
        listed = [core for ids in self._free for core in ids]
        assert len(listed) == len(set(listed)) == self.free, f"a core is free twice: {sorted(listed)}"

    def _sources(self, count: int, beside: Sequence[int]) -> list[list[int]]:
        """The free cores of NUMA nodes, in the order in which to take from them."""
        near = {self._numa_of[core] for core in beside} if beside else set()
        tightest = None if near else self._tightest(count)
        if tightest is not None:
            return [tightest]
        indices = sorted(range(len(self._free)), key=lambda index: (index not in near, -len(self._free[index]), index))
        return [self._free[index] for index in indices]

    def _tightest(self, count: int) -> list[int] | None:
        """The free cores of the NUMA node that has least of those that have so many; None where none has."""
        tightest = None
        for ids in self._free:
            if len(ids) >= count and (tightest is None or len(ids) < len(tightest)):
                tightest = ids
        return tightest
