"""CPU cores by allocate-on-execution (paper, CPU Manager via AOE): held during an action only, exclusive."""

from __future__ import annotations

from collections.abc import Sequence

from manager.config import NodeSpec
from manager.lease import Grant
from manager.resources.cores import Cores
from manager.resources.pool import Pool, PoolRequest


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
