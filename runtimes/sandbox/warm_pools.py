"""The warm pools: one for each sandbox that functions ask to be kept ready, and some for what trajectories choose."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec

from manager.clock import Clock
from manager.function import Network, SandboxSpec, Warm
from runtimes.sandbox.sandbox import Sandbox
from runtimes.sandbox.warm_pool import WarmPool


class WarmPools:
    """Pools by what their sandboxes are. Of those that trajectories chose the last claimed are kept, within a bound."""

    def __init__(self, create: Callable[[SandboxSpec], Awaitable[Sandbox]], clock: Clock) -> None:
        self._create = create
        self._clock = clock
        self._own: dict[bytes, WarmPool] = {}
        #: The last claimed comes last.
        self._chosen: dict[bytes, WarmPool] = {}

    def of(self, spec: SandboxSpec) -> WarmPool:
        """Return the pool of sandboxes equal to ``spec``, which keeps none ready until it is started."""
        return self._own.setdefault(_key(spec), self._pool(spec, spec.warm))

    def claim(self, spec: SandboxSpec) -> Sandbox | None:
        """Return a sandbox that lies ready; None if there is none. What is claimed is soon kept ready."""
        key = _key(spec)
        pool = self._own.get(key) or self._chosen_pool(key, spec)
        return None if pool is None else pool.claim()

    def living(self) -> list[Sandbox]:
        """Return all that lie ready."""
        return [sandbox for pool in (*self._own.values(), *self._chosen.values()) for sandbox in pool.living()]

    def take_superfluous(self) -> list[WarmPool]:
        """Take out the pools of chosen sandboxes that nobody has claimed for a while, and the oldest beyond the bound.

        Their sandboxes are the caller's to end.
        """
        most = max((pool.spec.trajectory.warm for pool in self._chosen.values()), default=0)
        beyond = list(self._chosen)[: max(0, len(self._chosen) - most)]
        over = [key for key, pool in self._chosen.items() if key in beyond or not pool.target]
        return [self._chosen.pop(key) for key in over]

    async def close(self) -> list[Sandbox]:
        """Stop making; returns what lies ready, for its owner to end or to keep."""
        pools = [*self._own.values(), *self._chosen.values()]
        return [sandbox for pool in pools for sandbox in await pool.close()]

    def _chosen_pool(self, key: bytes, spec: SandboxSpec) -> WarmPool | None:
        """Return the pool of a chosen sandbox, begun with its first claim; None if none is kept ready."""
        if not (spec.chosen and spec.warm.max and spec.trajectory.warm) or spec.network is Network.INTERNAL:
            return None
        pool = self._chosen.pop(key, None)
        if pool is None:
            pool = self._pool(spec, replace(spec.warm, min=0))
            pool.start()
        self._chosen[key] = pool
        return pool

    def _pool(self, spec: SandboxSpec, warm: Warm) -> WarmPool:
        return WarmPool(replace(spec, warm=warm), lambda: self._create(spec), self._clock)


def _key(spec: SandboxSpec) -> bytes:
    return msgspec.json.encode(replace(spec, chosen=False), order="deterministic")
