"""Held back: what is accepted for a function that is not ready yet waits here, in order, and does not fail for that."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from gateway.invocations.invocation import FunctionLookup, LiveInvocation
from manager.errors import NotFound


class HeldBack:
    """Queued invocations that the scheduler does not know of yet; ``expire`` ends one at its queue_timeout."""

    def __init__(
        self, functions: FunctionLookup, expire: Callable[[LiveInvocation, str], None], now: Callable[[], float]
    ) -> None:
        self._functions = functions
        self._expire = expire
        self._now = now
        self._held: dict[int, LiveInvocation] = {}
        #: Since when each has waited, also after it was let go, until it is asked for.
        self._since_s: dict[int, float] = {}
        #: Their trajectories, whose later actions wait behind them.
        self._trajectories: Counter[str | None] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def take(self, invocation: LiveInvocation) -> bool:
        """Hold it back if it may not start yet; whether it does."""
        record, function, action = invocation.record, invocation.function, invocation.action
        ready = self._functions.readiness(record.function).status == "ready"
        if function is None or (ready and not (record.trajectory and self._trajectories[record.trajectory])):
            return False
        since_s = self._since_s.setdefault(record.seq, self._now() if action is None else action.submitted_s)
        timeout_s = function.queue_timeout_s if action is None else action.queue_timeout_s
        left_s = max(0.0, since_s + timeout_s - self._now())
        self._held[record.seq] = invocation
        self._trajectories[record.trajectory] += 1
        invocation.retry = asyncio.get_running_loop().call_later(left_s, self._late, invocation, timeout_s)
        return True

    def leave(self, invocation: LiveInvocation) -> float | None:
        """It starts or has ended; since when it waited, if it was held back."""
        seq = invocation.record.seq
        if self._held.pop(seq, None) is not None:
            self._trajectories[invocation.record.trajectory] -= 1
        return self._since_s.pop(seq, None)

    def let_go(self) -> list[LiveInvocation]:
        """Take all of them out, in order; who may not start yet is to be held back again.

        What waited for a function that has changed meanwhile is of the new one.
        """
        held = list(self._held.values())
        self._held.clear()
        self._trajectories.clear()
        for invocation in held:
            assert invocation.retry is not None
            invocation.retry.cancel()
            invocation.retry = None
            with suppress(NotFound):
                current = self._functions.get(invocation.record.function)
                if current != invocation.function:
                    invocation.function, invocation.action = current, None
                    invocation.record.revision = current.revision
        return held

    def _late(self, invocation: LiveInvocation, timeout_s: float) -> None:
        found = self._functions.readiness(invocation.record.function)
        why = f"{found.status}: {found.problem}" if found.problem else found.status
        self._expire(invocation, f"waited longer than queue_timeout, {timeout_s:g} s: its function is {why}")
