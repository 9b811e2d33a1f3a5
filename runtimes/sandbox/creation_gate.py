"""The gate before the engine: how many sandboxes are being made at once, and whether any should be."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import structlog

from manager.clock import Clock, MonotonicClock
from manager.errors import CapacityExceeded, InvalidConfig, InvalidInput, Unsupported

logger = structlog.get_logger("sandbox.creation")

#: Failures that say nothing about the engine's health.
CALLERS_FAULT = (InvalidConfig, InvalidInput, Unsupported)


class CreationGate:
    """At most ``limit`` creations at a time; after ``threshold`` failures in a row none for a growing while."""

    def __init__(
        self,
        limit: int,
        *,
        threshold: int = 3,
        backoff_s: float = 1.0,
        backoff_max_s: float = 60.0,
        clock: Clock | None = None,
    ) -> None:
        self._semaphore = asyncio.Semaphore(limit)
        self._threshold = threshold
        self._backoff_s, self._backoff_max_s = backoff_s, backoff_max_s
        self._clock = clock or MonotonicClock()
        self._failures, self._why = 0, ""
        self._trouble = ""
        self._closed_s = -math.inf
        self._closed_until_s = 0.0
        #: What is being made now.
        self.names: set[str] = set()
        self._watched: list[set[str]] = []

    @property
    def wait_s(self) -> float:
        """Seconds until another creation may be tried; 0 if the gate is open."""
        return max(0.0, self._closed_until_s - self._clock.now())

    def hear(self, trouble: str) -> str:
        """Return what the engine is said to suffer from, empty: nothing; once that is over the gate is open."""
        if self._trouble and not trouble:
            self._failures, self._closed_until_s = 0, 0.0  # what failed meanwhile says nothing of it now
        self._trouble = trouble
        return trouble

    @contextmanager
    def watching(self) -> Iterator[set[str]]:
        """Yield the names of what is being made within the block: a search must not take it for left behind."""
        young = set(self.names)
        self._watched.append(young)
        try:
            yield young
        finally:
            self._watched = [other for other in self._watched if other is not young]

    @asynccontextmanager
    async def slot(self, name: str) -> AsyncIterator[None]:
        """Hold a slot for one creation; raises CapacityExceeded while the gate is closed."""
        async with self._semaphore:
            if self.wait_s > 0:
                raise CapacityExceeded(
                    f"{self._failures} sandboxes in a row could not be made ({self._why}); trying again soon",
                    component="sandbox",
                    retry_after_s=self.wait_s,
                )
            for names in (self.names, *self._watched):
                names.add(name)
            began_s = self._clock.now()
            try:
                yield
            except (asyncio.CancelledError, *CALLERS_FAULT):
                raise
            except Exception as error:
                self._failed(began_s, str(error))
                raise
            else:
                self._failures, self._closed_until_s = 0, 0.0  # there is one that could be made
            finally:
                self.names.discard(name)

    def _failed(self, began_s: float, why: str) -> None:
        if began_s <= self._closed_s:
            return  # what was under way when the gate closed tells nothing new
        self._failures, self._why = self._failures + 1, why
        beyond = self._failures - self._threshold
        if beyond >= 0:
            pause_s = min(self._backoff_max_s, self._backoff_s * 2**beyond)
            self._closed_s = self._clock.now()
            self._closed_until_s = self._closed_s + pause_s
            logger.warning("no sandboxes are made for a while", failures=self._failures, pause_s=pause_s)
