"""Quotas on record: what of each was consumed, so that a restart goes on in the same window and begins no new one."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from gateway.store.store import Store
from manager.action import Lease
from manager.engine import Engine
from manager.resources.pools import QuotaSpec, ResourceSpec

#: Instants that a window is kept as; each stands for what ended just before it.
INSTANTS = 100


@dataclass(slots=True)
class _Window:
    """Units of one quota: of calls under way, and of ended ones by the latest instant at which they ended."""

    running: int = 0
    ended: Counter[float] = field(default_factory=Counter)


class _Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The document of one quota."""

    running: int = 0
    ended: Sequence[tuple[float, int]] = ()


class QuotaRecord:
    """Counts calls as they begin and end; one small document of the store for each quota."""

    def __init__(
        self, store: Store, resources: Callable[[], Mapping[str, ResourceSpec]], wall: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._resources = resources
        self._wall = wall
        self._windows: dict[str, _Window] = {}

    async def take_up(self, engine: Engine) -> None:
        """Tell the engine what earlier gateways consumed. What was under way when one died counts as ended now."""
        for name, spec in self._quotas().items():
            text = await self._store.document(_document(name))
            found = _Saved() if text is None else msgspec.json.decode(text, type=_Saved)
            now_s, window = self._wall(), self._window(name)
            for at_s, units in found.ended:
                window.ended[min(at_s, now_s)] += units
            self._forget(window, spec, now_s)
            ages = [(now_s - at_s, units) for at_s, units in sorted(window.ended.items())]
            engine.tell_consumed(name, ages, running=found.running)
            if found.running:
                window.ended[now_s] += found.running
                self._save(name)

    def begin(self, lease: Lease) -> Mapping[str, int]:
        """Note the quota units that an action consumes, if any; they are to be durable before it asks."""
        quotas = self._quotas()
        used = {kind: grant.units for kind, grant in lease.grants.items() if kind in quotas}
        for name, units in used.items():
            self._window(name).running += units
            self._save(name)
        return used

    def again(self, used: Mapping[str, int]) -> None:
        """The action makes its call once more: what the try before consumed returns a period from now."""
        for name, units in used.items():
            self._window(name).running += units
        self.end(used)

    def end(self, used: Mapping[str, int]) -> None:
        """The action that consumed them has ended: they return a period from now."""
        quotas, now_s = self._quotas(), self._wall()
        for name, units in used.items():
            window = self._window(name)
            window.running -= units
            if name in quotas:
                width_s = quotas[name].period_s / INSTANTS
                window.ended[math.ceil(now_s / width_s) * width_s] += units
                self._forget(window, quotas[name], now_s)
            self._save(name)

    def _quotas(self) -> dict[str, QuotaSpec]:
        return {name: spec for name, spec in self._resources().items() if isinstance(spec, QuotaSpec)}

    def _window(self, name: str) -> _Window:
        return self._windows.setdefault(name, _Window())

    @staticmethod
    def _forget(window: _Window, spec: QuotaSpec, now_s: float) -> None:
        for at_s in [at_s for at_s in window.ended if at_s + spec.period_s <= now_s]:
            del window.ended[at_s]

    def _save(self, name: str) -> None:
        window = self._window(name)
        body = _Saved(running=window.running, ended=sorted(window.ended.items()))
        self._store.save_document(_document(name), msgspec.json.encode(body).decode())


def _document(name: str) -> str:
    return f"quota/{name}"
