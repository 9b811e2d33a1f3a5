"""The dispatcher: a checked decision becomes leases and commands."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import islice

from manager.action import ANYWHERE
from manager.core.executing import Running
from manager.core.state import SchedulerState
from manager.core.waiting.queue import Waiting
from manager.events import Execute, Resize
from manager.resources.pool import Pool, PoolRequest

#: Waiting actions of one group that are looked at for a batch.
_BATCH_WINDOW = 256


class Dispatcher:
    """Leases actions and tells the shell."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def start(
        self, alike: Sequence[Waiting], node: str, requests: Sequence[tuple[Pool, PoolRequest]], workers: int = 0
    ) -> None:
        """Lease waiting actions of one group what each requests of each pool.

        One that may have a batch is started alone, together with those that join it. ``workers`` are started for the
        key resource of a malleable one.
        """
        queue, executing, now_s = self._state.queue, self._state.executing, self._state.now_s
        mates = self._batch_mates(alike[0], requests)
        queue.leave(alike)
        members = executing.start(alike, node, requests, workers, now_s)
        if not mates:
            self._execute(members)
            return
        for mate in mates:
            queue.withdraw(mate)
            members.append(executing.join(mate, members[0], now_s))
        executing.seal(members)
        for member in members:
            self._execute([member])

    def resume(
        self, waiting: Waiting, node: str, requests: Sequence[tuple[Pool, PoolRequest]], started_s: float
    ) -> None:
        """Lease an action that runs already what it was granted at its start."""
        self._execute([self._state.executing.resume(waiting, node, requests, started_s, self._state.now_s)])

    def lend(self, child: Waiting, parent: Running) -> None:
        """Start a child on the units of its waiting parent."""
        running = self._state.executing.borrow(child, parent, self._state.now_s)
        self._state.queue.withdraw(child)
        self._execute([running])

    def resize(self, running: Running, kind: str, units: int) -> None:
        """Change the units of a running action."""
        lease = self._state.executing.resize(running, kind, units, self._state.now_s)
        running.resize_after_s = self._state.now_s + self._state.option(kind, "resize_interval_s", 0.0)
        self._state.commands.append(Resize(action=running.action, lease=lease))

    def _execute(self, alike: Sequence[Running]) -> None:
        """Have actions of one group executed."""
        state = self._state
        state.fair.starts([running.action for running in alike])
        for running in alike:
            if state.holds:
                state.holds.pop(running.id, None)
            if running.child:
                state.children.leave(running.waited)
            queue_s = running.started_s - running.action.submitted_s
            state.commands.append(Execute(running.action, running.lease, queue_s if queue_s > 0.0 else 0.0))

    def _batch_mates(self, waiting: Waiting, requests: Sequence[tuple[Pool, PoolRequest]]) -> list[Waiting]:
        """Return waiting actions of the same service that join the batch, first come first, up to its tokens."""
        service = "" if waiting.group is None else waiting.group.signature.batch_service
        if not service:
            return []
        queue = self._state.queue
        units = {pool.kind: request.units for pool, request in requests}
        placement = waiting.action.placement
        budget = queue.services[service].batch_tokens - waiting.action.batch_tokens
        alike = [group for group in queue.groups() if group.signature.batch_service == service]
        if placement != ANYWHERE:  # wherever the leader may start, its mates must be able to run
            nodes, right = self._state.nodes, self._state.nodes.right_for(placement)
            alike = [group for group in alike if nodes.right_for(group.signature.placement) >= right]
        mates: list[Waiting] = []
        for mate in heapq.merge(*(islice(group, _BATCH_WINDOW) for group in alike), key=lambda mate: mate.order):
            if mate is waiting or mate.action.cost.keys() != units.keys():
                continue
            if mate.action.batch_tokens > budget:
                break
            if all(count in mate.action.cost[kind] for kind, count in units.items()):
                budget -= mate.action.batch_tokens
                mates.append(mate)
        return mates
