"""Starting and resizing: a checked decision becomes leases and commands."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import islice

from manager.events import Execute, Resize
from manager.house import House
from manager.queue import Entry
from manager.scheduler.policy import Start

#: Queue mates of one group that are looked at for a batch.
_BATCH_WINDOW = 256


class Starter:
    """Leases actions of one house and tells the shell."""

    def __init__(self, house: House) -> None:
        self._house = house

    def start(
        self, entry: Entry, node: str, units: Mapping[str, int], wish: Start | None = None, key: str = ""
    ) -> None:
        """Take an action from the queue and lease it, with the queue mates that join its batch.

        ``wish`` is the policy's, for the resource ``key``: its chunk, and the workers to start.
        """
        house = self._house
        mates = self._mates(entry, units)
        for mate in mates:
            house.touch(mate)
        for started in (entry, *mates):
            self._leave(started)
        house.executing.start(entry, node, units, wish, key, self._house.now_s)
        if mates:
            for mate in mates:
                house.executing.join(mate, entry, self._house.now_s)
            house.executing.seal(entry, mates)
        for started in (entry, *mates):
            self._execute(started)

    def lend(self, child: Entry, parent: Entry) -> None:
        """Start a child on the units of its waiting parent."""
        self._house.executing.borrow(child, parent, self._house.now_s)
        self._leave(child)
        self._execute(child)

    def resize(self, entry: Entry, kind: str, units: int) -> None:
        """Change the units of a running action."""
        lease = self._house.executing.resize(entry, kind, units, self._house.now_s)
        entry.resize_after_s = self._house.now_s + self._house.option(kind, "resize_interval_s", 0.0)
        self._house.commands.append(Resize(action=entry.action, lease=lease))

    def _leave(self, entry: Entry) -> None:
        self._house.queue.leave(entry)
        self._house.holds.pop(entry.id, None)
        if entry.child:
            self._house.families.leave(entry)
        self._house.fair.started(entry.action, entry.key[0])

    def _execute(self, entry: Entry) -> None:
        assert entry.lease is not None
        queue_s = max(0.0, self._house.now_s - entry.action.submitted_s)
        self._house.commands.append(Execute(action=entry.action, lease=entry.lease, queue_s=queue_s))

    def _mates(self, entry: Entry, units: Mapping[str, int]) -> list[Entry]:
        """Waiting actions of the same service that join the batch, first come first, up to its tokens."""
        service = "" if entry.group is None else entry.group.signature.batch_service
        if not service:
            return []
        budget = self._house.services[service].batch_tokens - entry.action.batch_tokens
        alike = [group for group in self._house.queue.groups() if group.signature.batch_service == service]
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
