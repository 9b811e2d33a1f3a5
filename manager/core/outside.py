"""What waits outside the queue: for an image, for requirements, for its function. It is shown, and decides nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from manager.core.queue import Key
from manager.core.state import Cause, CauseTally


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutsideWait:
    """Somebody who waits for what is being made. Instants are those of the core."""

    id: str
    function: str
    #: Empty for an operator, who works for no task.
    task: str
    trajectory: str | None = None
    since_s: float
    #: What it waits for: those that wait for the same have the same cause.
    what: Hashable
    #: Tells that cause as it is now.
    why: Callable[[], Cause]


class OutsideQueue:
    """Who waits outside the queue, in the order of their coming. Use from one event loop."""

    def __init__(self, now: Callable[[], float]) -> None:
        #: The clock of the core.
        self.now = now
        self._numbers = itertools.count()
        #: By task and what they wait for, each with its number.
        self._groups: dict[tuple[str, Hashable], dict[OutsideWait, int]] = {}

    def enter(self, wait: OutsideWait) -> None:
        """It waits from now on."""
        self._groups.setdefault((wait.task, wait.what), {})[wait] = next(self._numbers)

    def leave(self, wait: OutsideWait) -> None:
        """It waits no more; nothing if it did not wait."""
        group = self._groups.get((wait.task, wait.what), {})
        if group.pop(wait, None) is not None and not group:
            del self._groups[wait.task, wait.what]

    @contextmanager
    def waiting(self, wait: OutsideWait) -> Iterator[None]:
        """Let it wait for as long as this lasts."""
        self.enter(wait)
        try:
            yield
        finally:
            self.leave(wait)

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def tasks(self) -> set[str]:
        """Return the tasks of those that wait."""
        return {task for task, _ in self._groups if task}

    def by_task(self, task: str) -> int:
        """Return how many of a task wait."""
        return sum(len(group) for (of, _), group in self._groups.items() if of == task)

    def ordered(self) -> Iterator[tuple[tuple[Key, int], OutsideWait]]:
        """Yield each with its place in the order of service, which is behind whatever the queue holds."""
        for group in self._groups.values():
            for wait, number in group.items():
                yield ((math.inf, number, 0), 0), wait

    def counted(self, now_s: float) -> list[CauseTally]:
        """Return how many of each task wait for the same: work by groups, not entries."""
        tallies: list[CauseTally] = []
        for (task, _), group in self._groups.items():
            first = next(iter(group))
            oldest_s = max(0.0, now_s - first.since_s)
            tallies.append(CauseTally(cause=first.why(), task=task, count=len(group), oldest_s=oldest_s))
        return tallies
