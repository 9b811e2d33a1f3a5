"""The warm pool: sandboxes made ahead of the actions that will claim them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import structlog

from manager.clock import Clock
from manager.errors import CodedError
from manager.function import SandboxSpec
from runtimes.sandbox.sandbox import Sandbox

logger = structlog.get_logger("sandbox.pool")

#: Seconds of past claims that say how many will be claimed in the next while.
DEMAND_S = 30.0
BACKOFF_S, BACKOFF_MAX_S = 1.0, 60.0


class WarmPool:
    """Idle sandboxes of one spec: at least ``warm.min``, after recent claims up to ``warm.max``."""

    def __init__(self, spec: SandboxSpec, make: Callable[[], Awaitable[Sandbox]], clock: Clock) -> None:
        self.spec = spec
        self._make = make
        self._clock = clock
        self._idle: deque[Sandbox] = deque()
        self._claims_s: deque[float] = deque()
        self._wanted = asyncio.Event()
        self._filled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> int:
        return len(self._idle)

    def living(self) -> list[Sandbox]:
        """Return the sandboxes that lie ready; those that died are dropped, and replaced in the background."""
        living = [sandbox for sandbox in self._idle if sandbox.alive]
        if len(living) < len(self._idle):
            self._idle = deque(living)
            self._wanted.set()
        return living

    @property
    def target(self) -> int:
        """How many should lie ready now."""
        while self._claims_s and self._claims_s[0] < self._clock.now() - DEMAND_S:
            self._claims_s.popleft()
        return max(self.spec.warm.min, min(self.spec.warm.max, len(self._claims_s)))

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._replenish())
            self._wanted.set()

    def claim(self) -> Sandbox | None:
        """Return one that lies ready, or None; it is replaced in the background."""
        self._claims_s.append(self._clock.now())
        if len(self._claims_s) > max(1, self.spec.warm.max):
            self._claims_s.popleft()
        self._wanted.set()
        while self._idle:
            sandbox = self._idle.popleft()
            if sandbox.alive:
                return sandbox
        return None

    async def filled(self) -> None:
        """Wait until as many as wanted lie ready."""
        while self.idle < self.target:
            self._filled.clear()
            await self._filled.wait()

    async def close(self) -> list[Sandbox]:
        """Stop making; returns what lies ready, for its owner to end or to keep."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        idle, self._idle = list(self._idle), deque()
        return idle

    async def _replenish(self) -> None:
        backoff_s = BACKOFF_S
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self.idle < self.target:
                try:
                    self._idle.append(await self._make())
                    backoff_s = BACKOFF_S
                except CodedError as error:
                    pause_s = error.retry_after_s or backoff_s
                    backoff_s = min(BACKOFF_MAX_S, backoff_s * 2)
                    logger.warning("no warm sandbox", image=self.spec.image, why=error.message, pause_s=pause_s)
                    await asyncio.sleep(pause_s)
            self._filled.set()
