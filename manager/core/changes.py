"""The changes since the last round of a pass, as those who changed tell them: a round looks at nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from manager.core.state import SchedulerState
from manager.core.waiting.queue import QueueGroup


class Changes:
    """Asks the queue, the pools, the nodes, the caps and the policies what may start now that could not before."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._rooms = state.cap_rooms()
        self._memory_waits_from: int | None = None
        #: Groups to look at, whatever happens to their pools.
        self._groups: set[QueueGroup] = set()

    def look_again(self, groups: Iterable[QueueGroup]) -> None:
        """Have these groups looked at in the next round."""
        self._groups.update(groups)

    def count_arrivals(self) -> None:
        """Look at the groups that something was offered to.

        Each action counts once for each kind that it needs.
        """
        state = self._state
        for group, count in state.queue.take_arrived().items():
            names = state.pools_of(group)
            for name in names:
                state.executing.load(name).arrivals.add(state.now_s, count * len(group.demand) / len(names))
            self._groups.add(group)
        if not state.spec.strict:
            self._groups = {group for group in self._groups if group.live and self._is_hopeful(group)}

    def take(self) -> tuple[set[str], set[QueueGroup]]:
        """Return the names of the pools, and the groups, that the next round must look at."""
        state = self._state
        pools = state.resources.take_changed()
        for group in state.queue.take_forsaken():
            # In strict order it may have stood in the way of everything behind it.
            pools.update((pool.name for pool in state.resources) if state.spec.strict else state.pools_of(group))
        self._compare_caps(pools)
        self._compare_memory(pools)
        if state.wakes:
            for pool, wake_s in list(state.wakes.items()):
                if wake_s <= state.now_s:
                    del state.wakes[pool]
                    pools.add(pool)
        groups, self._groups = self._groups, set()
        return pools, groups

    def _is_hopeful(self, group: QueueGroup) -> bool:
        """Return whether a pool that could serve the group has a free unit, or can make one.

        A group without hope is looked at when one of its pools has changed. Under load this spares most submissions
        their pass.
        """
        state = self._state
        names = state.pools_of(group)
        for name in names:
            if state.resources[name].free > 0 or state.executing.can_resize(name):
                return True
        return not names

    def _compare_caps(self, pools: set[str]) -> None:
        """Look at the pools of which a task may hold more than before, and at groups whose cap has come to block them.

        What such a group had reserved may serve others.
        """
        before, self._rooms = self._rooms, self._state.cap_rooms()
        now = self._rooms
        if before == now:
            return
        for task, kind in before:
            if (task, kind) not in now or now[task, kind] > before[task, kind]:
                pools.update(pool.name for pool in self._state.resources.of_kind(kind))
        for group in self._state.queue.groups():
            for kind, units in group.signature.demand:
                key = (group.signature.task, kind)
                if key in now and now[key] < units and (key not in before or units <= before[key]):
                    self._groups.add(group)

    def _compare_memory(self, pools: set[str]) -> None:
        """Look at every place where memory has returned, or is no longer kept for a trajectory that waited first."""
        state = self._state
        nodes = state.nodes.take_changed()
        before, self._memory_waits_from = self._memory_waits_from, state.memory_waits_from
        if before not in (None, state.memory_waits_from):
            nodes.update(state.nodes.names)
        if nodes:
            pools.update(name for node in nodes for name in state.resources.names_on(node))
            self.look_again(group for group in state.queue.groups_of("") if group.needs_memory_only)
