"""Pools of cores, on one machine or several."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from manager.action import Chunk, Grant
from manager.config import NodeSpec, ServiceSpec
from manager.resources.pools import Pool, PoolRequest
from manager.scheduler.policy import ChunkView


class Replica(NamedTuple):
    """A copy of a service in use that is to be made in free memory of idle places."""

    service: str
    node: str
    #: Counted on the node.
    chunk: Chunk
    #: The same in the pool's indices.
    place: Chunk


class PlacedPool(Pool):
    """Chunks that span nodes and hold services between actions."""

    #: Whether anything has changed since `replicate` looked for copies to be made.
    replicas_due = True

    @abstractmethod
    def join(self, node: NodeSpec) -> None:
        """Take in the units of a node that has come."""

    @abstractmethod
    def leave(self, node: str) -> None:
        """Forget the units of a node that is gone, and of which nothing is held any more."""

    @abstractmethod
    def close(self, node: str) -> None:
        """Give no units of a node any more; those that are held stay so."""

    @abstractmethod
    def open(self, node: str) -> None:
        """Give a closed node's units again."""

    @abstractmethod
    def learn(self, services: Mapping[str, ServiceSpec]) -> None:
        """Take up services that are new, or of another size than before."""

    @abstractmethod
    def report(self, node: str, resident: Mapping[str, Iterable[Chunk]]) -> None:
        """Believe what a node's devices hold: chunks by service, counted on the node."""

    @abstractmethod
    def restore_s(self, service: str, units: int, node: str = "") -> float:
        """Return the seconds to make a service resident on ``units``, of a node if one is named."""

    @abstractmethod
    def replicate(self, now_s: float) -> Iterable[Replica]:
        """Count on copies of services in use in free memory of idle places; nothing goes for them."""

    @abstractmethod
    def replicated(self, replica: Replica, done: bool) -> None:
        """Note that what `replicate` promised has arrived, or never will."""

    @property
    @abstractmethod
    def replicas(self) -> Mapping[str, int]:
        """How copies of services have fared, by outcome."""

    @abstractmethod
    def node_of(self, chunk: Chunk) -> str:
        """Return the node on which a place lies, given in the pool's indices."""

    @abstractmethod
    def chunk_of(self, holder: str) -> Chunk:
        """Return the place of a holder's units, in the pool's indices."""

    @abstractmethod
    def chunk_view(self, now_s: float) -> ChunkView:
        """Return the places of the pool as its policy sees them."""


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
        allocated: list[tuple[int, ...]] = []
        while len(allocated) < sets:
            ids = self._tightest(count)
            if ids is None:
                allocated.append(self.allocate(count))
                continue
            here = min(sets - len(allocated), len(ids) // count)  # for so long it stays the tightest
            most = len(ids)
            allocated += [tuple(sorted(ids[most - count * (n + 1) : most - count * n])) for n in range(here)]
            del ids[most - count * here :]
            self.free -= count * here
        return allocated

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


class CpuPool(Pool):
    """The cores of one node."""

    lendable = True
    measure = "core_s"

    def __init__(self, node: NodeSpec) -> None:
        super().__init__(f"cpu:{node.name}", "cpu", node.name)
        self._cores = Cores(node.numa)
        self._by_holder: dict[str, tuple[int, ...]] = {}

    @property
    def total(self) -> int:
        return self._cores.total

    @property
    def free(self) -> int:
        return 0 if self.closed else self._cores.free

    @property
    def idle(self) -> int:
        return self._cores.free

    def accepts(self, ask: PoolRequest) -> bool:
        return ask.units <= self.idle  # what runs already on a closed node may be resumed there

    def acquire(self, holder: str, ask: PoolRequest, now_s: float) -> Grant:
        self._enter(holder, ask.units)
        return self._grant(holder, self._cores.allocate(ask.units))

    def acquire_each(self, holders: Sequence[str], ask: PoolRequest, now_s: float) -> list[Grant]:
        if len(holders) == 1:
            return [self.acquire(holders[0], ask, now_s)]
        sets = self._cores.allocate_each(ask.units, len(holders))
        for holder in holders:
            self._enter(holder, ask.units)
        return [self._grant(holder, cores) for holder, cores in zip(holders, sets, strict=True)]

    def release(self, holder: str, now_s: float) -> None:
        self._leave(holder)
        self._cores.release(self._by_holder.pop(holder))

    def resize(self, holder: str, units: int) -> Grant:
        cores = self._by_holder[holder]
        if units < len(cores):
            cores = self._cores.shrink(cores, units)
            self._note_change()
        else:
            cores = tuple(sorted(cores + self._cores.allocate(units - len(cores), beside=cores)))
        self._held[holder] = units
        return self._grant(holder, cores)

    def bequeath(self, holder: str, heir: str, grant: Grant) -> None:
        self._leave(holder)
        kept = set(grant.cores)
        self._cores.release(core for core in self._by_holder.pop(holder) if core not in kept)
        self._enter(heir, len(kept))
        self._grant(heir, grant.cores)

    def check(self) -> None:
        super().check()
        self._cores.check()
        cores = [core for held in self._by_holder.values() for core in held]
        assert len(cores) == len(set(cores)), f"{self.name}: a core is leased twice: {self._by_holder}"

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "cores": {holder: list(cores) for holder, cores in self._by_holder.items()}}

    def _grant(self, holder: str, cores: tuple[int, ...]) -> Grant:
        self._by_holder[holder] = cores
        return Grant(pool=self.name, units=len(cores), cores=cores)


#: Seconds in which a use counts for ever less.
REUSE_S = 5.0


class Demand:
    """Uses by service, each fading over `REUSE_S`."""

    def __init__(self) -> None:
        #: Service -> (faded uses, when they were counted last).
        self._uses: dict[str, tuple[float, float]] = {}

    def use(self, service: str, now_s: float) -> None:
        self._uses[service] = (self.recent(service, now_s) + 1.0, now_s)

    def recent(self, service: str, now_s: float) -> float:
        """Uses in about the last `REUSE_S` seconds: with even arrivals, the rate times that."""
        uses, at_s = self._uses.get(service, (0.0, now_s))
        return uses * math.exp(min(0.0, at_s - now_s) / REUSE_S)
