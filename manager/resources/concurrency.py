"""Concurrency: at most so many units at the same time (paper, Basic Resource Manager)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from manager.lease import Grant
from manager.resources.declared import DeclaredPool, ResourceSpec
from manager.resources.pool import PoolRequest
from manager.setting import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencySpec(ResourceSpec):
    """A bound: at most ``limit`` units at the same time."""

    kind: ClassVar[str] = "concurrency"
    meaning: ClassVar[str] = "a bound"

    limit: Annotated[int, Setting("units held at the same time", ge=1)]

    @property
    def most(self) -> int:
        return self.limit

    def make_pool(self, name: str) -> ConcurrencyPool:
        return ConcurrencyPool(name, self)


class ConcurrencyPool(DeclaredPool[ConcurrencySpec]):
    """Units return with their action. A lower limit holds as soon as enough has been released."""

    lendable = True

    def __init__(self, name: str, spec: ConcurrencySpec) -> None:
        super().__init__(name, spec)
        self._used = 0

    @property
    def free(self) -> int:
        return max(0, self.spec.limit - self._used)

    def acquire(self, holder: str, ask: PoolRequest, now_s: float) -> Grant:
        assert ask.units <= self.free, f"{self.name}: {ask.units} units wanted, {self.free} free"
        self._enter(holder, ask.units)
        self._used += ask.units
        return Grant(pool=self.name, units=ask.units)

    def release(self, holder: str, now_s: float) -> None:
        self._used -= self._leave(holder)

    def bequeath(self, holder: str, heir: str, grant: Grant) -> None:
        self._used -= self._leave(holder) - grant.units
        self._enter(heir, grant.units)

    def check(self) -> None:
        assert sum(self._held.values()) == self._used, f"{self.name}: {self._held} held, {self._used} counted"
