"""The scheduling pass: what changed, who competes for it, the candidates, and each pool's turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from manager.core.alone import request_of, waits_alone
from manager.core.candidates import Candidate, CandidateSelection, Selector
from manager.core.changes import Changes
from manager.core.dispatcher import Dispatcher
from manager.core.pool_dispatch import PoolDispatch
from manager.core.state import SchedulerState
from manager.core.waiting.queue import QueueGroup, Waiting
from manager.resources.pool import Headroom, Pool

#: Rounds of one pass: units that a policy frees by resizing, or gives to somebody wider, are offered again this often.
_ROUNDS = 4


class SchedulingPass:
    """Runs the passes."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.dispatcher = Dispatcher(state)
        self._changes = Changes(state)

    def run(self) -> None:
        """Start what can start and resize what the policies want, until nothing changes (bounded)."""
        self._changes.count_arrivals()
        for _ in range(_ROUNDS):
            pools, groups = self._changes.take()
            if not pools and not groups:
                break
            if not pools and self._start_alone(groups):
                break  # nobody else's units, memory or cap has changed with it
            self._round(pools, groups)

    def _start_alone(self, groups: set[QueueGroup]) -> bool:
        """Start the only action that anything changed for, if it waits alone; return whether it did."""
        if len(groups) != 1:
            return False
        (group,) = groups
        state = self._state
        names = state.pools_of(group)
        if len(names) != 1 or not group.live or (state.paused and not group.signature.child):
            return False
        pool = state.resources[names[0]]
        waiting = waits_alone(state, pool, list(state.groups_at(pool)))
        if waiting is None:
            return False
        self._start_in(pool, waiting)
        return True

    def _start_in(self, pool: Pool, alone: Waiting) -> None:
        """Start what waits alone for a pool."""
        self._state.wakes.pop(pool.name, None)
        self.dispatcher.start([alone], pool.node, [(pool, request_of(alone, pool))])

    def _round(self, changed: set[str], changed_groups: set[QueueGroup]) -> None:
        state = self._state
        names, groups = self._closure(changed, changed_groups)
        groups_of: dict[str, list[QueueGroup]] = {}
        for group in groups:
            for name in state.pools_of(group):
                groups_of.setdefault(name, []).append(group)
        can_resize = state.executing.can_resize
        # Where nothing waits and nobody can be resized, nothing is to be decided: so it is while a thousand nodes join.
        pools = state.resources.in_order([name for name in names if name in groups_of or can_resize(name)])
        alone: dict[str, Waiting] = {}
        for pool in pools:
            waiting = waits_alone(state, pool, groups_of.get(pool.name, ()))
            if waiting is not None:
                alone[pool.name] = waiting
        sure = {waiting.group for waiting in alone.values()}
        selection = self.select([group for group in groups if group not in sure])
        by_pool: dict[str, list[Candidate]] = {}
        for candidate in selection.candidates:
            by_pool.setdefault(candidate.pool, []).append(candidate)
        for candidate in by_pool.pop("", []):
            self.dispatcher.start([candidate.waiting], candidate.option.node, ())
        for pool in pools:
            only = alone.get(pool.name)
            if only is not None:
                self._start_in(pool, only)
                continue
            candidates, here = by_pool.get(pool.name, []), groups_of.get(pool.name, [])
            PoolDispatch(state, self.dispatcher, pool, here, candidates, selection, self._changes.look_again).take()

    def select(self, groups: Sequence[QueueGroup]) -> CandidateSelection:
        """Return what could start now of these groups, by reservation."""
        state = self._state
        if not groups:
            return CandidateSelection()
        selector = Selector(
            state.resources,
            state.nodes,
            {key: Headroom(room) for key, room in state.cap_rooms().items()},
            memory_waits_from=state.memory_waits_from,
            memory_waits_bytes=state.memory_waits_bytes,
            strict=state.spec.strict,
        )
        return selector.walk(groups)

    def _closure(self, changed: set[str], changed_groups: set[QueueGroup]) -> tuple[set[str], list[QueueGroup]]:
        """Return the pools that compete for waiting actions with those that changed, and these actions' groups."""
        state = self._state
        chosen: dict[QueueGroup, None] = {}
        pools: set[str] = set()
        beyond = set(changed)

        def choose(groups: Iterable[QueueGroup]) -> None:
            for group in groups:
                if group not in chosen and (group.signature.child or not state.paused):
                    chosen[group] = None
                    beyond.update(state.pools_of(group))

        choose(state.queue.groups() if state.spec.strict else [group for group in changed_groups if group.live])
        if not state.queue.has_groups:
            return beyond, []
        while beyond:
            name = beyond.pop()
            if name not in pools:
                pools.add(name)
                pool = state.resources.get(name)
                choose(() if pool is None else state.groups_at(pool))
        return pools, list(chosen)
