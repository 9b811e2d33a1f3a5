"""Starting and resizing: a checked decision becomes leases and commands."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import islice

from manager.core.queue import Entry
from manager.core.state import SchedulerState
from manager.events import Execute, Resize
from manager.resources.pool import Pool, PoolRequest

#: Queue mates of one group that are looked at for a batch.
_BATCH_WINDOW = 256


class Dispatcher:
    """Leases actions and tells the shell."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def start(self, entry: Entry, node: str, asks: Sequence[tuple[Pool, PoolRequest]], workers: int = 0) -> None:
        """Take an action from the queue and lease it what it asks of each pool, with the queue mates of its batch.

        ``workers`` are started for its key resource, where it is malleable.
        """
        state = self._state
        mates = self._mates(entry, asks)
        state.queue.leave(entry)
        self._start(entry)
        state.executing.start(entry, node, asks, workers, state.now_s)
        for mate in mates:
            state.queue.withdraw(mate)
            self._start(mate)
            state.executing.join(mate, entry, state.now_s)
        if mates:
            state.executing.seal(entry, mates)
        self._execute(entry)
        for mate in mates:
            self._execute(mate)

    def resume(self, entry: Entry, node: str, asks: Sequence[tuple[Pool, PoolRequest]], started_s: float) -> None:
        """Lease an action that runs already what it was granted at its start."""
        self._state.executing.resume(entry, node, asks, started_s, self._state.now_s)
        self._state.fair.started(entry.action, entry.key[0])
        self._execute(entry)

    def lend(self, child: Entry, parent: Entry) -> None:
        """Start a child on the units of its waiting parent."""
        self._state.executing.borrow(child, parent, self._state.now_s)
        self._state.queue.withdraw(child)
        self._start(child)
        self._execute(child)

    def resize(self, entry: Entry, kind: str, units: int) -> None:
        """Change the units of a running action."""
        lease = self._state.executing.resize(entry, kind, units, self._state.now_s)
        entry.resize_after_s = self._state.now_s + self._state.option(kind, "resize_interval_s", 0.0)
        self._state.commands.append(Resize(action=entry.action, lease=lease))

    def _start(self, entry: Entry) -> None:
        state = self._state
        if state.holds:
            state.holds.pop(entry.id, None)
        if entry.child:
            state.families.leave(entry)
        state.fair.started(entry.action, entry.key[0])

    def _execute(self, entry: Entry) -> None:
        action, lease = entry.action, entry.lease
        assert lease is not None
        queue_s = max(0.0, entry.started_s - action.submitted_s)
        self._state.commands.append(Execute(action=action, lease=lease, queue_s=queue_s))

    def _mates(self, entry: Entry, asks: Sequence[tuple[Pool, PoolRequest]]) -> list[Entry]:
        """Waiting actions of the same service that join the batch, first come first, up to its tokens."""
        service = "" if entry.group is None else entry.group.signature.batch_service
        if not service:
            return []
        units = {pool.kind: ask.units for pool, ask in asks}
        budget = self._state.queue.services[service].batch_tokens - entry.action.batch_tokens
        alike = [group for group in self._state.queue.groups() if group.signature.batch_service == service]
        mates: list[Entry] = []
        for mate in heapq.merge(*(islice(group, _BATCH_WINDOW) for group in alike), key=lambda mate: mate.order):
            if mate is entry or mate.action.cost.keys() != units.keys():
                continue
            if mate.action.batch_tokens > budget:
                break
            if all(count in mate.action.cost[kind] for kind, count in units.items()):
                budget -= mate.action.batch_tokens
                mates.append(mate)
        return mates
