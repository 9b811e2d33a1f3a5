"""Admission: how many invocations may wait, and how many bytes they may be; decided before any work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from manager.errors import CapacityExceeded, Draining, QuotaExceeded
from manager.function import FunctionSpec

RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0
#: Weight of the newest interval between two starts in the smoothed one.
SMOOTHING = 0.1


class HeldInputs:
    """Bytes of inputs that are held at once: of those that arrive, and of invocations that have not ended."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.bytes = 0

    def check(self, size_bytes: int) -> None:
        """Raise CapacityExceeded when so much more may not be held."""
        if self.bytes + size_bytes > self._limit_bytes:
            raise CapacityExceeded(
                f"{self.bytes} bytes of inputs are held already, server.inputs_max is {self._limit_bytes}",
                component="admission",
                retry_after_s=RETRY_MIN_S,
            )

    def take(self, size_bytes: int) -> None:
        """Hold so much more, whatever is held: who may be refused asks `check` first."""
        self.bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        """So much is held no more."""
        self.bytes -= size_bytes


class Admission:
    """Counts what waits. ``now`` is a monotonic clock in seconds; ``task_max`` gives a task's bound."""

    def __init__(self, now: Callable[[], float], *, total_max: int, task_max: Callable[[str], int]) -> None:
        self._now = now
        self._total_max = total_max
        self._task_max = task_max
        self._by_function: Counter[str] = Counter()
        self._by_task: Counter[str] = Counter()
        self._interval_s: float | None = None
        self._last_start_s = now()
        self.queued = 0
        self.draining = False
        #: Called with the function of each that no longer waits.
        self.on_leave: list[Callable[[str], None]] = []

    def check(self, function: FunctionSpec, task: str) -> None:
        """Raise Draining, CapacityExceeded or QuotaExceeded when one more may not wait."""
        if self.draining:
            raise Draining("the gateway is shutting down and takes no new work", retry_after_s=RETRY_MIN_S)
        if self.queued >= self._total_max:
            raise CapacityExceeded(
                f"{self.queued} invocations wait already, which is scheduler.max_queued",
                component="admission",
                retry_after_s=self._retry_after_s(self.queued - self._total_max + 1),
            )
        self._bound("function", function.name, self._by_function[function.name], function.max_queued)
        self._bound("task", task, self._by_task[task], self._task_max(task))

    def enter(self, function: str, task: str) -> None:
        """One more waits."""
        self.queued += 1
        self._by_function[function] += 1
        self._by_task[task] += 1

    def leave(self, function: str, task: str) -> None:
        """One that waited was started, or has ended."""
        self.queued -= 1
        self._take(self._by_function, function)
        self._take(self._by_task, task)
        now_s = self._now()
        interval_s = now_s - self._last_start_s
        self._last_start_s = now_s
        past_s = interval_s if self._interval_s is None else self._interval_s
        self._interval_s = past_s + SMOOTHING * (interval_s - past_s)
        for on_leave in self.on_leave:
            on_leave(function)

    def waiting(self, function: str) -> int:
        """Invocations of the function that wait now."""
        return self._by_function[function]

    def _bound(self, kind: str, name: str, waiting: int, limit: int) -> None:
        if waiting >= limit:
            raise QuotaExceeded(
                f"{waiting} invocations of {kind} {name!r} wait already ({kind}s.{name}.max_queued)",
                component="admission",
                retry_after_s=self._retry_after_s(waiting - limit + 1),
            )

    def _retry_after_s(self, places: int) -> float:
        """Seconds until so many places are free at the present pace, within bounds."""
        pace_s = RETRY_MIN_S if self._interval_s is None else self._interval_s
        return min(RETRY_MAX_S, max(RETRY_MIN_S, places * pace_s))

    @staticmethod
    def _take(counter: Counter[str], name: str) -> None:
        counter[name] -= 1
        if counter[name] <= 0:
            del counter[name]
