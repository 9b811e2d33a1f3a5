"""Replication: services in use are copied into free memory of idle devices, so that their next action starts warm.

Nothing is evicted for a copy, and a copy is the first to go. One that failed is not tried again there before an action
has restored the service itself.
"""

from __future__ import annotations

from manager.core.state import SchedulerState
from manager.events import ReplicaEnded, Replicate
from manager.resources.placed import PlacedPool, Replica


class Replication:
    """Asks for copies after each pass, in pools that have places."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._count = 0
        #: Pool and copy of what is under way, by number.
        self._under_way: dict[int, tuple[PlacedPool, Replica]] = {}

    def run(self) -> None:
        """Ask for the copies that are worth having now."""
        state = self._state
        if state.spec.strict or state.paused or not state.spec.replicate:
            return
        for pool in state.resources.placed:
            for replica in pool.replicate(state.now_s):
                self._count += 1
                self._under_way[self._count] = pool, replica
                state.commands.append(
                    Replicate(number=self._count, service=replica.service, node=replica.node, chunk=replica.chunk)
                )

    def end(self, event: ReplicaEnded) -> None:
        """Note that a copy has arrived or failed; stale answers are ignored."""
        found = self._under_way.pop(event.number, None)
        if found is not None:
            pool, replica = found
            pool.replicated(replica, event.done)

    def lose(self, node: str) -> None:
        """Forget what was on its way to a node that is lost."""
        self._under_way = {number: what for number, what in self._under_way.items() if what[1].node != node}
